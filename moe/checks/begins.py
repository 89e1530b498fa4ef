"""Checks of a run's first weights: another run's, or none; anything refused is one line, before torch is imported and ranks are started."""

from __future__ import annotations

from pathlib import Path

from moe.recipe.sections import Run
from parallel.errors import BadInput


def has_checkpoint(folder: Path) -> bool:
    """Whether a run's folder has a checkpoint. Whether that is whole, the ranks find out."""
    return any((folder / "checkpoints").glob("step-*/manifest.json"))


def check_begins(run: Run, out: Path, *, fresh: bool, source: Path | None) -> None:
    """Refuse a start in `out` whose `source` (`--init_from`) has no checkpoint, and adapters without one. Raises BadInput."""
    if not fresh and has_checkpoint(out):  # it goes on from there
        return
    if source is None and run.lora.rank:
        raise no_base(run.lora.rank)
    if source is not None and not (source / "manifest.json").is_file() and not has_checkpoint(source):
        raise no_checkpoint(source)


def no_base(rank: int) -> BadInput:
    """The refusal of adapters beside nothing."""
    needed = "--init_from, the run or checkpoint whose weights are frozen"
    return BadInput("lora.rank", got=f"{rank} without weights to begin with", needed=needed, fix="--init_from runs/NAME")


def no_checkpoint(source: Path) -> BadInput:
    """The refusal of a folder from which no run can begin."""
    fix = "--init_from runs/NAME, or runs/NAME/checkpoints/step-N"
    needed = "a run that saved one, or a checkpoint's folder"
    return BadInput("--init_from", got=f"{source}, which has no checkpoint", needed=needed, fix=fix)
