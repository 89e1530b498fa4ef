"""Where the model meets the mesh: one line per step, in the order of application.

model on the meta device -> experts of this rank -> how rows reach them -> weights born here -> data-parallel engine
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from moe import config, dispatch
from moe.config import Run
from moe.experts import HIDDEN_DIM, Experts
from moe.model.transformer import Transformer, global_name, initialise, moe_layers, tile_and_shape
from moe.replicas import gather, scatter
from moe.router import Router
from parallel.data.dp import Replicas
from parallel.data.engine import AdamW, Engine
from parallel.data.replicate import DDP
from parallel.errors import BadInput
from parallel.layout import Layout, dense, stacked_over
from parallel.mesh import Mesh
from parallel.precision import DTYPES

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
    layouts = lay_out(model)
    spread_experts(model, mesh, settings=run.dispatch, kernels=run.experts.kernels)
    initialise(model, seed=run.train.seed, device=device)
    return model, layouts


def lay_out(model: Transformer) -> dict[str, Layout]:
    """Layouts of the whole model, before anything is split: experts by ep, their hidden units by etp, the rest copied."""
    layouts: dict[str, Layout] = {}
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            tile, shape = tile_and_shape(model, full)
            if isinstance(module, Experts):
                stem, matrix = global_name(full).rsplit(".", 1)
                layout = stacked_over("ep", shape, unstack=f"{stem}.{{}}.{matrix}", also={HIDDEN_DIM[matrix]: "etp"})
            else:
                layout = dense(shape, "router" if isinstance(module, Router) else "dense")
            layouts[full] = replace(layout, tile=tile)
    return layouts


def spread_experts(model: nn.Module, mesh: Mesh, *, settings: config.Dispatch, kernels: str) -> None:
    """Each rank of the ep axis holds an equal run of every layer's experts, and each rank of etp a run of their hidden units."""
    ep, etp = mesh.axis("ep"), mesh.axis("etp")
    for layer in moe_layers(model):
        each, units = layer.experts.num_experts // ep.size, layer.experts.d_ff // etp.size
        held = range(ep.index * each, (ep.index + 1) * each)
        layer.experts.hold(held, hidden=slice(etp.index * units, (etp.index + 1) * units))
        layer.dispatcher = dispatch.build(settings, mesh, kernels=kernels, label=f"layers.{layer.layer}")


def start_engine(run: Run, model: nn.Module, layouts: dict[str, Layout], mesh: Mesh) -> Engine:
    """The data-parallel kind the recipe names, around the model."""
    optimizer = optimizer_of(run.optimizer)
    if run.sharding.kind == "dp":
        first = next(model.parameters()).device
        apart = first.type == "cuda" and torch.cuda.device_count() >= run.sharding.replicas
        devices = [torch.device("cuda", i) if apart else first for i in range(run.sharding.replicas)]
        replicas = Replicas(model, devices=devices, scatter=scatter, gather=gather)
        return DDP(model, layouts=layouts, mesh=mesh, optimizer=optimizer, forward=replicas)
    if run.sharding.kind == "ddp":
        return DDP(model, layouts=layouts, mesh=mesh, optimizer=optimizer)
    from parallel.data.zero import Zero1  # here, because deepspeed takes seconds to import

    return Zero1(model, layouts=layouts, mesh=mesh, optimizer=optimizer)


def optimizer_of(settings: config.Optimizer) -> AdamW:
    return AdamW((settings.beta1, settings.beta2), settings.eps, settings.weight_decay, decays)


def decays(name: str, parameter: Tensor) -> bool:
    """Weight decay on matrices only: not on norms, biases, or the router."""
    return parameter.ndim > 1 and ".router." not in name and ".bias." not in name
