"""The pictures of one run, one function each: takes history and theme; returns a figure, or None if the run has no data for it.

`PLOTS` is the table of the report's pictures. A new picture is a function, a line in that table and a caption.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moe.report.experts import dropped, expert_load
from moe.report.history import Array, History, smoothed
from moe.report.style import Theme, figure, log_axis, marker, step_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Plot:
    """One kind of plot. `name`: the file's stem under plots/. A wide plot takes the whole width of the page."""

    name: str
    title: str
    draw: Callable[[History, Theme], Figure | None]
    wide: bool = False

    @property
    def caption(self) -> str:
        """Text below the plot, which says what to look for."""
        return CAPTIONS[self.name]


def _raw_and_smooth(ax: Axes, steps_S: Array, values_S: Array, *, colour: str, label: str) -> None:
    if len(steps_S) > 10:
        ax.plot(steps_S, values_S, color=colour, alpha=0.28, linewidth=0.8)
        ax.plot(steps_S, smoothed(values_S), color=colour, label=label)
    else:
        ax.plot(steps_S, values_S, color=colour, label=label, marker=marker(values_S))


def _events(ax: Axes, history: History, theme: Theme) -> None:
    """Draw a dotted line at each resume, the usual reason for a kink."""
    for event in history.events:
        if event.get("event") == "resumed":
            ax.axvline(event["step"], color=theme.muted, linewidth=0.9, linestyle=(0, (1, 2)), zorder=0)


def loss(history: History, theme: Theme) -> Figure | None:
    steps_S, loss_S = history.steps_S, history.series_S("loss")
    at, validation = history.evaluations()
    if not np.isfinite(loss_S).any() and not len(at):
        return None
    fig = figure()
    ax = fig.subplots()
    _raw_and_smooth(ax, steps_S, loss_S, colour=theme.lines[0], label="training")
    if len(at):
        ax.plot(at, validation, color=theme.lines[1], marker="o", markersize=4.5, label="validation")
        below = validation[-1] < np.nanmean(loss_S[-20:]) if np.isfinite(loss_S[-20:]).any() else False
        ax.annotate(
            f"{validation[-1]:.3f}",
            (at[-1], validation[-1]),
            xytext=(-4, -13 if below else 8),
            textcoords="offset points",
            ha="right",
            color=theme.lines[1],
            fontweight="bold",
        )
    _events(ax, history, theme)
    ax.set_title("Loss")
    ax.set_ylabel("cross-entropy (nats per token)")
    step_axis(ax, np.concatenate([steps_S, at]))
    ax.legend(loc="upper right")
    return fig


def router_losses(history: History, theme: Theme) -> Figure | None:
    steps_S = history.steps_S
    both = (("balance_loss", "balance loss"), ("z_loss", "z loss"))
    shown = [(key, name) for key, name in both if np.nan_to_num(history.series_S(key)).any()]
    if not history.layers or not shown:
        return None
    fig = figure()
    axes = np.atleast_1d(fig.subplots(len(shown), sharex=True))
    for ax, (key, name), colour in zip(axes, shown, theme.lines, strict=False):
        _raw_and_smooth(ax, steps_S, history.series_S(key), colour=colour, label=name)
        _events(ax, history, theme)
        if key == "balance_loss":  # an even load gives 1 in each layer, for any number of choices
            ax.axhline(len(history.layers), color=theme.muted, linewidth=1.0, linestyle=(0, (4, 3)), label="even load")
            ax.legend(loc="upper right")
        ax.set_ylabel(name if history.weights.get(key) != 0 else f"{name}\n(weight 0: only measured)")
        step_axis(ax, steps_S, label=ax is axes[-1])
    axes[0].set_title("Router losses, summed over layers")
    return fig


def gradient_norm(history: History, theme: Theme) -> Figure | None:
    steps_S, total_S = history.steps_S, history.series_S("grad_norm")
    if not np.isfinite(total_S).any():
        return None
    fig = figure()
    ax = fig.subplots()
    for name, colour in zip(history.families, theme.lines, strict=False):
        values_S = history.series_S(f"grad_norm_parts.{name}")
        _raw_and_smooth(ax, steps_S, np.where(values_S > 0, values_S, np.nan), colour=colour, label=name)
    # dashed and on top, since often one family is nearly the whole norm
    whole_S = smoothed(total_S) if len(steps_S) > 10 else total_S
    ax.plot(steps_S, whole_S, color=theme.text, linestyle=(0, (3, 2)), linewidth=1.3, label="total", marker=marker(whole_S))
    log_axis(ax)
    _events(ax, history, theme)
    ax.set_title("Gradient norm by family, before clipping")
    ax.set_ylabel("L2 norm (log scale)")
    step_axis(ax, steps_S)
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig


