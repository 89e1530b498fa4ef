"""Checks of degrees.sp: divisible positions and heads, whole routing groups, and keys that it excludes."""

from __future__ import annotations

from moe.recipe.sections import Run
from moe.router.checks import check_groups
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.mesh.mesh import Degrees, divisors
from parallel.sequence.kinds.kind import SequenceSizes
from parallel.sequence.order import Order


def check_sequence(run: Run) -> None:
    """Refuse positions, heads and routing groups that the ranks of sp cannot share out. Raises BadInput."""
    sp, sequence = run.degrees.sp, run.sequence
    if sp < 1:
        raise BadInput("degrees.sp", got=sp, needed="a whole number of at least 1", fix=Set("degrees.sp", 1))
    if sp == 1:
        return
    if run.sharding.named.threads:
        raise BadInput(
            "sharding.kind", got=f"dp with degrees.sp={sp}", needed="ddp, fsdp or zero: dp is one process", fix=Set("sharding.kind", "ddp")
        )
    _check_idle(run)
    heads = sequence.heads_of(sp)
    if sp % heads:
        raise BadInput("sequence.heads", got=heads, needed=f"a divisor of degrees.sp={sp}", fix=Set("it", *divisors(sp)))
    _check_order(run)
    _check_heads(run, heads)
    m = run.model
    windows, kv_heads = m.sliding_window is not None, m.num_kv_heads or m.num_heads
    sizes = SequenceSizes(sp, m.num_heads // run.tp_grid().units, kv_heads, m.max_length, m.positions == "t5", m.attention_sinks, windows)
    if (refused := sequence.named.refuses(sizes)) is not None:
        raise refused
    if run.model.layers_with_experts():
        check_groups(run.router, Degrees(sp=sp))


def without_effect(run: Run) -> list[str]:
    """Return a line for each key of section `sequence` that has no effect because degrees.sp is 1: a recipe for many ranks, on fewer."""
    if run.degrees.sp > 1:
        return []
    fields = type(run.sequence).model_fields.items()
    found = {key: value for key, field in fields if (value := getattr(run.sequence, key)) != field.default}
    return [f"sequence.{key} {str(value).lower()} has no effect: with degrees.sp 1 sequences are whole" for key, value in found.items()]


def _check_idle(run: Run) -> None:
    """Refuse keys of `sequence` that change nothing under the other values."""
    sequence, recompute = run.sequence, run.recompute.kind
    if sequence.keep_attention and recompute != "full":
        raise BadInput(
            "sequence.keep_attention",
            got=f"true with recompute.kind={recompute}",
            needed="recompute.kind full: otherwise attention is computed once anyway",
            fix=Set("sequence.keep_attention", False) | Set("recompute.kind", "full"),
        )
    if sequence.named.trades_heads and sequence.heads != 1:
        raise BadInput(
            "sequence.heads",
            got=f"{sequence.heads} with sequence.kind={sequence.kind}",
            needed="1: there all ranks of sp trade heads",
            fix=Set("sequence.heads", 1) | Set("sequence.kind", "ring"),
        )


def _check_order(run: Run) -> None:
    sp, sequence = run.degrees.sp, run.sequence
    if sequence.position_order not in sequence.named.orders:
        raise BadInput(
            "sequence.order",
            got=f"{sequence.order} with sequence.kind={sequence.kind}",
            needed="contiguous: other orders are a ring's",
            fix=Set("sequence.order", None) | Set("sequence.kind", "ring"),
        )
    heads = sequence.heads_of(sp)
    Order(sequence.position_order, sp // heads, run.model.max_length, inner=heads)


def _check_heads(run: Run, degree: int) -> None:
    """Refuse heads that do not divide: the heads of a tp rank are shared out over the ranks that trade heads for tokens."""
    held = run.model.num_heads // run.tp_grid().units
    if held % degree:
        what = "degrees.sp" if run.sequence.named.trades_heads else "sequence.heads"
        heads = Set("sequence.heads", *(d for d in divisors(held) if run.degrees.sp % d == 0))
        of_rank = f"{held} of model.num_heads={run.model.num_heads}" if run.degrees.tp > 1 else f"model.num_heads={held}"
        raise BadInput(
            what,
            got=f"{degree} ranks that trade heads for tokens, with {of_rank}",
            needed="a divisor of the heads",
            fix=heads & Set("sequence.kind", "ring") if what == "degrees.sp" else heads,
        )
