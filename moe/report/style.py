"""The look of every picture: sizes, and colors that can be told apart with any color vision (Okabe and Ito, 2008).

Figures are made without pyplot: no global state, no window system, no change to the caller's matplotlib.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NARROW, WIDE = 6.4, 12.8  # inches; a row of the page holds two narrow pictures or one wide picture
DPI = 150


TEXT, MUTED, GRID = "#1f2328", "#656d76", "#e4e7eb"  # as in pictures.mplstyle
LINES = ("#0072b2", "#d55e00", "#009e73", "#b0528b", "#c98500", "#4a9fd8", "#6b6b6b")  # colors of curves, in order of use
HEAT = ("#08407e", "#2f7fc1", "#a9cde8", "#f4f4f2", "#f9c48d", "#dd7412", "#7f3200")  # colors of an expert's load, from little to much
DEAD = "#000000"  # color of an expert without load


def styled() -> AbstractContextManager[Any]:
    """Return a context in which new figures have the style of pictures.mplstyle. At its exit, matplotlib's settings are restored."""
    import matplotlib

    return matplotlib.rc_context(fname=Path(__file__).with_name("pictures.mplstyle"))


def figure(*, width: float = NARROW, height: float = 3.6) -> Figure:
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    fig.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # type: ignore[union-attr,call-arg]
    return fig


def png(fig: Figure) -> bytes:
    """Return the picture as a PNG file. Call it in the same `styled` context in which the figure was made."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(fig).print_png(buffer, metadata={"Software": ""})  # type: ignore[no-untyped-call]
    return buffer.getvalue()


def save(draw: Callable[[], Figure], path: Path) -> Path:
    """Write the figure that `draw` makes, as a PNG. Return its path."""
    with styled():
        path.write_bytes(png(draw()))
    return path


def step_axis(ax: Axes, steps_S: Any, *, label: bool = True) -> None:
    """Set the x axis to the range of the steps (2 wide around a single step), with ticks at whole numbers. label: write "step" below it."""
    from matplotlib.ticker import MaxNLocator

    low, high = (float(np.min(steps_S)), float(np.max(steps_S))) if len(steps_S) else (0.0, 1.0)
    ax.set_xlim(*((low, high) if high > low else (low - 1, low + 1)))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 2.5, 5, 10], min_n_ticks=1))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if label:
        ax.set_xlabel("step")


def log_axis(ax: Axes) -> None:
    """Make the y axis logarithmic, with plain numbers at powers of ten, and at twos and fives if they fit. Call after plotting."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    near = high < 50 * low
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if near and f"{value:e}"[0] in "25" else "")


def colors(number: int) -> list[Any]:
    """Return `number` line colors: LINES if they suffice, else a scale from dark to bright."""
    if number <= len(LINES):
        return list(LINES[:number])
    import matplotlib

    scale = matplotlib.colormaps["viridis"]
    return [scale(0.1 + 0.8 * i / (number - 1)) for i in range(number)]


def marker(values: Any) -> str:
    """Return matplotlib's marker for a curve: points if it has fewer than 3 finite values, which a line might not show; otherwise none."""
    return "o" if int(np.isfinite(values).sum()) < 3 else ""
