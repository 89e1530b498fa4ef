"""DDP: ranks along dp and sp hold equal copies of the dense weights, and sum the gradients during the backward pass.

torch's DistributedDataParallel puts these gradients into buckets and overlaps their sums. A communication hook replaces its average by a
sum in fp32. DistributedDataParallel ignores parameters with gradients that are summed over another axis (experts: edp, the ranks with
copies of an expert); the engine sums these gradients in its own buckets (parallel/data/buckets.py).
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from parallel.data.buckets import Buckets, SummedEarly
from parallel.data.engine import Load, Rule, Working
from parallel.data.stepped import Stepped
from parallel.data.whole import Whole
from parallel.mesh.gradients import data_axis, start_flat
from parallel.mesh.layout import Layout, Layouts
from parallel.mesh.mesh import Axis, Mesh
from parallel.watch.audit import Held


class DDP(SummedEarly, Stepped):
    """The engine of DDP. `layouts`: parameter name -> its layout. `optimizer`: the optimizer's settings. Every rank must run the same
    number of micro-batches.
    `working`: None: the model casts weights at each use. Else parameter name -> the dtype to which the engine casts the weight once a step.
    The model then holds the cast weights, and `parameters` has the master weights; all gradients are in the engine's own buckets.
    `forward`: a module that runs in training instead of `model`: for DP, several replicas in one process (parallel/data/dp.py). With
    pipeline stages, torch's DistributedDataParallel is not used: all gradients are in the engine's own buckets."""

    def __init__(
        self,
        model: nn.Module,
        *,
        layouts: Layouts,
        mesh: Mesh,
        optimizer: Rule,
        forward: nn.Module | None = None,
        working: Working | None = None,
    ) -> None:
        super().__init__(model, layouts=layouts, mesh=mesh)
        self.weights = dict(model.named_parameters())
        self.masters = {} if working is None else masters_of(self.weights, working)
        self.parameters = self.weights | self.masters
        wholes = {id(p): whole for n, p in self.parameters.items() if (whole := Whole.of(layouts[n], mesh)) is not None}
        self.rule, self.optimizer = optimizer, optimizer.build(optimizer.groups(self.parameters.items()), wholes)
        self.model = forward or model
        dp, apart = dense_axis(layouts, mesh), mesh.axis("pp").size > 1 or bool(self.masters)
        self.apart = [name for name, layout in layouts.items() if apart or data_axis(layout, mesh).ranks != dp.ranks]
        self.sums = Buckets({name: self.weights[name] for name in self.apart}, layouts, mesh)
        if dp.size > 1 and not apart and any(p.requires_grad for name, p in self.parameters.items() if name not in self.apart):
            buffers = [name for name, _ in model.named_buffers()]  # not broadcast by DDP: the trainer keeps them equal
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*self.apart, *buffers])
            self.model = DistributedDataParallel(model, process_group=dp.group, gradient_as_bucket_view=True, init_sync=False)
            sums = _Sums(dp, {id(p): name for name, p in self.parameters.items()})
            self.model.register_comm_hook(sums, _sum_bucket)
            if dp.size > 2:  # then the order of additions depends on a gradient's position in its bucket, so buckets must not change later
                _settle_buckets(self.model, [p for name, p in self.parameters.items() if name not in self.apart and p.requires_grad], sums)

    def forward(self, *args: Any, last: bool) -> Any:
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = last
        return self.model(*args)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        if last:
            self.sums.expect(self.apart)
        super().backward(loss, last=last)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, weight.grad) for name, weight in self.weights.items() if weight.grad is not None)

    def step(self, lr: float, *, factor: float = 1.0) -> None:
        for name, master in self.masters.items():
            master.grad = self.weights[name].grad
        super().step(lr, factor=factor)
        self.copy_again()

    @torch.no_grad()
    def copy_again(self) -> bool:
        if self.masters:
            torch._foreach_copy_([self.weights[name] for name in self.masters], list(self.masters.values()))
        return bool(self.masters)

    def tensors(self) -> Iterator[Held]:
        yield from super().tensors()
        yield from (self.held(name, "copy of weight", self.weights[name]) for name in self.masters)

    def load_state(self, names: Iterable[str], load: Load, *, steps: int) -> None:
        super().load_state(names, load, steps=steps)
        self.copy_again()

    def drop_gradients(self) -> None:
        """Zero the gradients that are views of DDP's buckets, because the buckets stay allocated. Set all other gradients to None, which is
        cheaper."""
        freed = set(self.apart if isinstance(self.model, DistributedDataParallel) else self.parameters)
        for master in self.masters.values():
            master.grad = None
        kept = [weight.grad for name, weight in self.weights.items() if name not in freed and weight.grad is not None]
        for name in freed & self.weights.keys():
            self.weights[name].grad = None
        if kept:
            torch._foreach_zero_(kept)


def masters_of(weights: Mapping[str, nn.Parameter], working: Working) -> dict[str, nn.Parameter]:
    """Cast each trained weight in place to its dtype in `working`, if that differs. Return a dict: name of each cast weight -> its master
    weight, a parameter with the original values. Gradients of the cast weights have the master's dtype."""
    masters: dict[str, nn.Parameter] = {}
    for name, weight in weights.items():
        if weight.requires_grad and working(name) != weight.dtype:
            masters[name] = nn.Parameter(weight.data)
            weight.data = weight.data.to(working(name))
            weight.grad_dtype = masters[name].dtype
    return masters


