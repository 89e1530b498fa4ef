"""The pictures of one run. Each function draws one picture from a run's history, or returns None if the run has no data for it.

`PLOTS` lists the report's pictures: a new picture is a function and an entry in PLOTS. In the picture of expert load the color is the
logarithm of load / mean load, so that half and double the mean are equally far from the mean. The mean, which is a fair share, has nearly
the background's color.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moe.report.history import Array, History, smoothed, windows
from moe.report.style import DEAD, GRID, HEAT, LINES, MUTED, TEXT, WIDE, colors, figure, log_axis, marker, step_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_WINDOWS = 300  # largest number of columns in a panel of expert load: more would be narrower than one or two pixels
REACH = 2  # the color scale goes from mean load / 2^REACH to mean load * 2^REACH, as in the terminal (moe/records/heat.py)
HEAT_AT = (0.0, 0.22, 0.4, 0.5, 0.6, 0.78, 1.0)  # positions (0 to 1) of the 7 colors HEAT on that scale; a fair share is at 0.5


@dataclass(frozen=True)
class Plot:
    """One kind of picture. name: stem of its file under plots/. caption: the text below it. wide: it takes the page's whole width."""

    name: str
    title: str
    draw: Callable[[History], Figure | None]
    caption: str
    wide: bool = False


def _raw_and_smooth(ax: Axes, steps_S: Array, values_S: Array, *, color: str, label: str) -> None:
    if len(steps_S) > 10:
        ax.plot(steps_S, values_S, color=color, alpha=0.28, linewidth=0.8)
        ax.plot(steps_S, smoothed(values_S), color=color, label=label)
    else:
        ax.plot(steps_S, values_S, color=color, label=label, marker=marker(values_S))


def _panels(history: History, count: int = 1, *, steps_S: Array | None = None) -> tuple[Figure, Any]:
    """Return a figure and `count` axes over steps (the training steps, or `steps_S`), with a dotted line where the run was resumed."""
    fig = figure()
    axes = np.atleast_1d(fig.subplots(count, sharex=True))
    for ax in axes:
        step_axis(ax, history.steps_S if steps_S is None else steps_S, label=ax is axes[-1])
        for event in history.events:
            if event.get("event") == "resumed":
                ax.axvline(event["step"], color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)), zorder=0)
    return fig, axes


def loss(history: History) -> Figure | None:
    steps_S, loss_S = history.steps_S, history.series_S("loss")
    at, validation = history.evaluations()
    if not np.isfinite(loss_S).any() and not len(at):
        return None
    fig, (ax,) = _panels(history, steps_S=np.concatenate([steps_S, at]))
    _raw_and_smooth(ax, steps_S, loss_S, color=LINES[0], label="training")
    if len(at):
        ax.plot(at, validation, color=LINES[1], marker="o", markersize=4.5, label="validation", clip_on=False)
        below = validation[-1] < np.nanmean(loss_S[-20:]) if np.isfinite(loss_S[-20:]).any() else False
        place: Any = {"xytext": (-4, -13 if below else 8), "textcoords": "offset points", "ha": "right"}
        low, high = ax.get_ylim()
        ax.set_ylim(low - 0.1 * (high - low), high)  # room for the number below the lowest point
        ax.annotate(f"{validation[-1]:.3f}", (at[-1], validation[-1]), color=LINES[1], fontweight="bold", **place)
    ax.set_title("Loss")
    ax.set_ylabel("cross-entropy (nats per token)" if history.in_nats else "train.loss")
    ax.legend(loc="upper right")
    return fig


def router_losses(history: History) -> Figure | None:
    steps_S = history.steps_S
    both = (("balance_loss", "balance loss"), ("z_loss", "z loss"))
    shown = [(key, name) for key, name in both if np.nan_to_num(history.series_S(key)).any()]
    if not history.layers or not shown:
        return None
    fig, axes = _panels(history, len(shown))
    for ax, (key, name), color in zip(axes, shown, LINES, strict=False):
        only_measured = history.weights.get(key) == 0
        about = f"{name} (weight 0: only measured)" if only_measured else name
        _raw_and_smooth(ax, steps_S, history.series_S(key), color=color, label=about)
        if key == "balance_loss" and "own_balance" not in history.weights:  # dashed: even load, whose loss is 1 in each layer
            ax.axhline(len(history.layers), color=MUTED, linewidth=1.0, linestyle=(0, (4, 3)), label="even load")
        if key == "balance_loss" or only_measured:
            ax.legend(loc="best")
        ax.set_ylabel(name)
    axes[0].set_title("Router losses, summed over layers")
    return fig


