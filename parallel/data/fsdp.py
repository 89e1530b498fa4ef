"""FSDP: every one of N ranks keeps 1/N of each parameter, gradient and optimizer state; a unit's parameters are gathered only while it
runs.

    forward    gather unit 0 | run 0, gather 1 | run 1, gather 2 | ...         `reshard`: gathered parameters are freed after use
    backward   ... | gather 1 | run 1, gather 0, reduce-scatter 1 | ...        and gathered again here
    step       each rank updates its 1/N of the model states (16 P / N bytes in fp32 for P parameters); nothing is sent

A unit is a module of the model. Each parameter is sharded along one dim over the ranks that sum its gradient (dp and sp; for experts edp,
the ranks with copies of an expert). Parameters are gathered in the unit's dtype. Gradients are summed in fp32 or wider after each
micro-batch; with pipeline stages see stage_sums.py.
Small parameters outside of units are not sharded. Only this file and stage_sums.py use torch's fully_shard.
Sources: PyTorch FSDP (arXiv 2304.11277), ZeRO-3 (arXiv 1910.02054).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter  # no public module has them
from torch.distributed.tensor import DTensor, Shard

from parallel.data.engine import Load, Rule
from parallel.data.stage_sums import StageSums
from parallel.data.stepped import Stepped
from parallel.data.whole import Cut, Whole
from parallel.mesh.collectives import gather_into, scatter_sum_into
from parallel.mesh.gradients import data_axis, sum_gradients
from parallel.mesh.layout import Layouts
from parallel.mesh.mesh import Axis, Mesh
from parallel.numerics.first_values import Fill
from parallel.numerics.precision import sum_dtype
from parallel.numerics.weight_gradient import PendingGradients, open_pending
from parallel.watch.audit import Held, copies_of


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together, before the module at `path` runs and before its backward pass.

    dtype: dtype of gathered parameters; None: unchanged. backward: whether the backward pass needs them. ahead: whether they may be
    prefetched; False for a tile, which must not be in memory together with another tile, and for a unit that runs twice in a forward pass.
    stage: index of the unit's pipeline stage among this rank's stages; a unit prefetches only units of its own stage."""

    path: str
    parameters: tuple[str, ...]
    dtype: torch.dtype | None = None
    backward: bool = True
    ahead: bool = True
    stage: int = 0


def shard(
    model: nn.Module, units: Sequence[Unit], *, layouts: Layouts, mesh: Mesh, device: torch.device, reshard: bool, prefetch: int, fill: Fill
) -> None:
    """Shard a model that is on the meta device, then allocate this rank's shards on `device` and set their initial values.

    `units`: in the order in which they start to run; a nested unit follows the unit that contains it. `reshard`: free gathered parameters
    after the forward pass. `prefetch`: number of outermost units, with their nested units, that are gathered before they are needed.
    `fill`: sets initial values."""
    # torch warns about a unit that returns a view, because the view must not be changed in place; this project never changes it
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
    meshes: dict[str, DeviceMesh] = {}
    cut: dict[str, FSDPModule] = {}
    for unit in reversed(units):  # nested units first, as fully_shard needs
        axis = data_axis(layouts[unit.parameters[0]], mesh)
        assert {data_axis(layouts[name], mesh).ranks for name in unit.parameters} == {axis.ranks}, f"{unit.path}: one unit, one axis"
        if axis.size > 1:
            if axis.name not in meshes:
                meshes[axis.name] = DeviceMesh.from_group(axis.group, device.type, mesh_dim_names=(axis.name,))
            cut[unit.path] = _cut(model, unit, axis, meshes[axis.name], reshard=reshard)
    if cut:  # makes the model torch's root unit, which starts and ends each pass; it has no parameters itself
        whole = {p for p in model.parameters() if not isinstance(p, DTensor)}
        fully_shard(model, mesh=next(reversed(meshes.values())), ignored_params=whole)
        for module in cut.values():
            # prefetches nothing, because the module itself is gathered already; with [] torch would choose modules to prefetch
            module.set_modules_to_backward_prefetch([module])
        for _, of_stage in groupby((u for u in units if u.path in cut), key=lambda u: u.stage):
            _look_ahead(list(of_stage), cut, prefetch)
    model.to_empty(device=device)  # allocates only the shards of parameters that are cut
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            fill(name, parameter.data)
        elif (held := parameter.to_local().detach()).numel():
            cut_here = _cut_of(parameter, data_axis(layouts[name], mesh))
            start, length = cut_here.run(cut_here.axis.index)
            box = [slice(0, size) for size in parameter.shape]
            box[cut_here.dim] = slice(start, start + length)
            fill(name, held, tuple(box))


