"""The text that `moe simulate` prints: one schedule's timeline and ranks, or the table of all schedules."""

from __future__ import annotations

import shutil
import sys
from typing import Any

from parallel.errors import counted
from parallel.pipeline.schedules.catalog import SCHEDULES
from parallel.pipeline.simulator.draw import text
from parallel.pipeline.simulator.simulate import Timeline

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def duration(time: float, row: dict[str, Any]) -> str:
    """Return a duration as text: in s, ms or µs if the row's times are in seconds, otherwise as a plain number."""
    if row.get("time_unit") != "s":
        return f"{time:g}"
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if abs(time) >= scale), _UNITS[-1])
    return f"{time / scale:.4g} {unit}"


def print_one(row: dict[str, Any], timeline: Timeline) -> None:
    """Print one schedule: its timeline, its summary, and a line for each rank."""
    print(text(timeline, width=shutil.get_terminal_size((160, 24)).columns if sys.stdout.isatty() else 160))
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
    """Return one line of text on a schedule: sizes, time, and bubble (idle time / ideal time) of one more batch in steady state. If filling
    and draining the pipeline gives the whole run another bubble, that bubble is added."""
    size = f"{counted(row['stages'], 'rank')}, {counted(row['microbatches'], 'micro-batch')}"
    size += f", {row['batches']} batches" if row["batches"] > 1 else ""
    ramps = "" if abs(row["bubble"] - row["bubble_with_ramps"]) < 1e-9 else f" ({row['bubble_with_ramps']:.1%} with its ramps)"
    each = "" if ramps == "" else f" · each further batch {duration(row['time_per_batch'], row)}"
    speed = f" · {row['tokens_per_second']:,.0f} tokens a second" if "tokens_per_second" in row else ""
    return f"{row['schedule']}: {size} · time {duration(row['makespan'], row)}{each} · bubble {row['bubble']:.1%} of ideal{ramps}{speed}"


def _assumed(row: dict[str, Any]) -> str:
    left_out = f"; not counted: {', '.join(row['not_counted'])} (moe plan counts them)" if row["not_counted"] else ""
    return (
        f"assumed: {row['tflops']:g} TFLOP/s and {row['link_gb_s']:g} GB/s a rank, {row['sequences_a_microbatch']} sequences a micro-batch;"
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
    print("in flight: most micro-batches between forward and backward, summed over a rank's stages; kept: most until the weight gradient,")
    print("on any rank, in micro-batches of all its layers; bubble: idle over ideal time of a further batch, without the run's ramps")
    if model:
        print(_assumed(rows[0]))
