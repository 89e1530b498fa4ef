"""What a run takes over from the checkpoint that it goes on or begins from, beside tensors: its tokenizer, and the right to be its model.

checkpoint's recipe + this run's recipe  ->  refused, or allowed; told; recorded        (the table: moe/recipe/changes.py)
checkpoint's tokenizer                   ->  tokenises whatever the text is now: other ids would scramble the model
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe.recipe.changes import Change, changes, check_function, check_moments, function_changes
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from parallel.stored import Reader


@dataclass(frozen=True)
class Resumed:
    """`tokenizer`: the description to use, None where the text decides; `changed`: every key that differs; `function`: some of them.

    `world`: on how many ranks the steps before were made; None where nothing was trained.
    """

    tokenizer: dict[str, Any] | None = None
    changed: tuple[Change, ...] = ()
    function: tuple[Change, ...] = ()
    world: int | None = None

    @staticmethod
    def of(found: Reader | None, run: Run, allowed: Sequence[str]) -> Resumed:
        """Of a checkpoint, or of none. Raises BadInput for a recipe that makes another function of its weights, unless `allowed`."""
        if found is None:
            return Resumed()
        before = build_run(found.state["recipe"])
        check_function(before, run, allowed=allowed, where=found.path.name)
        if found.state["counters"]["step"] > 0:  # a converted model has not been trained yet
            check_moments(before, run, where=found.path.name)
        function = tuple(function_changes(before, run))
        retrained = any(change.key.startswith("data.") for change in function)
        d, trained = before.degrees, found.state["counters"]["step"] > 0
        world = d.dp * d.pp * d.tp * d.sp if trained and d.dp != "auto" else None
        return Resumed(None if retrained else found.state["tokenizer"], tuple(changes(before, run)), function, world)

    @staticmethod
    def begun(source: Reader, run: Run, allowed: Sequence[str]) -> Resumed:
        """Of another run's checkpoint, of which only the model is taken over (`--init_from`): nothing of how it was trained."""
        before = build_run(source.state["recipe"])
        check_function(before, run, allowed=allowed, where=str(source.path), otherwise="leave --init_from out")
        return Resumed(source.state["tokenizer"], (), tuple(function_changes(before, run)))

    def recorded(self) -> dict[str, Any]:
        """For the event of going on: what changed, and which of it was allowed by name."""
        about = {"changed": ", ".join(map(str, self.changed)), "allowed": ", ".join(change.key for change in self.function)}
        return {key: text for key, text in about.items() if text}

    def unused(self, allowed: Sequence[str]) -> list[str]:
        """A line for every permission that nothing needed."""
        used = {change.key for change in self.function}
        return [f"--allow-change {key} has no effect: it has not changed, or nothing reads it" for key in allowed if key not in used]
