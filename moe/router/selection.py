"""Selection of experts: one function per method, on scores without gradient. Of equal scores the lowest expert (or first token) wins.

    top_k            kernels.top_k of the scores
    group_limited    experts are in runs of equal size; a run's score is the sum of its two best, or its     DeepSeek-V3 (arXiv
                     best; top-k inside the best runs only, so that a token's rows go to few nodes           2412.19437, section 2.1.2), V2
    expert_choice    each expert takes its C best tokens of a group, so load is even by construction         arXiv 2202.09368
    hashed           a fixed map from the token's id: nothing is learned, nothing collapses                  arXiv 2106.04426
    balanced_plan    scores whose columns have equal sums (Sinkhorn), as in BASE layers' assignment          arXiv 2103.16716

With expert choice, tokens have different numbers of experts. Rows stay [T, K] with K the largest number, so that the code after it
works unchanged; `counted_TK` is False where an entry only fills a row.
"""

from __future__ import annotations

from types import ModuleType

import torch
from einops import rearrange
from torch import Tensor

from parallel.random import key_of, uniform

# T tokens, E experts, K choices, G groups, S tokens of a group, N runs of experts

ITERATIONS = 20  # a fixed number of Sinkhorn iterations, so that neither time nor result depends on a tolerance


def group_limited(scores_TE: Tensor, k: int, *, expert_groups: int, top_groups: int, best: int, kernels: ModuleType) -> Tensor:
    """Experts [T, k], highest score first, all from the `top_groups` best of `expert_groups` runs, by the sum of a run's `best` highest."""
    scores_TNE = rearrange(scores_TE, "t (n e) -> t n e", n=expert_groups)
    run_TN = scores_TNE.topk(min(best, scores_TNE.shape[2]), dim=2).values.sum(2)
    open_TN = torch.zeros_like(run_TN, dtype=torch.bool).scatter_(1, kernels.top_k(run_TN, top_groups), True)
    limited_TNE = scores_TNE.masked_fill(~open_TN.unsqueeze(2), -torch.inf)
    expert_TK: Tensor = kernels.top_k(limited_TNE.flatten(1), k)
    return expert_TK


def expert_choice(scores_TE: Tensor, *, slots: int, num_groups: int, valid_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """`expert_TK` (experts in ascending order) and `counted_TK`: each expert takes its `slots` best valid tokens of every group."""
    if valid_T is not None:
        scores_TE = scores_TE.masked_fill(~valid_T.unsqueeze(1), -torch.inf)
    scores_GSE = rearrange(scores_TE, "(g s) e -> g s e", g=num_groups)
    best_GCE = scores_GSE.argsort(dim=1, descending=True, stable=True)[:, :slots]
    chosen_TE = rearrange(torch.zeros_like(scores_GSE, dtype=torch.bool).scatter_(1, best_GCE, True), "g s e -> (g s) e")
    if valid_T is not None:
        chosen_TE = chosen_TE & valid_T.unsqueeze(1)
    most = max(1, int(chosen_TE.sum(1).amax()))
    expert_TK = chosen_TE.byte().argsort(dim=1, descending=True, stable=True)[:, :most].contiguous()
    return expert_TK, chosen_TE.gather(1, expert_TK)


def hashed(tokens_T: Tensor, k: int, *, num_experts: int, name: str, kernels: ModuleType) -> Tensor:
    """The k experts [T, k] of each token's id in the layer called `name`: those with the highest keyed random numbers."""
    expert_TK: Tensor = kernels.top_k(uniform(key_of("hash", name), tokens_T.long(), num_experts), k)
    return expert_TK


def balanced_plan(logits_TE: Tensor, *, num_groups: int, valid_T: Tensor | None) -> Tensor:
    """Logits plus a bias per group and expert, found by Sinkhorn scaling, so that each expert has about the same share of every group."""
    logits_GSE = rearrange(logits_TE, "(g s) e -> g s e", g=num_groups)
    absent_GS1 = None if valid_T is None else ~valid_T.view(num_groups, -1, 1)
    column_G1E = torch.zeros_like(logits_GSE[:, :1])
    for _ in range(ITERATIONS):
        plan_GSE = logits_GSE - torch.logsumexp(logits_GSE + column_G1E, dim=2, keepdim=True)
        if absent_GS1 is not None:
            plan_GSE = plan_GSE.masked_fill(absent_GS1, -1e30)
        column_G1E = -torch.logsumexp(plan_GSE, dim=1, keepdim=True)
    return rearrange(logits_GSE + column_G1E, "g s e -> (g s) e")
