"""The interface of dispatchers, the places of experts, and dropout inside the experts. Its random keys are sent with the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from moe.experts.experts import ExpertChunk, Experts
from moe.kernels import Plan
from moe.router.router import Routing

# T tokens, D model, R rows, F hidden, E experts, K choices


@dataclass(frozen=True)
class Dropout:
    """Dropout inside the experts.

    `position_T` int64 [T]: each token's index in the step. `scale(position_R)` returns 0 or 1 / (1 - p) for each hidden unit, [R, F].
    """

    position_T: Tensor
    scale: Callable[[Tensor], Tensor]


class Dispatcher(Protocol):
    """The interface of dispatchers."""

    def run(self, x_TD: Tensor, routing: Routing, experts: Experts, *, dropout: Dropout | None = None) -> Tensor:
        """Sum gate * expert(x) over each token's kept choices: [T, D] in x's dtype. A token without kept choices gets zeros."""
        ...


class Network(Protocol):
    """The function of a dispatcher that computes the held experts: `whole`, or `Split` over etp."""

    def __call__(
        self,
        rows_RD: Tensor,
        experts: Experts,
        *,
        counts: list[int],
        weights: ExpertChunk = None,
        position_R: Tensor | None = None,
        dropout: Dropout | None = None,
    ) -> Tensor:
        """Compute rows [R, D] sorted by expert, with all held experts or the chunk `weights`.

        `position_R`: index in the step of each row's token, needed only for dropout.
        """
        ...


def whole(
    rows_RD: Tensor,
    experts: Experts,
    *,
    counts: list[int],
    weights: ExpertChunk = None,
    position_R: Tensor | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """Compute rows with experts whose matrices are not split (etp = 1)."""
    dropped_RF = None if dropout is None or position_R is None else dropout.scale(position_R)
    out_RD: Tensor = experts(rows_RD, counts=counts, dropped_RF=dropped_RF, weights=weights)
    return out_RD


def plan_rows(
    kernels: ModuleType, routing: Routing, *, placement: tuple[int, ...] | None = None, order: tuple[int, ...] | None = None
) -> Plan:
    """Return the plan of the kept choices. Rows and counts are sorted by `place_of` their experts."""
    num_experts = routing.probs_TE.shape[1]
    place_TK = place_of(routing.expert_TK, num_experts=num_experts, placement=placement, order=order)
    plan: Plan = kernels.plan(place_TK, routing.kept_TK, num_experts=num_experts)
    return plan


def place_of(
    expert_TK: Tensor, *, num_experts: int, placement: tuple[int, ...] | None = None, order: tuple[int, ...] | None = None
) -> Tensor:
    """Return the place of each choice's expert, [T, K]. Place p holds expert `placement[p]` (None: expert p).

    `order`: a renumbering of places: its first place becomes 0, its second 1, ... (None: no renumbering).
    """
    if placement is None and order is None:
        return expert_TK
    return torch.tensor(_place_of_expert(num_experts, placement, order), device=expert_TK.device)[expert_TK]


@lru_cache
def _place_of_expert(num_experts: int, placement: tuple[int, ...] | None, order: tuple[int, ...] | None) -> list[int]:
    expert_at, ordered = placement or range(num_experts), order or range(num_experts)
    place_E = [0] * num_experts
    for number, place in enumerate(ordered):
        place_E[expert_at[place]] = number
    return place_E
