"""Draws the pictures of the docs: python docs/pictures/draw.py [name ...], from the repository's root.

What a picture shows is computed by the project's own code where there is any to compute it (who is dropped, where rows go,
which rank stands where, the learning rate), so that a picture cannot say something else than the code does.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.patches import Patch, Rectangle  # noqa: E402

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from over_ranks import SEQUENCE, TENSOR  # noqa: E402
from shapes import EXPERTS, GREY, INK, LINE, SOFT, WHITE, arrow, box, canvas, cell, note  # noqa: E402

from moe.cli.simulate import simulated, summary_line  # noqa: E402
from moe.kernels import reference  # noqa: E402
from moe.recipe.router_spec import RouterSpec  # noqa: E402
from moe.recipe.sections import Optimizer  # noqa: E402
from moe.router.capacity import kept_choices, slots_of  # noqa: E402
from moe.train.parts.learning_rate import learning_rate  # noqa: E402
from parallel.mesh.mesh import Degrees  # noqa: E402
from parallel.pipeline.schedule import Span  # noqa: E402
from parallel.pipeline.schedules import make_schedule  # noqa: E402
from parallel.pipeline.simulator.draw import add_legend, draw_on  # noqa: E402
from parallel.pipeline.simulator.simulate import costs, simulate  # noqa: E402
from tests.support.kfac_work import Packing, packing_of, works  # noqa: E402

# --- the pictures -----------------------------------------------------------------------------------------------------


def layer() -> Axes:
    """One MoE layer from tokens to tokens."""
    chosen = [1, 0, 1, 3, 1, 2]
    kept = _kept(chosen, groups=1, factor=4 / 3)
    axes = canvas(128, 56)
    tops = [42 - 6.4 * t for t in range(6)]
    note(axes, 8.5, 50, "tokens x", bold=True, color=INK)
    for t, y in enumerate(tops):
        cell(axes, 6, y, f"t{t}", fill=GREY)
        arrow(axes, (11, y + 2), (15, y + 2), color=LINE)
    box(axes, 15, 10, 18, 36, "router, fp32\n\np = softmax(W x)\n\nexpert: argmax p\ngate: its p", fill="#f5f7fa")
    note(axes, 46, 50, "send: rows by expert", bold=True, color=INK)
    note(axes, 72, 50, "experts", bold=True, color=INK)
    note(axes, 96, 50, "bring back: gate · row", bold=True, color=INK)
    place = {}
    row = 0
    for e in range(4):
        mine = [t for t in range(6) if chosen[t] == e and kept[t]]
        for t in mine:
            place[t] = 40 - 5 * row - 3 * e
            cell(axes, 46, place[t], f"t{t}", fill=EXPERTS[e])
            row += 1
        middle = sum(place[t] + 2 for t in mine) / len(mine)
        height = 5 * len(mine) - 1
        box(axes, 62, middle - height / 2, 20, height, f"expert {e}", fill=EXPERTS[e])
        for t in mine:
            arrow(axes, (51, place[t] + 2), (62, place[t] + 2), color=LINE)
            arrow(axes, (82, place[t] + 2), (98, tops[t] + 2), color=LINE)
    for t, y in enumerate(tops):
        if kept[t]:
            arrow(axes, (33, y + 2), (46, place[t] + 2), color=EXPERTS[chosen[t]])
        cell(axes, 98, y, f"y{t}" if kept[t] else "", fill=EXPERTS[chosen[t]], dropped=not kept[t])
        arrow(axes, (103, y + 2), (112, y + 2), color=LINE)
        cell(axes, 112, y, f"x{t}+y{t}" if kept[t] else f"x{t}", fill=GREY, w=10)
    note(axes, 117, 50, "residual", bold=True, color=INK)
    slots = _slots(6, 4 / 3)
    note(
        axes,
        64,
        5.5,
        f"Expert 1 has {slots} slots and three tokens: the last, t4, is dropped. It gets zero here and lives on in the residual.",
    )
    note(axes, 64, 2.2, "Balance and z loss are made from the router's numbers and join the backward pass here.")
    return axes


def _slots(tokens: int, factor: float) -> int | None:
    return slots_of(RouterSpec(capacity_factor=factor, min_capacity=1), tokens, num_experts=4, training=True)


def _kept(chosen: Sequence[int], *, groups: int, factor: float) -> list[bool]:
    expert_TK = torch.tensor(chosen).unsqueeze(1)
    slots = _slots(len(chosen) // groups, factor)
    active = torch.ones_like(expert_TK, dtype=torch.bool)
    kept = kept_choices(expert_TK, active, num_groups=groups, num_experts=4, slots_each=slots, kernels=reference)
    return [bool(k) for k in kept[:, 0]]


def groups() -> Axes:
    """Who is dropped: capacity per sequence on one rank and on two; capacity per rank on one and on two."""
    sequences = ([0, 1, 0, 0, 2, 0, 3, 1], [1, 2, 3, 2, 1, 3, 0, 2])
    both = [*sequences[0], *sequences[1]]
    axes = canvas(120, 58)
    note(axes, 38, 55, "capacity per sequence (group: sequence)", bold=True, color=INK)
    note(axes, 93, 55, "capacity per rank (group: rank)", bold=True, color=INK)
    for x, per_rank in ((15, False), (70, True)):
        for y, ranks in ((35, 1), (11.5, 2)):
            num_groups = ranks if per_rank else 2
            kept = _kept(both, groups=num_groups, factor=1.0)
            slots = _slots(16 // num_groups, 1.0)
            for s in range(2):
                top = y + 9 - 8 * s
                if ranks == 2 or s == 0:
                    axes.add_patch(
                        Rectangle(
                            (x - 1.2, top - (1.2 if ranks == 2 else 9.2)),
                            48,
                            6.6 if ranks == 2 else 14.6,
                            fill=False,
                            edgecolor=LINE,
                            linestyle="--",
                        )
                    )
                for t in range(8):
                    n = 8 * s + t
                    cell(axes, x + 5.8 * t, top, "AB"[s] + str(t), fill=EXPERTS[both[n]], dropped=not kept[n])
            dropped = ", ".join("AB"[n // 8] + str(n % 8) for n in range(16) if not kept[n])
            note(axes, x + 23, y - 3.6, f"{slots} slots an expert in each group; dropped: {dropped or 'none'}", color=INK)
    for y, text in ((43, "one\nrank"), (19.5, "two\nranks")):
        note(axes, 6, y, text, bold=True, color=INK)
    for e in range(4):
        cell(axes, 20 + 22 * e, 1.2, "", fill=EXPERTS[e], w=3, h=2.4)
        note(axes, 24 + 22 * e, 2.4, f"goes to expert {e}", ha="left")
    return axes


def mesh() -> Axes:
    """Four ranks, dp 4, ep 2: the dense and the expert view."""
    degrees = Degrees(dp=4, ep=2)
    axes = canvas(120, 50)
    note(axes, 30, 47, "dense view: dp", bold=True, color=INK, size=13)
    note(axes, 90, 47, "expert view: edp x ep", bold=True, color=INK, size=13)
    for rank in range(4):
        x = 3.0 + 14 * rank
        box(axes, x, 23, 12, 16, f"rank {rank}\n\ndp {degrees.coordinates(rank)['dp']}\nwhole dense\nmodel", fill=GREY, size=11)
    box(axes, 3, 16, 54, 4, "sum of dense gradients over dp: one group of 4", fill=WHITE, size=11)
    note(
        axes,
        30,
        11,
        "Every rank reads its own sequences.\nAttention, norms, router, dense feed-forward\nand embeddings are copied on all ranks.",
    )
    for rank in range(4):
        place = degrees.coordinates(rank)
        x, y = 72.0 + 22 * place["ep"], 32.0 - 16 * place["edp"]
        first = 2 * place["ep"]
        box(axes, x, y, 17, 9)
        note(axes, x + 8.5, y + 6.3, f"rank {rank}", color=INK)
        cell(axes, x + 1.2, y + 0.8, f"E{first}", fill=EXPERTS[first], w=6.9, h=2.6)
        cell(axes, x + 8.9, y + 0.8, f"E{first + 1}", fill=EXPERTS[first + 1], w=6.9, h=2.6)
        note(axes, 66, y + 4.5, f"edp {place['edp']}", color=INK)
    for ranks in degrees.groups("ep"):
        y = 36.5 - 16 * degrees.coordinates(ranks[0])["edp"]
        arrow(axes, (89, y), (94, y), color=INK)
        arrow(axes, (94, y), (89, y), color=INK)
    for ranks in degrees.groups("edp"):
        x = 80.5 + 22 * degrees.coordinates(ranks[0])["ep"]
        arrow(axes, (x, 25), (x, 32), color=EXPERTS[2])
        arrow(axes, (x, 32), (x, 25), color=EXPERTS[2])
        note(axes, x, 43, f"ep {degrees.coordinates(ranks[0])['ep']}", color=INK)
    said = {name: " and ".join("{" + ", ".join(map(str, g)) + "}" for g in degrees.groups(name)) for name in ("ep", "edp")}
    note(axes, 92, 10, f"black: rows travel over ep, groups {said['ep']}\nblue: expert gradients are summed over edp, groups {said['edp']}")
    note(axes, 60, 2.5, "Degrees(dp=4, ep=2), four experts: each expert has edp = dp / ep = 2 copies.", color=INK)
    return axes


def exchange() -> Axes:
    """Rows of two ranks on their way to four experts."""
    chosen = ([2, 0, 3, 0, 1], [1, 2, 0, 2, 3])
    plans = [reference.plan(torch.tensor(c).unsqueeze(1), torch.ones(5, 1, dtype=torch.bool), num_experts=4) for c in chosen]
    names = [[f"{'ab'[r]}{t}" for t in range(5)] for r in range(2)]
    by_expert = [[(names[r][t], chosen[r][t]) for t in plans[r].token_R.tolist()] for r in range(2)]
    counts = [plans[r].counts_E.view(2, 2) for r in range(2)]  # [to rank, its expert]
    axes = canvas(128, 74)
    titles = (
        "1 tokens",
        "2 permute:\nby expert",
        "3 counts\ncross first",
        "4 rows cross: by\n(source, expert)",
        "5 reorder:\nby expert",
        "6 experts",
    )
    xs = (6, 22, 36, 71, 91, 108)
    for x, title in zip((8.5, 24.5, 46, 73.5, 93.5, 116.5), titles, strict=True):
        note(axes, x, 70, title, bold=True, color=INK)
    for r in range(2):
        top = 60 - 33 * r
        note(axes, 1.5, top - 9, f"rank {r}", bold=True, color=INK)
        axes.texts[-1].set_rotation(90)
        for t in range(5):
            cell(axes, xs[0], top - 5 * t, names[r][t], fill=EXPERTS[chosen[r][t]])
            cell(axes, xs[1], top - 5 * t, by_expert[r][t][0], fill=EXPERTS[by_expert[r][t][1]])
        arrow(axes, (12, top - 7), (21.5, top - 7), color=LINE)
        text = "\n".join(f"to rank {p}:  {' + '.join(str(n) for n in counts[r][p].tolist())} rows" for p in range(2))
        box(axes, xs[2] - 0.5, top - 11, 21, 8, text, fill="#f5f7fa", size=11)
        arrow(axes, (28, top - 7), (35, top - 7), color=LINE)
        theirs = torch.stack([counts[s][r] for s in range(2)])
        arrived = [row for s in range(2) for row in by_expert[s] if row[1] // 2 == r]
        order = torch.argsort(torch.tensor([e for _, e in arrived]), stable=True).tolist()  # by expert, then by source
        for i, (name, e) in enumerate(arrived):
            cell(axes, xs[3], top - 5 * i, name, fill=EXPERTS[e])
        for i, n in enumerate(order):
            cell(axes, xs[4], top - 5 * i, arrived[n][0], fill=EXPERTS[arrived[n][1]])
        arrow(axes, (77, top - 8), (90, top - 8), color=LINE)
        at = 0
        for e, n in enumerate(theirs.sum(0).tolist()):
            box(axes, xs[5], top + 4 - 5 * (at + n) + 0.5, 16, 5 * n - 1, f"expert {2 * r + e}", fill=EXPERTS[2 * r + e])
            at += n
        arrow(axes, (97, top - 8), (107, top - 8), color=LINE)
    for r in range(2):  # the receiver
        first = 0
        for s in range(2):
            n = int(counts[s][r].sum())
            high, low = 64 - 33 * r - 5 * first, 64 - 33 * r - 5 * (first + n) + 1
            axes.plot([69.8, 69, 69, 69.8], [high, high, low, low], color=INK, linewidth=1.4)
            arrow(axes, (56.8, 53 - 33 * s), (68.6, (high + low) / 2), color=INK if r != s else LINE)
            first += n
    note(
        axes, 62, 2.5, "Back: the experts' results take the same way in reverse, and each token sums its rows times their gates.", color=INK
    )
    return axes


def memory() -> Axes:
    """Bytes a parameter of one rank, as `moe bench memory` measured them; the line across a bar is the formula."""
    figure, axes = plt.subplots(figsize=(11, 4.8))
    found = json.loads((HERE.parent / "benchmarks" / "memory.json").read_text())
    rows = {(row["kind"], row["ranks"]): row for row in found["rows"] if row["model"] == "dense"}
    kinds = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp": "FSDP"}
    parts = {"parameters": EXPERTS[2], "gradients": EXPERTS[0], "optimizer": EXPERTS[1]}
    numbers = (1, 2, 4)
    for i, ranks in enumerate(numbers):
        for j, (kind, label) in enumerate(kinds.items()):
            row, x, bottom = rows[kind, ranks], 6.4 * i + 1.08 * j, 0.0
            for part, color in parts.items():
                size = row[f"measured_{part}"] / row["num_parameters"]
                axes.bar(x, size, 0.98, bottom=bottom, color=color, edgecolor=INK, linewidth=0.8)
                bottom += size
            formula = row["expected_bytes"] / row["num_parameters"]
            axes.plot([x - 0.54, x + 0.54], [formula] * 2, color=INK, linewidth=2.4)
            axes.text(x, bottom + 0.3, f"{bottom:.3g}", ha="center", fontsize=11)
            axes.text(x, -0.35, label, ha="center", va="top", fontsize=8.5, color=SOFT)
    axes.set_xticks([6.4 * i + 2.16 for i in range(len(numbers))], [f"{n} rank{'s' if n > 1 else ''}" for n in numbers], fontsize=12)
    axes.tick_params(axis="x", length=0, pad=20)
    axes.set_ylabel("bytes a parameter")
    axes.set_ylim(0, 23.5)
    millions = rows["ddp", 1]["num_parameters"] / 1e6
    axes.set_title(f"Model states on one rank, measured: {millions:.0f}M parameters, AdamW, compute in bf16", fontsize=13, loc="left")
    handles = [*(Rectangle((0, 0), 1, 1, facecolor=c, edgecolor=INK) for c in parts.values()), Line2D([], [], color=INK, linewidth=2.4)]
    axes.legend(handles, ["weights", "gradients", "optimizer state", "formula"], loc="upper right", frameon=False, ncols=4)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return axes


def schedules() -> Axes:
    """The three schedules, by the code that trains."""
    figure, axes = plt.subplots(figsize=(9, 4))
    total = 600
    for kind, color in (("cosine", "#1d6fa5"), ("wsd", "#c2571a"), ("constant", "#3f7d4e")):
        settings = Optimizer(lr=1.0, warmup_steps=50, schedule=kind)
        rates = [learning_rate(u, settings, total=total) for u in range(total)]
        axes.plot(rates, color=color, linewidth=2.2)
        at = {"cosine": 330, "wsd": 555, "constant": 560}[kind]
        shift = {"cosine": (-14, -0.1), "wsd": (-75, -0.12), "constant": (-20, 0.035)}[kind]
        axes.text(at + shift[0], rates[at] + shift[1], kind, color=color, fontsize=12, ha="center")
    axes.set_xlabel("update")
    axes.set_ylabel("share of optimizer.lr")
    axes.set_ylim(0, 1.12)
    axes.set_xlim(0, total)
    axes.set_title("warmup_steps 50, decay_share 0.2, min_lr_share 0.1, 600 steps", fontsize=12, loc="left")
    axes.grid(color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return axes


def pipelines() -> Axes:
    """Six schedules of the same work on one time axis: four ranks, eight micro-batches, backward twice as long as forward. Times and
    bubbles are those that `moe simulate` prints."""
    names = ("gpipe", "1f1b", "interleaved", "chimera", "zb_h1", "zb_v")
    drawn = [simulated(name, stages=4, microbatches=8) for name in names]
    figure, rows = plt.subplots(len(names), 1, figsize=(16, 1.62 * len(names)), layout="constrained", sharex=True)
    until = max(timeline.makespan for _, timeline in drawn)
    for axes, (row, timeline) in zip(rows, drawn, strict=True):
        draw_on(axes, timeline, title=summary_line(row), until=until)
    rows[-1].set_xlabel("time (1: a forward pass of one micro-batch through a rank's layers)", fontsize=9)
    add_legend(figure, [timeline for _, timeline in drawn])
    return rows[0]


WORK = {"curvature": "#d9b8e8", "sum": "#e0457b", "inversion": "#f2c230"}  # of K-FAC, beside the blues and greens of the actions


def kfac() -> Axes:
    """K-FAC's work in the waits of 1F1B and Chimera: two linears a stage, backward twice as long as forward."""
    factors = {stage: [(factor, f"{stage}.{linear}") for factor in "AG" for linear in ("up", "down")] for stage in range(4)}
    seconds = {"curvature": 0.25, "sum": 0.06, "inversion": 0.7}
    packings = []
    for name in ("1f1b", "chimera"):
        schedule = make_schedule(name, ranks=4, microbatches=4)
        timeline = simulate(schedule, costs(1, 2, summation=0.4))
        packings.append(packing_of(timeline, works(schedule, factors, seconds)))
    figure, rows = plt.subplots(4, 1, figsize=(14, 8.6), layout="constrained")
    for axes, (packing, filled) in zip(rows, [(packing, filled) for packing in packings for filled in (False, True)], strict=True):
        _packed(axes, packing, filled=filled)
    handles = [Patch(facecolor=color, edgecolor=INK, linewidth=0.5, label=kind) for kind, color in _LEGEND.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=10, frameon=False)
    return rows[0]


