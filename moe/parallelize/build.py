"""Where the model meets the mesh: one line per step, in the order of application.

model on the meta device -> layers of this rank's stages -> experts of this rank -> how rows reach them -> weights born here
-> data-parallel engine
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moe.experts import dispatch
from moe.experts.copies import Copies
from moe.experts.experts import HIDDEN_DIM, Experts
from moe.experts.layer import MoELayer
from moe.model.initialise import FirstValues, initialise, tile_and_shape, zero_buffers
from moe.model.names import global_name
from moe.model.transformer import Block, Transformer, embedding_as_module, moe_layers
from moe.nn.attention import RelativeBias
from moe.nn.linear import Linear, Norm
from moe.nn.vocabulary import Rows
from moe.parallelize import stages
from moe.parallelize.curvature import watched
from moe.parallelize.replicas import gather, scatter
from moe.recipe import sections
from moe.recipe.sections import Run
from moe.router.router import Router
from parallel.data.ddp import DDP
from parallel.data.dp import Replicas
from parallel.data.engine import AdamW, Engine
from parallel.data.offload import Offload
from parallel.data.tiling import tiles_of
from parallel.errors import BadInput
from parallel.kfac.grafted import Curved, Grafted
from parallel.kfac.kfac import Settings
from parallel.layout import Layout, dense, stacked_over
from parallel.malloc import give_freed_memory_back
from parallel.mesh import Mesh
from parallel.precision import DTYPES

if TYPE_CHECKING:
    from parallel.data.fsdp import Unit

FAMILIES = ("dense", "router", "expert")


def build(run: Run, mesh: Mesh, *, device: torch.device) -> tuple[Transformer, dict[str, Layout]]:
    """The model as this rank holds it, and every parameter's layout by module name. Raises BadInput for a compute dtype left `auto`."""
    if run.precision.compute not in DTYPES:
        raise BadInput(
            "precision.compute", got=run.precision.compute, needed="a dtype here", fix="settle it first, as train() does, or set bf16"
        )
    with torch.device("meta"):
        compute = DTYPES[run.precision.compute]
        model = Transformer(
            run.model, run.experts, run.router, vocab_size=run.vocab_size, compute=compute, recompute=run.recompute, tiling=run.tiling
        )
        model.to(DTYPES[run.precision.master])
    if by_fsdp(run):
        embedding_as_module(model)
    layouts = lay_out(model)
    for axes in sorted({layout.summed_over() for layout in layouts.values()}):
        mesh.axis(*axes)  # of the whole model: every rank makes the same groups, whatever its stages hold
    if mesh.axis("pp").size > 1:
        layouts = stages.hold(run, model, layouts, mesh)
    spread_experts(model, mesh, settings=run.dispatch, kernels=run.experts.kernels)
    first = FirstValues(run.model, layouts, mesh, seed=run.train.seed)
    if by_fsdp(run):
        from parallel.data.fsdp import shard  # here, because it takes a second to import

        s = run.sharding
        reshard = s.reshard and run.degrees.pp == 1
        shard(model, units_of(model), layouts=layouts, mesh=mesh, device=device, reshard=reshard, prefetch=s.prefetch, fill=first.fill)
        zero_buffers(model, device=device)
    elif run.sharding.kind == "zero" and run.sharding.stage == 3:
        from parallel.data.zero3 import Birth  # here, because deepspeed takes seconds to import

        Birth(layouts, mesh, device=device, fill=first.fill, offload=offload_of(run.sharding.offload))(model)
        zero_buffers(model, device=device)
    else:
        initialise(model, first, device=device)
    return model, layouts


def prepare(run: Run, say: Callable[[str], None]) -> None:
    """Have compiled, once on a machine, what the kind needs; collective as `build` is, and before it. Raises BadInput."""
    if offload_of(run.sharding.offload).on_disk:
        from parallel.data.deepspeed import compile_async_io

        compile_async_io(say)
        give_freed_memory_back()  # memory is what is scarce then, and speed is the disk's


