"""Advice that has been tried: each change that a fix proposes is applied to the recipe, and changes that lead to no run are left out.

    Set("degrees.tp", 1, 2, 4) | Set("model.num_heads", 8)        on 2 processes
        ->  degrees.tp: 1    degrees.tp: 2    degrees.tp: 4 x    model.num_heads: 8 x        each applied alone, then all checks again
        ->  Set("degrees.tp", 1, 2)

If no change works alone, the fix of the next refusal is added: Set("degrees.tp", 2) & Nproc(2). A check thus needs to know
only its own reason. Advice without a change ("check the spelling") is kept as it is.
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
_TRY_S = 0.3  # seconds for all trials, so that an error comes in under a second
_FURTHER = 3  # maximum number of changes that are added to a first change

Origins = Mapping[str, str]


def check_for_user(run: Run, world: int, origins: Origins | None = None) -> Run:
    """Return `check_run`'s result. If it refuses, raise BadInput with advice that has been tried on this recipe and number of processes.

    Also checks the recipe's router.hash_table, if that file exists (a resumed run has the table in its checkpoint).
    origins: where each value comes from, by key. Advice that makes a value from the command line unused is left out.
    """
    try:
        checked = check_run(run, world)
    except BadInput as bad:
        raise tried(bad, run, world, origins or {}) from None
    hash_table.read(checked, or_none=True)
    return checked


def tried(bad: BadInput, run: Run, world: int, origins: Origins) -> BadInput:
    """Return the refusal `bad` of a recipe on `world` processes, with only the changes that lead to a run.

    If no change of one key does, its fix is several changes. If none are found, it is a change after which another mistake is left. If
    there is no such change either, it says that none was found.
    """
    until = time.process_time() + _TRY_S
    kept: list[Fix] = []
    failed: list[tuple[Fix, BadInput]] = []
    for fix in bad.fix.alternatives:
        ways = fix.ways(bad.what)
        again = [(way, _refused(way, run, world, origins)) for way in ways if time.process_time() < until]
        working = [way for way, refused in again if refused is None]
        failed += [(way, refused) for way, refused in again if refused is not None]
        if len(working) == len(ways):  # also true for a text, which has no changes to try
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
            mends = [way for way, refused in failed if refused.what not in (bad.what, *_keys(way))]  # another mistake is refused after it
            kept += mends[:1] or ([] if kept else [_NO_ADVICE])
    return BadInput(bad.what, got=bad.got, needed=bad.needed, fix=any_of(kept))


def _further(ways: list[tuple[Fix, BadInput]], run: Run, world: int, origins: Origins, until: float) -> Fix | None:
    """Return the fewest changes that together lead to a run, or None. ways: first changes, each with the refusal of the changed recipe.

    Each further change is from the fix of the last refusal. until: the process time (time.process_time) at which the search ends.
    """
    for _ in range(_FURTHER):
        longer: list[tuple[Fix, BadInput]] = []
        for way, refused in ways:
            for change in refused.fix.ways(refused.what):
                if _keys(way) & _keys(change) or time.process_time() > until:
                    continue
                again = _refused(way & change, run, world, origins)
                if again is None:
                    return way & change
                longer.append((way & change, again))
        ways = longer
    return None


def _refused(way: Fix, run: Run, world: int, origins: Origins) -> BadInput | None:
    """Return the refusal of the recipe with the change `way` on the command line; None if the changed recipe is accepted."""
    try:
        changed, processes = build_run(applied(way, run.model_dump())), nproc(way, world)
        if changed == run and processes == world:
            return BadInput("recipe", got="no change", needed="one", fix="another")
        check_run(changed, processes)
        check_read(changed, origins_with(way, origins), file="")
    except BadInput as bad:
        return bad
    return None


def origins_with(way: Fix, origins: Origins) -> dict[str, str]:
    """Return the origin of each value, by key, after the change `way` has been made on the command line."""
    changed = {part.key: "default" if isinstance(part, Remove) else COMMAND_LINE for part in way.parts if isinstance(part, Set | Remove)}
    return {**origins, **changed}


def nproc(way: Fix, world: int) -> int:
    """Return the number of processes with which the run starts after the change `way`; `world` is the number before it."""
    return next((part.number for part in reversed(way.parts) if isinstance(part, Nproc)), world)


def applied(way: Fix, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the recipe's nested values with the change `way`."""
    made = copy.deepcopy(dict(values))
    way.apply(made)
    return made


def _keys(way: Fix) -> set[str]:
    return {part.key for part in way.parts if isinstance(part, Set | Remove)}