_LEGEND = {
    "forward (darker: the other direction)": "#bcd4ea",
    "backward": "#b9d8c8",
    "curvature of a micro-batch (its number)": WORK["curvature"],
    "sum over replicas": WORK["sum"],
    "inversion of a factor": WORK["inversion"],
}


def _packed(axes: Axes, packing: Packing, *, filled: bool) -> None:
    """The steps of a packing one after the other, with its work or without."""
    timeline, steps = packing.timeline, packing.steps
    shifts = [step * timeline.makespan for step in range(steps)]
    spans = tuple(tuple(Span(s.action, s.start + shift, s.end + shift) for shift in shifts for s in row) for row in timeline.spans)
    busy = packing.utilization if filled else packing.utilization_before
    how = f"{steps} steps, {'with' if filled else 'without'} K-FAC in the waits"
    said = f"{timeline.schedule.name}, {how}: ranks are at work {busy:.0%} of the time"
    draw_on(axes, replace(timeline, spans=spans), title=said)
    for shift in shifts[1:]:
        axes.axvline(shift, color=INK, linewidth=1.8, zorder=0)
    for placed in packing.placed if filled else ():
        kind, rank, length = placed.work.name.split()[0], placed.work.rank, placed.end - placed.start
        axes.barh(rank, length, left=placed.start, height=0.78, color=WORK[kind], edgecolor=INK, linewidth=0.5)
        found = re.search(r"^(?:curvature .* micro-batch (\d+)|inversion ([AG]))", placed.work.name)
        if found:
            axes.text(placed.start + length / 2, rank, found[1] or found[2], ha="center", va="center", fontsize=7, clip_on=True)


DRAWN = (layer, groups, mesh, *TENSOR, *SEQUENCE, exchange, memory, schedules, pipelines, kfac)
PICTURES: dict[str, Callable[[], Axes]] = {f.__name__: f for f in DRAWN}


def main(names: Sequence[str]) -> None:
    """Write each picture as PNG beside this file."""
    for name in names or PICTURES:
        PICTURES[name]()
        plt.savefig(HERE / f"{name}.png", dpi=110)
        plt.close()


if __name__ == "__main__":
    main(sys.argv[1:])