def dense_axis(layouts: Layouts, mesh: Mesh) -> Axis:
    """Return the axis over which the gradients of dense parameters are summed; of several such axes, the one with the most elements to
    sum."""
    axes: dict[tuple[int, ...], Axis] = {}
    elements: Counter[tuple[int, ...]] = Counter()
    for layout in (layout for layout in layouts.values() if layout.family == "dense"):
        axis = data_axis(layout, mesh)
        axes[axis.ranks] = axis
        elements[axis.ranks] += math.prod(layout.shape)
    return axes[elements.most_common(1)[0][0]] if elements else data_axis(Layout(()), mesh)


@dataclass
class _Sums:
    """State of DDP's communication hook. axis: the ranks of the sum. names: id(parameter) -> name. sends: False: the hook starts no sums,
    as the backward pass of `_settle_buckets` needs."""

    axis: Axis
    names: dict[int, str]
    sends: bool = True


def _settle_buckets(model: DistributedDataParallel, parameters: Sequence[nn.Parameter], sums: _Sums) -> None:
    """Make torch rebuild its buckets now, by a backward pass of zeros that sends nothing. Otherwise torch rebuilds them after the first
    step of a process. The first step of a resumed run would then sum in another order than the same step of an uninterrupted run. sums:
    state of the model's communication hook."""

    class Touch(nn.Module):
        def forward(self) -> Tensor:
            return torch.stack([p.flatten()[:1].sum().float() * 0.0 for p in parameters]).sum()

    module, model.module, sums.sends = model.module, Touch(), False
    try:
        model().backward()
    finally:
        model.module, sums.sends = module, True


def _sum_bucket(sums: _Sums, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook: start to sum one bucket of gradients in fp32, and return a future of the sum. torch's own hook averages.
    sums: state of the hook."""
    buffer = bucket.buffer()
    if not sums.sends:
        ready: torch.futures.Future[Tensor] = torch.futures.Future()
        ready.set_result(buffer)
        return ready
    wide = buffer.float()
    future = start_flat(wide, sums.axis, first=sums.names[id(bucket.parameters()[0])]).get_future()

    def summed(arrived: torch.futures.Future[Any]) -> Tensor:
        arrived.wait()  # raises if the sum failed; `wide` now contains the sum
        return wide if buffer is wide else buffer.copy_(wide)

    done: torch.futures.Future[Tensor] = future.then(summed)
    return done
