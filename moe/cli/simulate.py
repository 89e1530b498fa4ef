"""`moe simulate`: simulates and draws pipeline schedules, compares all schedules in a table, or (`moe simulate search`) searches for an
order of actions for given times and memory. Training runs the same schedules; with pipeline.schedule FILE.csv it runs a file's order.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

from moe.cli.run import check_least, refuse, write_rows
from moe.cli.simulate_times import MOST_ACTIONS, NEEDS_RECIPE, OF_FILE, Costs, OfRecipe, check_filled, check_size, of_recipe, times_of
from moe.cli.verbs import Simulate
from moe.launch import exit_codes
from parallel.errors import BadInput, counted
from parallel.pipeline.order_file import read_order, write_order
from parallel.pipeline.schedule import Schedule, flushed
from parallel.pipeline.schedules import SCHEDULES, kind_of, make_schedule
from parallel.pipeline.schedules.search import homes_of, search
from parallel.pipeline.simulator.draw import common_unit, text, write_trace
from parallel.pipeline.simulator.held import peak_activations, peak_held, weight_versions
from parallel.pipeline.simulator.simulate import Timeline, period
from parallel.store.files import write_text

KINDS = {".png": "a picture", ".csv": "the actions", ".txt": "the timeline as text", ".json": "a trace"}
OPTIONS = ("vertical_sync", "pipelines")  # the first flag is only for pipedream, the second only for chimera
RANKS, MICROBATCHES = 4, 8  # defaults of --stages and --microbatches
SEARCH = "search"  # the word of `moe simulate search`
SEARCHED = 16  # a search takes about as long as 16 simulations, so it may have only a 16th of their largest number of actions
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
UNIT = "1 = forward pass of one micro-batch through a rank's layers, unless times were given"
TIMES = ("forward_time", "backward_time", "weight_share", "transfer_time", "overlap", "tflops", "link_gb_s")


def main(flags: Simulate, overrides: dict[str, str]) -> int:
    """Draw the named schedules, or print a table of all schedules. Raises BadInput for impossible input."""
    name, out, recipe = flags.name, flags.out, flags.recipe
    if out is not None and out.suffix not in KINDS:
        raise BadInput("--out", got=str(out), needed=", ".join(f"*{k} ({v})" for k, v in KINDS.items()), fix=f"--out {out.stem}.png")
    if name is None and out is not None:
        raise BadInput("--out", got=str(out), needed="one schedule to draw", fix=f"moe simulate 1f1b --out {out}")
    size: dict[str, Any] = {flag: getattr(flags, flag) for flag in ("stages", "microbatches", "chunks", "batches", "pipelines")}
    check_least(flags, **dict.fromkeys(size, 1) | {"pipelines": 2})
    if name != SEARCH:
        of_search = {"placement": flags.placement, "memory": flags.memory}
        refuse(of_search, got=f"with {name or 'all schedules'}", needed=f"moe simulate {SEARCH}: only it has this flag")
    if recipe is None:
        refuse(overrides, **NEEDS_RECIPE)
    size["vertical_sync"] = None if flags.vertical_sync is None else flags.vertical_sync == "on"
    order = read_order(name) if name is not None and name.endswith(".csv") else None
    if name is not None and order is not None:
        refuse({flag: size[flag] for flag in ("stages", "microbatches", "chunks", *OPTIONS)}, got=f"with {name}", needed=OF_FILE)
    times = {flag: value for flag in TIMES if (value := getattr(flags, flag)) is not None}
    costs: Costs = times_of(times) if recipe is None else of_recipe(recipe, overrides, times, size, order)
    if flags.others:
        refuse({"out": out if out is not None and out.suffix != ".png" else None}, got="with several schedules", needed="--out FILE.png")
    size |= {"stages": size["stages"] or RANKS, "microbatches": size["microbatches"] or MICROBATCHES}
    most = MOST_ACTIONS // (len(SCHEDULES) if name is None else SEARCHED if name == SEARCH else 1 + len(flags.others))
    check_size(**{flag: size[flag] for flag in ("stages", "microbatches", "chunks", "batches")}, most_actions=most)
    if name is None:
        return _all(size, costs, flags.json)
    if flags.others:
        drawn = [_from_catalog(each, _own(each, size), costs) for each in (name, *flags.others)]
    elif name == SEARCH or order is not None:
        order = order or _searched(size, costs, flags)
        drawn = [_row(order.repeated, flags.batches or 1, costs, drains=True)]
    else:
        drawn = [_from_catalog(name, size, costs)]
    unit = common_unit([timeline for _, timeline in drawn])
    for row, timeline in drawn:
        print_one(row, timeline, unit=unit)
        if flags.others:
            print()
    if out is not None:
        _write(drawn, out, seconds=recipe is not None)
        print(f"{KINDS[out.suffix]}: {out}")
    write_rows(flags.json, "simulate", [row for row, _ in drawn], refused=[])
    return exit_codes.DONE


def _own(name: str, size: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `size` (flag -> value) for the schedule `name`: None for options that it lacks, and for chunks if their number is
    fixed."""
    kind = kind_of(name)
    return size | {option: None for option in OPTIONS if kind.option != option} | ({} if kind.chunks is None else {"chunks": None})


