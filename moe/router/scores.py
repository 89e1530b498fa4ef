"""From logits to scores, and from the scores of the chosen experts to gates; with gradient, in fp32.

    softmax            exp(l_e) / sum exp(l)          a distribution; over the chosen experts only: after selection
    sigmoid            1 / (1 + exp(-l_e))            each expert on its own          DeepSeek-V3 (arXiv 2412.19437, eq. 15)
    sqrt_softplus      sqrt(log(1 + exp(l_e)))        grows without bound, slowly     Megatron-LM's sqrtsoftplus

A gate made to sum to 1 over one expert is always 1: such a router gets no gradient from the model's loss
(moe/router/checks.py refuses it).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from moe.recipe.router_spec import RouterSpec

# T tokens, E experts, K choices

_TINY = 1e-20  # the smallest sum of scores that is divided by


def scores_of(logits_TE: Tensor, spec: RouterSpec) -> Tensor:
    """The scores [T, E] that select experts and give gates (unless softmax is over the chosen experts)."""
    if spec.score == "softmax":
        return logits_TE.softmax(-1)
    if spec.score == "sigmoid":
        return logits_TE.sigmoid()
    return F.softplus(logits_TE).clamp(min=1e-30).sqrt()  # the slope of a square root at 0 is infinite


def probabilities(scores_TE: Tensor, spec: RouterSpec) -> Tensor:
    """Scores normalised to sum to 1 over the experts [T, E]; balance losses and the entropy use them."""
    return scores_TE if spec.score == "softmax" else scores_TE / scores_TE.sum(-1, keepdim=True).clamp(min=_TINY)


def chosen_gates(scores_TE: Tensor, logits_TE: Tensor, expert_TK: Tensor, *, spec: RouterSpec, of_TK: Tensor | None) -> Tensor:
    """Gates [T, K] of the chosen experts. `of_TK` bool: where it is False the gate is set to 0, before gates are normalised."""
    over_chosen = spec.softmax_over == "chosen"
    gate_TK = logits_TE.gather(1, expert_TK).softmax(-1) if over_chosen else scores_TE.gather(1, expert_TK)
    if of_TK is not None:
        gate_TK = gate_TK * of_TK
    if spec.gates != "as_is":
        gate_TK = gate_TK / gate_TK.sum(-1, keepdim=True).clamp(min=_TINY)
    return gate_TK if spec.gate_scale == 1 else gate_TK * spec.gate_scale
