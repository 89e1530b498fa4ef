"""Capacity: an expert takes at most C tokens of a group, one in each of its C slots. Computes C, and the choices that get a slot.

    C = max(min_capacity, rounded(factor * group_tokens * k / num_experts))     (top-2 with factor 1 has the C of top-1 with factor 2)

The recipe defines groups of tokens (GShard, arXiv 2006.16668), so drops do not depend on the layout. A choice is kept if its position
in its expert's queue is below C. `router.queue` and `router.drop` set the order: docs/moe/routing.md. Functions import torch themselves,
because recipes are checked before torch is loaded.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from parallel.errors import BadInput, counted
from parallel.fixes import Set

if TYPE_CHECKING:
    from torch import Tensor

    from moe.recipe.router_spec import RouterSpec

# T tokens, K choices, G groups, S tokens of a group, N = T * K


def slots_of(spec: RouterSpec, group_tokens: int, *, num_experts: int, training: bool) -> int | None:
    """Return an expert's number of slots in a group of tokens, at most `group_tokens`; None if the spec sets no capacity. Training and
    evaluation have different capacity factors."""
    factor, choices = spec.capacity_factor if training else spec.eval_capacity_factor, spec.num_choices
    if factor is None:
        return None
    # rounded to 9 decimals first, because 200 * 1.1 / 4 is 55.00000000000001 in binary
    exact = round(group_tokens * (choices if spec.capacity_counts == "choices" else 1) * factor / num_experts, 9)
    rounding = spec.capacity_rounding
    slots = math.ceil(exact) if rounding == "ceil" else math.floor(exact) if rounding == "floor" else round(exact)
    return min(group_tokens, max(spec.min_capacity, -(-slots // spec.capacity_multiple) * spec.capacity_multiple))


def kept_choices(
    expert_TK: Tensor,
    active_TK: Tensor | None,
    *,
    num_groups: int,
    num_experts: int,
    slots_each: int | None,
    kernels: ModuleType,
    queue: Literal["choices_first", "tokens_first"] = "choices_first",
    priority_TK: Tensor | None = None,
) -> Tensor:
    """Return whether each choice gets a slot: bool [T, K]. `active_TK`: True for choices that need a slot; None: all do. `slots_each`:
    slots of an expert in a group; None: no limit. `priority_TK` fp32: choices with higher values get slots first, equal ones in queue
    order. Raise BadInput if the tokens do not divide into groups.
    """
    import torch

    if expert_TK.shape[0] % num_groups:
        needed, fix = f"a divisor of the number of tokens, {expert_TK.shape[0]}", Set("router.group", "sequence")
        raise BadInput("router.group", got=counted(num_groups, "group"), needed=needed, fix=fix)
    if slots_each is None:
        return torch.ones_like(expert_TK, dtype=torch.bool) if active_TK is None else active_TK
    sizes = {"num_groups": num_groups, "num_experts": num_experts, "slots_each": slots_each}
    if priority_TK is None and (queue == "choices_first" or expert_TK.shape[1] == 1):  # the order in which kernels.kept gives slots
        first_TK: Tensor = kernels.kept(expert_TK, active_TK, **sizes)
        return first_TK
    order_N = _service_order(expert_TK, num_groups, queue, priority_TK)
    queued_N1, active_N1 = (None if x is None else x.reshape(-1)[order_N].unsqueeze(1) for x in (expert_TK, active_TK))
    kept_N = torch.empty_like(order_N, dtype=torch.bool)
    kept_N[order_N] = kernels.kept(queued_N1, active_N1, **sizes)[:, 0]
    return kept_N.view_as(expert_TK)


def _service_order(expert_TK: Tensor, num_groups: int, queue: str, priority_TK: Tensor | None) -> Tensor:
    """Return the flat indices t * K + k of the choices, in the order in which choices get slots: int64 [T * K]. All choices of one group
    of tokens come before the next group's. Inside a group, the order is `queue` (router.queue) or, with `priority_TK`, falling priority."""
    import torch
    from einops import rearrange

    tokens, choices = expert_TK.shape
    order_TK = torch.arange(tokens * choices, device=expert_TK.device).view(tokens, choices)
    pattern = "(g s) k -> g k s" if queue == "choices_first" else "(g s) k -> g 1 (s k)"
    order = rearrange(order_TK, pattern, g=num_groups)
    if priority_TK is not None:
        ranked = rearrange(priority_TK, pattern, g=num_groups).argsort(dim=2, descending=True, stable=True)
        order = order.gather(2, ranked)
    return order.flatten()
