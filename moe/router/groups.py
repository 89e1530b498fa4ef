"""Over which axes a router's groups of tokens are cut, where ranks read slices of sequences.

    router.group sequence, sp 2        tokens 0 .. 5 on sp 0 | 6 .. 11 on sp 1       one group, one capacity: who is dropped on sp 1
                                                                                     depends on how many sp 0 has sent before

A group is a sequence, or several, whatever the layout (docs/moe/moe.md). Data parallelism gives whole sequences to a rank and cuts none.
"""

from __future__ import annotations

from moe.recipe.router_spec import RouterSpec
from parallel.errors import BadInput
from parallel.mesh import Degrees


def needs_group(spec: RouterSpec) -> str | None:
    """What a router decides over a whole group, or None: then it looks at each token alone."""
    if spec.select in ("expert_choice", "sinkhorn"):
        return f"router.select={spec.select}"
    if spec.drops:
        return "a capacity"
    if spec.balance_scope != "global_batch" and (spec.balance_weight or spec.importance_weight):
        return f"router.balance_scope={spec.balance_scope}"
    return None


def cut_by(spec: RouterSpec, degrees: Degrees) -> tuple[str, ...]:
    """The axes whose ranks hold parts of one group, and so must exchange counts or choices before one of them decides."""
    return ("sp",) if degrees.sp > 1 and spec.group != "rank" and needs_group(spec) else ()


def check_groups(spec: RouterSpec, degrees: Degrees) -> None:
    """Refuse a group that is cut: its ranks do not exchange counts, so each would take its slice for the whole. Raises BadInput."""
    if axes := cut_by(spec, degrees):
        raise BadInput(
            " * ".join(f"degrees.{axis}" for axis in axes),
            got=" * ".join(str(degrees.size(axis)) for axis in axes),
            needed=f"1 with {needs_group(spec)} over groups of whole sequences (router.group={spec.group})",
            fix="set it to 1; or router.capacity_factor to null and router.balance_scope to global_batch",
        )
