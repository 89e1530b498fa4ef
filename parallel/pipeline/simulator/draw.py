"""Shows a Timeline: as text, as a trace for chrome://tracing or ui.perfetto.dev, or as a picture by Matplotlib (imported when drawing).

rank 0 | F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2     a column is one unit of time, .. is a wait
rank 1 | .. F0 B0 B0 F1 B1 B1 F2 B2 B2 .. ..     F1 is the forward pass of micro-batch 1, B1 its backward pass
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel.pipeline.schedule import Action, Op, Schedule, Span
from parallel.pipeline.simulator.simulate import Timeline
from parallel.store.files import write_text, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# op -> (color for the first half of a rank's stages, darker color for the later half)
_COLORS = {Op.F: ("#bcd4ea", "#5b8fc2"), Op.B: ("#b9d8c8", "#4f8a70"), Op.I: ("#d9ead9", "#8dbf9f"), Op.W: ("#f8d3ae", "#e39a50")}
_COLORS |= {Op.U: ("#1f2933", "#1f2933"), Op.S: ("#bc6c8f", "#bc6c8f")}
_NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "input gradient", Op.W: "weight gradient", Op.S: "sum over replicas", Op.U: "update"}
_INK, _SOFT = "#1f2933", "#52606d"  # colors of titles and bar labels, and of the time axis


def label(schedule: Schedule, action: Action) -> str:
    """Return the short name of an action: F3 (op, micro-batch), or 5F3 (with its stage) if any rank has several stages."""
    named = str(action._replace(version=0))
    return named if sum(map(len, schedule.homes)) > schedule.num_ranks else named[len(str(action.stage)) :]


def text(timeline: Timeline, *, width: int | None = None, unit: float | None = None) -> str:
    """Return text with a row for each rank and a column for each unit of time. width: maximum length of a row; longer rows end in ` ...`.
    unit: time of a column; None: `common_unit` of this timeline. Actions of zero duration and all-reduces (S) are not shown."""
    seen = _shown(timeline)
    unit = common_unit([timeline]) if unit is None else unit
    schedule = timeline.schedule
    longest = {(a.op, a.stage): Action(a.op, a.stage, schedule.microbatches - 1) for spans in seen for a, _, _ in spans}
    size = 1 + max(len(label(schedule, action)) for action in longest.values())
    columns = max(round(spans[-1].end / unit) for spans in seen if spans)
    head = len(f"rank {schedule.num_ranks - 1}") + 3
    shown = columns if width is None else min(columns, max(1, (width - head - 4) // size))
    rows = []
    for rank, mine in enumerate(seen):
        cells = ["." * (size - 1)] * shown
        for action, start, end in mine:
            first, last = round(start / unit), min(shown, round(end / unit))
            if first >= shown:
                break
            cells[first:last] = [label(schedule, action)] * (last - first)
        row = " ".join(cell.ljust(size - 1) for cell in cells)
        rows.append(f"{f'rank {rank}':<{head - 3}} | {row}{' ...' if shown < columns else ''}".rstrip())
    return "\n".join(rows)


def _shown(timeline: Timeline) -> list[list[Span]]:
    return [[span for span in spans if span.end > span.start and span.action.op is not Op.S] for spans in timeline.spans]


def common_unit(timelines: Sequence[Timeline]) -> float:
    """Return the largest time that divides all durations of actions (up to rounding). If it is at most 1/12 of the shortest duration,
    which would make rows too long, return the shortest duration."""
    durations = [end - start for timeline in timelines for spans in _shown(timeline) for _, start, end in spans]
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
    """Return the timeline in Chrome's trace format. Each rank has one track for compute, and one for sends and all-reduces.
    microseconds: length of the timeline's unit of time."""
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
    """Write `trace(timeline)` as a JSON file. Raises BadInput if the file cannot be written."""
    write_text(Path(path), json.dumps(trace(timeline, microseconds=microseconds)) + "\n", what="--out")


def draw(titled: Mapping[str, Timeline], path: str | Path, *, unit: str) -> None:
    """Write a PNG file with timelines one below another, on axes of the same length. titled: title -> timeline. unit: name of the unit of
    time, for the axes. Raises BadInput if the file cannot be written."""
    figure = _figure(*titled.values())
    until = max(timeline.makespan for timeline in titled.values())
    for number, (title, timeline) in enumerate(titled.items(), 1):
        draw_on(figure.add_subplot(len(titled), 1, number), timeline, title=title, unit=unit, until=until)
    add_legend(figure, list(titled.values()))
    _save(figure, path)


