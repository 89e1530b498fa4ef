"""Checks of sequence parallelism: the sp ranks must divide positions equally, each Ulysses group the heads; some keys clash."""

from __future__ import annotations

from moe.checks.clash import clash
from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.mesh.mesh import divisors
from parallel.sequence.order import Order


def check_sequence(run: Run) -> None:
    """Raise BadInput if positions or heads cannot be divided equally among the sp ranks, or if a key has no effect."""
    sp, sequence = run.degrees.sp, run.sequence
    if sp == 1:
        return
    _check_idle(run)
    heads = sequence.heads_of(sp)
    if sp % heads:
        raise BadInput("sequence.heads", got=heads, needed=f"a divisor of degrees.sp={sp}", fix=Set("it", *divisors(sp)))
    _check_order(run)
    _check_heads(run, heads)


def without_effect(run: Run) -> list[str]:
    """Return a line for each key in section `sequence` that has no effect because degrees.sp is 1."""
    if run.degrees.sp > 1:
        return []
    fields = type(run.sequence).model_fields.items()
    found = {key: value for key, field in fields if (value := getattr(run.sequence, key)) != field.default}
    why = "with degrees.sp 1 each rank has whole sequences"
    return [f"sequence.{key} {str(value).lower()} has no effect: {why}" for key, value in found.items()]


def _check_idle(run: Run) -> None:
    if run.sequence.keep_attention and run.recompute.kind != "full":
        full, needed = Set("recompute.kind", "full"), "recompute.kind full: without it, attention is not recomputed anyway"
        raise clash(run, "sequence.keep_attention", "recompute.kind", False, "", full, needed=needed)
    if run.sequence.named.trades_heads and run.sequence.heads != 1:
        why = "with ulysses, all ranks of sp exchange heads for tokens"
        raise clash(run, "sequence.heads", "sequence.kind", 1, why, Set("sequence.kind", "ring"))


def _check_order(run: Run) -> None:
    sp, sequence = run.degrees.sp, run.sequence
    if sequence.position_order not in sequence.named.orders:
        ring, needed = Set("sequence.kind", "ring"), "contiguous: only sequence.kind ring has other orders"
        raise clash(run, "sequence.order", "sequence.kind", None, "", ring, needed=needed)
    heads = sequence.heads_of(sp)
    if run.model.kind == "decoder":  # moe/checks/model.py checks the two lengths of an encoder-decoder
        Order(sequence.position_order, sp // heads, run.model.max_length, inner=heads)


def _check_heads(run: Run, degree: int) -> None:
    """Raise BadInput unless `degree`, the number of ranks in a Ulysses group, divides the number of heads on one tp rank."""
    held = run.model.num_heads // run.tp_grid().units
    if held % degree:
        what = "degrees.sp" if run.sequence.named.trades_heads else "sequence.heads"
        heads = Set("sequence.heads", *(d for d in divisors(held) if run.degrees.sp % d == 0))
        of_rank = f"{held} of model.num_heads={run.model.num_heads}" if run.degrees.tp > 1 else f"model.num_heads={held}"
        got = f"{degree} ranks that exchange heads for tokens, with {of_rank}"
        fix = heads & Set("sequence.kind", "ring") if what == "degrees.sp" else heads
        raise BadInput(what, got=got, needed="a divisor of the number of heads", fix=fix)