def simulated(name: str, *, stages: int, microbatches: int, **times: Any) -> tuple[dict[str, Any], Timeline]:
    """Simulate the catalog's schedule `name`. Return (its row in `moe simulate --json`, its timeline). times: fields of `Times`."""
    size = {"stages": stages, "microbatches": microbatches} | dict.fromkeys(("chunks", "batches", *OPTIONS))
    return _from_catalog(name, size, times_of(times))


def _searched(size: dict[str, Any], costs: Costs, flags: Simulate) -> Schedule:
    placement = flags.placement or "line"
    refuse({flag: size[flag] for flag in OPTIONS}, got="with search", needed="only flags of moe simulate search")
    check_least(flags, memory=1)
    if placement != "loop":
        refuse({"chunks": size["chunks"]}, got=f"with --placement {placement}", needed="--placement loop, the only one with chunks")
    ranks, microbatches, chunks = size["stages"], size["microbatches"], size["chunks"] or 2
    # durations depend on a schedule's stages, not on its actions, so a schedule without actions suffices
    empty = flushed(SEARCH, homes_of(placement, ranks, chunks), microbatches, [()] * ranks)
    limits: dict[str, Any] = {"chunks": chunks, "memory": flags.memory, "overlap": costs.overlap == "on"}
    return search(placement, ranks, microbatches, costs.cost(empty), transfer_time=costs.transfer_of(empty), **limits)


def _from_catalog(name: str, size: dict[str, Any], costs: Costs) -> tuple[dict[str, Any], Timeline]:
    """Simulate the catalog's schedule `name`. Return (row of the table, timeline). size: flags that set sizes -> value, or None. costs:
    durations of actions and messages."""
    kind, own = kind_of(name), {flag: size[flag] for flag in ("microbatches", "chunks", *OPTIONS)}

    def of_batches(batches: int) -> Schedule:
        return make_schedule(name, ranks=size["stages"], batches=batches, **own)

    return _row(of_batches, size["batches"] or kind.batches, costs, drains=not kind.continuous)


def _row(of_batches: Callable[[int], Schedule], batches: int, costs: Costs, *, drains: bool) -> tuple[dict[str, Any], Timeline]:
    """Simulate `batches` batches. Return (row of the table, timeline). of_batches: number of batches -> their schedule.
    costs: durations of actions and messages. drains: whether the pipeline is empty at the end of each batch."""
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
    for name in SCHEDULES:
        try:
            rows.append(_from_catalog(name, _own(name, size), costs)[0])
        except BadInput as bad:
            refused.append({"schedule": name, "reason": str(bad)})
            of_flags += [bad] * bad.what.startswith("--")
    if of_flags and not rows:  # no schedule was simulated, and at least one was refused because of a flag
        raise of_flags[0]
    print_all(rows, refused)
    write_rows(json, "simulate", rows, refused=refused)
    return exit_codes.DONE


def _write(drawn: list[tuple[dict[str, Any], Timeline]], out: Path, *, seconds: bool) -> None:
    """Write `out`, as its suffix says: a picture of all schedules, or the order, trace or text of the first. drawn: (row of the table,
    timeline) of each schedule. seconds: whether times are in seconds; otherwise they are in the unit of the flags."""
    timeline = drawn[0][1]
    if out.suffix == ".png":
        from parallel.pipeline.simulator.draw import draw

        draw({summary_line(row): timeline for row, timeline in drawn}, out, unit="s" if seconds else UNIT)
    elif out.suffix == ".csv":
        write_order(timeline.schedule, out)
    elif out.suffix == ".json":
        write_trace(timeline, out, microseconds=1e6 if seconds else 1000)
    else:
        write_text(out, text(timeline) + "\n", what="--out")


# --- printed text --------------------------------------------------------------------------------------------------------


def duration(time: float, row: dict[str, Any]) -> str:
    """Format a duration: in s, ms or µs if the row's times are in seconds, otherwise as a number without a unit."""
    if row.get("time_unit") != "s":
        return f"{time:g}"
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if abs(time) >= scale), _UNITS[-1])
    return f"{time / scale:.4g} {unit}"