def draw_clocks(timeline: Timeline, clocks_mhz: Sequence[Sequence[float]], path: str | Path, *, title: str, unit: str) -> None:
    """Write a PNG file in which each action's color shows its GPU clock. clocks_mhz: for each rank, the clocks of its actions in order; an
    action of 0 MHz is not drawn. unit: name of the unit of time. Raises BadInput if the file cannot be written."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    known = [mhz for row in clocks_mhz for mhz in row if mhz]
    low, high = min(known), max(*known, min(known) + 1)
    colors = LinearSegmentedColormap.from_list("clocks", ["#fff5d6", "#e58a5c"])
    figure = _figure(timeline)
    axes = figure.add_subplot()
    for rank, spans in enumerate(timeline.spans):
        for span, mhz in zip(spans, clocks_mhz[rank], strict=True):
            if mhz and span.end > span.start:
                _bar(axes, timeline, rank, span, color=colors((mhz - low) / (high - low)), until=timeline.makespan)
    _frame(axes, timeline, title, unit, until=timeline.makespan)
    figure.colorbar(ScalarMappable(Normalize(low, high), colors), ax=axes, label="MHz", pad=0.01)
    _save(figure, path)


def draw_on(axes: Axes, timeline: Timeline, *, title: str, unit: str | None = None, until: float | None = None) -> None:
    """Draw a timeline on `axes`, with a row for each rank. Later stages of a rank are darker. An all-reduce S is a thin line below the row.
    unit: name of the unit of time; None: no label. until: end of the time axis; None: end of the timeline."""
    schedule = timeline.schedule
    until = until or timeline.makespan
    for rank, spans in enumerate(timeline.spans):
        stages = schedule.stages_of(rank)
        for span in spans:
            if span.end > span.start:
                dark = stages.index(span.action.stage) / max(1, len(stages) - 1) > 0.5
                _bar(axes, timeline, rank, span, color=_COLORS[span.action.op][dark], until=until)
    _frame(axes, timeline, title, unit, until=until)


def _frame(axes: Axes, timeline: Timeline, title: str, unit: str | None, *, until: float) -> None:
    schedule = timeline.schedule
    axes.set_xlim(0, until)
    axes.set_ylim(schedule.num_ranks - 0.45, -0.55)
    axes.set_yticks(range(schedule.num_ranks), [f"rank {rank}" for rank in range(schedule.num_ranks)], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, colors=_SOFT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(title, fontsize=10, loc="left", color=_INK)
    if unit is not None:
        axes.set_xlabel(f"time ({unit})", fontsize=9, color=_SOFT)


def _figure(*timelines: Timeline) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = sum(1.3 + 0.42 * timeline.schedule.num_ranks for timeline in timelines)
    figure = Figure(figsize=(12, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: str | Path) -> None:
    with writing(Path(path), what="--out"):
        figure.savefig(path, format="png")


def _bar(axes: Axes, timeline: Timeline, rank: int, span: Span, *, color: Any, until: float) -> None:
    op, length = span.action.op, span.end - span.start
    if op is Op.S:
        axes.barh(rank + 0.44, length, left=span.start, height=0.07, color=color)
        return
    axes.barh(rank, length, left=span.start, height=0.78, color=color, edgecolor=_INK, linewidth=0.5)
    name = label(timeline.schedule, span.action)
    figure = axes.get_figure(root=True)
    assert figure is not None
    bar_points = figure.get_figwidth() * 72 * 0.9 * length / until  # the axes take about 0.9 of the figure's width
    size = min(8.5, bar_points / (0.8 * len(name)))  # largest font size, in points, at which the name fits into the bar
    if size >= 5:
        axes.text(span.start + length / 2, rank, name, ha="center", va="center", fontsize=size, color=_INK)


def add_legend(figure: Figure, timelines: Sequence[Timeline]) -> None:
    """Add a legend of the actions' colors below all axes of `figure`, which needs a constrained layout."""
    from matplotlib.patches import Patch

    present = {span.action.op for timeline in timelines for spans in timeline.spans for span in spans if span.end > span.start}
    handles = [Patch(facecolor=_COLORS[op][0], edgecolor=_INK, linewidth=0.5, label=_NAMES[op]) for op in _COLORS if op in present]
    if any(timeline.schedule.num_stages > timeline.schedule.num_ranks for timeline in timelines):
        handles.append(Patch(facecolor=_COLORS[Op.F][1], edgecolor=_INK, linewidth=0.5, label="darker: a later stage of the rank"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
