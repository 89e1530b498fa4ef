"""Gates on the experts' inputs instead of their outputs: the sum over a token's choices of E(g x) (Llama 4).

    tokens [T, D], K choices each      ->      T K tokens g x with one choice each and gate 1      ->      sums of K

Dispatch, dropping and combination do not change. With K > 1 choices a token, this needs memory for K copies of the tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from einops import rearrange
from torch import Tensor

from moe.experts.dispatch.dispatcher import Exchange
from moe.experts.dispatch.network import Dropout
from moe.experts.experts import Experts
from moe.router.router import Routing

# T tokens, K choices, N = T * K, D model


def run(dispatcher: Exchange, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
    """Call the dispatcher's `run` with gates on inputs: [T, D] in x's dtype."""
    choices = routing.expert_TK.shape[1]
    x_ND = rearrange(x_TD.unsqueeze(1) * routing.gate_TK.unsqueeze(2), "t k d -> (t k) d").to(x_TD.dtype)
    each = replace(
        routing,
        expert_TK=routing.expert_TK.reshape(-1, 1),
        kept_TK=routing.kept_TK.reshape(-1, 1),
        gate_TK=torch.ones_like(routing.gate_TK).reshape(-1, 1),
    )
    if dropout is not None:
        dropout = replace(dropout, position_T=dropout.position_T.repeat_interleave(choices))
    y_ND = dispatcher.run(x_ND, each, experts, dropout=dropout)
    return y_ND if choices == 1 else rearrange(y_ND.float(), "(t k) d -> t k d", k=choices).sum(1).to(x_TD.dtype)
