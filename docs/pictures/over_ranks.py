"""The pictures of what is cut over ranks: a layer (tensor parallelism) and a sequence (sequence parallelism), one function a method.

Who holds what, and who works on what when, is asked of the methods' own layouts, orders and schedules.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from shapes import EXPERTS, GREY, INK, LINE, SOFT, WHITE, arrow, box, canvas, cell, note

from parallel.mesh.grids import Grid, grid
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Axis, Degrees, Mesh
from parallel.sequence.balanced import steps, task
from parallel.sequence.order import ORDERS, Order
from parallel.tensor.linear_1d import Column, Row
from parallel.tensor.linear_2d import Block
from parallel.tensor.linear_3d import Cube
from parallel.tensor.sliced import own_columns
from tests.counted.tensor import PAPER
from tests.counted.tensor_forms import cost

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"

# --- tensor parallelism -----------------------------------------------------------------------------------------------


def tensor_1d() -> Axes:
    """A feed-forward network of 8 hidden units on two ranks: which units are where, and where the ranks meet."""
    column, row = Column().layout("w1", (8, 5)), Row().layout("w2", (5, 8))
    axes = canvas(120, 56)
    box(axes, 2, 24, 11, 8, "x [b, s, h]\nwhole", fill=GREY, size=11)
    box(axes, 107, 24, 11, 8, "y [b, s, h]\nwhole", fill=GREY, size=11)
    for x, label, forward, backward in ((20, "f", "identity", "sum over tp"), (92, "g", "sum over tp", "identity")):
        box(axes, x, 11, 6, 34, label, fill=WHITE, size=16, bold=True)
        note(axes, x + 3, 6, f"forward: {forward}\nbackward: {backward}", size=10)
    arrow(axes, (13.3, 28), (19.7, 28))
    arrow(axes, (98.3, 28), (106.7, 28))
    for rank in range(2):
        mesh, y, fill = Mesh.of(Degrees(tp=2), rank), 34 - 22 * rank, EXPERTS[2 * rank + 1]
        units, inputs = column.region(mesh)[0], row.region(mesh)[1]
        assert units == inputs
        numbers = range(units.start, units.stop)
        note(axes, 59, y + 15.5, f"rank {rank}: hidden units {', '.join(map(str, numbers))} of 8", color=INK, bold=True)
        for i in range(4):
            axes.add_patch(Rectangle((32 + 2.6 * i, y), 2.6, 9, facecolor=fill, edgecolor=WHITE))
            axes.add_patch(Rectangle((72, y - 0.3 + 2.4 * i), 13, 2.4, facecolor=fill, edgecolor=WHITE))
        box(axes, 48, y + 1.5, 19, 6, "activation,\nunit by unit", fill=WHITE, size=10.5)
        note(axes, 37.2, y + 11.2, "columns of W1", size=10.5)
        note(axes, 78.5, y + 11.2, "the same rows of W2", size=10.5)
        for start, end in (((26.3, 28), (31.5, y + 4.5)), ((85.5, y + 4.5), (91.7, 28))):
            arrow(axes, start, end)
        arrow(axes, (42.8, y + 4.5), (47.7, y + 4.5))
        arrow(axes, (67.3, y + 4.5), (71.5, y + 4.5))
    note(axes, 60, 53.5, "1D: one sum forward and one backward for each layer, and nothing in between", bold=True, color=INK, size=13)
    return axes


def tensor_slices() -> Axes:
    """Eight tokens on two ranks: which of them each has between layers and within."""
    axes, size, length = canvas(124, 47), 2, 8
    titles = {
        13: "between layers:\nnorm, residual, dropout",
        58: "within a layer: products of\na rank's heads or hidden units",
        107: "between layers",
    }
    for x, label in titles.items():
        note(axes, x, 43, label, bold=True, color=INK)
    for rank in range(size):
        places, y, fill = own_columns(length, axis=Axis("tp", tuple(range(size)), rank)), 26 - 17 * rank, EXPERTS[2 * rank + 1]
        mine = range(length)[places]
        note(axes, 13, y + 7, f"rank {rank}: {len(mine)} of {length} tokens", color=INK)
        for i, place in enumerate(mine):
            cell(axes, 4 + 4.6 * i, y, str(place), fill=fill, w=4.2)
            cell(axes, 98 + 4.6 * i, y, str(place), fill=fill, w=4.2)
        for place in range(length):
            owner = place // (length // size)
            cell(axes, 40 + 4.6 * place, y, str(place), fill=EXPERTS[2 * owner + 1], w=4.2)
        note(axes, 58, y + 7, "x of all tokens in, this rank's share of y of all tokens out", size=10)
    for rank in range(size):
        for other in range(size):
            arrow(axes, (22.8, 28 - 17 * other), (39.5, 28 - 17 * rank), color=EXPERTS[2 * other + 1])
            arrow(axes, (77.4, 28 - 17 * other), (97.5, 28 - 17 * rank), color=EXPERTS[2 * rank + 1])
    note(axes, 31, 4, "enter\nforward: gather\nbackward: reduce-scatter", size=10)
    note(axes, 87.5, 4, "leave\nforward: reduce-scatter (the shares' sum)\nbackward: gather", size=10)
    return axes


def tensor_2d() -> Axes:
    """SUMMA on 2 x 2 ranks: what each holds, and whose blocks it multiplies in each step."""
    axes, degrees, side = canvas(124, 47), Degrees(tp=4, tp_col=2), 2
    layout, meshes = Block().layout("w", (8, 8)), [Mesh.of(degrees, rank) for rank in range(4)]
    held(axes, 3, 12, 2.6, "x\nsequences down, channels across", [(read(m), *columns_of(m)) for m in meshes])
    held(axes, 31, 12, 2.6, "W transposed\ninputs down, outputs across", [transposed(m_w(layout, m)) for m in meshes])
    places = {(m.axis("tp_row").index, m.axis("tp_col").index): rank for rank, m in enumerate(meshes)}
    for step in range(side):
        left = 61 + 32 * step
        note(axes, left + 14, 43, f"step {step}", bold=True, color=INK)
        for (row, column), rank in places.items():
            x, y = left + 15 * column, 26 - 16 * row
            axes.add_patch(Rectangle((x - 0.8, y - 1.2), 14, 13.4, facecolor="none", edgecolor=LINE, linestyle="--"))
            note(axes, x + 6.2, y + 10, f"rank {rank}: y +=", size=10, color=INK)
            cell(axes, x, y, f"x{places[row, step]}", fill=EXPERTS[places[row, step]], w=5.4, h=5.4)
            cell(axes, x + 7, y, f"W{places[step, column]}", fill=EXPERTS[places[step, column]], w=5.4, h=5.4)
            note(axes, x + 6.2, y + 2.7, "·", size=14, color=INK)
    note(axes, 62, 5, "In step t the ranks of column t send their x along rows, those of row t their W along columns.", color=INK)
    note(axes, 62, 2, "x2: the block of x that rank 2 holds", size=10)
    return axes


def tensor_2p5d() -> Axes:
    """Two grids of 2 x 2: each has its own sequences and all weights."""
    axes, degrees = canvas(112, 47), Degrees(tp=8, tp_col=2, tp_depth=2)
    layout, meshes = Block().layout("w", (8, 8)), [Mesh.of(degrees, rank) for rank in range(8)]
    held(axes, 4, 6, 3.6, "x: sequences down, channels across", [(read(m), *columns_of(m)) for m in meshes])
    for depth, y in ((0, 27.6), (1, 13.2)):
        note(axes, 36, y, f"depth {depth}", color=INK, bold=True, ha="left")
        axes.plot([34.2, 35, 35, 34.2], [y + 6.9, y + 6.9, y - 6.9, y - 6.9], color=INK)
    for depth in range(2):
        mine = [transposed(m_w(layout, m)) if m.axis("tp_depth").index == depth else None for m in meshes]
        held(axes, 50 + 33 * depth, 12, 2.8, f"W transposed, on depth {depth}", mine)
    arrow(axes, (73.5, 22), (82, 22))
    arrow(axes, (82, 22), (73.5, 22))
    said = "Each depth multiplies by SUMMA alone. Ranks 0 and 4 hold the same block of W:"
    note(axes, 78, 7, f"{said}\ntheir gradients of it are summed once a step, with data parallelism's.", color=INK)
    return axes


def tensor_3d() -> Axes:
    """A cube of 2 x 2 x 2 ranks: x, a first product's weight, and what comes out."""
    axes, degrees = canvas(124, 47), Degrees(tp=8, tp_col=2, tp_depth=2)
    layout, meshes = Cube("first").layout("w", (8, 8)), [Mesh.of(degrees, rank) for rank in range(8)]
    held(axes, 3, 12, 3.1, "x: sequences down, channels across", [(read(m), *columns_of(m)) for m in meshes])
    held(axes, 44, 12, 3.1, "W transposed: inputs down, outputs across", [transposed(m_w(layout, m)) for m in meshes])
    turned = [(part_of_8(m.axis("tp_depth", "tp_col")), *bounds(part_of_8(m.axis("tp_row")))) for m in meshes]
    held(axes, 88, 12, 3.1, "y: sequences down, channels across", turned)
    lines = [", ".join(" ".join(map(str, ranks)) for ranks in list(degrees.groups(a))[:2]) for a in ("tp_row", "tp_depth", "tp_col")]
    note(axes, 15, 6, f"gather x over rows\n(ranks {lines[0]}, ...)", color=INK)
    note(axes, 56, 6, f"gather W over depth\n(ranks {lines[1]}, ...)", color=INK)
    note(axes, 100, 6, f"sum over columns, share out sequences\n(ranks {lines[2]}, ...)", color=INK)
    arrow(axes, (30, 24), (42, 24))
    arrow(axes, (71, 24), (86, 24))
    return axes


