"""Measures the largest number of bytes of feed-forward weights that are gathered on a rank at once, without tiling and with q tiles.

    2 out in  ->  2 out in / q      bytes of each matrix in 16 bits: ZeRO-Infinity (arXiv 2104.07857), section 5.1.3

FSDP gathers all weights of a feed-forward layer together; DeepSpeed gathers each matrix separately, but all experts' matrices of a layer
together. Gathered weights are counted at every matrix product of the third step, without prefetching.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe.bench.training.sharded import ShardedKind, kinds_of, load_engines, start, tokens_of
from moe.calibrate.own_step import CPU
from moe.launch import exit_codes
from moe.records.results import write_json
from moe.train.loop.step import finish
from parallel.mesh.layout import Layout
from parallel.numerics.precision import LossScale
from parallel.process.fork import run_on_ranks
from tests.counted.comm import travels, without_look_ahead

TILES, LENGTH, TOLERANCE = (1, 2, 4, 8), 7, 0.05
_WIDE = re.compile(r"\.(ffn|experts)\.")


class Whole(TorchDispatchMode):
    """Mode that counts gathered weights. most: peak bytes of feed-forward parameters that were gathered during a matrix product."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.most = model, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.most = max(self.most, sum(map(whole_bytes, self._wide())))
        return func(*args, **(kwargs or {}))

    def _wide(self) -> list[Tensor]:
        return [parameter for name, parameter in self.model.named_parameters() if _WIDE.search(name)]


def whole_bytes(parameter: Tensor) -> int:
    """Return the bytes of a parameter if it is gathered now; 0 if the rank has only its shard."""
    if isinstance(parameter, DTensor):
        return 0
    return min(parameter.untyped_storage().nbytes(), parameter.numel() * parameter.element_size())


def recipe(kind: ShardedKind, ranks: int, tiles: int, *, sparse: bool, precision: str) -> dict[str, Any]:
    """Return the recipe of two wide layers: the first layer's weights must be freed before the second's are gathered."""
    values: dict[str, Any] = {
        "model": {"num_layers": 2, "d_model": 128, "num_heads": 4, "d_ff": 2048, "max_length": LENGTH, "moe_every": 1 if sparse else 0},
        "sharding": kind.sharding,
        "tiling": {"ffn": tiles},
        "degrees": {"dp": ranks, "ep": 1},
        "precision": {"compute": precision},
        "train": {"global_batch": ranks, "eval_sequences": ranks},
    }
    if sparse:
        values |= {"experts": {"num_experts": 4}, "router": {"preset": "switch", "capacity_factor": None}}
    return values


def measure(rank: int, ranks: int, kind: ShardedKind, sparse: bool, precision: str, folder: str) -> list[dict[str, Any]]:
    """Return this rank's rows: one for each number of tiles."""
    rows: list[dict[str, Any]] = []
    for tiles in TILES:
        values = recipe(kind.with_path(folder), ranks, tiles, sparse=sparse, precision=precision)
        with without_look_ahead() if kind.by_deepspeed else nullcontext():
            started = start(kind, values, rank, ranks)
        batch = tokens_of(rank, sequences=1, length=LENGTH)
        for step in range(3):
            with Whole(started.model) as seen:
                numbers = started.accumulate(batch, step=step)
            world, scale = started.mesh.axis("world"), LossScale.of("none")
            finish(started.engine, numbers, world=world, scale=scale, lr=1e-3, clip_norm=1.0, device=CPU)
        expected = together(started.layouts, apart=kind.by_deepspeed) * travels(kind, precision).parameters / tiles
        row: dict[str, Any] = {"kind": kind.name, "model": f"{'sparse' if sparse else 'dense'}, tiling", "ranks": ranks, "tiles": tiles}
        row |= {"precision": precision, "measured_bytes": seen.most, "expected_bytes": expected, "error": seen.most / expected - 1}
        rows.append(row | {"passed": abs(row["error"]) <= TOLERANCE})
    return rows


def together(layouts: dict[str, Layout], *, apart: bool) -> int:
    """Return the largest number of elements that are gathered together without tiling. apart: True: weights are gathered for
    each module; False: for a whole feed-forward layer."""
    sizes: Counter[str] = Counter()
    for name, layout in whole_layouts(layouts).items():
        if found := _WIDE.search(name):
            sizes[name.rpartition(".")[0] if apart else name[: found.end()]] += torch.Size(layout.shape).numel()
    return max(sizes.values())


def whole_layouts(layouts: dict[str, Layout]) -> dict[str, Layout]:
    """Return name of each untiled tensor -> layout of one of its tiles, which contains the untiled shape."""
    return {re.sub(r"\.tiles\.\d+", "", name): layout for name, layout in layouts.items()}


def main(*, kinds: str = "fsdp,zero3", json: str | None = None) -> int:
    """Print a row for each kind and number of tiles. Return 1 if the measured bytes differ from the formula."""
    torch.set_num_threads(1)
    chosen = kinds_of(kinds)
    load_engines(chosen)
    rows = [row for kind in chosen for row in cases(kind)]
    if json:
        write_json(json, verb="counted tiling", rows=rows, tolerance=TOLERANCE)
    return exit_codes.of(all(row["passed"] for row in rows))


def cases(kind: ShardedKind) -> list[dict[str, Any]]:
    """Measure one kind on two ranks; print and return its rows."""
    rows: list[dict[str, Any]] = []
    for sparse in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            rows += run_on_ranks(measure, 2, 2, kind, sparse, "bf16", folder, timeout_s=120)[0]
    for row in rows:
        print(
            f"{kind.name}, {row['model']}, {row['tiles']} tiles: {row['measured_bytes']:,} bytes of feed-forward weights whole at once,"
            f" formula {row['expected_bytes']:,.0f}{'' if row['passed'] else '  FAIL'}",
            flush=True,
        )
    return rows
