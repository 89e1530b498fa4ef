"""Sums the gradients of a parameter over the ranks that hold copies of it and process different tokens, in flat buckets, in fp32 or wider.

Layouts say which ranks these are (parallel/mesh/layout.py). Gradients are summed and never averaged, because each rank's loss is already
its share of the mean over all tokens (parallel/data/engine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.mesh.layout import Layout, Layouts
from parallel.mesh.mesh import Axis, Mesh

_BUCKET_ELEMENTS = 8 * 2**20  # 32 MiB of fp32: large enough for the full rate of a link, small compared with all gradients


def sum_gradients(grads: Mapping[str, Tensor], layouts: Layouts, mesh: Mesh) -> None:
    """Sum the gradients `grads` (parameter name -> gradient) in place, each over the axes that its layout's summed_over() returns.
    Collective: all ranks must pass the same names."""
    _sum(grads, lambda name: data_axis(layouts[name], mesh))


def sum_over_holders(grads: Mapping[str, Tensor], layouts: Layouts, mesh: Mesh) -> None:
    """Sum the gradients of parameters that several pipeline stages hold (Layout.holders), in place, over these stages. grads: name of a
    parameter -> gradient; other parameters are ignored. Collective: these stages must pass the same parameters in the same order."""
    shared = sorted((name for name in grads if layouts[name].holders), key=lambda name: layouts[name].holders)
    _sum({name: grads[name] for name in shared}, lambda name: on_stages(layouts[name].holders, mesh))


def on_stages(places: tuple[int, ...], mesh: Mesh) -> Axis:
    """Return the axis over the pipeline stages `places`, one of which must be this rank's. Collective: all ranks must call this for the
    same stages in the same order."""
    axis = mesh.part("pp", places, label="replicas")
    assert axis is not None, f"this rank's stage is not one of {places}"
    return axis


def data_axis(layout: Layout, mesh: Mesh) -> Axis:
    """Return the axis over which a parameter's gradients are summed. FSDP and ZeRO shard the parameter over the same axis."""
    return mesh.axis(*layout.summed_over())


@dataclass(frozen=True)
class StartedSum:
    """A started all-reduce or reduce of gradients. When `work` is done, the buffer `flat` holds the sums, concatenated in the order of
    `grads`. `grads` is empty if `flat` is a view of a single gradient, which is summed in place, or if only another rank gets the sums."""

    work: dist.Work
    flat: Tensor
    grads: Sequence[Tensor]

    def finish(self) -> None:
        """Wait, and copy the sums into the gradients."""
        self.work.wait()
        parts = self.flat.split([g.numel() for g in self.grads]) if self.grads else ()
        for grad, part in zip(self.grads, parts, strict=True):
            grad.copy_(part.view_as(grad))


def start_sum(grads: Sequence[Tensor], axis: Axis, *, first: str, root: int | None = None) -> StartedSum:
    """Start to sum these gradients, as one flat buffer, over an axis of at least 2 ranks. A single contiguous gradient in fp32 or wider is
    summed in place. `first`: name of the first gradient, for error messages. `root`: index of the only rank that gets the sums; None: all
    do. On other ranks than `root`, the gradients keep their values or become undefined."""
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    if len(grads) == 1 and grads[0].is_contiguous() and grads[0].dtype == wide:
        flat = grads[0].view(-1)
        return StartedSum(start_flat(flat, axis, first=first, root=root), flat, ())
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    return StartedSum(start_flat(flat, axis, first=first, root=root), flat, grads if root in (None, axis.index) else ())


def start_flat(flat: Tensor, axis: Axis, *, first: str, root: int | None = None) -> dist.Work:
    """Start to sum a contiguous buffer of gradients in place, in its dtype. `first`: name of its first gradient, for error messages.
    `root`: index of the only rank that gets the sums; None: all ranks get them."""
    name = "all_reduce" if root is None else "reduce"
    replace(axis, label=f"the gradients from {first} on").count(name, flat)
    same: dict[str, Any] = {"group": axis.group, "async_op": True}
    work: dist.Work = dist.all_reduce(flat, **same) if root is None else dist.reduce(flat, axis.ranks[root], **same)
    return work


def _sum(grads: Mapping[str, Tensor], axis_of: Callable[[str], Axis]) -> None:
    for bucket in buckets_of({name: grad.numel() for name, grad in grads.items()}, axis_of):
        start_sum([grads[name] for name in bucket.names], bucket.axis, first=bucket.names[0]).finish()


class Bucket(NamedTuple):
    """Names of gradients that are summed together, and the axis of the sum."""

    axis: Axis
    names: list[str]


def buckets_of(elements: Mapping[str, int], axis_of: Callable[[str], Axis]) -> list[Bucket]:
    """Split the gradients of each axis into buckets: consecutive gradients with at most _BUCKET_ELEMENTS elements together, or one larger
    gradient. Gradients with an axis of one rank are left out. elements: name -> number of elements. axis_of: name -> axis."""
    found: dict[tuple[str, tuple[int, ...]], list[Bucket]] = {}
    room: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, count in elements.items():
        axis = axis_of(name)
        key = axis.name, axis.ranks
        if axis.size == 1:
            continue
        if room.get(key, -1) < count:
            found.setdefault(key, []).append(Bucket(axis, []))
            room[key] = _BUCKET_ELEMENTS
        found[key][-1].names.append(name)
        room[key] -= count
    return [bucket for buckets in found.values() for bucket in buckets]
