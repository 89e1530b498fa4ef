"""Tests the fix of an error before the user reads it: applies each change that the fix proposes to the recipe, and drops the change if the
recipe is still refused.

    Set("degrees.tp", 1, 2, 4) | Set("model.num_heads", 8)      fix of a refusal on 2 processes: four changes, each tried alone
    tp 1 and tp 2 are accepted, tp 4 and num_heads 8 refused    ->  Set("degrees.tp", 1, 2)

If no single change is enough, a change is combined with one that the fix of the remaining error proposes: Set("degrees.tp", 2) & Nproc(2).
So a check proposes fixes without knowing the other checks. Advice in words ("check the spelling") cannot be tested, and is kept.
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

# for a change without effect, which mends nothing; its words are not shown
_NO_EFFECT = BadInput("recipe", got="the same one", needed="a change", fix="change a key")
_NO_ADVICE = Words("no change of one key alone was found that works: see docs/use/recipes.md")
_TRY_S = 0.3  # limit on processor seconds for testing changes of the recipe, so that the error message appears within a second
_FURTHER = 3  # largest number of changes that are added to a first change

Origins = Mapping[str, str]


def check_for_user(run: Run, world: int, origins: Origins | None = None) -> Run:
    """Check a run (`check_run`), and return it with its `auto` degrees resolved. A BadInput of the check gets a tested fix (`tried`).

    Also checks the file of router.hash_table if it exists (a resumed run reads the table from its checkpoint). world: number of
    processes. origins: key -> origin of its value: "default", "command line" or a recipe file. A fix is not proposed if it would make a
    value from the command line have no effect."""
    try:
        checked = check_run(run, world)
    except BadInput as bad:
        raise tried(bad, run, world, origins or {}) from None
    hash_table.read(checked, or_none=True)
    return checked


def tried(bad: BadInput, run: Run, world: int, origins: Origins) -> BadInput:
    """Return the error `bad` of a recipe on `world` processes, with a tested fix. The fix is the first of these that exists: (1) all single
    changes after which the recipe is accepted; (2) several changes together after which the recipe is accepted; (3) one change that mends
    this error but leaves an error about another key; (4) a text that says that none was found. Fixes in words, which cannot be tested, are
    kept. origins: key -> origin of its value."""
    until = time.process_time() + _TRY_S
    kept: list[Fix] = []
    failed: list[tuple[Fix, BadInput]] = []
    for fix in bad.fix.alternatives:
        changes = fix.ways(bad.what)
        again = [(change, _refused(change, run, world, origins)) for change in changes if time.process_time() < until]
        working = [change for change, refused in again if refused is None]
        failed += [(change, refused) for change, refused in again if refused is not None]
        if len(working) == len(changes):  # also true for advice without changes: both lists are empty
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
            # changes that mend this error: the one that remains is about a key that is neither `bad.what` nor changed
            mending = [change for change, left in failed if left is not _NO_EFFECT and left.what not in (bad.what, *_keys(change))]
            kept += mending[:1] or ([] if kept else [_NO_ADVICE])
    return BadInput(bad.what, got=bad.got, needed=bad.needed, fix=any_of(kept))


def _further(tries: list[tuple[Fix, BadInput]], run: Run, world: int, origins: Origins, until: float) -> Fix | None:
    """Extend changes that were not enough until the recipe is accepted. Return the first extended change that is enough; None if none is.
    tries: (change, error that remains after it). In each of _FURTHER rounds, every change is combined with each change that the fix of its
    error proposes. origins: key -> origin of its value. The search ends at process time `until`."""
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
    """Return the error that the recipe has after `change`, or _NO_EFFECT if nothing changes; None if the changed recipe is accepted. Keys
    that `change` sets count as given on the command line. origins: key -> origin of its value before the change."""
    try:
        changed, processes = build_run(applied(change, run.model_dump())), nproc(change, world)
        if changed == run and processes == world:
            return _NO_EFFECT
        check_run(changed, processes)
        check_read(changed, origins_with(change, origins), file="")
    except BadInput as bad:
        return bad
    return None


def origins_with(change: Fix, origins: Origins) -> dict[str, str]:
    """Return key -> origin of its value, after a change on the command line."""
    keys = {part.key: "default" if isinstance(part, Remove) else COMMAND_LINE for part in change.parts if isinstance(part, Set | Remove)}
    return {**origins, **keys}


def nproc(change: Fix, world: int) -> int:
    """Return the number of processes after a change on the command line. world: number of processes before the change."""
    return next((part.number for part in reversed(change.parts) if isinstance(part, Nproc)), world)


def applied(change: Fix, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a recipe's nested values with the change applied."""
    made = copy.deepcopy(dict(values))
    change.apply(made)
    return made


def _keys(change: Fix) -> set[str]:
    return {part.key for part in change.parts if isinstance(part, Set | Remove)}
