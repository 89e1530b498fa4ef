"""Sinkhorn: in training, top-k of a balanced plan (BASE layers, arXiv 2103.16716). The plan is the matrix of a group's token-expert
probabilities, rescaled so that all experts have about equal sums.

BASE layers assign tokens to experts by an auction. Here 20 rounds of Sinkhorn scaling make a plan, as in Megatron-LM. Evaluation is plain
top-k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe.router.methods.method import BALANCED, Method, RoutingRequest

if TYPE_CHECKING:
    from torch import Tensor

# T tokens, E experts, G groups, S tokens of a group

ITERATIONS = 20  # a fixed number, so that neither time nor result depends on a tolerance


class Sinkhorn(Method):
    """Selection of the K highest entries: of a balanced plan in training, of the scores in evaluation."""

    name = "sinkhorn"
    example = {"preset": "switch", "select": "sinkhorn", "balance_weight": 0.0, "allow_noncausal": True}
    uses_bias = False
    noises = ("none", "noisy_top_k")
    needs_whole_groups = True
    looks_ahead = "the balanced plan is made over all tokens of the group"
    excess = BALANCED  # ranks' loads differ as with a balance loss: balanced_plan equalizes sums of probabilities, not numbers of choices
    is_balanced = "the plan already gives every expert its share, and the loss would pull against it"

    def select(self, request: RoutingRequest) -> Tensor:
        preferred_TE = request.preferred_TE
        if request.training:
            preferred_TE = balanced_plan(request.logits_TE, num_groups=request.num_groups, valid_T=request.context.valid_T)
        expert_TK: Tensor = request.kernels.top_k(preferred_TE, request.spec.num_choices)
        return expert_TK


def balanced_plan(logits_TE: Tensor, *, num_groups: int, valid_T: Tensor | None) -> Tensor:
    """Return logits plus a bias for each group and expert, so that all experts have about the same sum of probabilities over a group."""
    import torch
    from einops import rearrange

    logits_GSE = rearrange(logits_TE, "(g s) e -> g s e", g=num_groups)
    absent_GS1 = None if valid_T is None else ~valid_T.view(num_groups, -1, 1)
    column_G1E = torch.zeros_like(logits_GSE[:, :1])
    for _ in range(ITERATIONS):
        plan_GSE = logits_GSE - torch.logsumexp(logits_GSE + column_G1E, dim=2, keepdim=True)
        if absent_GS1 is not None:
            plan_GSE = plan_GSE.masked_fill(absent_GS1, -1e30)
        column_G1E = -torch.logsumexp(plan_GSE, dim=1, keepdim=True)
    return rearrange(logits_GSE + column_G1E, "g s e -> (g s) e")