def offload_of(settings: sections.Offload) -> Offload:
    return Offload(settings.optimizer, settings.parameters, settings.path)


def by_fsdp(run: Run) -> bool:
    """Whether torch's fully_shard carries out the kind that the recipe names."""
    s = run.sharding
    slow = run.degrees.pp > 1 and s.allow_slow and s.stage >= 2  # with stages nobody else can
    return s.kind == "fsdp" or (s.kind == "zero" and (s.engine == "fsdp" or slow))


def units_of(model: Transformer) -> list[Unit]:
    """What FSDP gathers together, in the order in which it runs: embedding, blocks, in a block its experts and what stands beside
    them, head; each tile alone. In the compute dtype, but for the embedding, whose gradient sums over tokens in fp32. What a model
    reads in fp32 besides, all of it small, is in no unit.
    """
    from parallel.data.fsdp import Unit

    tiles = {id(tile) for tile in tiles_of(model)}
    alone = (Block, MoELayer, Rows)
    paths = [
        path
        for path, module in model.named_modules()
        if isinstance(module, alone) or id(module) in tiles or path.endswith((".moe.shared", ".moe.residual"))
    ]
    owned: dict[str, list[str]] = {path: [] for path in sorted(paths, key=lambda path: not path.startswith("embedding"))}
    small = _read_in_fp32(model)
    for name, _ in model.named_parameters():
        inside = [path for path in paths if name.startswith(f"{path}.")]
        if inside and name not in small:
            owned[max(inside, key=len)].append(name)
    narrow = model.compute.itemsize < next(model.parameters()).dtype.itemsize
    units = []
    for path, names in owned.items():
        table, tile = path.startswith("embedding"), id(model.get_submodule(path)) in tiles
        tied = table and model.config.tied_embeddings
        dtype = model.compute if narrow and not table else None
        units.append(Unit(path, tuple(names), dtype, backward=tied or not table, ahead=not (tile or tied)))
    return [unit for unit in units if unit.parameters]


def _read_in_fp32(model: Transformer) -> set[str]:
    """Parameters by module name that the model never casts to its compute dtype."""
    found: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, (Norm, RelativeBias, Router)) or path.endswith((".moe.shared_gate", ".moe.coefficient")):
            found |= {f"{path}.{name}" for name, _ in module.named_parameters()}
    return found


def lay_out(model: Transformer) -> dict[str, Layout]:
    """Layouts of the whole model, before anything is split: experts by ep, their hidden units by etp, the rest copied.

    In a MoE layer every token is on one rank alone (moe/experts/copies.py), so what it holds in copies has seen other tokens on each.
    """
    sparse = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, MoELayer))
    layouts: dict[str, Layout] = {}
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            tile, shape = tile_and_shape(model, full)
            if isinstance(module, Experts):
                stem, matrix = global_name(full).rsplit(".", 1)
                layout = stacked_over("ep", shape, unstack=f"{stem}.{{}}.{matrix}", also={HIDDEN_DIM[matrix]: "etp"})
            else:
                alike = () if full.startswith(sparse) else ("tp",)
                layout = dense(shape, "router" if isinstance(module, Router) else "dense", alike=alike)
            layouts[full] = replace(layout, tile=tile)
    return layouts


def spread_experts(model: nn.Module, mesh: Mesh, *, settings: sections.Dispatch, kernels: str) -> None:
    """Each rank of the ep axis holds an equal run of every layer's experts, and each rank of etp a run of their hidden units.

    What tp holds in copies, tokens, is cut over tp first.
    """
    ep, etp, tp = mesh.axis("ep"), mesh.axis("etp"), mesh.axis("tp")
    for layer in moe_layers(model):
        each, units = layer.experts.num_experts // ep.size, layer.experts.d_ff // etp.size
        held = range(ep.index * each, (ep.index + 1) * each)
        layer.experts.hold(held, hidden=slice(etp.index * units, (etp.index + 1) * units))
        layer.copies = Copies(replace(tp, label=f"layers.{layer.layer}")) if tp.size > 1 else None
        layer.dispatcher = dispatch.dispatcher_of(settings, mesh, kernels=kernels, label=f"layers.{layer.layer}")


