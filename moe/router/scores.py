"""From logits to scores, from the scores of the chosen to gates; with gradient, in fp32.

    softmax            exp(l_e) / sum exp(l)          probabilities; over the chosen alone: taken after selection
    sigmoid            1 / (1 + exp(-l_e))            each expert by itself           DeepSeek-V3 (arXiv 2412.19437, eq. 15)
    sqrt_softplus      sqrt(log(1 + exp(l_e)))        grows without bound, slowly     Megatron-LM's sqrtsoftplus

A gate that sums to 1 with one expert is 1 whatever the router thinks: that router learns nothing from the model's loss
(moe/router/checks.py refuses it).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from moe.recipe.router_spec import RouterSpec

# T tokens, E experts, K choices

_TINY = 1e-20  # below it a sum of scores is no number to divide by


def scores_of(logits_TE: Tensor, spec: RouterSpec) -> Tensor:
    """What experts are chosen and weighed by (unless softmax is taken over the chosen)."""
    if spec.score == "softmax":
        return logits_TE.softmax(-1)
    if spec.score == "sigmoid":
        return logits_TE.sigmoid()
    return F.softplus(logits_TE).clamp(min=1e-30).sqrt()  # a root's slope at 0 is infinite


def probabilities(scores_TE: Tensor, spec: RouterSpec) -> Tensor:
    """Scores that sum to 1 over the experts: what balance losses and the entropy are made of."""
    return scores_TE if spec.score == "softmax" else scores_TE / scores_TE.sum(-1, keepdim=True).clamp(min=_TINY)


def chosen_gates(scores_TE: Tensor, logits_TE: Tensor, expert_TK: Tensor, *, spec: RouterSpec, of_TK: Tensor | None) -> Tensor:
    """Gates [T, K] of the chosen experts. `of_TK` bool: the others' gates are 0, before anything is made to sum to 1."""
    over_chosen = spec.softmax_over == "chosen"
    gate_TK = logits_TE.gather(1, expert_TK).softmax(-1) if over_chosen else scores_TE.gather(1, expert_TK)
    if of_TK is not None:
        gate_TK = gate_TK * of_TK
    if spec.gates != "as_is":
        gate_TK = gate_TK / gate_TK.sum(-1, keepdim=True).clamp(min=_TINY)
    return gate_TK if spec.gate_scale == 1 else gate_TK * spec.gate_scale
