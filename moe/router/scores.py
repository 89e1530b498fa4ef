"""From logits to scores, from the scores of the chosen experts to gates, and noise. In fp32, with gradient.

softmax        exp(l_e) / sum exp(l)                    or, over the chosen experts only, after selection
sigmoid        1 / (1 + exp(-l_e))                                                              DeepSeek-V3 (arXiv 2412.19437, eq. 15)
sqrt_softplus  sqrt(log(1 + exp(l_e)))                  grows without bound, slowly             Megatron-LM's sqrtsoftplus
jitter         x' = x * uniform(1 - e, 1 + e)           for the router; experts get x           Switch (arXiv 2101.03961, app. C)
gumbel         expert e has the highest l_e + G_e with its softmax probability; G = -log(-log u)    "RSample" of DeepSpeed
noisy_top_k    l_e + N_e softplus((W_noise x)_e)        N normal, size learned                  Shazeer et al. (arXiv 1701.06538, eq. 4)

Gates that sum to 1 are exp(a_i) / sum exp(a_j) over a token's choices, where a is the logarithm of a score: the sum of scores may be too
small for a division in fp32. Noise, in training only, is made from uniform numbers that are equal on every layout.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.recipe.plugin import is_plugin
from moe.router.own import own_scores

if TYPE_CHECKING:
    from moe.recipe.router_spec import RouterSpec

# T tokens, D model, E experts, K choices

_TINY = 1e-20  # lower bound of scores and their sums before a logarithm or a division
_LEAST = 1e-6  # lower bound of the noise's standard deviation, which is a divisor
_EDGE = 2.0**-24  # uniform numbers stay this far from 0 and 1, where their logarithms are infinite


def scores_of(logits_TE: Tensor, spec: RouterSpec) -> Tensor:
    """Return the scores [T, E] that select experts and, unless softmax is over the chosen experts only, give the gates."""
    if spec.score == "softmax":
        return logits_TE.softmax(-1)
    if is_plugin(spec.score):
        return own_scores(logits_TE, spec.score)
    if spec.score == "sigmoid":
        return logits_TE.sigmoid()
    return F.softplus(logits_TE).clamp(min=1e-30).sqrt()  # clamped, because the slope of a square root at 0 is infinite


def probabilities(scores_TE: Tensor, spec: RouterSpec) -> Tensor:
    """Return the scores normalized to sum to 1 over the experts [T, E], for balance losses and the entropy."""
    return scores_TE if spec.score == "softmax" else scores_TE / scores_TE.sum(-1, keepdim=True).clamp(min=_TINY)


def chosen_scores(scores_TE: Tensor, logits_TE: Tensor, expert_TK: Tensor, *, spec: RouterSpec) -> Tensor:
    """Return the chosen experts' gates [T, K] for router.gates `as_is`, without gate_scale. router.drop `lowest_gate` compares them."""
    if spec.softmax_over == "chosen":
        return logits_TE.gather(1, expert_TK).softmax(-1)
    return scores_TE.gather(1, expert_TK)


def chosen_gates(scores_TE: Tensor, logits_TE: Tensor, expert_TK: Tensor, *, spec: RouterSpec, of_TK: Tensor | None) -> Tensor:
    """Return the chosen experts' gates [T, K]. `of_TK` bool: choices that get a gate. The others get 0, and are left out if gates
    are normalized to sum to 1."""
    if spec.gates == "as_is":
        gate_TK = chosen_scores(scores_TE, logits_TE, expert_TK, spec=spec)
        gate_TK = gate_TK if of_TK is None else gate_TK * of_TK
    else:
        own = is_plugin(spec.score)  # a user's score may depend on all logits of a token, so it is not computed from the chosen ones
        log_TK = scores_TE.gather(1, expert_TK).clamp(min=_TINY).log() if own else _log_scores(logits_TE.gather(1, expert_TK), spec)
        gate_TK = _sum_to_one(log_TK, of_TK)
    return gate_TK if spec.gate_scale == 1 else gate_TK * spec.gate_scale


def _log_scores(logits_TK: Tensor, spec: RouterSpec) -> Tensor:
    """Return the logarithms of scores [T, K]. All logarithms of a token may be off by one constant, which `_sum_to_one` cancels."""
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


def jittered(x_TD: Tensor, uniform_TD: Tensor, size: float) -> Tensor:
    return x_TD * uniform_TD.mul_(2 * size).add_(1 - size)


def gumbel(uniform_TE: Tensor) -> Tensor:
    return -(-uniform_TE.clamp(_EDGE, 1 - _EDGE).log()).log()


def normal(uniform_TE: Tensor) -> Tensor:
    return (2 * uniform_TE.clamp(_EDGE, 1 - _EDGE) - 1).erfinv() * math.sqrt(2)


def chance_of_choice(logits_TE: Tensor, noisy_TE: Tensor, size_TE: Tensor, k: int) -> Tensor:
    """Return each expert's probability [T, E], with gradient, of being one of a token's k choices if only this expert's noise is drawn
    again. size_TE: standard deviation of the noise.

    It is Phi((l_e - the k-th highest noisy logit of the other experts) / size_e) (Shazeer et al., eq. 8, 9). k must be less than E.
    """
    best_TK = noisy_TE.topk(k + 1).values
    chosen_TE = noisy_TE > best_TK[:, k:]
    threshold_TE = torch.where(chosen_TE, best_TK[:, k:], best_TK[:, k - 1 : k])
    chance_TE: Tensor = torch.special.ndtr((logits_TE - threshold_TE) / size_TE.clamp(min=_LEAST))
    return chance_TE
