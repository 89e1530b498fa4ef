"""Multi-token prediction, in training only: each token also predicts tokens after the next one (DeepSeek-V3, arXiv 2412.19437, section
2.2).

    h0: the model's output for token i, before the last norm
    h1 = block(proj [ norm h0 ; norm embedding(t_i+1) ])     head(norm h1) predicts t_i+2      embedding and head: the model's
    h2 = block(proj [ norm h1 ; norm embedding(t_i+2) ])     head(norm h2) predicts t_i+3      proj, block and norms: one for each depth

The loss is the mean over input tokens and depths, times `model.ahead_weight`. Its gradient with respect to h0 is added to the gradient of
h0 from the main loss. The last pipeline stage has these blocks and a copy of the embedding. If sequences are sharded, ranks first gather
the token ids of entire sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moe.nn.context import Context
from moe.nn.linear import Linear, Norm
from moe.nn.vocabulary import PADDING, as_inputs
from moe.recipe import sections

# B batch, L tokens of a sequence on this rank, S tokens of a whole sequence, D model


class PredictionDepth(nn.Module):
    """One depth: concatenates the previous depth's hidden states with the embeddings of the tokens that the previous depth predicts,
    projects the result to D channels, and applies a Transformer block."""

    def __init__(self, model: sections.Model, block: nn.Module) -> None:
        super().__init__()
        self.hidden_norm, self.token_norm, self.norm = (Norm(model.d_model, model.norm, eps=model.norm_eps) for _ in range(3))
        self.proj = Linear(2 * model.d_model, model.d_model)
        self.block = block

    def forward(self, hidden_BLD: Tensor, token_BLD: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return (input of the next depth, input of the head), both [B, L, D] in hidden's dtype."""
        joined = torch.cat([self.hidden_norm(hidden_BLD), self.token_norm(token_BLD)], dim=-1)
        hidden_BLD, _ = self.block(self.proj(joined), context)
        return hidden_BLD, self.norm(hidden_BLD)


def multi_token_loss(
    depths: nn.ModuleList,
    hidden_BLD: Tensor,
    targets_BL: Tensor,
    context: Context,
    *,
    look_up: Callable[[Tensor], Tensor],
    summed_loss: Callable[[Tensor, Tensor], Tensor],
    whole_sequences: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the loss, averaged over valid input tokens and over depths: fp32 []. `targets_BL`: the token after each input token.
    `look_up`: returns embeddings. `summed_loss(hidden, targets)`: applies the head, and returns the loss, summed over tokens.
    `whole_sequences`: gathers [B, L] over ranks to [B, S]."""
    place_L, next_BS = context.place_L, whole_sequences(targets_BL)
    total = hidden_BLD.new_zeros((), dtype=torch.float32)
    for depth in depths:
        later_BS = torch.cat([next_BS[:, 1:], torch.full_like(next_BS[:, :1], PADDING)], dim=1)
        later_BS = later_BS.masked_fill(next_BS == PADDING, PADDING)
        next_BL = next_BS[:, place_L]
        hidden_BLD, head_BLD = depth(hidden_BLD, look_up(as_inputs(next_BL).masked_fill(next_BL == PADDING, 0)), context)
        total = total + summed_loss(head_BLD, later_BS[:, place_L])
        next_BS = later_BS
    tokens = targets_BL.numel() if context.valid_T is None else context.valid_T.sum().clamp(min=1)
    return total / tokens / len(depths)
