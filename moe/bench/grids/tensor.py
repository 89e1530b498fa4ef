"""Measures 1D tensor parallelism, forward and backward through Transformer blocks, and compares it with torch's tensor parallelism.

    1d        compared with the same blocks with tensor.kind dtensor, and with torch's parallelize_module on the same blocks, in which every
              matrix product is an nn.Linear
    sliced    the same comparisons with Megatron's sequence parallelism between layers (tensor.sequence_parallel; torch: SequenceParallel)

All use the same weights, so their outputs and input gradients must be equal up to rounding; the largest difference is printed. With the
smaller of the two widths, a larger part of the time is the overhead of launching operations. Each implementation runs once in every round.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moe.bench.timing import Race, conclude, in_turn, race_row, slowest
from moe.launch import exit_codes
from moe.model.transformer import Block
from moe.nn.context import Context
from moe.parallelize.plan import lay_out, plan_of
from moe.recipe import sections
from parallel.mesh.mesh import Degrees, Mesh
from parallel.process import process
from parallel.process.fork import run_on_ranks
from parallel.tensor.style import apply

BATCH, LENGTH, LAYERS = 2, 256, 2
WIDTHS = {128: 4, 512: 8}  # width of the model -> number of heads; there are half as many key-value heads
WITHIN = 1e-4  # relative tolerance of outputs and gradients: implementations sum in different orders in fp32

RACES = (  # Race(name, implementation, the one that it is compared with, largest allowed ratio of seconds; None: no limit)
    Race("1d over dtensor", "1d", "dtensor", 1.0),
    Race("1d over torch's styles", "1d", "torch", 1.0),
    Race("dtensor over torch's styles", "dtensor", "torch", None),
    Race("1d sliced over dtensor sliced", "1d sliced", "dtensor sliced", 1.0),
    Race("1d sliced over torch's styles", "1d sliced", "torch sliced", 1.0),
    Race("1d sliced over 1d", "1d sliced", "1d", None),
    Race("1d in 4 chunks over 1d", "1d in 4 chunks", "1d", None),
    Race("1d sliced in 4 chunks over 1d sliced", "1d sliced in 4 chunks", "1d sliced", None),
)


def main(*, nproc: int = 2, rounds: int = 15, json: str | None = None) -> int:
    """`moe bench tensor`. Returns 1 if results differ between implementations, or if a timing ratio exceeds its limit (`race_row`)."""
    torch.set_num_threads(1)
    rows = []
    for width in WIDTHS:
        found = run_on_ranks(_measured, nproc, nproc, width, rounds, timeout_s=600)
        times, apart = slowest([seconds for seconds, _ in found]), max(apart for _, apart in found)
        print(f"width {width}, {LAYERS} layers of {BATCH} x {LENGTH} tokens; results differ by at most {apart:.0e}", flush=True)
        rows += [{"width": width, "apart": apart} | race_row(race, times, ranks=nproc) for race in RACES]
    same = all(row.get("apart", 0.0) <= WITHIN for row in rows)
    return max(conclude(json, "tensor", rows, shape=[BATCH, LENGTH, LAYERS], rounds=rounds), exit_codes.of(same))


def _measured(rank: int, ranks: int, width: int, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Return (name of an implementation -> seconds of each round on this rank, largest relative difference between results)."""
    mesh = process.connect(Degrees(tp=ranks), process.World(rank, ranks))
    heads = {"num_heads": WIDTHS[width], "num_kv_heads": WIDTHS[width] // 2}
    model = sections.Model(d_model=width, d_ff=4 * width, ffn="swiglu", moe_every=0, num_layers=LAYERS, **heads)
    passes: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {}
    for sliced, suffix in ((False, ""), (True, " sliced")):
        blocks = {kind + suffix: _ours(model, mesh, kind + suffix) for kind in ("1d", "dtensor")}
        blocks["torch" + suffix] = _theirs(model, mesh, sliced=sliced)
        blocks[f"1d{suffix} in 4 chunks"] = _ours(model, mesh, "1d" + suffix, chunks=4)
        passes |= {name: partial(_forward_backward, stack, mesh, width, sliced) for name, stack in blocks.items()}
    results = {name: run() for name, run in passes.items()}
    apart = max(_apart(found, results["1d sliced" if " sliced" in name else "1d"]) for name, found in results.items())
    return in_turn(passes, rounds=rounds, warmups=1), apart


def _forward_backward(blocks: nn.ModuleList, mesh: Mesh, width: int, sliced: bool) -> tuple[Tensor, Tensor]:
    """Run forward and backward. Return (output, gradient of the input); if `sliced`, each is this rank's slice along the sequence."""
    dist.barrier()
    x = torch.randn(BATCH, LENGTH, width, generator=torch.Generator().manual_seed(1))
    x = (x.chunk(mesh.axis("tp").size, 1)[mesh.axis("tp").index] if sliced else x).clone().requires_grad_()
    y: Tensor = x
    context = Context.of(torch.zeros(BATCH, LENGTH, dtype=torch.long))
    for block in blocks:
        y, _ = block(y, context)
    y.square().sum().backward()
    for parameter in blocks.parameters():
        parameter.grad = None
    assert x.grad is not None
    return y.detach(), x.grad


def _apart(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> float:
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(a, b, strict=True))


def _blocks(model: sections.Model) -> nn.Module:
    with torch.device("meta"):
        made = [Block(model, sections.Experts(), sections.Router(), layer) for layer in range(model.num_layers)]
    return nn.ModuleDict({"layers": nn.ModuleList(made)})


def _values(name: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)))).div(shape[1] ** 0.5)


