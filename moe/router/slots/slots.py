"""Slots: the number of tokens that an expert takes from one group. No torch here: recipes are checked by it, too.

    C = max(min_capacity, rounded(factor * group_tokens * k / num_experts))     (top-2 with factor 1 equals top-1 with factor 2)

Capacity is counted per group of tokens (GShard, arXiv 2006.16668). The recipe defines the group, not the layout, so the same tokens are
dropped on any number of ranks. Systems round differently: docs/moe/moe.md has the table.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from moe.recipe.router_spec import RouterSpec


def capacity(
    group_tokens: int,
    *,
    num_experts: int,
    num_choices: int,
    factor: float | None,
    minimum: int,
    rounding: Literal["ceil", "floor", "round"] = "ceil",
    multiple: int = 1,
) -> int | None:
    """Return the slots per expert and group; None if dropless. Never more than the group's tokens: a token chooses an expert only once."""
    if factor is None:
        return None
    # round in decimal first: 200 * 1.1 / 4 is 55, and binary error must not make it 56
    exact = round(group_tokens * num_choices * factor / num_experts, 9)
    slots = math.ceil(exact) if rounding == "ceil" else math.floor(exact) if rounding == "floor" else round(exact)
    return min(group_tokens, max(minimum, -(-slots // multiple) * multiple))


def slots_of(spec: RouterSpec, group_tokens: int, *, num_experts: int, training: bool) -> int | None:
    """Return the slots per expert and group that `spec` sets for training or evaluation."""
    return capacity(
        group_tokens,
        num_experts=num_experts,
        num_choices=spec.num_choices if spec.capacity_counts == "choices" else 1,
        factor=spec.capacity_factor if training else spec.eval_capacity_factor,
        minimum=spec.min_capacity,
        rounding=spec.capacity_rounding,
        multiple=spec.capacity_multiple,
    )