def _cut_of(parameter: DTensor, axis: Axis) -> Cut:
    """Return the dim and shard sizes by which fully_shard has cut a parameter over the axis. The last ranks may have fewer elements."""
    dim: int = parameter.placements[0].dim  # type: ignore[attr-defined]
    return Cut(dim - parameter.ndim, -(-parameter.shape[dim] // axis.size), parameter.shape[dim], axis)


def _cut(model: nn.Module, unit: Unit, axis: Axis, on: DeviceMesh, *, reshard: bool) -> FSDPModule:
    module = model.get_submodule(unit.path)
    mine = {model.get_parameter(name) for name in unit.parameters}
    wide = sum_dtype(next(iter(mine)).dtype)
    fully_shard(
        module,
        mesh=on,
        reshard_after_forward=reshard,
        shard_placement_fn=lambda parameter: Shard(dim_to_cut(tuple(parameter.shape), axis.size)),
        mp_policy=MixedPrecisionPolicy(param_dtype=unit.dtype, reduce_dtype=wide, cast_forward_inputs=False),
        ignored_params={p for p in module.parameters() if p not in mine},
    )
    assert isinstance(module, FSDPModule)
    # Gradients are summed and not averaged, because losses are shares of the global mean. A divide factor of 1 alone is not enough: torch
    # would then use a reduction that gloo lacks.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    module.set_unshard_in_backward(unit.backward)
    module.set_custom_all_gather(_Gather(replace(axis, label=unit.path)))
    module.set_custom_reduce_scatter(_ScatterSum(replace(axis, label=f"the gradients of {unit.path}")))
    _sum_uses_in(wide, model, unit)
    return module


def _sum_uses_in(dtype: torch.dtype, model: nn.Module, unit: Unit) -> None:
    """Make autograd add the gradients of a weight's several uses in `dtype`, even if the weight is gathered in 16 bits."""

    def when_gathered(module: nn.Module, _: Any) -> None:
        for name in unit.parameters:
            model.get_parameter(name).grad_dtype = dtype
        first.remove()  # once is enough: freeing gathered memory keeps the parameter object and its grad_dtype

    first = model.get_submodule(unit.path).register_forward_pre_hook(when_gathered)


def dim_to_cut(shape: tuple[int, ...], ranks: int) -> int:
    """Return the first dim that `ranks` divides; else 0, which torch pads. (Dim 0 of a stack of experts can be shorter than `ranks`.)"""
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


def _look_ahead(units: list[Unit], cut: dict[str, FSDPModule], prefetch: int) -> None:
    """Set the units that each unit prefetches once it is gathered. torch's default order fails if forward passes are recomputed."""
    groups: list[list[Unit]] = []  # each: an outermost unit, then its nested units
    for unit in units:
        if groups and unit.path.startswith(f"{groups[-1][0].path}."):
            groups[-1] += [unit] if unit.ahead else []
        elif unit.ahead:
            groups.append([unit])
    for i, (first, *inside) in enumerate(groups if prefetch else ()):
        # nested units prefetch nothing: when recomputed in the backward pass, they would prefetch the units after them in forward order
        module, later, earlier = cut[first.path], groups[i + 1 : i + 1 + prefetch], groups[max(0, i - prefetch) : i]
        module.set_modules_to_forward_prefetch([cut[u.path] for u in chain(inside, *later)])
        module.set_modules_to_backward_prefetch([module, *(cut[u.path] for u in chain(inside, *reversed(earlier)))])


class _OnAxis:
    """Base of FSDP's collectives on an axis. They call this project's functions, which count them and check them in debug mode."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_OnAxis, AllGather):
    """All-gather. On a CPU it is asynchronous too, so that a prefetch overlaps with computation."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
        return gather_into(output_tensor, input_tensor, self.axis, wait=not (async_op or input_tensor.device.type == "cpu"))


class _ScatterSum(_OnAxis, ReduceScatter):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        assert op == dist.ReduceOp.SUM and not async_op
        scatter_sum_into(output_tensor, input_tensor, self.axis)
        return None


def _on_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, page-locked if the tensor is on a GPU."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False).copy_(tensor.detach())


class FSDP(Stepped):
    """The engine of FSDP, for a model that `shard` has cut, or that has nothing to cut. once: with pipeline stages, gradients are
    reduce-scattered once a batch; False: after each backward pass. host: optimizer states and master weights are in host memory; updated
    weights are copied to the device's shards."""

    def __init__(self, model: nn.Module, *, layouts: Layouts, mesh: Mesh, optimizer: Rule, once: bool = False, host: bool = False) -> None:
        super().__init__(model, layouts=layouts, mesh=mesh)
        staged = mesh.axis("pp").size > 1 and isinstance(model, FSDPModule)
        self.sums = StageSums(model, once=once) if staged else None
        named = dict(model.named_parameters())
        self.cut = {name: p for name, p in named.items() if isinstance(p, DTensor)}
        self.whole = {name: p for name, p in named.items() if name not in self.cut}
        # the optimizer's parameters: unsharded parameters, and this rank's shards as ordinary tensors that share the DTensors' memory
        self.parameters = {
            name: nn.Parameter(p.to_local().detach(), p.requires_grad) if isinstance(p, DTensor) else p for name, p in named.items()
        }
        self.on_device = self.parameters if host else {}
        if host:
            self.parameters = {name: nn.Parameter(_on_host(p), p.requires_grad) for name, p in self.on_device.items()}
        wholes = {id(p): whole for name, p in self.parameters.items() if (whole := self._whole(name)) is not None}
        stepped = ((name, p) for name, p in self.parameters.items() if p.numel() or id(p) in wholes)
        self.rule, self.optimizer = optimizer, optimizer.build(optimizer.groups(stepped), wholes)

    def _whole(self, name: str) -> Whole | None:
        """Return how to gather a parameter's matrices: first from FSDP's shards, then from the layout's tensor-parallel shards. Return
        None if no other rank has a shard or copy of this rank's matrices."""
        whole = Whole.of(self.layouts[name], self.mesh)
        if name not in self.cut:
            return whole
        own = self._cut_of(name)
        cuts = (*((own,) if own.dim >= -2 and own.axis.size > 1 else ()), *(whole.cuts if whole else ()))
        return Whole(cuts) if cuts else None  # no `copies`: ranks that would hold copies hold different FSDP shards

    def backward_from(self, output: GradientEdge, gradient: Tensor | None) -> None:
        with nullcontext() if self.sums is None else self.sums.backward(open_pending()):
            super().backward_from(output, gradient)

    def deferred(self, pending: PendingGradients) -> None:
        if self.sums is None:
            pending.compute()
        else:
            self.sums.deferred(pending)

    def start_sums(self, names: Sequence[str]) -> None:
        if self.sums is not None:
            self.sums.start(names)
            if any(self.layouts[name].holders for name in names):
                self.sums.finish()  # complete before the pipeline ranks that hold copies of a parameter add up its gradients

    def reduce(self) -> None:
        if self.sums is not None:
            self.sums.start(self.cut)
            self.sums.finish()
        sum_gradients({n: p.grad for n, p in self.whole.items() if p.grad is not None}, self.layouts, self.mesh)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, this rank's shard of the summed gradient)."""
        for name, parameter in (self.whole | self.cut).items():
            if parameter.grad is not None:
                yield name, parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad

    def owned_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, grad in self.gradients():
            layout = self.layouts[name]
            if grad.numel() and (layout.shard_counts(self.mesh) if name in self.cut else layout.is_owner(self.mesh)):
                yield layout.family, grad

    def held(self, name: str, kind: str, tensor: Tensor) -> Held:
        """Return the tensor with the axes along which ranks hold copies of it. Axes over which FSDP shards the parameter are left out."""
        layout = self.layouts[name]
        return copies_of(name, kind, tensor, layout, but=layout.summed_over() if name in self.cut else ())

    @torch.no_grad()
    def copy_again(self) -> bool:
        self._reshard()
        for name, parameter in self.on_device.items():
            parameter.copy_(self.parameters[name], non_blocking=True)
        return bool(self.on_device)

    def tensors(self) -> Iterator[Held]:
        yield from super().tensors()
        yield from (self.held(name, "copy of weight", parameter) for name, parameter in self.on_device.items())

    def step(self, lr: float, *, factor: float = 1.0) -> None:
        for name, grad in self.gradients():
            self.parameters[name].grad = grad.to(self.parameters[name].device)
        super().step(lr, factor=factor)
        if self.on_device:
            self.copy_again()

    def drop_gradients(self) -> None:
        super().drop_gradients()
        for parameter in (self.whole | self.cut).values():
            parameter.grad = None

    def gradient(self, name: str) -> Tensor:
        return self._gathered(name, super().gradient(name))

    def state(self, name: str) -> dict[str, Tensor]:
        device = self.on_device.get(name, self.parameters[name]).device
        means = self.rule.kept(name, self.parameters[name].ndim)
        return {kind: self._gathered(name, part.to(device), means.get(kind)) for kind, part in super().state(name).items()}

    def load_state(self, names: Iterable[str], load: Load, *, steps: int) -> None:
        super().load_state(names, load, steps=steps)
        self.copy_again()

    def _reshard(self) -> None:
        """Free gathered parameters, so that the next use gathers the shards' new values."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def start(self, name: str) -> list[int]:
        """Return the index, one number for each dim, at which this rank's FSDP shard of the parameter starts in the rank's tensor- or
        expert-parallel shard."""
        start = [0] * self.parameters[name].ndim
        if name in self.cut:
            cut = self._cut_of(name)
            start[cut.dim], _ = cut.run(cut.axis.index)
        return start

    def _gathered(self, name: str, part: Tensor, mean: int | None = None) -> Tensor:
        """Return this rank's tensor- or expert-parallel shard of a parameter, gradient or optimizer state, gathered from the FSDP shards.
        part: this rank's FSDP shard. mean: the (negative) dim of the parameter over which `part` was averaged, so that `part` has one dim
        less; None: no dim. Collective."""
        if name not in self.cut or (cut := self._cut_of(name)).dim == mean:
            return part
        return Whole((cut if mean is None or cut.dim > mean else replace(cut, dim=cut.dim + 1),)).gathered(part)

    def _cut_of(self, name: str) -> Cut:
        return _cut_of(self.cut[name], replace(data_axis(self.layouts[name], self.mesh), label=name))