def speed_and_memory(history: History, theme: Theme) -> Figure | None:
    steps_S, speed_S, memory_S = history.steps_S, history.series_S("tokens_per_second"), history.series_S("memory_bytes")
    if not np.isfinite(speed_S).any():
        return None
    has_memory = bool(np.isfinite(memory_S).any())
    fig = figure()
    axes = np.atleast_1d(fig.subplots(1 + has_memory, sharex=True))
    _raw_and_smooth(axes[0], steps_S, speed_S, colour=theme.lines[2], label="tokens per second")
    axes[0].set_title("Speed and memory" if has_memory else "Speed")
    axes[0].set_ylabel("tokens / s")
    axes[0].yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes[0].set_ylim(bottom=0)
    if has_memory:
        unit, name = (2**30, "GiB") if np.nanmax(memory_S) >= 2**30 else (2**20, "MiB")
        axes[1].plot(steps_S, memory_S / unit, color=theme.lines[3], marker=marker(memory_S))
        axes[1].set_ylabel(f"peak memory ({name})")
        axes[1].set_ylim(bottom=0, top=1.15 * float(np.nanmax(memory_S)) / unit)
    for ax in axes:
        _events(ax, history, theme)
        step_axis(ax, steps_S, label=ax is axes[-1])
    return fig


def learning_rate(history: History, theme: Theme) -> Figure | None:
    """Draw the learning rate. The loss scale is added if it ever differed from 1, with a mark at each skipped step."""
    steps_S, rate_S, scale_S = history.steps_S, history.series_S("lr"), history.series_S("loss_scale")
    if not np.isfinite(rate_S).any():
        return None
    skipped = np.array([bool(line.get("skipped")) for line in history.train])
    scaled = bool((np.nan_to_num(scale_S, nan=1.0) != 1).any())
    fig = figure()
    axes = np.atleast_1d(fig.subplots(1 + scaled, sharex=True))
    axes[0].plot(steps_S, rate_S, color=theme.lines[0], marker=marker(rate_S))
    axes[0].set_title("Learning rate and loss scale" if scaled else "Learning rate")
    axes[0].set_ylabel("learning rate")
    axes[0].set_ylim(bottom=0)
    axes[0].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    last = axes[-1]
    if scaled:
        last.step(steps_S, scale_S, color=theme.lines[3], where="post", marker=marker(scale_S))
        last.set_yscale("log", base=2)
        last.set_ylabel("loss scale")
    if skipped.any():
        on_S = scale_S if scaled else rate_S
        marks = {"linestyle": "", "marker": "x", "markersize": 7, "color": theme.lines[1]}
        last.plot(steps_S[skipped], on_S[skipped], label=f"{skipped.sum()} skipped", **marks)
        last.legend(loc="best")
    for ax in axes:
        _events(ax, history, theme)
        step_axis(ax, steps_S, label=ax is last)
    return fig


CAPTIONS = {
    "loss": "Training loss (thin: every step, thick: smoothed) and validation loss.",
    "gradient_norm": "Each family of parameters on its own: a router's or expert's norm that runs away shows here first.",
    "expert_load": "Each row is one expert. Neutral: a fair share; orange: too much; blue: too little; the arrow's colour: not one token.",
    "dropped": "Tokens that found their expert full and took the residual path, by layer.",
    "router_losses": "Balance loss: 1 a layer where load is even (dashed). z loss: size of the router's logits, held by its weight alone.",
    "speed_and_memory": "All processes together; memory is the largest peak of any process.",
    "learning_rate": "The schedule, and the loss scale where the precision needs one.",
}
PLOTS = (
    Plot("loss", "Loss", loss),
    Plot("gradient_norm", "Gradient norm", gradient_norm),
    Plot("expert_load", "Expert load over time", expert_load, wide=True),
    Plot("dropped", "Dropped tokens", dropped),
    Plot("router_losses", "Router losses", router_losses),
    Plot("speed_and_memory", "Speed and memory", speed_and_memory),
    Plot("learning_rate", "Learning rate", learning_rate),
)
