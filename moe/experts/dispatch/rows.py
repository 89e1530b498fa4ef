"""The row of each kept choice: rows are sorted by the place of their expert, and a rank's places are one chunk of them."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from moe.kernels import Plan
from moe.router.router import Routing

# T tokens, K choices, E experts


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