def tensor_dtensor() -> Axes:
    """How tensors are placed through a layer: what torch must send stands where a placement changes."""
    axes = canvas(128, 40)
    (first,), (second,) = Column().layout("w1", (8, 4)).split, Row().layout("w2", (4, 8)).split
    rows = (
        ("whole sequences", "Replicate", "Replicate", "nothing", "all-reduce"),
        ("slices", "Shard(1)", "Shard(1)", "all-gather", "reduce-scatter"),
    )
    for row, (title, entering, leaving, before, after) in enumerate(rows):
        y = 23 - 17 * row
        note(axes, 1, y + 10, title, bold=True, color=INK, ha="left")
        products = ((f"x W1\nW1: Shard({first})", "Shard(-1)"), (f"h W2\nW2: Shard({second})", "Partial"))
        parts = (("x", entering), ("x", "Replicate"), *products, ("y", leaving))
        for i, (what, placement) in enumerate(parts):
            box(axes, 2 + 27 * i, y, 15, 8, f"{what}\n{placement}", fill=EXPERTS[2] if i in (2, 3) else GREY, size=10)
        for i, what in enumerate((before, "", "activation", after)):
            arrow(axes, (17.3 + 27 * i, y + 4), (28.7 + 27 * i, y + 4))
            note(axes, 23 + 27 * i, y + 6.2, what, size=9, color=INK if "-" in what else SOFT, bold="-" in what)
    note(axes, 64, 2, "The slot enter, two products, the slot leave. Between the products h is a plain local tensor.", size=10)
    return axes


