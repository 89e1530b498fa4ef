"""Reads and writes energy plans (a GPU clock for each action of a pipeline schedule) as JSON: `moe energy --out plan.json` writes one, and
training reads it.

    {"schedule": "1f1b", ..., "ranks": [[{"action": "0F0", "mhz": 1530}, {"action": "0F1", "mhz": 1080}, ...], ...]}

0F1: stage 0, forward pass (F; B: backward), micro-batch 1. 0 MHz: no planned clock. Training follows the file's order of actions, because
a plan may lengthen 1F1B's warm-up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parallel.errors import BadInput, counted
from parallel.fixes import Fix
from parallel.pipeline.check import check
from parallel.pipeline.energy.clocks import is_number
from parallel.pipeline.energy.energy import EnergyPlan
from parallel.pipeline.schedule import Action, Schedule
from parallel.store.files import read_text, write_text

_MOST_MHZ = 1e5  # clocks in a file must be below this


@dataclass(frozen=True)
class ClockedSchedule:
    """A schedule with its actions in the order of its energy plan. mhz: for each rank, action -> its planned GPU clock; 0: none."""

    schedule: Schedule
    mhz: tuple[Mapping[Action, float], ...]


def write_plan(plan: EnergyPlan, path: str | Path) -> None:
    """Write the plan as JSON. Raises BadInput if the file cannot be written."""
    value = {
        "schedule": plan.schedule.name,
        "makespan_s": plan.timeline.makespan,
        "energy_j": plan.energy,
        "full_clock": {"makespan_s": plan.full_clock.makespan, "energy_j": plan.full_clock_energy},
        "saved": plan.saved,
        "slowdown": plan.slowdown,
        "idle_power_w": plan.idle_power,
        "ranks": [
            [{"action": str(action), "mhz": clock.mhz} for action, clock in zip(order, clocks, strict=True)]
            for order, clocks in zip(plan.schedule.orders, plan.clocks, strict=True)
        ],
    }
    write_text(Path(path), json.dumps(value, indent=1) + "\n", what="--out")


def read_plan(path: str | Path, schedule: Schedule, *, what: str, fix: Fix | str) -> ClockedSchedule:
    """Read a plan for this schedule. Raises BadInput, with `what` and `fix`, if the file is not a plan or is for another schedule."""
    numbers = {"rank": schedule.num_ranks, "stage": schedule.num_stages, "micro-batch": schedule.microbatches}
    size = ", ".join(counted(number, name) for name, number in numbers.items())

    def wrong(got: str) -> BadInput:
        return BadInput(what, got=f"{path}: {got}", needed=f"a plan of {schedule.name} with {size}, made by moe energy", fix=fix)

    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise wrong(getattr(error, "strerror", None) or "no JSON") from None
    ranks = _ranks(value)
    if ranks is None:
        raise wrong("no plan")
    if value["schedule"] != schedule.name:
        raise wrong(f"a plan of {value['schedule']}")
    if len(ranks) != schedule.num_ranks:
        raise wrong(f"a plan of {counted(len(ranks), 'rank')}")
    orders, clocks = [], []
    for rank, planned in enumerate(ranks):
        known = {str(action): action for action in schedule.orders[rank]}
        names = [name for name, _ in planned]
        odd = next((name for name in [*names, *known] if name not in known or names.count(name) != 1), None)
        if odd is not None:
            raise wrong(f"rank {rank} {f'with {odd} {names.count(odd)} times' if odd in known else f'with {odd}'}")
        orders.append(tuple(known[name] for name in names))
        clocks.append({known[name]: mhz for name, mhz in planned})
    if schedule.pairs and tuple(orders) != schedule.orders:
        # schedule.pairs (F and B that run as one block) are positions in the schedule's order, so they would be wrong in another
        raise wrong("another order of actions")
    return ClockedSchedule(check(replace(schedule, orders=tuple(orders))), tuple(clocks))


def _ranks(value: Any) -> list[list[tuple[str, float]]] | None:
    """Return for each rank its (action, MHz) in order, from the parsed JSON of a plan file; None if any part of it is wrong."""
    if not isinstance(value, dict) or not isinstance(value.get("schedule"), str) or not isinstance(value.get("ranks"), list):
        return None
    found: list[list[tuple[str, float]]] = []
    for rank in value["ranks"]:
        entries: list[Any] = rank if isinstance(rank, list) else [None]
        if not all(
            isinstance(entry, dict) and isinstance(entry.get("action"), str) and is_number(entry.get("mhz"), below=_MOST_MHZ)
            for entry in entries
        ):
            return None
        found.append([(entry["action"], float(entry["mhz"])) for entry in entries])
    return found