def whole_layouts(run: Run) -> dict[str, Layout]:
    """Every parameter of the recipe's model, whoever holds it."""
    with torch.device("meta"):
        model = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size, tiling=run.tiling)
    return lay_out(model)


def start_engine(run: Run, model: nn.Module, layouts: dict[str, Layout], mesh: Mesh) -> Engine:
    """The data-parallel kind that the recipe names, around the model. What carries out its passes is moe/train/executor.py. Collective."""
    optimizer = optimizer_of(run.optimizer)
    if run.sharding.kind == "dp":
        first = next(model.parameters()).device
        apart = first.type == "cuda" and torch.cuda.device_count() >= run.sharding.replicas
        devices = [torch.device("cuda", i) if apart else first for i in range(run.sharding.replicas)]
        replicas = Replicas(model, devices=devices, scatter=scatter, gather=gather)
        return DDP(model, layouts=layouts, mesh=mesh, optimizer=optimizer, forward=replicas)
    if run.sharding.kind == "ddp":
        return _start_ddp(run, model, layouts, mesh)
    if by_fsdp(run):
        from parallel.data.fsdp import FSDP

        return FSDP(model, layouts=layouts, mesh=mesh, optimizer=optimizer)
    return _start_zero(run, model, layouts, mesh)


def _start_ddp(run: Run, model: nn.Module, layouts: dict[str, Layout], mesh: Mesh) -> Engine:
    optimizer, k = optimizer_of(run.optimizer), run.optimizer.kfac
    if run.optimizer.kind == "adamw":
        return DDP(model, layouts=layouts, mesh=mesh, optimizer=optimizer)
    settings = Settings(k.damping, k.ema, k.refresh_every, k.delay)
    kfac = watched(model, layouts, mesh, settings=settings, experts=k.experts)
    optimizer = replace(optimizer, make=partial(Grafted, kfac=kfac))
    return Curved(DDP(model, layouts=layouts, mesh=mesh, optimizer=optimizer), kfac)


def _start_zero(run: Run, model: nn.Module, layouts: dict[str, Layout], mesh: Mesh) -> Engine:
    """ZeRO by DeepSpeed's engine; stage 0 shards nothing and is DDP, and so are stages of a pipeline without replicas."""
    assert isinstance(model, Transformer)
    wide, optimizer, offload = DTYPES[run.precision.master], optimizer_of(run.optimizer), offload_of(run.sharding.offload)
    if run.sharding.stage == 0 or (mesh.axis("pp").size > 1 and mesh.axis("dp", "sp").size == 1):
        return _start_ddp(run, model, layouts, mesh)
    kept = _read_in_fp32(model)
    working = None if model.compute == wide else lambda name: wide if name in kept else model.compute

    if run.sharding.stage == 3:
        from parallel.data.zero3 import Zero3

        for module in model.modules():
            if isinstance(module, Linear):
                module.recast = True  # a plain product would keep its weight until the backward pass
        return Zero3(model, layouts=layouts, mesh=mesh, optimizer=optimizer, offload=offload, working=working)
    from parallel.data.zero import Zero  # here, because deepspeed takes seconds to import

    stage = run.sharding.stage
    return Zero(model, layouts=layouts, mesh=mesh, optimizer=optimizer, stage=stage, offload=offload, working=working)


def optimizer_of(settings: sections.Optimizer) -> AdamW:
    return AdamW((settings.beta1, settings.beta2), settings.eps, settings.weight_decay, decays)


def decays(name: str, parameter: Tensor) -> bool:
    """Weight decay on matrices only: not on norms, biases, or the router."""
    return parameter.ndim > 1 and ".router." not in name and ".bias." not in name
