"""From logits to scores, and from the scores of the chosen experts to gates; with gradient, in fp32.

    softmax            exp(l_e) / sum exp(l)          a distribution; over the chosen experts only: after selection
    sigmoid            1 / (1 + exp(-l_e))            each expert on its own          DeepSeek-V3 (arXiv 2412.19437, eq. 15)
    sqrt_softplus      sqrt(log(1 + exp(l_e)))        grows without bound, slowly     Megatron-LM's sqrtsoftplus

Gates that sum to 1 are exp(a_i) / sum exp(a_j) over a token's choices, where a is the logarithm of a score. Nothing is divided by a sum
of scores, so gates sum to 1 even if fp32 cannot add up such small scores. A single gate made to sum to 1 would always be 1, and the
router would get no gradient from the model's loss: moe/router/checks.py refuses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.recipe.plugin import is_plugin
from moe.router.own import own_scores

if TYPE_CHECKING:
    from moe.recipe.router_spec import RouterSpec

# T tokens, E experts, K choices

_TINY = 1e-20  # lower bound of scores and their sums before a logarithm or a division


def scores_of(logits_TE: Tensor, spec: RouterSpec) -> Tensor:
    """Return the scores [T, E] that select experts and give gates (unless softmax is over the chosen experts)."""
    if spec.score == "softmax":
        return logits_TE.softmax(-1)
    if is_plugin(spec.score):
        return own_scores(logits_TE, spec.score)
    if spec.score == "sigmoid":
        return logits_TE.sigmoid()
    return F.softplus(logits_TE).clamp(min=1e-30).sqrt()  # clamped, because the slope of a square root at 0 is infinite


def probabilities(scores_TE: Tensor, spec: RouterSpec) -> Tensor:
    """Return the scores normalised to sum to 1 over the experts [T, E], for balance losses and the entropy."""
    return scores_TE if spec.score == "softmax" else scores_TE / scores_TE.sum(-1, keepdim=True).clamp(min=_TINY)


def chosen_scores(scores_TE: Tensor, logits_TE: Tensor, expert_TK: Tensor, *, spec: RouterSpec) -> Tensor:
    """Return the chosen experts' gates [T, K] before they are made to sum to 1. With router.drop lowest_gate, these are compared."""
    if spec.softmax_over == "chosen":
        return logits_TE.gather(1, expert_TK).softmax(-1)
    return scores_TE.gather(1, expert_TK)


def chosen_gates(scores_TE: Tensor, logits_TE: Tensor, expert_TK: Tensor, *, spec: RouterSpec, of_TK: Tensor | None) -> Tensor:
    """Return the gates [T, K] of the chosen experts. `of_TK` bool: choices that have a gate; all others get 0, and no part of the sum 1."""
    if spec.gates == "as_is":
        gate_TK = chosen_scores(scores_TE, logits_TE, expert_TK, spec=spec)
        gate_TK = gate_TK if of_TK is None else gate_TK * of_TK
    else:
        own = is_plugin(spec.score)  # a user's score may depend on all of a token's logits, so it is not computed from the chosen ones
        log_TK = scores_TE.gather(1, expert_TK).clamp(min=_TINY).log() if own else _log_scores(logits_TE.gather(1, expert_TK), spec)
        gate_TK = _sum_to_one(log_TK, of_TK)
    return gate_TK if spec.gate_scale == 1 else gate_TK * spec.gate_scale


def _log_scores(logits_TK: Tensor, spec: RouterSpec) -> Tensor:
    """Return the logarithms of scores, each token's up to a constant."""
    if spec.score == "softmax":
        return logits_TK
    if spec.score == "sigmoid":
        return F.logsigmoid(logits_TK)
    # log(softplus(l)) is l if exp(l) is too small to be added to 1
    small_TK = logits_TK < -15
    return 0.5 * logits_TK.where(small_TK, F.softplus(logits_TK.masked_fill(small_TK, 0.0)).log())


def _sum_to_one(log_TK: Tensor, of_TK: Tensor | None) -> Tensor:
    """Return the softmax over a token's entries with `of_TK` True. All other entries get 0; so do all entries of a token without any."""
    if of_TK is None:
        return log_TK.softmax(-1)
    none_T1 = ~of_TK.any(-1, keepdim=True)
    return log_TK.masked_fill(~of_TK & ~none_T1, -torch.inf).softmax(-1).masked_fill(none_T1 | ~of_TK, 0.0)
