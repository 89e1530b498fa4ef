"""SparseMixer (arXiv 2310.00811; for several experts GRIN, 2409.12136, section 3; Phi-3.5-MoE): experts are drawn, and the router's
gradient is that of their probabilities.

    choice k    open_k    experts not yet chosen whose logit is near the best of them: (best - l_e) / max(|l_e|, best) <= 2 margin
                p_k       softmax of the logits of open_k
                e_k       drawn by p_k in training; the best one in evaluation
                gate_k    p_k(e_k), in training times s_k: 1 if e_k is the best one, or else with probability 1/4, and 1/3 otherwise

The gradient is that of p_k(e_k), without s_k: with s_k in the forward pass this is Heun's third-order method for the gradient of an
expectation over draws. Gates of a token do not sum to 1; where one expert is far ahead its gate is 1, and it gets no gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe.router.noise import gumbel

# T tokens, E experts, K choices

HALFWAY, LEAST = 0.25, 1 / 3  # how often a choice that is not the best counts whole, and as how much it counts otherwise


def one_by_one(
    logits_TE: Tensor, k: int, *, margin: float, uniform: Callable[[int], Tensor] | None, given_TK: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Experts [T, K] int64, whether each is the best one that was left, and who was open for each choice, bool [T, K, E].

    `uniform(k)`: numbers [T, E] by which choice k is drawn; None: the best are taken, of equal ones the first.
    `given_TK`: experts that are taken instead, and are open with any logit; -1: none.
    """
    left_TE, experts, best, near = logits_TE, [], [], []
    for choice in range(k):
        highest_T1, first_T1 = left_TE.max(1, keepdim=True)
        open_TE = ~((highest_T1 - left_TE) / logits_TE.abs().clamp(min=highest_T1) > 2 * margin)
        chosen_T1 = first_T1
        if uniform is not None:
            chosen_T1 = (logits_TE + gumbel(uniform(choice))).masked_fill(~open_TE, -torch.inf).argmax(1, keepdim=True)
        if given_TK is not None:
            given_T1 = given_TK[:, choice : choice + 1]
            chosen_T1 = torch.where(given_T1 < 0, chosen_T1, given_T1)
            open_TE = open_TE.scatter(1, chosen_T1, True)
        left_TE = left_TE.scatter(1, chosen_T1, -torch.inf)
        experts.append(chosen_T1)
        best.append(chosen_T1 == first_T1)
        near.append(open_TE)
    return torch.cat(experts, 1), torch.cat(best, 1), torch.stack(near, 1)


def shares(best_TK: Tensor, uniform_TK: Tensor) -> Tensor:
    """s of each choice in training: fp32 [T, K]."""
    return torch.where(best_TK | (uniform_TK > 1 - HALFWAY), 1.0, LEAST)


def mixed_gates(logits_TE: Tensor, expert_TK: Tensor, open_TKE: Tensor, share_TK: Tensor | None) -> Tensor:
    """The gates [T, K], whose gradient knows nothing of the shares; None: all are 1."""
    near_TKE = logits_TE.unsqueeze(1).masked_fill(~open_TKE, -torch.inf)
    gate_TK = near_TKE.softmax(-1).gather(2, expert_TK.unsqueeze(2)).squeeze(2)
    return gate_TK if share_TK is None else gate_TK + (gate_TK * share_TK - gate_TK).detach()