def gradient_norm(history: History) -> Figure | None:
    steps_S, total_S = history.steps_S, history.series_S("grad_norm")
    if not np.isfinite(total_S).any():
        return None
    fig, (ax,) = _panels(history)
    for name, color in zip(history.families, LINES, strict=False):
        values_S = history.series_S(f"grad_norm_parts.{name}")
        if (values_S > 0).any():  # a dense model has no routers and experts
            _raw_and_smooth(ax, steps_S, np.where(values_S > 0, values_S, np.nan), color=color, label=name)
    # the total is dashed and drawn last, because the norm of one family is often nearly equal to it
    whole_S = smoothed(total_S) if len(steps_S) > 10 else total_S
    ax.plot(steps_S, whole_S, color=TEXT, linestyle=(0, (3, 2)), linewidth=1.3, label="total", marker=marker(whole_S))
    log_axis(ax)
    ax.set_title("Gradient norm by family, before clipping")
    ax.set_ylabel("L2 norm (log scale)")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig


def speed_and_memory(history: History) -> Figure | None:
    steps_S, speed_S, memory_S = history.steps_S, history.series_S("tokens_per_second"), history.series_S("memory_bytes")
    if not np.isfinite(speed_S).any():
        return None
    has_memory = bool(np.isfinite(memory_S).any())
    fig, axes = _panels(history, 1 + has_memory)
    _raw_and_smooth(axes[0], steps_S, speed_S, color=LINES[2], label="tokens per second")
    axes[0].set_title("Speed and memory" if has_memory else "Speed")
    axes[0].set_ylabel("tokens / s")
    axes[0].yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes[0].set_ylim(bottom=0)
    if has_memory:
        unit, name = (2**30, "GiB") if np.nanmax(memory_S) >= 2**30 else (2**20, "MiB")
        axes[1].plot(steps_S, memory_S / unit, color=LINES[3], marker=marker(memory_S))
        axes[1].set_ylabel(f"peak memory ({name})")
        axes[1].set_ylim(bottom=0, top=1.15 * float(np.nanmax(memory_S)) / unit)
    return fig


def learning_rate(history: History) -> Figure | None:
    """Draw the learning rate, a mark at each skipped step, and the loss scale if it ever differed from 1."""
    steps_S, rate_S, scale_S = history.steps_S, history.series_S("lr"), history.series_S("loss_scale")
    if not np.isfinite(rate_S).any():
        return None
    skipped = np.array([bool(line.get("skipped")) for line in history.train])
    scaled = bool((np.nan_to_num(scale_S, nan=1.0) != 1).any())
    fig, axes = _panels(history, 1 + scaled)
    axes[0].plot(steps_S, rate_S, color=LINES[0], marker=marker(rate_S))
    axes[0].set_title("Learning rate and loss scale" if scaled else "Learning rate")
    axes[0].set_ylabel("learning rate")
    axes[0].set_ylim(bottom=0)
    axes[0].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    last = axes[-1]
    if scaled:
        last.step(steps_S, scale_S, color=LINES[3], where="post", marker=marker(scale_S))
        last.set_yscale("log", base=2)
        last.set_ylabel("loss scale")
    if skipped.any():
        on_S = scale_S if scaled else rate_S
        marks = {"linestyle": "", "marker": "x", "markersize": 7, "color": LINES[1]}
        last.plot(steps_S[skipped], on_S[skipped], label=f"{skipped.sum()} skipped", **marks)
        last.legend(loc="best")
    return fig


def expert_load(history: History) -> Figure | None:
    """Draw a panel for each MoE layer: each expert's load (a row) over the steps, all panels on one color scale."""
    from matplotlib.colors import LinearSegmentedColormap

    loads = {layer: history.load_SE(layer) for layer in history.layers}
    loads = {layer: load_SE for layer, load_SE in loads.items() if np.isfinite(load_SE).any()}
    if not loads:
        return None
    columns = 1 if len(loads) == 1 else 2 if len(loads) <= 12 else 3
    rows = -(-len(loads) // columns)
    experts = max(load_SE.shape[1] for load_SE in loads.values())
    panel_height = min(3.0, max(2.0, 1.2 + 0.11 * experts))
    fig = figure(width=WIDE, height=0.7 + rows * panel_height)
    axes = np.atleast_1d(fig.subplots(rows, columns, sharex=True, squeeze=False)).ravel()
    color_map = LinearSegmentedColormap.from_list("load", list(zip(HEAT_AT, HEAT, strict=True))).with_extremes(bad=GRID, under=DEAD)
    mesh: Any = None
    for index, (ax, (layer, load_SE)) in enumerate(zip(axes, loads.items(), strict=False)):
        means_WE, edges = windows(load_SE, history.steps_S, MOST_WINDOWS)
        with np.errstate(divide="ignore"):
            shade_WE = np.where(means_WE == 0, -REACH - 1, np.clip(np.log2(means_WE), -REACH, REACH))
        num_experts = load_SE.shape[1]
        mesh = ax.pcolormesh(edges, np.arange(num_experts + 1) - 0.5, shade_WE.T, cmap=color_map, vmin=-REACH, vmax=REACH)
        ax.set_title(f"layer {layer}", fontsize=10, pad=4)
        ax.grid(False)
        ax.yaxis.set_major_locator(_expert_ticks(num_experts))
        ax.invert_yaxis()
        if index % columns == 0:
            ax.set_ylabel("expert")
        step_axis(ax, edges, label=index + columns >= len(loads))
        ax.tick_params(labelbottom=index + columns >= len(loads))
    for ax in axes[len(loads) :]:
        ax.set_visible(False)
    fig.suptitle("Expert load over time, before dropping", x=0.01, ha="left", fontsize=11, fontweight="bold", color=TEXT)
    bar = fig.colorbar(mesh, ax=list(axes), pad=0.01, fraction=0.03, aspect=22, extend="min")
    ticks = range(-REACH, REACH + 1)
    bar.set_ticks(list(ticks), labels=[f"{['¼', '½', '1', '2', '4'][tick + REACH]}×" for tick in ticks])
    bar.set_label("load relative to uniform")
    bar.ax.grid(False)
    return fig


def _expert_ticks(experts: int) -> Any:
    from matplotlib.ticker import FixedLocator

    spacing = next(gap for gap in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2**30) if experts / gap <= 8)
    return FixedLocator(list(range(0, experts, spacing)))


