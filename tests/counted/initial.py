"""Measures that initializing one rank's shards takes time and memory in proportion to the shards, for any size of the whole model.

    one matrix         one matrix of glam_8b_64e; an eighth of its rows; an eighth of its columns
    glam_8b_64e        one rank of ep 64, pp 8 (512 processes), and of ep 8, pp 8, which holds eight times as many experts
    dense_8b, tp 8     every matrix sharded over 8 ranks along its outputs (q, k, v, w1, w3, embedding) or inputs (out, w2)

The whole model is only on the meta device. If a rank's shards exceed MOST_BYTES, only as many parameters as fit are drawn. A row passes if
the peak memory is about the size of the drawn values, and the time per element is at most MORE_TIME times that of the whole matrix.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe.model.initialize import FirstValues
from moe.model.transformer import Transformer
from moe.parallelize import stages
from moe.parallelize.plan import lay_out
from moe.recipe.load import load
from moe.recipe.sections import Model, Run
from moe.records.results import write_json
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Degrees, Mesh
from parallel.numerics.first_values import key_of_tensor
from parallel.process.fork import run_on_ranks
from parallel.process.libc import give_freed_memory_back

MOST_BYTES = 2**30
SLACK_BYTES, MORE_BYTES, MORE_TIME = 16 * 2**20, 1.05, 1.5
BY_INPUT = (".attention.out.weight", ".w2.weight")
MATRIX = Layout((4096, 16384))  # an expert's matrix [in, out]

Case = tuple[str, Model, dict[str, Layout], Degrees, int]  # (name of the case, model, parameter's name -> layout, mesh degrees, rank)


def main(*, json: str | None = None, only: str | None = None) -> int:
    """Print a row for each case. Return 1 if memory or time of a case is not in proportion to the rank's shards."""
    rows: list[dict[str, Any]] = []
    print(f"{'rank of':<34}{'elements':>16}{'held':>16}{'drawn':>8}{'seconds':>10}{'ns each':>9}{'torch':>7}{'peak/drawn':>12}")
    for case in cases():
        if only is None or only in case[0] or not rows:  # the first row is always measured, because the others are compared with it
            (found,) = run_on_ranks(measure, 1, case, MOST_BYTES // 4, timeout_s=1800)
            rows.append(judged(found, rows[0] if rows else found))
            r = rows[-1]
            print(
                f"{r['case']:<34}{r['elements']:>16,}{r['held']:>16,}{r['drawn_share']:>8.0%}{r['seconds']:>10.2f}{r['ns_each']:>9.1f}"
                f"{r['torch_ns_each']:>7.1f}{r['peak_bytes'] / r['drawn_bytes']:>12.3f}{'' if r['passed'] else '  FAIL'}"
            )
    if json:
        write_json(json, verb="bench initial", rows=rows, most_bytes=MOST_BYTES)
    return 0 if all(row["passed"] for row in rows) else 1


def judged(found: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Return the row `found` with the key `passed`. whole: the row of the whole matrix, with whose time per element it is compared."""
    light = found["peak_bytes"] <= MORE_BYTES * found["drawn_bytes"] + SLACK_BYTES
    return found | {"passed": light and found["ns_each"] <= MORE_TIME * whole["ns_each"]}


def cases() -> Iterator[Case]:
    """Yield the cases in the table at the top of this file."""
    one, tp = Degrees(), Degrees(tp=8)
    model = Model()
    for name, layout, degrees in (
        ("one matrix", MATRIX, one),
        ("one matrix, an eighth of rows", replace(MATRIX, split={0: "tp"}), tp),
        ("one matrix, an eighth of columns", replace(MATRIX, split={1: "tp"}), tp),
    ):
        yield name, model, {"layers.1.experts.0.w1": layout}, degrees, degrees.tp - 1
    for ep in (64, 8):
        run, _ = load("glam_8b_64e", {"degrees.dp": str(ep), "degrees.ep": str(ep), "degrees.pp": "8"})
        yield (f"glam_8b_64e, ep {ep}, pp 8", run.model, *of_rank(run, rank=0))
    run, _ = load("dense_8b", {})
    yield "dense_8b, tp 8", run.model, {name: cut_in(layout, name) for name, layout in whole_of(run)[1].items()}, tp, 5


def whole_of(run: Run) -> tuple[Transformer, dict[str, Layout]]:
    """Return (the model on the meta device, name of each parameter -> layout)."""
    with torch.device("meta"):
        model = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size)
    return model, lay_out(model)


def of_rank(run: Run, *, rank: int) -> tuple[dict[str, Layout], Degrees, int]:
    """Return (name -> layout of each tensor of which this rank has a shard, mesh degrees, rank)."""
    model, layouts = whole_of(run)
    degrees = run.mesh_degrees()
    return stages.hold(run, model, layouts, Mesh.of(degrees, rank)), degrees, rank


def cut_in(layout: Layout, name: str) -> Layout:
    """Return the layout of the tensor `name` for tp: a matrix is sharded along its outputs or inputs; other tensors stay whole."""
    if len(layout.shape) < 2 or name.endswith("attention.bias.weight"):
        return layout
    return replace(layout, split={1 if name.endswith(BY_INPUT) else 0: "tp"})


def _peak_resident_bytes(*, forget: bool = False) -> int:
    """Return the peak resident memory of this process, including mapped files. forget: reset the peak first, so that it is the current
    memory."""
    if forget:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(rank: int, case: Case, most: int) -> dict[str, Any]:
    """Return the row of one case. Must run in a new process, because the peak memory of a process is measured."""
    name, model, layouts, degrees, place = case
    torch.set_num_threads(1)
    give_freed_memory_back()
    mesh = Mesh.of(degrees, place)
    first = FirstValues(model, layouts, mesh, seed=0)
    shapes = {n: layout.local_shape(mesh) for n, layout in layouts.items()}
    held = sum(map(math.prod, shapes.values()))
    first.fill(*small(shapes))  # warm-up: one element, so that imports and caches are not measured
    before = _peak_resident_bytes(forget=True)
    drawn: dict[str, Tensor] = {}
    left, began = most, time.process_time()
    for n, shape in shapes.items():
        if math.prod(shape) <= left:
            left -= math.prod(shape)
            drawn[n] = torch.empty(shape)
            first.fill(n, drawn[n])
    seconds = time.process_time() - began
    count = most - left
    peak = _peak_resident_bytes() - before
    row = {"case": name, "rank": place, "world": degrees.world, "elements": sum(math.prod(x.shape) for x in layouts.values())}
    row |= {"held": held, "drawn_share": count / held, "drawn_bytes": 4 * count, "peak_bytes": peak}
    return row | {"seconds": seconds, "ns_each": seconds / count * 1e9, "torch_ns_each": by_torch(min(count, 2**24))}


def small(shapes: dict[str, tuple[int, ...]]) -> tuple[str, Tensor, tuple[slice, ...]]:
    """Return arguments of `FirstValues.fill` that draw one element: (name of the first tensor, tensor of one element, its slices)."""
    name, shape = next(iter(shapes.items()))
    return name, torch.empty([1] * len(shape)), (slice(0, 1),) * len(shape)


def by_torch(count: int) -> float:
    """Return the nanoseconds per element that torch's trunc_normal_ takes for `count` elements."""
    out, began = torch.empty(count), time.process_time()
    generator = torch.Generator().manual_seed(key_of_tensor(0, "x") >> 1)
    torch.nn.init.trunc_normal_(out, std=1.0, a=-2.0, b=2.0, generator=generator)
    return (time.process_time() - began) / count * 1e9