Part = tuple[slice, int, int]  # of 8 x 8: rows, and columns from, to


def held(axes: Axes, left: float, bottom: float, unit: float, words: str, parts: list[Part | None] | list[Part]) -> None:
    """What each rank holds of 8 x 8 elements; parts that several hold name them all."""
    owners: dict[tuple[int, int, int, int], list[int]] = {}
    for rank, part in enumerate(parts):
        if part is not None:
            down, start, stop = part
            owners.setdefault((down.start, down.stop, start, stop), []).append(rank)
    note(axes, left + 4 * unit, bottom + 8 * unit + (5 if "\n" in words else 3), words, size=10)
    for (top, end, start, stop), ranks in owners.items():
        w, h, corner = unit * (stop - start), unit * (end - top), (left + unit * start, bottom + unit * (8 - end))
        axes.add_patch(Rectangle(corner, w, h, facecolor=EXPERTS[ranks[0] % 4], edgecolor=WHITE, alpha=1.0 if ranks[0] < 4 else 0.55))
        note(axes, corner[0] + w / 2, corner[1] + h / 2, ", ".join(map(str, ranks)), color=INK)


def part_of_8(axis: Axis) -> slice:
    return slice(axis.index * 8 // axis.size, (axis.index + 1) * 8 // axis.size)


def bounds(part: slice) -> tuple[int, int]:
    return part.start, part.stop


def read(mesh: Mesh) -> slice:
    """Of 8 sequences."""
    return part_of_8(mesh.axis("tp_depth", "tp_row"))


def columns_of(mesh: Mesh) -> tuple[int, int]:
    """Of 8 channels: from, to."""
    return bounds(part_of_8(mesh.axis("tp_col")))


def m_w(layout: Layout, mesh: Mesh) -> Part:
    """A part of W: outputs, and inputs from, to."""
    outputs, inputs = layout.region(mesh)
    return outputs, inputs.start, inputs.stop


def transposed(part: Part) -> Part:
    rows, start, stop = part
    return slice(start, stop), rows.start, rows.stop


def tensor_costs() -> Axes:
    """A layer as wide as GPT-3's on more and more ranks: what a rank holds, keeps and sends; and where 3D begins to send less than 1D."""
    figure, panels = plt.subplots(1, 4, figsize=(15, 4.2), layout="constrained")
    colors = dict(zip(("1d", "sliced", "2d", "2.5d", "3d"), (INK, SOFT, *EXPERTS[:3]), strict=True))
    names = {"1d": "1D", "sliced": "1D, slices", "2d": "2D", "2.5d": "2.5D, depth 2", "3d": "3D"}

    rows = json.loads((BENCHMARKS / "comm-tensor.json").read_text())["rows"]
    run = {(row["kind"], row["ranks"]) for row in rows if row["passed"]}  # on so many ranks what was sent is the formula, to the byte
    for axes, what, label in zip(
        panels, ("weights", "kept", "sent"), ("weights", "kept for the backward pass", "sent, both passes"), strict=False
    ):
        for kind, color in colors.items():
            line = kind in ("1d", "sliced")
            shapes = [
                (ranks, grid(kind, ranks, 2 if kind == "2.5d" else None)) for ranks in range(2, 513) if not line or ranks & (ranks - 1) == 0
            ]
            known = [(ranks, cost(shape, PAPER)) for ranks, shape in shapes if shape is not None]
            values = [(found.forward + found.backward if what == "sent" else getattr(found, what)) / 2**20 for _, found in known]
            axes.plot([ranks for ranks, _ in known], values, color=color, marker=".", label=names[kind])
            counted = [at for at in zip([ranks for ranks, _ in known], values, strict=True) if (f"tensor {kind}", at[0]) in run]
            axes.plot(*zip(*counted, strict=True), "o", color=color, fillstyle="none", markersize=9)
        axes.set(xscale="log", yscale="log", title=f"{label}, MiB a rank", xlabel="ranks")
        axes.set_xticks([2, 8, 64, 512], ["2", "8", "64", "512"])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    widths = [2**n for n in range(9, 16)]
    for kind in ("2d", "2.5d", "3d"):
        for ranks, style in ((64, "-"), (512, ":")):
            shape = grid(kind, ranks, 2 if kind == "2.5d" else None)
            if shape is None:
                continue
            ratios = []
            for width in widths:
                of = replace(PAPER, width=width, heads=width // 128, kv_heads=width // 128, hidden=4 * width)
                one, found = cost(Grid("1d", 1, ranks, 1), of), cost(shape, of)
                ratios.append((found.forward + found.backward) / (one.forward + one.backward))
            panels[3].plot(widths, ratios, style, color=colors[kind], label=f"{names[kind]}, {ranks} ranks")
    panels[3].axhline(1, color=LINE)
    panels[3].set(yticks=[0.1, 0.3, 1, 3])
    panels[3].set(xscale="log", yscale="log", title="sent, of what 1D sends", xlabel="width (8,192 tokens)")
    panels[0].legend(fontsize=9)
    panels[3].legend(fontsize=7.5)
    return panels[0]


# --- sequence parallelism ---------------------------------------------------------------------------------------------


def sequence_ring() -> Axes:
    """Four ranks: who holds which places under each order, and what that makes each rank compute as keys go round."""
    axes, size = canvas(124, 62), 4
    note(axes, 62, 59, "which rank holds which place (16 places), and how many pairs of query and key it computes", bold=True, color=INK)
    for row, kind in enumerate(ORDERS):
        order, y = Order(kind, size, 16), 51 - 6 * row
        note(axes, 2, y + 2, kind, color=INK, ha="left")
        for rank in range(size):
            for place in order.positions(rank):
                cell(axes, 17 + 3.3 * place, y, str(rank), fill=EXPERTS[rank], w=3)
        work = [sum(order.seen(rank, other) for other in range(size)) for rank in range(size)]
        note(axes, 74, y + 2, "pairs on ranks 0 to 3:  " + ", ".join(map(str, work)), color=INK, ha="left")
    for panel, kind in enumerate(ORDERS):
        order, x = Order(kind, size, 16), 6 + 41 * panel
        note(axes, x + 15, 33, f"ring, {kind}", bold=True, color=INK)
        for rank in range(size):
            note(axes, x + 3.6 + 7.8 * rank, 30, f"rank {rank}", size=9)
            for step in range(size):
                source = (rank - step) % size
                pairs, y = order.seen(rank, source), 24 - 6 * step
                cell(axes, x + 7.8 * rank, y, f"k{source}: {pairs}" if pairs else "waits", fill=EXPERTS[source] if pairs else GREY, w=7.2)
        for step in range(size):
            note(axes, x - 1, 26 - 6 * step, str(step), ha="right")
    note(axes, 62, 2, "Rows are steps. k1: 16 means keys of rank 1 are here, and this rank's queries see them in 16 pairs.", size=10)
    return axes


def sequence_lightseq() -> Axes:
    """Which block each rank computes when: a contiguous ring, and LightSeq on an even and an odd number of ranks."""
    axes = canvas(124, 42)
    colors = (*EXPERTS, "#d9c35b")

    def ring(rank: int, step: int, size: int) -> tuple[int, int] | None:
        return (rank, rank - step) if rank >= step else None

    def helped(rank: int, step: int, size: int) -> tuple[int, int] | None:
        job = task(rank, step, size)
        return job and (job.queries, job.keys)

    panels = (
        (4, "ring, contiguous, 4 ranks", 4, ring, 4),
        (43, "LightSeq, 4 ranks", 4, helped, steps(4)),
        (83, "LightSeq, 5 ranks", 5, helped, steps(5)),
    )
    for x, title, size, tasks, rows in panels:
        note(axes, x + 3.75 * size, 39, title, bold=True, color=INK)
        idle = 0
        for rank in range(size):
            note(axes, x + 3.5 + 7.5 * rank, 35.5, f"rank {rank}", size=9)
            for step in range(rows):
                done, y = tasks(rank, step, size), 29 - 6 * step
                idle += done is None
                text, fill = ("waits", GREY) if done is None else (f"q{done[0]}k{done[1]}", colors[done[0]])
                cell(axes, x + 7.5 * rank, y, text, fill=fill, w=7)
        for step in range(rows):
            note(axes, x - 0.8, 31 - 6 * step, str(step), ha="right")
        note(axes, x + 3.75 * size, 32.5 - 6 * rows, f"idle: {idle} of {size * rows} blocks", color=INK)
    note(
        axes,
        62,
        2,
        "q3k0: queries of rank 3 with keys of rank 0. The color is the queries' rank: where another computes them, it helps.",
        size=10,
    )
    return axes


def sequence_colossal_ring() -> Axes:
    """The scores of one rank's queries as keys go round, the softmax of whole rows, and values going round."""
    axes, size, rank = canvas(124, 40), 4, 2
    order = Order("contiguous", size, 16)
    for x, title, letter in ((3, "1  ring QK: scores [L / N, L], step by step", "k"), (75, "3  ring AV: output, step by step", "v")):
        note(axes, x + 22, 36, title, bold=True, color=INK)
        for step in range(size):
            source, y = (rank - step) % size, 29 - 6 * step
            note(axes, x - 0.5, y + 2, str(step), ha="right")
            for column in range(size):
                there = (rank - column) % size <= step
                if letter == "v" and column != source:
                    continue
                seen = order.seen(rank, column) > 0
                text = (f"q{rank} k{column}" if seen else "masked") if letter == "k" else f"p{column} v{column}" if seen else "0"
                cell(axes, x + 11 * column, y, text if there else "", fill=(EXPERTS[column] if seen else GREY) if there else WHITE, w=10.4)
    box(axes, 53, 11, 16, 22, "2  softmax\nof whole rows,\nall at home", fill="#f5f7fa", size=11)
    arrow(axes, (47.5, 22), (52.5, 22))
    arrow(axes, (69.5, 22), (72.5, 22))
    note(axes, 62, 5, f"Rank {rank} of {size}; p1: its queries' probabilities of the keys of rank 1.", color=INK)
    note(axes, 62, 2, "Probabilities of all keys are kept for the backward pass: L² / N a head.", color=INK)
    return axes


def sequence_ulysses() -> Axes:
    """Heads down, places across: who holds what before, within and after attention; and both exchanges with a ring between nodes."""
    axes, heads, length = canvas(124, 58), 4, 16
    size, pairs = 4, "Ulysses in pairs of neighbors, a ring over the pairs (heads: 2)"
    for y, inner, title in ((31, 4, "Ulysses on 4 ranks"), (4, 2, pairs)):
        note(axes, 2, y + 24.5, title, bold=True, color=INK, ha="left")
        kind = "contiguous" if inner == size else "zigzag"
        order = Order(kind, size // inner, length, inner=inner)
        owner = {place: rank for rank in range(size) for place in order.positions(rank)}
        group = {place: rank // inner for place, rank in owner.items()}
        within = {(h, p): group[p] * inner + h * inner // heads for h in range(heads) for p in range(length)}
        for x, words, holder in (
            (4, "before and after attention: all heads of some places", {(h, p): owner[p] for h in range(heads) for p in range(length)}),
            (68, "in attention: some heads of " + ("all places" if inner == size else "a pair's places"), within),
        ):
            note(axes, x + 25, y + 20.5, words, color=INK)
            for (h, p), rank in holder.items():
                cell(axes, x + 3.15 * p, y + 14.4 - 4.2 * h, str(rank), fill=EXPERTS[rank], w=3)
        arrow(axes, (56.5, y + 8), (66, y + 8))
        arrow(axes, (66, y + 8), (56.5, y + 8))
        note(axes, 61.2, y + 11, "all-to-all", size=9)
    note(axes, 62, 1.2, "Heads down, 16 places across; the number is the rank.", size=10)
    return axes


TENSOR: tuple[Callable[[], Axes], ...] = (tensor_1d, tensor_slices, tensor_2d, tensor_2p5d, tensor_3d, tensor_dtensor, tensor_costs)
SEQUENCE: tuple[Callable[[], Axes], ...] = (sequence_ring, sequence_lightseq, sequence_colossal_ring, sequence_ulysses)
