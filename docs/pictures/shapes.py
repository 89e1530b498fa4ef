"""What the pictures are made of: a page, boxes, cells, arrows and notes, in the same colors everywhere."""

from __future__ import annotations

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle  # noqa: E402

INK, SOFT, LINE = "#1f2933", "#52606d", "#9aa5b1"
GREY, WHITE = "#e4e7eb", "#ffffff"
EXPERTS = ("#f4a259", "#5b8e7d", "#8cb4d9", "#bc6c8f")  # orange, green, blue, plum: apart for color-blind readers by lightness too
plt.rcParams.update({"font.family": "DejaVu Sans", "font.size": 12, "text.color": INK, "axes.edgecolor": LINE, "savefig.facecolor": WHITE})


def canvas(width: float, height: float) -> Axes:
    """An empty page in units of a tenth of an inch."""
    figure = plt.figure(figsize=(width / 10, height / 10))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return axes


def box(
    axes: Axes, x: float, y: float, w: float, h: float, text: str = "", *, fill: str = WHITE, size: float = 12, bold: bool = False
) -> None:
    """A rounded box with its lower left corner at (x, y)."""
    axes.add_patch(FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0,rounding_size=0.8", facecolor=fill, edgecolor=INK, linewidth=1.2))
    axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=size, fontweight="bold" if bold else "normal")


def cell(axes: Axes, x: float, y: float, text: str, *, fill: str, w: float = 5, h: float = 4, dropped: bool = False) -> None:
    """One token or row."""
    axes.add_patch(
        Rectangle((x, y), w, h, facecolor=WHITE if dropped else fill, edgecolor=fill if dropped else INK, linewidth=2.2 if dropped else 1)
    )
    axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=11, color=SOFT if dropped else INK)
    if dropped:
        axes.plot([x + 0.7, x + w - 0.7], [y + 0.7, y + h - 0.7], color=fill, linewidth=2)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], *, color: str = INK, bend: float = 0, width: float = 1.6
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=14,
            color=color,
            linewidth=width,
            connectionstyle=f"arc3,rad={bend}",
            shrinkA=0,
            shrinkB=0,
        )
    )


def note(axes: Axes, x: float, y: float, text: str, *, size: float = 11, color: str = SOFT, ha: str = "center", bold: bool = False) -> None:
    axes.text(x, y, text, ha=ha, va="center", fontsize=size, color=color, fontweight="bold" if bold else "normal", linespacing=1.4)
