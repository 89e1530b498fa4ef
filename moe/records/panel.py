"""Draws the live display from a run's state: a panel for terminals (left), a line for each step in logs (right). Nothing is printed here.

╭─ moe · switch_tiny · 2 processes ─────────────────╮     step 142/300 · loss 1.8423 · ... · load L1 ▃▄▅▄▂▆▄▄ 1.42
│ ━━━━━━━━━━━━━━━╸         step 142/300 · 1:09 left │
│ loss 1.8423 ▇▅▄▃▃▂▂ ...                           │
│ L1  ▃▃▃ ▄▄▄ ▅▅▅ ▄▄▄ ▂▂▂ ▆▆▆ ▄▄▄ ▄▄▄   1.42   1.2 % │
╰───────────────────────────────────────────────────╯
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from moe.records import heat
from moe.records.summary import clock, fixed, known, percent, size, why_skipped
from parallel.errors import counted

LABEL = "dim"  # style of labels; not bright black, because some terminal themes have it as the background
LABEL_WIDTH = 14
NUMBERS = (("loss", "loss", ".4f"), ("tokens/s", "tokens_per_second", ",.0f"), ("lr", "lr", ".2e"))  # label, key in metrics.jsonl, format
MAX_POINTS = 1024  # largest number of points of the loss curve in memory


@dataclass
class State:
    """Data that the display shows. steps: number of steps of the run. world: number of processes. lines: printed under the title. ramp:
    characters of growing height, with which curves and loads are drawn. step, evaluation: the latest training and the latest
    evaluation line of metrics.jsonl. losses: points of the loss curve, each a mean over `losses_per_point` steps. recent: losses of steps
    that do not fill a point yet. seconds: durations of the last 20 steps."""

    steps: int
    recipe: str
    world: int = 1
    lines: Sequence[str] = ()
    ramp: str = heat.BLOCKS
    step: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    losses_per_point: int = 1
    seconds: list[float] = field(default_factory=list)

    def add(self, line: Mapping[str, Any]) -> None:
        self.step = line
        if known(line.get("loss")):
            self.recent.append(line["loss"])
        if len(self.recent) >= self.losses_per_point:
            self.losses.append(sum(self.recent) / len(self.recent))
            self.recent = []
        if len(self.losses) >= MAX_POINTS:  # halve the resolution, so that a long run's curve stays complete
            self.losses = heat.binned(self.losses, MAX_POINTS // 2)
            self.losses_per_point *= 2
        if known(line.get("step_seconds")):
            self.seconds = [*self.seconds[-19:], line["step_seconds"]]

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the end of training: remaining steps * median seconds of the last 20 steps. None before the first step."""
        return statistics.median(self.seconds) * (self.steps - self.step.get("step", 0)) if self.seconds else None


def title(state: State) -> str:
    separator = " - " if state.ramp == heat.ASCII else " · "
    return f"{state.recipe}{separator}{counted(state.world, 'process')}"


def panel(state: State, *, width: int, height: int) -> Panel:
    """Return the whole display for a terminal of `width` x `height` characters."""
    inner = max(20, width - 4)
    parts: list[RenderableType] = [Text(line, style=LABEL, no_wrap=True, overflow="ellipsis") for line in state.lines]
    parts += [_bar(state, inner), _numbers(state, inner)]
    layers = state.step.get("moe") or []
    if layers:
        room = max(1, height - len(state.lines) - 12)
        parts += [Rule(style=LABEL), *_heat_rows(layers, inner, room, state.ramp)]
    heading = Text(title(state), style="bold")
    return Panel(Group(*parts), title=heading, title_align="left", box=box.ROUNDED, border_style="cyan", width=width)


def _bar(state: State, width: int) -> Table:
    done = state.step.get("step", 0)
    left = f"{clock(state.seconds_left)} left" if done < state.steps else "done"
    where = f"step {done:,}/{state.steps:,} · {left}"
    row, rest = Table.grid(padding=(0, 1)), max(8, width - len(where) - 1)
    bar = ProgressBar(total=state.steps, completed=done, width=rest, complete_style="cyan", finished_style="green")
    row.add_row(bar, Text(where, no_wrap=True))
    return row


