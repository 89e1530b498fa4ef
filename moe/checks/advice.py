"""Tries advice before the user reads it: applies each change that a fix proposes to the recipe, and drops a change if the recipe is still
refused.

    Set("degrees.tp", 1, 2, 4) | Set("model.num_heads", 8)      fix of a refusal on 2 processes: four changes, each tried alone
    tp 1 and tp 2 are accepted, tp 4 and num_heads 8 refused    ->  Set("degrees.tp", 1, 2)

If no single change is enough, the fix of the next refusal is added to it: Set("degrees.tp", 2) & Nproc(2). A check thus needs to know only
its own reason. Advice in words ("check the spelling") cannot be tried, and is kept.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

from moe.checks.together import check_run
from moe.recipe import hash_table
from moe.recipe.idle import COMMAND_LINE, check_read
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.fixes import Fix, Nproc, Remove, Set, Words, any_of

_NO_ADVICE = Words("no change of one key alone was found that works: see docs/use/recipes.md")
_TRY_S = 0.3  # processor seconds for all trials, so that the error message appears within a second
_FURTHER = 3  # maximum number of changes that are added to a first change

Origins = Mapping[str, str]


def check_for_user(run: Run, world: int, origins: Origins | None = None) -> Run:
    """Return `check_run`'s result, the run with its `auto` degrees resolved. If it refuses, raise BadInput with tried advice (`tried`).

    Also checks the file of router.hash_table, if it exists (a resumed run has the table in its checkpoint). origins: key -> where its value
    comes from. Advice that would make a value of the command line unused is dropped.
    """
    try:
        checked = check_run(run, world)
    except BadInput as bad:
        raise tried(bad, run, world, origins or {}) from None
    hash_table.read(checked, or_none=True)
    return checked


def tried(bad: BadInput, run: Run, world: int, origins: Origins) -> BadInput:
    """Return the refusal `bad` of a recipe on `world` processes, with a fix that was tried: single changes after which the recipe is
    accepted; or else several changes that are accepted together; or else a change after which only another mistake is refused; or else a
    text that says that no change was found."""
    until = time.process_time() + _TRY_S
    kept: list[Fix] = []
    failed: list[tuple[Fix, BadInput]] = []
    for fix in bad.fix.alternatives:
        changes = fix.ways(bad.what)
        again = [(change, _refused(change, run, world, origins)) for change in changes if time.process_time() < until]
        working = [change for change, refused in again if refused is None]
        failed += [(change, refused) for change, refused in again if refused is not None]
        if len(working) == len(changes):  # also true for advice in words: both lists are empty
            kept.append(fix)
        elif working:
            kept.append(any_of(working))
    if not failed:
        return bad
    if not any(fix.ways(bad.what) for fix in kept):
        found = _further(failed, run, world, origins, until)
        if found is not None:
            kept.insert(0, found)
        else:
            half = [change for change, refused in failed if refused.what not in (bad.what, *_keys(change))]  # then another key is refused
            kept += half[:1] or ([] if kept else [_NO_ADVICE])
    return BadInput(bad.what, got=bad.got, needed=bad.needed, fix=any_of(kept))


def _further(tries: list[tuple[Fix, BadInput]], run: Run, world: int, origins: Origins, until: float) -> Fix | None:
    """Return the smallest set of changes after which the recipe is accepted; None if none is found before process time `until`.
    tries: changes that were not enough alone, each with the next refusal. A change of that refusal's fix is added to each of them."""
    for _ in range(_FURTHER):
        longer: list[tuple[Fix, BadInput]] = []
        for change, refused in tries:
            for added in refused.fix.ways(refused.what):
                if _keys(change) & _keys(added) or time.process_time() > until:
                    continue
                again = _refused(change & added, run, world, origins)
                if again is None:
                    return change & added
                longer.append((change & added, again))
        tries = longer
    return None


def _refused(change: Fix, run: Run, world: int, origins: Origins) -> BadInput | None:
    """Return the refusal of the recipe after a change on the command line; None if the changed recipe is accepted."""
    try:
        changed, processes = build_run(applied(change, run.model_dump())), nproc(change, world)
        if changed == run and processes == world:
            return BadInput("recipe", got="no change", needed="one", fix="another")
        check_run(changed, processes)
        check_read(changed, origins_with(change, origins), file="")
    except BadInput as bad:
        return bad
    return None


def origins_with(change: Fix, origins: Origins) -> dict[str, str]:
    """Return key -> origin of its value, after a change has been made on the command line."""
    keys = {part.key: "default" if isinstance(part, Remove) else COMMAND_LINE for part in change.parts if isinstance(part, Set | Remove)}
    return {**origins, **keys}


def nproc(change: Fix, world: int) -> int:
    """Return the number of processes after a change of the command line; `world` is the number before it."""
    return next((part.number for part in reversed(change.parts) if isinstance(part, Nproc)), world)


def applied(change: Fix, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a recipe's nested values to which the change has been applied."""
    made = copy.deepcopy(dict(values))
    change.apply(made)
    return made


def _keys(change: Fix) -> set[str]:
    return {part.key for part in change.parts if isinstance(part, Set | Remove)}
