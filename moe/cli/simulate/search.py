"""`moe simulate search`: searches an order of actions for the given times and memory. --out writes it for pipeline.schedule.

moe simulate search --stages 4 --microbatches 6 --forward-time 1,1,1,2 --backward-time 2,2,2,3 --memory 4 --out order.csv
moe train R --degrees.pp 4 --pipeline.microbatches 6 --pipeline.schedule order.csv
"""

from __future__ import annotations

from typing import Any

from moe.cli.simulate.times import OfRecipe, Times
from parallel.errors import BadInput
from parallel.pipeline.schedule import Schedule, flushed
from parallel.pipeline.schedules.search import homes_of, search

NAME = "search"
SEARCHED = 16  # a search takes about as long as simulating this number of orders


def searched(size: dict[str, Any], costs: Times | OfRecipe, *, placement: str | None, memory: float | None) -> Schedule:
    """The order found. Raises BadInput for flags of other schedules, and if `memory` is too small for any order."""
    for flag in ("vertical_sync", "pipelines"):
        if size[flag] is not None:
            raise BadInput(f"--{flag}", got="it with search", needed="the flags of search", fix=f"remove --{flag}")
    if memory is not None and memory < 1:
        raise BadInput("--memory", got=memory, needed="at least 1, a micro-batch of all layers of a rank", fix="--memory 1")
    placement = placement or "line"
    if size["chunks"] is not None and placement != "loop":
        raise BadInput("--chunks", got=f"it with --placement {placement}", needed="--placement loop, which has a choice", fix="remove it")
    ranks, microbatches, chunks = size["stages"], size["microbatches"], size["chunks"] or 2
    # an order without actions: its stages give the costs
    empty = flushed(NAME, homes_of(placement, ranks, chunks), microbatches, [()] * ranks)
    return search(
        placement,
        ranks,
        microbatches,
        costs.cost(empty),
        chunks=chunks,
        transfer_time=costs.transfer_of(empty),
        memory=memory,
        overlap=costs.overlap == "on",
    )


def refuse_elsewhere(name: str | None, **given: object) -> None:
    """Raise BadInput for a flag of `search` that was given with another schedule."""
    for flag, value in given.items():
        if value is not None and name != NAME:
            got = f"it with {name or 'all schedules'}"
            raise BadInput(f"--{flag}", got=got, needed=f"moe simulate {NAME}: only it has this flag", fix=f"remove --{flag}")
