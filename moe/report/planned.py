"""Table and bar chart of each pipeline rank's predicted memory, with its parts (moe/plan/memory/memory.py): parameters, gradients, ..."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moe.plan.memory.memory import Memory
from moe.report.style import GRID, LINES, TEXT, figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 2**30


def parts_of(ranks: Sequence[Memory]) -> tuple[str, ...]:
    """Return the names of the parts of memory that are above 0 on at least one rank, the largest first."""
    most = {name: max(rank.parts.get(name, 0.0) for rank in ranks) for rank in ranks for name in rank.parts}
    return tuple(sorted((name for name, size in most.items() if size > 0), key=lambda name: -most[name]))


def table(ranks: Sequence[Memory], *, context: bool = True) -> str:
    """Format a table: GiB of each part on each pipeline rank, and their sum. context: add a line that includes the allocator's blocks and
    CUDA's context."""
    head = f"{'GiB of pipeline rank':<24}" + "".join(f"{rank.rank:>9}" for rank in ranks)
    lines = [(name, [rank.parts[name] for rank in ranks]) for name in parts_of(ranks)]
    lines.append(("allocated", [rank.allocated for rank in ranks]))
    if context:
        lines.append(("with allocator, context", [rank.used for rank in ranks]))
    if any(rank.host for rank in ranks):
        lines.append(("on the host", [sum(rank.host.values()) for rank in ranks]))
    texts = [head]
    for name, sizes in lines:
        texts.append(f"{name:<24}" + "".join(f"{size / GIB:>9.{'2f' if size >= 0.1 * GIB or not size else '2g'}}" for size in sizes))
    return "\n".join(texts)


def bars(ranks: Sequence[Memory], *, capacity: float | None = None, context: bool = True) -> Figure:
    """Draw the predicted peak memory of each pipeline rank, in GiB, as a stacked bar of its parts, the largest part at the bottom.
    capacity: bytes of the device, drawn as a line. context: add the allocator's blocks and CUDA's context on top of the parts."""
    names = parts_of(ranks)
    fig = figure(width=max(6.4, 3.0 + 0.7 * len(ranks)), height=4.2)
    ax = fig.subplots()
    bottoms = [0.0] * len(ranks)
    for number, name in enumerate((*names, *["allocator and context"] * context)):
        sizes = [(rank.parts[name] if name in names else rank.used - rank.allocated) / GIB for rank in ranks]
        color = LINES[number % len(LINES)] if name in names else GRID
        alpha = 0.55 if len(LINES) <= number < len(names) else 1.0
        ax.bar([str(rank.rank) for rank in ranks], sizes, bottom=bottoms, label=name, width=0.7, color=color, alpha=alpha)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    title = "Memory at the peak"
    if capacity is not None and max(bottoms) < capacity / GIB / 20:  # a line at the capacity would shrink the bars: write it in the title
        title += f", of the device's {capacity / GIB:.4g} GiB"
    elif capacity is not None:
        ax.axhline(capacity / GIB, color=TEXT, linewidth=1.2, linestyle=(0, (4, 3)), label="the device's memory")
    ax.set_title(title)
    ax.set_ylabel("GiB")
    ax.set_xlabel("pipeline rank")
    fig.legend(*ax.get_legend_handles_labels(), loc="outside right upper")
    return fig


def draw(ranks: Sequence[Memory], path: Path, *, capacity: float | None = None, context: bool = True) -> Path:
    """Draw `bars`, the chart of each rank's predicted memory, with the same arguments. Write it to `path` as a PNG, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return save(lambda: bars(ranks, capacity=capacity, context=context), path)
