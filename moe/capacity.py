"""How many tokens an expert takes from one group, and which of the choices that gives.

    C = max(min_capacity, ceil(group_tokens * k * capacity_factor / num_experts))        (k counts: cf 2, k 1 == cf 1, k 2)

Capacity is counted per group of tokens (GShard), and the group belongs to the recipe, not to the layout: the same
tokens are dropped on any number of ranks. A choice is kept while its position in the expert's queue is below C;
the queue is first come, first served, all first choices before any second one. Systems round differently:
docs/moe.md has the table.
"""

from __future__ import annotations

import math
from types import ModuleType

from torch import Tensor

from parallel.errors import BadInput


def capacity(group_tokens: int, *, num_experts: int, num_choices: int, factor: float | None, minimum: int) -> int | None:
    """Slots per expert and group; None is dropless. Never more than the group has tokens (an expert is chosen once a token)."""
    if factor is None:
        return None
    # round before ceil: 200 * 1.1 / 4 is 55 in decimals and must not become 56 by a binary tail
    slots = math.ceil(round(group_tokens * num_choices * factor / num_experts, 9))
    return min(group_tokens, max(minimum, slots))


def kept_choices(
    expert_TK: Tensor, active_TK: Tensor, *, num_groups: int, num_experts: int, slots_each: int | None, kernels: ModuleType
) -> Tensor:
    """Bool [T, K]: the choices that find a slot. `active_TK` False: a choice the router declined; it takes no slot."""
    if expert_TK.shape[0] % num_groups:
        raise BadInput(
            "router.group",
            got=f"{num_groups} groups",
            needed=f"a divisor of {expert_TK.shape[0]} tokens",
            fix="set router.group to sequence",
        )
    if slots_each is None:
        return active_TK
    slot_TK: Tensor = kernels.slots(expert_TK, active_TK, num_groups=num_groups, num_experts=num_experts)
    return active_TK & (slot_TK < slots_each)
