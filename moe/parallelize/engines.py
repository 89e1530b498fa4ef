"""From a recipe's sharding and optimizer to the engine that carries them out, around a model that is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from moe.model.names import is_bias
from moe.model.transformer import Transformer
from moe.nn.linear import Linear
from moe.parallelize.curvature import watched
from moe.parallelize.replicas import gather, scatter
from moe.parallelize.units import read_in_fp32
from moe.recipe import sections
from moe.recipe.plugin import is_plugin, load_plugin
from moe.recipe.sections import Run
from parallel.data.ddp import DDP
from parallel.data.dp import Replicas
from parallel.data.engine import AdamW, Engine, Rule
from parallel.data.offload import Offload
from parallel.errors import BadInput
from parallel.kfac.grafted import Curved, Grafted
from parallel.kfac.kfac import Settings
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Mesh
from parallel.numerics.precision import DTYPES
from parallel.optim.adafactor import Adafactor
from parallel.optim.given import Factory, Given
from parallel.optim.muon import Muon, Orientation
from parallel.optim.sgd import Sgd
from parallel.process.malloc import give_freed_memory_back


def prepare(run: Run, say: Callable[[str], None]) -> None:
    """Compile DeepSpeed's async_io, if states are on a disk: once on a machine, before `build`. Collective. Raises BadInput."""
    if offload_of(run.sharding.offload).on_disk:
        from parallel.data.deepspeed import compile_async_io

        compile_async_io(say)
        give_freed_memory_back()  # memory is scarce then, and the disk limits the speed anyway


def offload_of(settings: sections.Offload) -> Offload:
    return Offload(settings.optimizer, settings.parameters, settings.path)


def by_fsdp(run: Run) -> bool:
    """Return whether torch's fully_shard carries out the recipe's sharding."""
    s = run.sharding
    slow = run.degrees.pp > 1 and s.allow_slow and s.stage >= 2  # with stages no other engine can
    return s.kind == "fsdp" or (s.kind == "zero" and (s.engine == "fsdp" or slow))


def start_engine(run: Run, model: nn.Module, layouts: dict[str, Layout], mesh: Mesh, *, rule: Rule | None = None) -> Engine:
    """Start the engine of the recipe's data parallelism around the model. Collective.

    `rule`: a user's own optimizer, instead of the recipe's. moe/train/parts/executor.py runs the engine's forward and backward passes.
    """
    optimizer = rule or optimizer_of(run.optimizer)
    if run.sharding.kind == "dp":
        first = next(model.parameters()).device
        apart = first.type == "cuda" and torch.cuda.device_count() >= run.sharding.replicas
        devices = [torch.device("cuda", i) if apart else first for i in range(run.sharding.replicas)]
        replicas = Replicas(model, devices=devices, scatter=scatter, gather=gather)
        return DDP(model, layouts=layouts, mesh=mesh, optimizer=optimizer, forward=replicas)
    if run.sharding.kind == "ddp":
        return _start_ddp(run, model, layouts, mesh, optimizer)
    if by_fsdp(run):
        from parallel.data.fsdp import FSDP

        return FSDP(model, layouts=layouts, mesh=mesh, optimizer=optimizer)
    return _start_zero(run, model, layouts, mesh, optimizer)


def _start_ddp(run: Run, model: nn.Module, layouts: dict[str, Layout], mesh: Mesh, optimizer: Rule) -> Engine:
    k = run.optimizer.kfac
    if run.optimizer.kind != "kfac":
        return DDP(model, layouts=layouts, mesh=mesh, optimizer=optimizer)
    settings = Settings(k.damping, k.ema, k.refresh_every, k.delay)
    kfac = watched(model, layouts, mesh, settings=settings, experts=k.experts)
    assert isinstance(optimizer, AdamW)
    optimizer = replace(optimizer, make=partial(Grafted, kfac=kfac))
    return Curved(DDP(model, layouts=layouts, mesh=mesh, optimizer=optimizer), kfac)


