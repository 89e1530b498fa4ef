"""Verdict on a recipe: "refused" if `check_run` raises BadInput, "not recommended" if another recipe computes the same with less time or
memory, otherwise "runs". docs/parallel/combinations.md has the verdicts on all pairs of values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe.checks.pipeline import not_recommended
from moe.checks.together import check_run
from moe.recipe.sections import Run
from parallel.errors import BadInput


@dataclass(frozen=True)
class Verdict:
    """Verdict on a recipe. advice: reasons why it is not recommended. refused: the error, if it cannot run."""

    status: Literal["runs", "not recommended", "refused"]
    advice: tuple[str, ...] = ()
    refused: BadInput | None = None


def verdict(run: Run, world_size: int) -> Verdict:
    try:
        run = check_run(run, world_size)
    except BadInput as refused:
        return Verdict("refused", refused=refused)
    advice = not_recommended(run)
    return Verdict("not recommended", tuple(advice)) if advice else Verdict("runs")