def print_one(row: dict[str, Any], timeline: Timeline, *, unit: float) -> None:
    """Print one schedule: its timeline, its summary, and a line for each rank. row, timeline: results of `_row`. unit: time that a column
    of the printed timeline stands for."""
    print(text(timeline, unit=unit, width=shutil.get_terminal_size((160, 24)).columns if sys.stdout.isatty() else 160))
    print(summary_line(row))
    schedule, bubbles = timeline.schedule, timeline.bubbles()
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_of(rank)
        layers = f" ({_layers(row, stages)})" if "layers_by_stage" in row else ""
        memory = f" · {_memory(row, rank)}" if "memory_gb_by_rank" in row else ""
        print(
            f"rank {rank}: stages {', '.join(map(str, stages))}{layers} · idle {bubbles[rank]:.1%} of ideal"
            f" · in flight {row['peak_activations'][rank]} · weight versions {row['weight_versions_by_rank'][rank]}"
            f" · messages {row['messages_by_rank'][rank]}{memory}"
        )
    if "time_unit" in row:
        print(_assumed(row))


def _layers(row: dict[str, Any], stages: tuple[int, ...]) -> str:
    counts = row["layers_by_stage"]
    firsts = [sum(counts[:stage]) for stage in stages]
    ranges = [(first, first + counts[stage] - 1) for first, stage in zip(firsts, stages, strict=True)]
    return "layers " + ", ".join(f"{first}-{last}" if last > first else str(first) if last == first else "none" for first, last in ranges)


def _memory(row: dict[str, Any], rank: int) -> str:
    states, activations = row["state_bytes_by_rank"][rank], row["activation_bytes_by_rank"][rank]
    return f"{_gb(states + activations)} = {_gb(states)} states + {_gb(activations)} activations"


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def summary_line(row: dict[str, Any]) -> str:
    """Return one line about a schedule: sizes, time, and bubble (idle time / ideal time) of one more batch in steady state. The bubble of
    all batches, including the ramps (filling and draining the pipeline), is added if it differs."""
    size = f"{counted(row['stages'], 'rank')}, {counted(row['microbatches'], 'micro-batch')}"
    size += f", {row['batches']} batches" if row["batches"] > 1 else ""
    ramps = "" if abs(row["bubble"] - row["bubble_with_ramps"]) < 1e-9 else f" ({row['bubble_with_ramps']:.1%} with its ramps)"
    each = "" if ramps == "" else f" · each further batch {duration(row['time_per_batch'], row)}"
    speed = f" · {row['tokens_per_second']:,.0f} tokens a second" if "tokens_per_second" in row else ""
    return f"{row['schedule']}: {size} · time {duration(row['makespan'], row)}{each} · bubble {row['bubble']:.1%} of ideal{ramps}{speed}"


def _assumed(row: dict[str, Any]) -> str:
    left_out = f"; not counted: {', '.join(row['not_counted'])} (moe plan counts them)" if row["not_counted"] else ""
    sequences = counted(row["sequences_a_microbatch"], "sequence")
    return (
        f"assumed: {row['tflops']:g} TFLOP/s and {row['link_gb_s']:g} GB/s a rank, {sequences} a micro-batch;"
        f" states: 16 bytes a parameter, 4 for each older version; only matrix products and messages take time{left_out}"
    )


def print_all(rows: list[dict[str, Any]], refused: list[dict[str, str]]) -> None:
    """Print the table of all schedules, the refused ones with their reasons, and the meaning of the columns."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    model = any("time_unit" in row for row in rows)
    titles = ["schedule", "time", "further batch", "bubble", "in flight by rank", "kept", "versions", "messages"]
    titles += ["GB by rank"] if model else []
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in (*titles, ""):
        table.add_column(title, justify="left" if title in ("schedule", "in flight by rank", "GB by rank", "") else "right")
    for row in rows:
        table.add_row(
            row["schedule"],
            duration(row["makespan"], row) + (f" ({row['batches']} batches)" if row["batches"] > 1 else ""),
            duration(row["time_per_batch"], row),
            f"{row['bubble']:.1%}",
            " ".join(map(str, row["peak_activations"])),
            f"{row['most_kept']:g}",
            str(row["weight_versions"]),
            str(sum(row["messages_by_rank"])),
            *([" ".join(f"{gb:.3g}" for gb in row["memory_gb_by_rank"])] if model else []),
            Text(SCHEDULES[row["schedule"]].about),
        )
    Console(width=None if sys.stdout.isatty() else 180).print(table)
    for line in refused:
        print(f"{line['schedule']}: {line['reason']}")
    print("in flight: largest number of micro-batches between forward and backward, summed over a rank's stages; kept: most activations")
    print("that a rank keeps until their weight gradients, 1 = one micro-batch in all of the rank's layers; bubble: idle time / ideal time")
    print("of a further batch, without filling and draining the pipeline")
    if model:
        print(_assumed(rows[0]))
