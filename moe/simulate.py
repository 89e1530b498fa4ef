"""`moe simulate`: a pipeline schedule drawn and counted without a process, or all of them side by side.

    moe simulate chimera --stages 4 --microbatches 8 --out chimera.png

The numbers come from parallel/pipeline: the same value that is drawn here is what a run carries out.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from parallel.errors import BadInput
from parallel.pipeline.catalog import SCHEDULES, build
from parallel.pipeline.held import peak_activations, peak_held, weight_versions
from parallel.pipeline.order_file import read_order, write_order
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.simulate import Timeline, costs, period, simulate
from parallel.pipeline.timeline import text, write_trace

KINDS = {".png": "a picture", ".csv": "the actions", ".txt": "the rows as text", ".json": "a trace"}


@dataclass(frozen=True)
class Times:
    """As the flags say: a number for the layers of a rank, which its chunks share, or one for each stage with commas between."""

    forward: str = "1"
    backward: str = "2"
    weight_share: float = 0.5
    transfer: float = 0
    overlap: str = "on"

    def run(self, schedule: Schedule) -> Timeline:
        forward = _numbers("--forward_time", self.forward, schedule)
        backward = _numbers("--backward_time", self.backward, schedule)
        cost = costs(forward, backward, weight_share=self.weight_share)
        return simulate(schedule, cost, transfer_time=self.transfer, overlap=self.overlap == "on")


def main(
    name: str | None = None,
    *,
    stages: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    batches: int | None = None,
    forward_time: str = "1",
    backward_time: str = "2",
    weight_share: float = 0.5,
    transfer_time: float = 0,
    overlap: str = "on",
    out: Path | None = None,
    json: Path | None = None,
) -> int:
    """One schedule drawn, or a table of all. Raises BadInput, one line, for what cannot be."""
    times = _times(forward_time, backward_time, weight_share, transfer_time, overlap)
    if out is not None and out.suffix not in KINDS:
        raise BadInput("--out", got=str(out), needed=", ".join(f"*{k} ({v})" for k, v in KINDS.items()), fix=f"--out {out.stem}.png")
    size = {"stages": stages, "microbatches": microbatches, "chunks": chunks, "batches": batches}
    if name is None:
        if out is not None:
            raise BadInput("--out", got=str(out), needed="one schedule to draw", fix=f"moe simulate 1f1b --out {out}")
        return _all(size, times, json)
    of_batches = _from_file(name, size) if name.endswith(".csv") else _from_catalog(name, size)
    row, timeline = _row(of_batches, batches, times)
    _print_one(row, timeline)
    if out is not None:
        _write(timeline, out)
        print(f"{KINDS[out.suffix]}: {out}")
    return _finish([row], [], json)


def _times(forward: str, backward: str, weight_share: float, transfer: float, overlap: str) -> Times:
    if not 0 <= weight_share <= 1:
        raise BadInput("--weight_share", got=weight_share, needed="a share from 0 to 1", fix="--weight_share 0.5")
    if transfer < 0:
        raise BadInput("--transfer_time", got=transfer, needed="at least 0", fix="--transfer_time 0")
    return Times(forward, backward, weight_share, transfer, overlap)


def _numbers(flag: str, value: str, schedule: Schedule) -> float | list[float]:
    try:
        numbers = [float(word) for word in value.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < 1e12 for number in numbers):
        raise BadInput(flag, got=value, needed="a time above 0, or one for each stage with commas between", fix=f"{flag} 1")
    if len(numbers) not in (1, schedule.num_stages):
        needed = f"1 time, or {schedule.num_stages}: one for each stage of {schedule.name}"
        raise BadInput(flag, got=f"{len(numbers)} times", needed=needed, fix=f"{flag} {','.join(['1'] * schedule.num_stages)}")
    return numbers[0] * schedule.num_ranks / schedule.num_stages if len(numbers) == 1 else numbers


def _from_catalog(name: str, size: dict[str, int | None]) -> Callable[[int | None], Schedule]:
    ranks, microbatches = size["stages"] or 4, size["microbatches"] or 8
    for flag, given in size.items():
        if given is not None and given < 1:
            raise BadInput(f"--{flag}", got=given, needed="at least 1", fix=f"--{flag} 1")
    return lambda batches: build(name, ranks=ranks, microbatches=microbatches, chunks=size["chunks"], batches=batches)


def _from_file(path: str, size: dict[str, int | None]) -> Callable[[int | None], Schedule]:
    for flag in ("stages", "microbatches", "chunks"):
        if size[flag] is not None:
            raise BadInput(f"--{flag}", got=f"it with {path}", needed="the file alone, which says that", fix=f"remove --{flag}")
    schedule = read_order(path)
    return lambda batches: schedule.repeated(batches or 1)


def _row(of_batches: Callable[[int | None], Schedule], batches: int | None, times: Times) -> tuple[dict[str, Any], Timeline]:
    schedule = of_batches(batches)
    timeline = times.run(schedule)
    num_batches = batches or (2 if schedule.name == "two_bw" else 1)
    microbatches = schedule.microbatches // num_batches
    fill = max(2, ceil(2 * schedule.num_ranks / microbatches))  # batches after which a pipeline that never drains is in its rhythm
    time_per_batch = period(of_batches, times.run, batches=fill)
    ideal = sum(timeline.busy(rank) for rank in range(schedule.num_ranks)) / num_batches
    versions = weight_versions(schedule)
    row = {
        "schedule": schedule.name,
        "stages": schedule.num_ranks,
        "microbatches": microbatches,
        "chunks": max(len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks)),
        "batches": num_batches,
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
        "messages_by_rank": [sum(t.message.source == rank for t in timeline.transfers) for rank in range(schedule.num_ranks)],
    }
    return row, timeline


def _all(size: dict[str, int | None], times: Times, json: Path | None) -> int:
    rows, refused = [], []
    for name, kind in SCHEDULES.items():
        own = dict(size, chunks=size["chunks"] if kind.chunks is None else None)
        try:
            rows.append(_row(_from_catalog(name, own), own["batches"], times)[0])
        except BadInput as bad:
            if bad.what.startswith("--"):  # a flag that is wrong for all
                raise
            refused.append({"schedule": name, "reason": str(bad)})
    _print_all(rows, refused)
    return _finish(rows, refused, json)


def _print_one(row: dict[str, Any], timeline: Timeline) -> None:
    print(text(timeline, width=shutil.get_terminal_size((160, 24)).columns if sys.stdout.isatty() else 160))
    print(_said(row))
    schedule = timeline.schedule
    for rank in range(schedule.num_ranks):
        stages = ", ".join(map(str, schedule.stages_of(rank)))
        print(
            f"rank {rank}: stages {stages} · idle {timeline.bubbles()[rank]:.1%} of ideal"
            f" · in flight {row['peak_activations'][rank]} · weight versions {row['weight_versions_by_rank'][rank]}"
            f" · messages {row['messages_by_rank'][rank]}"
        )


def _said(row: dict[str, Any]) -> str:
    size = f"{row['stages']} ranks, {row['microbatches']} micro-batches" + (f", {row['batches']} batches" if row["batches"] > 1 else "")
    ramps = "" if abs(row["bubble"] - row["bubble_with_ramps"]) < 1e-9 else f" ({row['bubble_with_ramps']:.1%} with its ramps)"
    each = "" if ramps == "" else f" · a further batch {row['time_per_batch']:g}"
    return f"{row['schedule']}: {size} · time {row['makespan']:g}{each} · bubble {row['bubble']:.1%} of ideal{ramps}"


def _print_all(rows: list[dict[str, Any]], refused: list[dict[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("schedule", "time", "a batch more", "bubble", "in flight by rank", "kept", "versions", "messages", ""):
        table.add_column(title, justify="left" if title in ("schedule", "in flight by rank", "") else "right")
    for row in rows:
        table.add_row(
            row["schedule"],
            f"{row['makespan']:g}" + (f" ({row['batches']} batches)" if row["batches"] > 1 else ""),
            f"{row['time_per_batch']:g}",
            f"{row['bubble']:.1%}",
            " ".join(map(str, row["peak_activations"])),
            f"{row['most_kept']:g}",
            str(row["weight_versions"]),
            str(sum(row["messages_by_rank"])),
            Text(SCHEDULES[row["schedule"]].about),
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    for line in refused:
        print(f"{line['schedule']}: {line['reason']}")
    print("in flight: micro-batches of a stage, with several stages a rank of each; kept: most on a rank until the weights' gradient,")
    print("in micro-batches of all its layers; bubble: idle over ideal time of a batch more, which does not wait for the ramps of the run")


def _write(timeline: Timeline, out: Path) -> None:
    if out.suffix == ".png":
        from parallel.pipeline.draw import draw

        draw(timeline, out)
    elif out.suffix == ".csv":
        write_order(timeline.schedule, out)
    elif out.suffix == ".json":
        write_trace(timeline, out)
    else:
        try:
            out.write_text(text(timeline) + "\n", encoding="utf-8")
        except OSError as error:
            raise BadInput(
                "--out", got=f"{out}: {error.strerror}", needed="a file that can be written", fix="choose another path"
            ) from None


def _finish(rows: list[dict[str, Any]], refused: list[dict[str, str]], json: Path | None) -> int:
    if json is not None:
        from moe.results import write_json

        write_json(json, verb="simulate", rows=rows, refused=refused)
    return 0
