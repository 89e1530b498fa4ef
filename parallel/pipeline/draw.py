"""The picture of a Timeline: a row a rank, time to the right, waits left white (matplotlib, imported where it is needed).

Forwards are blue, backwards green, input gradients light green, weight gradients orange; later stages of a rank are darker. The sum of
replicas' gradients is a thin line below its rank, because it runs beside what the rank computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from parallel.errors import BadInput
from parallel.pipeline.schedule import Op
from parallel.pipeline.simulate import Span, Timeline
from parallel.pipeline.timeline import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {Op.F: ("#bcd4ea", "#5b8fc2"), Op.B: ("#b9d8c8", "#4f8a70"), Op.I: ("#d9ead9", "#8dbf9f"), Op.W: ("#f8d3ae", "#e39a50")}
_COLORS |= {Op.U: ("#1f2933", "#1f2933"), Op.S: ("#bc6c8f", "#bc6c8f")}
_NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "input gradient", Op.W: "weight gradient", Op.S: "sum over replicas", Op.U: "update"}
_INK, _SOFT = "#1f2933", "#52606d"


def draw(timeline: Timeline, path: str | Path, *, title: str | None = None) -> None:
    """Write a PNG. Raises BadInput where it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ranks = timeline.schedule.num_ranks
    figure = Figure(figsize=(12, 1.3 + 0.42 * ranks), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    draw_on(figure.add_subplot(), timeline, title=title)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise BadInput("--out", got=f"{path}: {error.strerror}", needed="a file that can be written", fix="choose another path") from None


def draw_on(axes: Axes, timeline: Timeline, *, title: str | None = None, legend: bool = True) -> None:
    """The rows of a timeline on axes of one's own, with its bubble in the title."""
    schedule = timeline.schedule
    for rank, spans in enumerate(timeline.spans):
        stages = schedule.stages_of(rank)
        for span in spans:
            if span.end > span.start:
                _bar(axes, timeline, rank, span, dark=stages.index(span.action.stage) / max(1, len(stages) - 1))
    axes.set_xlim(0, timeline.makespan)
    axes.set_ylim(schedule.num_ranks - 0.45, -0.55)
    axes.set_yticks(range(schedule.num_ranks), [f"rank {rank}" for rank in range(schedule.num_ranks)], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8, colors=_SOFT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    said = f"{schedule.name}, {schedule.microbatches} micro-batches: time {timeline.makespan:g}, idle {timeline.bubble():.1%} of ideal"
    axes.set_title(title or said, fontsize=10, loc="left", color=_INK)
    if legend:
        _legend(axes, timeline)


def _bar(axes: Axes, timeline: Timeline, rank: int, span: Span, *, dark: float) -> None:
    op, length = span.action.op, span.end - span.start
    color = _COLORS[op][1 if dark > 0.5 else 0]
    if op is Op.S:
        axes.barh(rank + 0.44, length, left=span.start, height=0.07, color=color)
        return
    axes.barh(rank, length, left=span.start, height=0.78, color=color, edgecolor=_INK, linewidth=0.5)
    name = label(timeline.schedule, span.action)
    size = min(8.5, 12 * 72 * 0.9 * length / timeline.makespan / (0.8 * len(name)))  # points: what fits the bar's width
    if size >= 5:
        axes.text(span.start + length / 2, rank, name, ha="center", va="center", fontsize=size, color=_INK)


def _legend(axes: Axes, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    present = {span.action.op for spans in timeline.spans for span in spans if span.end > span.start}
    handles = [Patch(facecolor=_COLORS[op][0], edgecolor=_INK, linewidth=0.5, label=_NAMES[op]) for op in _COLORS if op in present]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(handles), fontsize=8, frameon=False)
