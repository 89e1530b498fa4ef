"""Values other than tensors that a run takes from the checkpoint that it resumes or starts from, and a check that the model is the same.

recipe                                    compared with this run's: changes are refused, or allowed and recorded (moe/recipe/changes.py)
tokenizer                                 used, even if the text has changed: a new tokenizer would give words other ids. Only a resumed
                                          run in which a change of data.tokenizer or data.vocab_size is allowed makes a new one
table of experts by token id              used; a different one in the recipe's file is refused, unless allowed (moe/recipe/hash_table.py)
files of an imported transformers model   copied from the RUN/huggingface/ of --init_from; moe convert exports them again
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe.recipe import hash_table
from moe.recipe.changes import Change, changes, check_function, check_moments, function_changes
from moe.recipe.hash_table import Table
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.store.stored import Reader

KEPT = "huggingface"  # folder in a run: config.json, generation_config.json, tokenizer files, chat template, dtypes.json


@dataclass(frozen=True)
class Resumed:
    """Values that a run takes from a checkpoint, and the changes of its recipe since then."""

    tokenizer: dict[str, Any] | None = None  # description of the tokenizer; None: one is made from the text
    before: Run | None = None  # the recipe of the run's own checkpoint; None: the run is new
    function: tuple[Change, ...] = ()  # the changes that alter what the model computes
    world: int | None = None  # number of ranks that made the earlier steps; None without earlier steps or if it is not known
    table: Table | None = None  # token id -> experts, for hash routers

    @staticmethod
    def of(found: Reader | None, run: Run, allowed: Sequence[str]) -> Resumed:
        """Return the values from the run's own checkpoint `found`, which may be None. Raises BadInput if a changed key alters what the
        model computes, unless it is in `allowed`, or if the optimizer cannot read the checkpoint's optimizer states."""
        if found is None:
            return Resumed(table=hash_table.read(run))
        before = build_run(found.state["recipe"])
        check_function(before, run, allowed=allowed, where=found.path.name)
        if trained := found.state["counters"]["step"] > 0:  # False if moe convert made the checkpoint
            check_moments(before, run, where=found.path.name)
        table, other = _table(found, run, allowed, where=found.path.name)
        function = (*function_changes(before, run), *other)
        retrained = any(change.key.startswith("data.") for change in function)
        d = before.degrees
        world = d.dp * d.pp * d.tp * d.sp if trained and d.dp != "auto" else None
        return Resumed(None if retrained else found.state["tokenizer"], before, function, world, table)

    @staticmethod
    def begun(source: Reader, run: Run, allowed: Sequence[str]) -> Resumed:
        """Return the values for a new run that starts from `source`, another run's checkpoint (`--init_from`). Raises BadInput if the
        recipes differ in a key that alters what the model computes, unless it is in `allowed`."""
        before = build_run(source.state["recipe"])
        check_function(before, run, allowed=allowed, where=str(source.path), otherwise="leave --init_from out")
        table, other = _table(source, run, allowed, where=str(source.path))
        return Resumed(source.state["tokenizer"], None, (*function_changes(before, run), *other), table=table)

    def recorded(self, run: Run) -> dict[str, Any]:
        """Return fields for the line of metrics.jsonl about this start: "changed": new values; "allowed": keys that needed permission."""
        changed = [] if self.before is None else changes(self.before, run)
        about = {"changed": ", ".join(map(str, changed)), "allowed": ", ".join(change.key for change in self.function)}
        return {key: text for key, text in about.items() if text}

    def unused(self, allowed: Sequence[str]) -> list[str]:
        """Return a warning line for every key in `allowed` that needed no permission."""
        used = {change.key for change in self.function}
        return [f"--allow-change {key} has no effect: the key has not changed, or nothing reads it" for key in allowed if key not in used]


def _table(found: Reader, run: Run, allowed: Sequence[str], *, where: str) -> tuple[Table | None, list[Change]]:
    """Return (hash routers' table, changes). The table has the experts of each token id; it is None if the run needs none. It is the one
    of the checkpoint `found`, or the recipe's if the checkpoint has none. If both have one and they differ, the recipe's is taken, with one
    Change, if `allowed` has router.hash_table; else BadInput is raised. Otherwise changes is []. where: name of the checkpoint in the
    error."""
    if (name := hash_table.wanted(run)) is None:
        return None, []
    stored = found.state.get(hash_table.STATE)
    if stored is None:
        return hash_table.read(run), []
    hash_table.check(stored, run, where=where)
    given = hash_table.read(run, or_none=True)
    if given is None or hash_table.same(given, stored):
        return stored, []
    if hash_table.KEY in allowed:
        return given, [Change(hash_table.KEY, "the checkpoint's table", "that of the file")]
    fix = f"--{hash_table.KEY} with the file of that table, or --allow-change {hash_table.KEY} if the change is meant"
    raise BadInput(hash_table.KEY, got=f"another table in {name}", needed=f"the table with which {where} was trained", fix=fix)


def kept(checkpoint: Path) -> Path:
    """Return the path of the folder that has the files of an imported transformers model, in the run of `checkpoint`. It may not exist."""
    return checkpoint.parent.parent / KEPT


def pass_on(checkpoint: Path, out: Path) -> None:
    """Copy the files of an imported transformers model, if there are any, from the run of `checkpoint` to the new run in `out`."""
    source, target = kept(checkpoint), out / KEPT
    if not source.is_dir() or (target.exists() and target.samefile(source)):
        return
    part = out / f".{KEPT}.partial-{os.getpid()}"
    shutil.copytree(source, part)
    shutil.rmtree(target, ignore_errors=True)  # may exist after an interrupted start
    part.rename(target)