def _numbers(state: State, width: int) -> Table:
    """Return a table of the step's numbers: up to three numbers a row, then rows of longer texts. Rows are cropped, not wrapped."""
    s = state.step
    shown = [(name, fixed(s.get(key), form)) for name, key, form in NUMBERS]
    if s.get("moe"):
        shown += [("balance loss", fixed(s.get("balance_loss"), ".4f")), ("dropped", percent(s.get("dropped_share")))]
    shown.append(("memory", size(s.get("memory_bytes"))))
    per_row = 3 if width >= 66 else 2 if width >= 44 else 1
    value = max(9, min(16, width // per_row - LABEL_WIDTH - 1))
    table = Table.grid()
    for first in range(0, len(shown), per_row):
        line = Text(no_wrap=True, overflow="crop")
        for label, text in shown[first : first + per_row]:
            line.append(f"{label:<{LABEL_WIDTH}}", style=LABEL)
            line.append(f"{text:<{value}}", style="bold")
        table.add_row(line)
    for label, text, style in _wide_rows(state, width - LABEL_WIDTH):
        table.add_row(Text.assemble((f"{label:<{LABEL_WIDTH}}", LABEL), (text, style), no_wrap=True, overflow="ellipsis"))
    return table


def _wide_rows(state: State, width: int) -> list[tuple[str, str, str]]:
    """Return (label, text, style) of each row below the numbers: gradient norms, skipped steps, validation, loss curve."""
    s = state.step
    rows = [("gradient", _norms(s), "bold")]
    if (skips := _skips(s))[0]:
        rows.append((*skips, "bold yellow" if s.get("skipped") else "bold"))
    if state.evaluation:
        rows.append(("validation", _evaluation(state.evaluation), "bold green"))
    if len(state.losses) > 1:
        rows.append(("loss so far", sparkline(state.losses, cells=max(8, width), ramp=state.ramp), "cyan"))
    return rows


def _norms(s: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{name} {value:.3g}" for name, value in (s.get("grad_norm_parts") or {}).items() if known(value))
    return f"norm {fixed(s.get('grad_norm'), '.3g')}" + (f" ({parts})" if parts else "")


def _evaluation(line: Mapping[str, Any]) -> str:
    bits = f", {line['bits_per_byte']:.4f} bits per byte" if known(line.get("bits_per_byte")) else ""
    return f"{fixed(line.get('validation_loss'), '.4f')}{bits} at step {line.get('step', 0):,}"


def _skips(s: Mapping[str, Any]) -> tuple[str, str]:
    """Return (label, text) about the loss scale and skipped steps; ("", "") if the scale is 1 or unknown and
    no step was skipped. s: the latest step's line."""
    scale, skips = s.get("loss_scale"), s.get("skipped_total") or 0
    steps, too = f"{skips:,} step{'s' if skips > 1 else ''}", ", this one too" if s.get("skipped") else ""
    if known(scale) and scale != 1:
        return "loss scale", (f"{scale:,.0f}" if scale >= 1 else f"{scale:.3g}") + (f" · {steps} skipped{too}" if skips else "")
    return ("skipped", f"{steps}{too}: {why_skipped(scale)}") if skips else ("", "")


def sparkline(values: Sequence[float], *, cells: int, ramp: str = heat.BLOCKS) -> str:
    """Draw values as a curve of one row with at most `cells` characters, on a logarithmic scale if all values are positive. ramp:
    characters of growing height."""
    n = min(cells, len(values))
    parts = [values[i * len(values) // n : (i + 1) * len(values) // n] for i in range(n)]
    means = [sum(part) / len(part) for part in parts]
    if min(means) > 0:
        means = [math.log(mean) for mean in means]
    low, high = min(means), max(means)
    return "".join(ramp[1 + round(7 * (mean - low) / (high - low))] if high > low else ramp[4] for mean in means)


def worst(layers: Sequence[Mapping[str, Any]], room: int) -> list[Mapping[str, Any]]:
    """Return at most `room` of the step's MoE layers, in order. If not all fit, they are the ones with the least balanced load."""
    if len(layers) <= room:
        return list(layers)
    by_imbalance = sorted(layers, key=lambda layer: -_imbalance(layer))[: max(1, room)]
    return [layer for layer in layers if any(layer is chosen for chosen in by_imbalance)]


def _imbalance(layer: Mapping[str, Any]) -> float:
    found = heat.imbalance(layer.get("load") or [])
    return 0.0 if math.isnan(found) else found


def _dropped(layer: Mapping[str, Any]) -> float | None:
    kept, dropped = layer.get("kept"), layer.get("dropped")
    return dropped / (kept + dropped) if known(kept) and known(dropped) and kept + dropped else None


def _heat_rows(layers: Sequence[Mapping[str, Any]], width: int, room: int, ramp: str) -> list[RenderableType]:
    """Return a heading, and a row for each of at most `room` layers: a cell for each expert, largest load / mean load, and, if it fits, the
    dropped share."""
    shown = worst(layers, room)
    experts = max(len(layer.get("load") or ()) for layer in layers)
    name = max(len(_name(layer)) for layer in layers) + 1
    tail = 18 if width - name - experts >= 18 else 7  # width of the columns "max/mean" and "dropped", or of "max/mean" alone
    cells = max(1, width - name - tail)
    cell_width = max(1, min(8, cells // max(1, experts)))
    per_bin = math.ceil(experts / cells)
    note = f", {per_bin} to a cell" if per_bin > 1 else ""
    if len(shown) < len(layers):
        note += f"; the {len(shown)} least even of {len(layers)} layers"
    head = f"load of {experts} experts{note}"
    right = "max/mean  dropped" if tail == 18 else "max/mean"
    scale = f"  ({ramp[0]} none {ramp[4]} fair {ramp[8]} double)"
    if len(head) + len(scale) + len(right) < width:
        head += scale
    head = head[: width - len(right) - 1]
    rows: list[RenderableType] = [Text(f"{head:<{width - len(right)}}{right}", style=LABEL, no_wrap=True, overflow="crop")]
    for layer in shown:
        text = Text(no_wrap=True, overflow="crop").append(f"{_name(layer):<{name}}", style=LABEL)
        for value in heat.binned(heat.relative(layer.get("load") or []), cells):
            glyphs = heat.cell(value, ramp) * max(1, cell_width - (cell_width > 2))
            text.append(f"{glyphs:<{cell_width}}", style=heat.color(value))
        text.pad_right(max(0, width - tail - text.cell_len))
        over = _imbalance(layer)
        text.append(f"{over:>7.2f}", style=f"bold {heat.color(over)}" if over > 2 else "")
        if tail == 18:
            text.append(f"{percent(_dropped(layer)):>11}")
        rows.append(text)
    return rows


def _name(layer: Mapping[str, Any]) -> str:
    return f"L{layer.get('layer', '?')}"


def plain_step(state: State) -> str:
    """Format the latest step as one line of a log."""
    s, layers = state.step, state.step.get("moe") or []
    parts = [f"step {s.get('step', 0)}/{state.steps}", f"loss {fixed(s.get('loss'), '.4f')}"]
    if layers:
        parts.append(f"balance {fixed(s.get('balance_loss'), '.4f')}")
    parts.append(f"{fixed(s.get('tokens_per_second'), ',.0f')} tokens/s")
    if layers:
        parts.append(f"dropped {percent(s.get('dropped_share'))}")
    parts += [f"grad {_norms(s)}", f"lr {fixed(s.get('lr'), '.2e')}"]
    if (skips := _skips(s))[0]:
        parts.append(" ".join(skips))
    if known(s.get("memory_bytes")):
        parts.append(size(s["memory_bytes"]))
    if known(state.seconds_left) and s.get("step", 0) < state.steps:
        parts.append(f"{clock(state.seconds_left)} left")
    if layers:
        shown = worst(layers, 4)
        rows = [f"{_name(layer)} |{heat.row(layer.get('load') or [], ramp=state.ramp)}| {_imbalance(layer):.2f}" for layer in shown]
        more = f" (the least even of {len(layers)})" if len(shown) < len(layers) else ""
        parts.append(f"load {' '.join(rows)}{more}")
    return " · ".join(parts)


def plain_evaluation(state: State) -> str:
    return f"validation loss {_evaluation(state.evaluation)}"


def unicode_ramp(encoding: str | None) -> str:
    """Return the characters that draw heights: heat.BLOCKS if the stream's encoding has them, else heat.ASCII."""
    try:
        heat.BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return heat.ASCII
    return heat.BLOCKS