def _start_zero(run: Run, model: nn.Module, layouts: dict[str, Layout], mesh: Mesh, optimizer: Rule) -> Engine:
    """Start ZeRO by DeepSpeed's engine. Stage 0 shards nothing and is DDP, and so is a pipeline stage without replicas or offload."""
    assert isinstance(model, Transformer)
    wide, offload = DTYPES[run.precision.master], offload_of(run.sharding.offload)
    alone = mesh.axis("pp").size > 1 and mesh.axis("dp", "sp").size == 1
    if run.sharding.stage == 0 or (alone and offload.optimizer == "none"):
        return _start_ddp(run, model, layouts, mesh, optimizer)
    assert isinstance(optimizer, AdamW)
    kept = read_in_fp32(model)
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


def optimizer_of(settings: sections.Optimizer) -> Rule:
    """Return the optimizer that a recipe names, as data; for K-FAC its AdamW part."""
    s, betas = settings, (settings.beta1, settings.beta2)
    if is_plugin(s.kind):
        return given_of(s, load_plugin("optimizer.kind", s.kind, arguments=1))
    if s.kind == "muon":
        m = s.muon
        own = m.momentum, m.nesterov, m.iterations, m.scale, m.lr_factor
        return Muon(*own, betas, s.eps, s.weight_decay, decays, matrix)
    if s.kind == "adafactor":
        a = s.adafactor
        return Adafactor(a.decay_rate, a.clip, a.step, a.eps, a.floor, s.weight_decay, decays)
    if s.kind == "sgd":
        return Sgd(s.sgd.momentum, s.sgd.nesterov, s.weight_decay, decays)
    return AdamW(betas, s.eps, s.weight_decay, decays)


def given_of(settings: sections.Optimizer, factory: Factory) -> Given:
    """Return a user's own optimizer as a rule."""
    return Given(factory, "optimizer.kind" if is_plugin(settings.kind) else "optimizer", settings.lr, settings.weight_decay, decays)


def check_given(rule: Given, run: Run, layouts: dict[str, Layout], mesh: Mesh) -> None:
    """Refuse an optimizer that does not work on shards: no checkpoint can hold its state, or a step depends on the shard or on other
    parameters.

    `layouts`: layouts of the whole model, so that every rank finds the same mistake. Raises BadInput for the first parameter.
    """
    unlike = mesh.axis("pp").size > 1  # ranks hold different parameters, or different shards
    for name, layout in layouts.items():
        num_dims = len(layout.shape)
        rule.kept(name, num_dims)
        apart = {dim for dim in range(num_dims) if any(mesh.axis(axis).size > 1 for axis in layout.cut_by(dim))}
        stacked = {0} if num_dims > 2 else set()  # experts, each stepped by itself on any rank
        if by_fsdp(run) or layout.tile is not None:
            apart |= set(range(num_dims))
        unlike = unlike or bool(apart)
        if mixed := sorted((apart | stacked) - rule.cuts(name, num_dims)):
            experts = mixed == [0] and bool(stacked)
            what = "experts of a layer are stacked" if experts else f"ranks hold parts of it, cut along dim {mixed[-1]}"
            fix = "step each expert by itself" if experts else "set sharding.kind to ddp, and degrees.tp, degrees.etp and tiling to 1"
            raise BadInput(
                rule.key,
                got=f"an optimizer whose steps of a part of {name} differ from the whole parameter's",
                needed=f"the same: {what}",
                fix=f"{fix}, or leave that parameter to an optimizer that goes by elements",
            )
    if unlike and rule.coupled({name: len(layout.shape) for name, layout in layouts.items()}):
        raise BadInput(
            rule.key,
            got="an optimizer whose update of a parameter depends on other parameters",
            needed="each parameter by itself: ranks hold different ones",
            fix="set degrees.pp, tp, ep and etp to 1 and sharding.kind to ddp, or leave the norm of all to optimizer.clip_norm",
        )


_TABLES = ("embedding", "head")
_GATES = (".router.", ".shared_gate.", ".coefficient.")  # with few outputs a token


def matrix(name: str, num_dims: int) -> Orientation | None:
    """Return the orientation of a parameter's matrices for Muon, or None for tables of the vocabulary, gates, norms and biases."""
    if num_dims < 2 or is_bias(name) or name.split(".")[0] in _TABLES or any(part in name for part in _GATES):
        return None
    return "in_out" if ".experts." in name else "out_in"


def decays(name: str, parameter: Tensor) -> bool:
    """Return whether weight decay applies: to matrices only, not to norms, biases, or the router."""
    return parameter.ndim > 1 and ".router." not in name and not is_bias(name)