def _ours(model: sections.Model, mesh: Mesh, kind: str, *, chunks: int = 1) -> nn.ModuleList:
    """Return blocks sharded by this project. kind: a value of tensor.kind; the ending " sliced" also sets tensor.sequence_parallel. chunks:
    tensor.overlap_chunks, the number of pieces into which each collective is cut."""
    whole = _blocks(model)
    plan = plan_of(sections.Dispatch(), tensor=kind, chunks=chunks)
    layouts = lay_out(whole, plan)
    apply(whole, plan, layouts, mesh)
    for name, layout in layouts.items():
        path, _, last = name.rpartition(".")
        setattr(whole.get_submodule(path), last, nn.Parameter(_values(name, layout.shape)[layout.region(mesh)].clone()))
    return whole.get_submodule("layers")  # type: ignore[return-value]


def _theirs(model: sections.Model, mesh: Mesh, *, sliced: bool) -> nn.ModuleList:
    """Return the blocks of `_ours` with nn.Linear for every matrix product, sharded by torch's parallelize_module. sliced: with sequence
    parallelism between layers."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module

    whole = _blocks(model)
    for name, parameter in list(whole.named_parameters()):
        path, _, last = name.rpartition(".")
        values, (parent, _, own) = _values(name, tuple(parameter.shape)), path.rpartition(".")
        if values.ndim == 2:
            setattr(whole.get_submodule(parent), own, nn.Linear(values.shape[1], values.shape[0], bias=False))
        setattr(whole.get_submodule(path), last, nn.Parameter(values))
    between = Shard(1) if sliced else Replicate()
    plan: dict[str, Any] = {f"layers.*.attention.{name}": ColwiseParallel() for name in ("q", "k", "v")}
    plan |= {f"layers.*.ffn.{name}": ColwiseParallel() for name in ("w1", "w3")}
    plan |= {f"layers.*.{path}": RowwiseParallel(output_layouts=between) for path in ("attention.out", "ffn.w2")}
    plan["layers.*.attention"] = PrepareModuleInput(input_layouts=(between, None), desired_input_layouts=(Replicate(), None))
    plan["layers.*.ffn"] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    if sliced:
        plan |= {f"layers.*.{norm}": SequenceParallel(use_local_output=True) for norm in ("attention_norm", "ffn_norm")}
    cut = parallelize_module(whole, DeviceMesh.from_group(mesh.axis("tp").group, "cpu"), plan)
    return cut.get_submodule("layers")  # type: ignore[return-value]
