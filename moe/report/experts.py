"""Pictures of the experts: each expert's load over time (one panel per layer), and the share of dropped choices.

The colour is the logarithm of the load relative to uniform, so that half and double are equally far from fair. A fair share is white (in
the dark theme: the background). An expert without any token has a separate colour.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moe.report.history import Array, History, smoothed, windows
from moe.report.style import WIDE, Theme, colours, figure, marker, step_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_WINDOWS = 300  # columns of a panel: more would be narrower than a pixel or two

REACH = 2  # doublings to each side of fair on the colour scale, as in the terminal's row
HEAT_AT = (0.0, 0.22, 0.4, 0.5, 0.6, 0.78, 1.0)  # positions of the theme's heat colours: small deviations from fair are already visible


def expert_load(history: History, theme: Theme) -> Figure | None:
    """Draw heat maps of load, step by expert, all on one scale."""
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
    colour_map = LinearSegmentedColormap.from_list("load", list(zip(HEAT_AT, theme.heat, strict=True))).with_extremes(
        bad=theme.grid, under=theme.dead
    )
    mesh: Any = None
    for index, (ax, (layer, load_SE)) in enumerate(zip(axes, loads.items(), strict=False)):
        means_WE, edges = windows(load_SE, history.steps_S, MOST_WINDOWS)
        with np.errstate(divide="ignore"):
            shade_WE = np.where(means_WE == 0, -REACH - 1, np.clip(np.log2(means_WE), -REACH, REACH))
        num_experts = load_SE.shape[1]
        mesh = ax.pcolormesh(edges, np.arange(num_experts + 1) - 0.5, shade_WE.T, cmap=colour_map, vmin=-REACH, vmax=REACH)
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
    fig.suptitle("Expert load over time, before dropping", x=0.01, ha="left", fontsize=11, fontweight="bold", color=theme.text)
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


def dropped(history: History, theme: Theme) -> Figure | None:
    shares: dict[int, Array] = {layer: history.dropped_S(layer) for layer in history.layers}
    shares = {layer: share_S for layer, share_S in shares.items() if np.isfinite(share_S).any()}
    if not shares:
        return None
    fig = figure()
    ax = fig.subplots()
    steps_S = history.steps_S
    few = len(shares) <= 7
    for (layer, share_S), colour in zip(shares.items(), colours(theme, len(shares)), strict=True):
        if few and len(steps_S) > 10:
            ax.plot(steps_S, 100 * share_S, color=colour, alpha=0.28, linewidth=0.8)
        shown_S = smoothed(share_S) if len(steps_S) > 10 else share_S
        ax.plot(steps_S, 100 * shown_S, color=colour, label=f"layer {layer}", linewidth=1.8 if few else 1.2, marker=marker(shown_S))
    ax.set_title("Dropped tokens by layer")
    ax.set_ylabel("share of token choices (%)")
    ax.set_ylim(bottom=0, top=max(1.0, 105 * float(np.nanmax([np.nanmax(s) for s in shares.values()]))))
    step_axis(ax, steps_S)
    if few:
        fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=len(shares))
    else:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import ListedColormap

        scale = ScalarMappable(cmap=ListedColormap(colours(theme, len(shares))))
        scale.set_clim(-0.5, len(shares) - 0.5)
        ends = [0, len(shares) // 2, len(shares) - 1]
        fig.colorbar(scale, ax=ax, pad=0.02).set_ticks(ends, labels=[f"layer {list(shares)[i]}" for i in ends])
    return fig
