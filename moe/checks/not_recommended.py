"""Reasons not to run a recipe that the checks accept: another recipe computes the same with less time or memory."""

from __future__ import annotations

from moe.checks.pipeline import slow_sharding
from moe.recipe.sections import Run
from parallel.pipeline.schedules.catalog import SCHEDULES


def not_recommended(run: Run) -> list[str]:
    """Return the reasons not to run this recipe, each with a better choice. run: recipe with resolved degrees."""
    found, d, sequence = [], run.degrees, run.sequence
    if (slow := slow_sharding(run)) is not None:
        found.append(f"{slow.what} with degrees.pp: {slow.needed.partition(': ')[2]}; better: zero of stage 1, or fsdp with reshard false")
    kind = SCHEDULES.get(run.pipeline.schedule)
    if d.pp > 1 and kind is not None and kind.advice is not None:
        found.append(f"pipeline.schedule {run.pipeline.schedule}: {kind.advice}")
    if d.sp > 1 and (advice := sequence.named.advice(sequence.position_order, d.sp // sequence.heads_of(d.sp))) is not None:
        found.append(advice)
    if d.sp > 1 and run.recompute.kind == "full" and not sequence.keep_attention:
        found.append("recompute.kind full with degrees.sp: keys are sent a second time; better: also sequence.keep_attention true")
    if d.tp > 1 and run.tensor.kind == "copied":
        found.append("tensor.kind copied: every rank of tp does the same work, useful only in tests; better: 1d")
    return found
