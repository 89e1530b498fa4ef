"""The verdict on a recipe: it runs, it runs but is not recommended, or it is refused; with the reason.

    refused           check_run raises BadInput (moe/checks/together.py)
    not recommended   it runs, and the result is right; but another recipe does the same work with less time, memory or doubt
    runs              all others

The table of all pairs is docs/parallel/combinations.md, made from these verdicts by `moe combinations`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moe.checks.pipeline import slow_sharding
from moe.checks.together import check_run
from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.pipeline.schedules.catalog import SCHEDULES

Status = Literal["runs", "not recommended", "refused"]


@dataclass(frozen=True)
class Verdict:
    """`advice`: reasons why the recipe is not recommended, one a line; `refused`: the reason why it cannot run."""

    status: Status
    advice: tuple[str, ...] = ()
    refused: BadInput | None = None


def verdict(run: Run, world_size: int) -> Verdict:
    """Return the verdict on a recipe with this number of processes."""
    try:
        run = check_run(run, world_size)
    except BadInput as refused:
        return Verdict("refused", refused=refused)
    advice = not_recommended(run)
    return Verdict("not recommended", tuple(advice)) if advice else Verdict("runs")


def not_recommended(run: Run) -> list[str]:
    """Return reasons against a resolved run that the checks accept, each with a better choice."""
    return [*_pipeline(run), *_sequence(run), *_tensor(run)]


def _pipeline(run: Run) -> Iterator[str]:
    if run.degrees.pp == 1:
        return
    slow = slow_sharding(run)
    if slow is not None:
        yield f"{slow.what} with degrees.pp: {slow.needed.partition(': ')[2]}; better: zero of stage 1"
    kind = SCHEDULES.get(run.pipeline.schedule)
    if kind is not None and kind.advice is not None:
        yield f"pipeline.schedule {run.pipeline.schedule}: {kind.advice}"


def _sequence(run: Run) -> Iterator[str]:
    sequence = run.sequence
    if run.degrees.sp == 1:
        return
    if (advice := sequence.named.advice(sequence.position_order, run.degrees.sp // sequence.heads_of(run.degrees.sp))) is not None:
        yield advice
    if run.recompute.kind == "full" and not sequence.keep_attention:
        yield "recompute.kind full with degrees.sp: keys are sent a second time; better: also sequence.keep_attention true"


def _tensor(run: Run) -> Iterator[str]:
    if run.degrees.tp > 1 and run.tensor.kind == "copied":
        yield "tensor.kind copied: every rank of tp does the same work, which only checks engines; better: 1d"
