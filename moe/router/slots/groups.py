"""Groups of tokens that sequence parallelism would cut: the settings that need whole groups, and a check.

    router.group sequence, sp 2        tokens 0 .. 5 on sp 0 | 6 .. 11 on sp 1       one group, one capacity: tokens dropped on sp 1
                                                                                     depend on the number that sp 0 routed before

A group is a sequence, or several, whatever the layout (docs/moe/moe.md). Data parallelism gives whole sequences to a rank and cuts none.
Ranks that hold shards of one group exchange scores before they decide (moe/router/slots/slices.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe.router.methods.catalog import method_of
from moe.router.slots.causal import drops
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.mesh.mesh import Degrees

if TYPE_CHECKING:
    from moe.recipe.router_spec import RouterSpec


def needs_group(spec: RouterSpec) -> str | None:
    """Return the setting that makes a router decide over a whole group; None if it looks at each token alone."""
    if method_of(spec).needs_whole_groups:
        return f"router.select={spec.select}"
    if drops(spec):
        return "a capacity"
    if spec.balance_scope != "global_batch" and spec.asks_balance:
        return f"router.balance_scope={spec.balance_scope}"
    return None


def check_groups(spec: RouterSpec, degrees: Degrees) -> None:
    """Refuse `router.group: rank` with sequence parallelism: a rank holds shards of sequences, so no other layout has its groups. Raises
    BadInput.
    """
    if degrees.sp > 1 and spec.group == "rank" and needs_group(spec):
        raise BadInput(
            "router.group",
            got=f"rank with degrees.sp={degrees.sp} and {needs_group(spec)}",
            needed="sequence, or a number of sequences: a rank holds slices of them",
            fix=Set("router.group", "sequence") | Set("degrees.sp", 1),
        )
