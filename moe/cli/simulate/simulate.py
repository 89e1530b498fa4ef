"""`moe simulate`: draws a pipeline schedule and counts its costs without starting a process, or compares all schedules in a table.

    moe simulate chimera --stages 4 --microbatches 8 --out chimera.png
    moe simulate search --stages 4 --memory 4 --out o.csv    searches an order (moe/cli/simulate/search.py)
    moe simulate 1f1b --stages 4 --recipe switch_base        stages cut from the recipe's model, seconds and GB

A training run executes the same schedules of parallel/pipeline that are drawn here. Times: moe/cli/simulate/times.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

from moe.cli.simulate.search import NAME, SEARCHED, refuse_elsewhere, searched
from moe.cli.simulate.text import print_all, print_one, summary_line
from moe.cli.simulate.times import MOST_ACTIONS, OfRecipe, Times, check_filled, check_size, of_recipe, times_of
from moe.launch import exit_codes
from parallel.errors import BadInput
from parallel.pipeline.order_file import read_order, write_order
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.schedules.catalog import SCHEDULES, kind_of, make_schedule
from parallel.pipeline.simulator.draw import text, write_trace
from parallel.pipeline.simulator.held import peak_activations, peak_held, weight_versions
from parallel.pipeline.simulator.simulate import Timeline, period
from parallel.store.files import write_text

KINDS = {".png": "a picture", ".csv": "the actions", ".txt": "the rows as text", ".json": "a trace"}
OPTIONS = ("vertical_sync", "pipelines")  # options that only one schedule has
RANKS, MICROBATCHES = 4, 8


def main(
    name: str | None = None,
    *,
    recipe: str | None = None,
    overrides: dict[str, str] | None = None,
    stages: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    batches: int | None = None,
    vertical_sync: str | None = None,
    pipelines: int | None = None,
    placement: str | None = None,
    memory: float | None = None,
    out: Path | None = None,
    json: Path | None = None,
    **times: Any,
) -> int:
    """Draw one schedule, or print a table of all. Raises BadInput, one line, for impossible input."""
    if out is not None and out.suffix not in KINDS:
        raise BadInput("--out", got=str(out), needed=", ".join(f"*{k} ({v})" for k, v in KINDS.items()), fix=f"--out {out.stem}.png")
    if name is None and out is not None:
        raise BadInput("--out", got=str(out), needed="one schedule to draw", fix=f"moe simulate 1f1b --out {out}")
    size = {"stages": stages, "microbatches": microbatches, "chunks": chunks, "batches": batches, "pipelines": pipelines}
    _at_least_1(size)
    refuse_elsewhere(name, placement=placement, memory=memory)
    if overrides and recipe is None:
        flag = next(iter(overrides))
        raise BadInput(
            f"--{flag}", got="it without a recipe", needed="--recipe RECIPE, because it is a recipe's key", fix="--recipe dense_tiny"
        )
    size["vertical_sync"] = None if vertical_sync is None else vertical_sync == "on"
    from_file = read_order(name) if name is not None and name.endswith(".csv") else None
    if recipe is None:
        costs: Times | OfRecipe = times_of(times)
    else:
        costs = of_recipe(recipe, overrides or {}, times, size, from_file)
    ranks, cut = size["stages"] or RANKS, size["microbatches"] or MICROBATCHES
    orders = len(SCHEDULES) if name is None else SEARCHED if name == NAME else 1
    check_size(stages=ranks, microbatches=cut, chunks=size["chunks"], batches=size["batches"], most_actions=MOST_ACTIONS // orders)
    size["stages"], size["microbatches"] = ranks, cut
    if name is None:
        return _all(size, costs, json)
    if from_file is not None:
        _refuse_with_file(name, {"stages": stages, "microbatches": microbatches, "chunks": chunks} | {o: size[o] for o in OPTIONS})
    if name == NAME:
        from_file = searched(size, costs, placement=placement, memory=memory)
    if from_file is not None:
        row, timeline = _row(from_file.repeated, batches or 1, costs, drains=True)
    else:
        kind = kind_of(name)
        row, timeline = _row(_from_catalog(name, size), batches or kind.batches, costs, drains=not kind.continuous)
    print_one(row, timeline)
    if out is not None:
        _write(timeline, out, title=summary_line(row), seconds=recipe is not None)
        print(f"{KINDS[out.suffix]}: {out}")
    return _finish([row], [], json)


def simulated(name: str, *, stages: int, microbatches: int, **times: Any) -> tuple[dict[str, Any], Timeline]:
    """(the row that `moe simulate` prints for this schedule of the catalog, its timeline)."""
    size = {"stages": stages, "microbatches": microbatches, "chunks": None} | dict.fromkeys(OPTIONS)
    kind = kind_of(name)
    return _row(_from_catalog(name, size), kind.batches, times_of(times), drains=not kind.continuous)


def _at_least_1(size: dict[str, int | None]) -> None:
    for flag, given in size.items():
        if given is not None and given < 1:
            raise BadInput(f"--{flag}", got=given, needed="at least 1", fix=f"--{flag} {2 if flag == 'pipelines' else 1}")


def _refuse_with_file(path: str, size: dict[str, int | None]) -> None:
    for flag, given in size.items():
        if given is not None:
            raise BadInput(f"--{flag}", got=f"it with {path}", needed="the file alone, which sets it", fix=f"remove --{flag}")


def _from_catalog(name: str, size: dict[str, Any]) -> Callable[[int], Schedule]:
    own = {option: size[option] for option in OPTIONS}
    return lambda batches: make_schedule(
        name, ranks=size["stages"], microbatches=size["microbatches"], chunks=size["chunks"], batches=batches, **own
    )


def _row(of_batches: Callable[[int], Schedule], batches: int, costs: Times | OfRecipe, *, drains: bool) -> tuple[dict[str, Any], Timeline]:
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


def _all(size: dict[str, Any], costs: Times | OfRecipe, json: Path | None) -> int:
    rows, refused, of_flags = [], [], []
    for name, kind in SCHEDULES.items():
        own = size | {option: None for option in OPTIONS if kind_of(name).option != option}
        own["chunks"] = size["chunks"] if kind.chunks is None else None
        try:
            rows.append(_row(_from_catalog(name, own), own["batches"] or kind.batches, costs, drains=not kind.continuous)[0])
        except BadInput as bad:
            refused.append({"schedule": name, "reason": str(bad)})
            of_flags += [bad] * bad.what.startswith("--")
    if of_flags and not rows:  # a flag that every schedule refuses
        raise of_flags[0]
    print_all(rows, refused)
    return _finish(rows, refused, json)


UNIT = "1 = forward pass of one micro-batch through a rank's layers, unless times were given"


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


def _finish(rows: list[dict[str, Any]], refused: list[dict[str, str]], json: Path | None) -> int:
    if json is not None:
        from moe.records.results import write_json

        write_json(json, verb="simulate", rows=rows, refused=refused)
    return exit_codes.DONE
