"""`moe simulate`: draws a pipeline schedule and counts its costs without starting a process, or compares all schedules in a table.

    moe simulate chimera --stages 4 --microbatches 8 --out chimera.png
    moe simulate search --stages 4 --memory 4 --out o.csv    searches an order of actions for these times and this memory
    moe simulate 1f1b --stages 4 --recipe switch_base        stages cut from the recipe's model, seconds and GB

A training run executes the same schedules of parallel/pipeline that are drawn here, and with pipeline.schedule=o.csv the searched order.
Times: moe/cli/simulate_times.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

from moe.cli.run import check_least, refuse, write_rows
from moe.cli.simulate_text import print_all, print_one, summary_line
from moe.cli.simulate_times import MOST_ACTIONS, NEEDS_RECIPE, OF_FILE, Costs, OfRecipe, check_filled, check_size, of_recipe, times_of
from moe.cli.verbs import Simulate
from moe.launch import exit_codes
from parallel.errors import BadInput
from parallel.pipeline.order_file import read_order, write_order
from parallel.pipeline.schedule import Schedule, flushed
from parallel.pipeline.schedules.catalog import SCHEDULES, kind_of, make_schedule
from parallel.pipeline.schedules.search import homes_of, search
from parallel.pipeline.simulator.draw import text, write_trace
from parallel.pipeline.simulator.held import peak_activations, peak_held, weight_versions
from parallel.pipeline.simulator.simulate import Timeline, period
from parallel.store.files import write_text

KINDS = {".png": "a picture", ".csv": "the actions", ".txt": "the rows as text", ".json": "a trace"}
OPTIONS = ("vertical_sync", "pipelines")  # flags of a single schedule: pipedream, chimera
RANKS, MICROBATCHES = 4, 8
SEARCH = "search"  # NAME with which an order is searched instead of a schedule simulated
SEARCHED = 16  # divides the limit on forward passes for a search, which takes as long as about 16 simulations
UNIT = "1 = forward pass of one micro-batch through a rank's layers, unless times were given"
TIMES = ("forward_time", "backward_time", "weight_share", "transfer_time", "overlap", "tflops", "link_gb_s")


def main(flags: Simulate, overrides: dict[str, str]) -> int:
    """Draw one schedule, or print a table of all. Raises BadInput, one line, for impossible input."""
    name, out, recipe = flags.name, flags.out, flags.recipe
    if out is not None and out.suffix not in KINDS:
        raise BadInput("--out", got=str(out), needed=", ".join(f"*{k} ({v})" for k, v in KINDS.items()), fix=f"--out {out.stem}.png")
    if name is None and out is not None:
        raise BadInput("--out", got=str(out), needed="one schedule to draw", fix=f"moe simulate 1f1b --out {out}")
    size: dict[str, Any] = {flag: getattr(flags, flag) for flag in ("stages", "microbatches", "chunks", "batches", "pipelines")}
    check_least(flags, **dict.fromkeys(size, 1) | {"pipelines": 2})
    if name != SEARCH:
        of_search = {"placement": flags.placement, "memory": flags.memory}
        refuse(of_search, got=f"it with {name or 'all schedules'}", needed=f"moe simulate {SEARCH}: only it has this flag")
    if recipe is None:
        refuse(overrides, **NEEDS_RECIPE)
    size["vertical_sync"] = None if flags.vertical_sync is None else flags.vertical_sync == "on"
    order = read_order(name) if name is not None and name.endswith(".csv") else None
    if name is not None and order is not None:
        refuse({flag: size[flag] for flag in ("stages", "microbatches", "chunks", *OPTIONS)}, got=f"it with {name}", needed=OF_FILE)
    times = {flag: value for flag in TIMES if (value := getattr(flags, flag)) is not None}
    costs: Costs = times_of(times) if recipe is None else of_recipe(recipe, overrides, times, size, order)
    size |= {"stages": size["stages"] or RANKS, "microbatches": size["microbatches"] or MICROBATCHES}
    most = MOST_ACTIONS // (len(SCHEDULES) if name is None else SEARCHED if name == SEARCH else 1)
    check_size(**{flag: size[flag] for flag in ("stages", "microbatches", "chunks", "batches")}, most_actions=most)
    if name is None:
        return _all(size, costs, flags.json)
    if name == SEARCH:
        order = _searched(size, costs, flags)
    if order is not None:
        row, timeline = _row(order.repeated, flags.batches or 1, costs, drains=True)
    else:
        kind = kind_of(name)
        row, timeline = _row(_from_catalog(name, size), flags.batches or kind.batches, costs, drains=not kind.continuous)
    print_one(row, timeline)
    if out is not None:
        _write(timeline, out, title=summary_line(row), seconds=recipe is not None)
        print(f"{KINDS[out.suffix]}: {out}")
    write_rows(flags.json, "simulate", [row], refused=[])
    return exit_codes.DONE


def simulated(name: str, *, stages: int, microbatches: int, **times: Any) -> tuple[dict[str, Any], Timeline]:
    """Simulate the schedule `name` of the catalog. Return (its row as in `moe simulate --json`, its timeline). times: fields of `Times`."""
    size = {"stages": stages, "microbatches": microbatches, "chunks": None} | dict.fromkeys(OPTIONS)
    kind = kind_of(name)
    return _row(_from_catalog(name, size), kind.batches, times_of(times), drains=not kind.continuous)


def _searched(size: dict[str, Any], costs: Costs, flags: Simulate) -> Schedule:
    """Search an order of actions, and return it as a schedule. Raises BadInput for flags that a search does not have."""
    placement = flags.placement or "line"
    refuse({flag: size[flag] for flag in OPTIONS}, got="it with search", needed="the flags of search")
    check_least(flags, memory=1)
    if placement != "loop":
        refuse({"chunks": size["chunks"]}, got=f"it with --placement {placement}", needed="--placement loop, which has a choice")
    ranks, microbatches, chunks = size["stages"], size["microbatches"], size["chunks"] or 2
    # durations are computed for a schedule: this one has the stages, but no actions yet
    empty = flushed(SEARCH, homes_of(placement, ranks, chunks), microbatches, [()] * ranks)
    limits: dict[str, Any] = {"chunks": chunks, "memory": flags.memory, "overlap": costs.overlap == "on"}
    return search(placement, ranks, microbatches, costs.cost(empty), transfer_time=costs.transfer_of(empty), **limits)


def _from_catalog(name: str, size: dict[str, Any]) -> Callable[[int], Schedule]:
    own = {option: size[option] for option in OPTIONS}
    return lambda batches: make_schedule(
        name, ranks=size["stages"], microbatches=size["microbatches"], chunks=size["chunks"], batches=batches, **own
    )


def _row(of_batches: Callable[[int], Schedule], batches: int, costs: Costs, *, drains: bool) -> tuple[dict[str, Any], Timeline]:
    """Simulate `batches` batches. Return (row of the table, timeline). of_batches: number of batches -> their schedule.
    drains: whether the pipeline is empty at the end of each batch."""
    schedule = of_batches(batches)
    microbatches = schedule.microbatches // batches
    fill = max(2, ceil(2 * schedule.num_ranks / microbatches))  # number of batches after which a continuous pipeline is in its steady state
    if drains:
        time_per_batch = costs.period(schedule if batches == 1 else of_batches(1), fill)
    else:
        check_filled(stages=schedule.num_ranks, microbatches=microbatches, batches=batches, filled=fill + 1)
        time_per_batch = period(of_batches, costs.makespan, batches=fill)
    timeline = costs.run(schedule)
    ideal = sum(timeline.busy(rank) for rank in range(schedule.num_ranks)) / batches
    versions, sent = weight_versions(schedule), Counter(transfer.message.source for transfer in timeline.transfers)
    row = {
        "schedule": schedule.name,
        "stages": schedule.num_ranks,
        "microbatches": microbatches,
        "chunks": schedule.num_stages // schedule.num_ranks,
        "batches": batches,
        "bubble": schedule.num_ranks * time_per_batch / ideal - 1,
        "bubble_with_ramps": timeline.bubble(),
        "bubbles_with_ramps": list(timeline.bubbles()),
        "makespan": timeline.makespan,
        "time_per_batch": time_per_batch,
        "peak_activations": list(peak_activations(schedule)),
        "peak_activations_until_weight_gradient": list(peak_held(schedule)),
        "most_kept": max(peak_held(schedule)) * schedule.num_ranks / schedule.num_stages,
        "weight_versions": max(versions),
        "weight_versions_by_rank": list(versions),
        "messages_by_rank": [sent[rank] for rank in range(schedule.num_ranks)],
    }
    return row | (costs.of_memory(timeline, batches, time_per_batch) if isinstance(costs, OfRecipe) else {}), timeline


def _all(size: dict[str, Any], costs: Costs, json: Path | None) -> int:
    rows, refused, of_flags = [], [], []
    for name, kind in SCHEDULES.items():
        own = size | {option: None for option in OPTIONS if kind_of(name).option != option}
        own["chunks"] = size["chunks"] if kind.chunks is None else None
        try:
            rows.append(_row(_from_catalog(name, own), own["batches"] or kind.batches, costs, drains=not kind.continuous)[0])
        except BadInput as bad:
            refused.append({"schedule": name, "reason": str(bad)})
            of_flags += [bad] * bad.what.startswith("--")
    if of_flags and not rows:  # no schedule was simulated, and at least one was refused because of a flag
        raise of_flags[0]
    print_all(rows, refused)
    write_rows(json, "simulate", rows, refused=refused)
    return exit_codes.DONE


def _write(timeline: Timeline, out: Path, *, title: str, seconds: bool) -> None:
    if out.suffix == ".png":
        from parallel.pipeline.simulator.draw import draw

        draw(timeline, out, unit="s" if seconds else UNIT, title=title)
    elif out.suffix == ".csv":
        write_order(timeline.schedule, out)
    elif out.suffix == ".json":
        write_trace(timeline, out, microseconds=1e6 if seconds else 1000)
    else:
        write_text(out, text(timeline) + "\n", what="--out")
