"""Shows a Timeline as text, and as a trace for chrome://tracing or ui.perfetto.dev. (draw.py draws it as a picture.)

rank 0 | F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2     a column is one unit of time, .. is a wait
rank 1 | .. F0 B0 B0 F1 B1 B1 F2 B2 B2 .. ..
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parallel.pipeline.schedule import Action, Op, Schedule
from parallel.pipeline.simulator.simulate import Span, Timeline
from parallel.store.files import write_text


def label(schedule: Schedule, action: Action) -> str:
    """Short name of an action: F3, or 5F3 with its stage if any rank has several stages."""
    return _label(action, several=_several(schedule))


def _several(schedule: Schedule) -> bool:
    return any(len(schedule.stages_of(rank)) > 1 for rank in range(schedule.num_ranks))


def _label(action: Action, *, several: bool) -> str:
    named = str(action._replace(version=0))
    return named if several else named[len(str(action.stage)) :]


def text(timeline: Timeline, *, width: int | None = None) -> str:
    """Text with a row for each rank and a column for each unit of time. Actions without a duration are not shown.

    The unit is the largest that divides all durations, or else the shortest duration. width: longer rows are cut, and end in ` ...`.
    """
    seen = [[span for span in spans if span.end > span.start and span.action.op is not Op.S] for spans in timeline.spans]
    unit = _unit([end - start for spans in seen for _, start, end in spans])
    several, schedule = _several(timeline.schedule), timeline.schedule
    longest = {(a.op, a.stage): Action(a.op, a.stage, schedule.microbatches - 1) for spans in seen for a, _, _ in spans}
    size = 1 + max(len(_label(action, several=several)) for action in longest.values())
    columns = max(round(spans[-1].end / unit) for spans in seen if spans)
    head = len(f"rank {schedule.num_ranks - 1}") + 3
    shown = columns if width is None else min(columns, max(1, (width - head - 4) // size))
    rows = []
    for rank, mine in enumerate(seen):
        cells = ["." * (size - 1)] * shown
        for action, start, end in mine:
            first = round(start / unit)
            if first >= shown:
                break
            cells[first : min(shown, round(end / unit))] = [_label(action, several=several)] * (min(shown, round(end / unit)) - first)
        row = " ".join(cell.ljust(size - 1) for cell in cells)
        rows.append(f"{f'rank {rank}':<{head - 3}} | {row}{' ...' if shown < columns else ''}".rstrip())
    return "\n".join(rows)


def _unit(durations: list[float]) -> float:
    """Largest unit that divides all durations; the shortest duration if that unit is below a twelfth of it."""
    shortest = min(durations)
    unit = shortest
    for duration in dict.fromkeys(durations):
        a, b = unit, duration
        while b > 1e-6 * shortest:
            a, b = b, a % b
            b = 0.0 if a - b < 1e-6 * shortest else b
        unit = a
    return unit if unit > shortest / 12 else shortest


def trace(timeline: Timeline, *, microseconds: float = 1000) -> dict[str, Any]:
    """Timeline in Chrome's trace format. Each rank has a track for compute and one for sends and sums. One unit is `microseconds`."""
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(timeline.spans):
        for track, name in ((2 * rank, f"rank {rank}"), (2 * rank + 1, f"rank {rank} network")):
            events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": track, "args": {"name": name}})
            events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": track, "args": {"sort_index": track}})
        for span in spans:
            track = 2 * rank + (span.action.op is Op.S)
            args = {"stage": span.action.stage, "microbatch": span.action.microbatch, "version": span.action.version}
            events.append(_event(str(span.action), span.action.op.value, track, span, microseconds) | {"args": args})
    for transfer in timeline.transfers:
        message = transfer.message
        name = f"{message.stage}{message.op}{message.microbatch} to rank {message.target}"
        span = Span(Action(message.op, message.stage, message.microbatch), transfer.start, transfer.end)
        events.append(_event(name, "send", 2 * message.source + 1, span, microseconds) | {"args": {"bytes": transfer.num_bytes}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(name: str, category: str, track: int, span: Span, microseconds: float) -> dict[str, Any]:
    times = {"ts": span.start * microseconds, "dur": (span.end - span.start) * microseconds}
    return {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": track, **times}


def write_trace(timeline: Timeline, path: str | Path, *, microseconds: float = 1000) -> None:
    """Write the trace as JSON. Raises BadInput if the file cannot be written."""
    write_text(Path(path), json.dumps(trace(timeline, microseconds=microseconds)) + "\n", what="--out")
