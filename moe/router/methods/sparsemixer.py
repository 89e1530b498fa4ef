"""SparseMixer: experts are drawn one after another, and the router gets the gradient of their probabilities.

    choice k    open_k    candidates: experts not yet chosen whose logit l_e is near the best: (best - l_e) / max(|l_e|, best) <= 2 margin
                p_k       softmax of the logits of open_k
                e_k       drawn by p_k in training; the best expert of open_k in evaluation
                gate_k    p_k(e_k), in training times s_k. s_k is 1 for the best expert; else 1 with probability 1/4, and 1/3 otherwise

The gradient is taken of p_k(e_k), without s_k (Heun's third-order method). Gates of a token do not sum to 1. Sources: arXiv 2310.00811;
for several experts GRIN (arXiv 2409.12136, section 3), Phi-3.5-MoE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe.router.methods.method import Chosen, Method, RoutingRequest
from parallel.errors import BadInput
from parallel.fixes import Set

if TYPE_CHECKING:
    from torch import Tensor

    from moe.recipe.router_spec import RouterSpec

# T tokens, E experts, K choices

HALFWAY, LEAST = 0.25, 1 / 3  # if e_k is not the best expert: s_k is 1 with probability HALFWAY, otherwise LEAST


@dataclass(frozen=True)
class Mixed(Chosen):
    """The drawn experts. `open_TKE` bool: the candidates of each choice k (open_k). `share_TK` fp32: factor s_k on each gate; None: 1."""

    open_TKE: Tensor | None = None
    share_TK: Tensor | None = None


class SparseMixer(Method):
    name = "sparsemixer"
    reads = {"mixer_margin": "only sparsemixer draws experts near the best"}
    uses_bias = False
    noises = ("none",)

    def check(self, spec: RouterSpec, num_experts: int) -> None:
        wanted: dict[str, tuple[object, object]] = {
            "score": (spec.score, "softmax"),
            "softmax_over": (spec.softmax_over, "all"),
            "noise": (spec.noise, "none"),
            "gates": (spec.gates, "as_is"),
            "second": (spec.second, "always"),
        }
        if spec.capacity_factor is not None or spec.eval_capacity_factor is not None:
            wanted["drop"] = (spec.drop, "random" if spec.drop == "random" else "position")
        for key, (got, needed) in wanted.items():
            if got != needed:
                why = f"{needed}: experts are drawn by their logits, and gates are the probabilities of the draws"
                fix = Set(f"router.{key}", needed) | Set("router.select", "top_k")
                raise BadInput(f"router.{key}", got=f"{got} with select sparsemixer", needed=why, fix=fix)

    def kept_bytes(self, *, num_choices: int, num_experts: int) -> int:
        return 5 * num_choices * num_experts  # for each choice and expert, 1 byte of open_TKE and 4 bytes of a logit

    def choose(self, request: RoutingRequest) -> Mixed:
        k, margin = request.spec.num_choices, request.spec.mixer_margin

        def draw(choice: int) -> Tensor:
            return request.uniform(f"mixer.{choice}", request.num_experts)

        uniform = draw if request.training else None
        expert_TK, best_TK, open_TKE = one_by_one(request.logits_TE, k, margin=margin, uniform=uniform, given_TK=request.given_TK)
        share_TK = shares(best_TK, request.uniform("midpoint", k)) if request.training else None
        return Mixed(expert_TK, open_TKE=open_TKE, share_TK=share_TK)

    def gates(self, logits_TE: Tensor, chosen: Chosen) -> Tensor:
        assert isinstance(chosen, Mixed) and chosen.open_TKE is not None
        return mixed_gates(logits_TE, chosen.expert_TK, chosen.open_TKE, chosen.share_TK)


def one_by_one(
    logits_TE: Tensor, k: int, *, margin: float, uniform: Callable[[int], Tensor] | None, given_TK: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose k experts for each token, one after another. Return three tensors: the experts, int64 [T, K]; whether each was the best of
    those not yet chosen, bool [T, K]; the candidates of each choice, bool [T, K, E].

    `margin`: how near to the best expert a candidate must be (open_k at the top of this file). `uniform(n)`: random numbers [T, E] with
    which choice n is drawn. None: the best expert is taken (ties: the first). `given_TK`: experts to take instead of drawing; they count as
    candidates whatever their logit. -1: draw this choice."""
    import torch

    from moe.router.scores import gumbel

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
    """Return the factor s_k on each choice's gate in training, fp32 [T, K]. It is 1 if the choice is the best expert (`best_TK`). For other
    experts it is 1 with probability HALFWAY, otherwise LEAST; the random numbers `uniform_TK` decide."""
    import torch

    return torch.where(best_TK | (uniform_TK > 1 - HALFWAY), 1.0, LEAST)


def mixed_gates(logits_TE: Tensor, expert_TK: Tensor, open_TKE: Tensor, share_TK: Tensor | None) -> Tensor:
    """Return the gates [T, K]: each chosen expert's probability among the candidates of its choice (`open_TKE` bool), times `share_TK`
    (None: 1). The gradient is computed without the factor `share_TK`."""
    import torch

    near_TKE = logits_TE.unsqueeze(1).masked_fill(~open_TKE, -torch.inf)
    gate_TK = near_TKE.softmax(-1).gather(2, expert_TK.unsqueeze(2)).squeeze(2)
    return gate_TK if share_TK is None else gate_TK + (gate_TK * share_TK - gate_TK).detach()
