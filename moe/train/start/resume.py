"""State other than tensors that a run takes over from a checkpoint that it resumes or begins with, and the check that the model fits.

checkpoint's recipe + this run's recipe  ->  refused, or allowed; told; recorded        (the table: moe/recipe/changes.py)
checkpoint's tokenizer                   ->  tokenizes the text even if that changed: other ids would scramble the model
checkpoint's table of experts by id      ->  is taken, and another in the recipe's file refused       (moe/recipe/hash_table.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe.recipe import hash_table
from moe.recipe.changes import Change, changes, check_function, check_moments, function_changes
from moe.recipe.hash_table import Table
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.store.stored import Reader


@dataclass(frozen=True)
class Resumed:
    """Result of the check. `tokenizer`: the description to use, None if the text decides. `changed`: every key that differs. `function`:
    the changes that alter the model's function. `table`: of hash routers, or None.

    `world`: number of ranks of the earlier steps; None if nothing was trained.
    """

    tokenizer: dict[str, Any] | None = None
    changed: tuple[Change, ...] = ()
    function: tuple[Change, ...] = ()
    world: int | None = None
    table: Table | None = None

    @staticmethod
    def of(found: Reader | None, run: Run, allowed: Sequence[str]) -> Resumed:
        """Check a recipe against a checkpoint, if there is one. Raises BadInput if its weights would compute another function, unless
        `allowed`."""
        if found is None:
            return Resumed(table=hash_table.read(run))
        before = build_run(found.state["recipe"])
        check_function(before, run, allowed=allowed, where=found.path.name)
        if found.state["counters"]["step"] > 0:  # a converted model has not been trained yet
            check_moments(before, run, where=found.path.name)
        table, other = _table(found, run, allowed, where=found.path.name)
        function = (*function_changes(before, run), *other)
        retrained = any(change.key.startswith("data.") for change in function)
        d, trained = before.degrees, found.state["counters"]["step"] > 0
        world = d.dp * d.pp * d.tp * d.sp if trained and d.dp != "auto" else None
        return Resumed(None if retrained else found.state["tokenizer"], tuple(changes(before, run)), function, world, table)

    @staticmethod
    def begun(source: Reader, run: Run, allowed: Sequence[str]) -> Resumed:
        """Check another run's checkpoint (`--init_from`). Only the model is taken over, no training state."""
        before = build_run(source.state["recipe"])
        check_function(before, run, allowed=allowed, where=str(source.path), otherwise="leave --init_from out")
        table, other = _table(source, run, allowed, where=str(source.path))
        return Resumed(source.state["tokenizer"], (), (*function_changes(before, run), *other), table=table)

    def recorded(self) -> dict[str, Any]:
        """Return the fields of the resume event: the changes, and the keys allowed by name."""
        about = {"changed": ", ".join(map(str, self.changed)), "allowed": ", ".join(change.key for change in self.function)}
        return {key: text for key, text in about.items() if text}

    def unused(self, allowed: Sequence[str]) -> list[str]:
        """Return a line for every permission that was not needed."""
        used = {change.key for change in self.function}
        return [f"--allow-change {key} has no effect: it has not changed, or nothing reads it" for key in allowed if key not in used]


def _table(found: Reader, run: Run, allowed: Sequence[str], *, where: str) -> tuple[Table | None, list[Change]]:
    """Return the checkpoint's table. Return the recipe's file if the checkpoint has none, or if another is `allowed`; then also return the
    change, because no key of the recipe shows it."""
    if hash_table.wanted(run) is None:
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
    name = hash_table.wanted(run)
    fix = f"--{hash_table.KEY} with the file of that table, or --allow-change {hash_table.KEY} if it is meant"
    raise BadInput(hash_table.KEY, got=f"another table in {name}", needed=f"the one with which {where} was trained", fix=fix)
