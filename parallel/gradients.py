"""The sum of gradients: over the ranks that saw other tokens, flat and in fp32 at least, some whole gradients at a time.

    sum_gradients(grads, layouts, mesh)     each over its layout's summed_over()         after a backward pass
    sum_over_holders(...)                   each over the stages that hold it            what several stages of a pipeline have
    start_sums(grads, layouts, mesh)        the same as sum_gradients, on their way     what a stage has while others compute
    start_sum(grads, axis)  ...  .finish()  one bucket, on its way while others compute

Which ranks they are is not decided here: layouts say it (parallel/layout.py). Sums, never means: the losses are shares of the
global mean (parallel/data/engine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.collectives import count
from parallel.layout import Layout
from parallel.mesh import Axis, Mesh

_BUCKET_ELEMENTS = 8 * 2**20  # 32 MiB of fp32: large enough for the link, small enough beside the gradients themselves


def sum_gradients(grads: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh) -> None:
    """Sum gradients in place over the ranks whose copies of a parameter saw other tokens. Collective: all of them sum the same names."""
    _sum(grads, lambda name: data_axis(layouts[name], mesh))


def start_sums(grads: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh) -> list[Started]:
    """What `sum_gradients` does, all of it on its way at once: until each is finished, its gradients are there twice. Collective."""
    return list(_started(grads, lambda name: data_axis(layouts[name], mesh)))


def sum_over_holders(grads: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh) -> None:
    """Sum in place over the stages that hold a parameter, for those that several hold. Collective, in an order that they all have."""
    shared = sorted((name for name in grads if layouts[name].holders), key=lambda name: layouts[name].holders)
    _sum({name: grads[name] for name in shared}, lambda name: holders(layouts[name], mesh))


def holders(layout: Layout, mesh: Mesh) -> Axis:
    """The stages that hold a parameter, of which there are several, as an axis."""
    return on_stages(layout.holders, mesh)


def on_stages(places: tuple[int, ...], mesh: Mesh) -> Axis:
    """These places on the pp axis, this rank's among them, as an axis. Every rank must ask for the same ones in the same order, once."""
    axis = mesh.part("pp", places, label="replicas")
    assert axis is not None, "asked by a rank that does not hold it"
    return axis


def data_axis(layout: Layout, mesh: Mesh) -> Axis:
    """The ranks over which a parameter's gradients are summed, and its shards lie where an engine cuts it."""
    return mesh.axis(*layout.summed_over())


@dataclass(frozen=True)
class Started:
    """A sum on its way. `flat` is the gradients' sum once `work` is done."""

    work: dist.Work
    flat: Tensor
    grads: Sequence[Tensor]

    def finish(self) -> None:
        """Wait, and put the sums in the gradients' place."""
        self.work.wait()
        for grad, part in zip(self.grads, self.flat.split([g.numel() for g in self.grads]), strict=True):
            grad.copy_(part.view_as(grad))


def start_sum(grads: Sequence[Tensor], axis: Axis, *, first: str) -> Started:
    """Start one flat sum of these gradients over an axis longer than 1; `first`: the first one's name, which tells where ranks disagree."""
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    return Started(start_flat(flat, axis, first=first), flat, grads)


def start_flat(flat: Tensor, axis: Axis, *, first: str) -> dist.Work:
    """Start to sum a buffer of gradients in place, as it lies and in its dtype."""
    count(replace(axis, label=f"the gradients from {first} on"), "all_reduce", flat)
    work: dist.Work = dist.all_reduce(flat, group=axis.group, async_op=True)
    return work


def _sum(grads: Mapping[str, Tensor], axis_of: Callable[[str], Axis]) -> None:
    for one in _started(grads, axis_of):
        one.finish()


def _started(grads: Mapping[str, Tensor], axis_of: Callable[[str], Axis]) -> Iterator[Started]:
    """What has one axis together, bucket by bucket, each started when it is asked for."""
    names: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    axes: dict[tuple[str, tuple[int, ...]], Axis] = {}
    for name in grads:
        axis = axis_of(name)
        axes[axis.name, axis.ranks] = axis
        names.setdefault((axis.name, axis.ranks), []).append(name)
    for key, axis in axes.items():
        for bucket in _buckets(names[key], grads) if axis.size > 1 else ():
            yield start_sum([grads[name] for name in bucket], axis, first=bucket[0])


def _buckets(names: Iterable[str], grads: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names in order, about _BUCKET_ELEMENTS at a time."""
    bucket: list[str] = []
    held = 0
    for name in names:
        if bucket and held + grads[name].numel() > _BUCKET_ELEMENTS:
            yield bucket
            bucket, held = [], 0
        bucket.append(name)
        held += grads[name].numel()
    if bucket:
        yield bucket