def dropped(history: History) -> Figure | None:
    shares = {layer: 100 * history.dropped_S(layer) for layer in history.layers}
    return _by_layer(history.steps_S, shares, title="Dropped choices by layer", label="share of token choices (%)", least_top=1.0)


def selection_bias(history: History) -> Figure | None:
    ranges = {layer: history.bias_range_S(layer) for layer in history.layers}
    return _by_layer(history.steps_S, ranges, title="Selection bias by layer", label="largest - least bias", least_top=0.001)


def _by_layer(steps_S: Array, values: dict[int, Array], *, title: str, label: str, least_top: float) -> Figure | None:
    """Draw a line for each layer. values: layer -> its value at each training step [S]; a layer without a finite value is left out.
    least_top: the y axis goes from 0 to at least this value."""
    values = {layer: values_S for layer, values_S in values.items() if np.isfinite(values_S).any()}
    if not values:
        return None
    fig = figure()
    ax = fig.subplots()
    few = len(values) <= 7
    for (layer, values_S), color in zip(values.items(), colors(len(values)), strict=True):
        if few and len(steps_S) > 10:
            ax.plot(steps_S, values_S, color=color, alpha=0.28, linewidth=0.8)
        shown_S = smoothed(values_S) if len(steps_S) > 10 else values_S
        ax.plot(steps_S, shown_S, color=color, label=f"layer {layer}", linewidth=1.8 if few else 1.2, marker=marker(shown_S))
    ax.set_title(title)
    ax.set_ylabel(label)
    ax.set_ylim(bottom=0, top=max(least_top, 1.05 * max(float(np.nanmax(values_S)) for values_S in values.values())))
    step_axis(ax, steps_S)
    if few:
        fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=len(values))
    else:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import ListedColormap

        scale = ScalarMappable(cmap=ListedColormap(colors(len(values))))
        scale.set_clim(-0.5, len(values) - 0.5)
        ends = [0, len(values) // 2, len(values) - 1]
        fig.colorbar(scale, ax=ax, pad=0.02).set_ticks(ends, labels=[f"layer {list(values)[i]}" for i in ends])
    return fig


PLOTS = (
    Plot("loss", "Loss", loss, "Training loss (thin: every step, thick: smoothed) and validation loss."),
    Plot(
        "gradient_norm",
        "Gradient norm",
        gradient_norm,
        "Norm of all gradients, and of each family of parameters if there are several. A norm that diverges is seen here first.",
    ),
    Plot(
        "expert_load",
        "Expert load over time",
        expert_load,
        "Each row is one expert. Neutral: a fair share; orange: too much; blue: too little; color of the arrow below the scale: no token.",
        wide=True,
    ),
    Plot("dropped", "Dropped choices", dropped, "Choices that found their expert full, by layer."),
    Plot(
        "router_losses",
        "Router losses",
        router_losses,
        "Balance loss: 1 for each layer if load is even (dashed). z loss: grows with the size of the router's logits.",
    ),
    Plot(
        "selection_bias",
        "Selection bias",
        selection_bias,
        "Largest minus least selection bias of each layer's router. For comparison: two softmax or sigmoid scores differ by at most 1.",
    ),
    Plot("speed_and_memory", "Speed and memory", speed_and_memory, "Tokens per second of all processes; largest peak memory of a process."),
    Plot("learning_rate", "Learning rate", learning_rate, "The schedule, and the loss scale if the precision needs one."),
)
