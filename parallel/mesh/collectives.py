"""Differentiable collectives over one mesh axis. Every call is counted.

    forward          backward
    all_reduce       identity          (g in Megatron-LM, arXiv 1909.08053)
    identity         all_reduce        (f: `reduce_backward`)
    all_gather       reduce_scatter
    reduce_scatter   all_gather
    cut_copies       all_gather        of a tensor that all ranks have: each keeps its shard (Megatron-LM's scatter)
    join_copies      cut_copies        all ranks have the whole tensor again (Megatron-LM's gather)
    all_to_all       all_to_all with send and receive exchanged    (start and finish can be separate calls)
    shift            shift in the other direction

On an axis of size 1 each is the identity and costs nothing. The reduce_scatter of a backward pass sums in fp32 or wider; all other
sums are in the tensor's dtype. For each axis and collective, the axis's communicator counts calls, bytes given to the collective, and
bytes that leave this rank (parallel/mesh/communicator.py). Bytes follow from sizes, not from measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.mesh.mesh import Axis
from parallel.mesh.regions import region
from parallel.mesh.traffic import leaving

# torch 2.13 renamed these, and warns about the old names
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def count(axis: Axis, name: str, tensor: Tensor, *, send: list[int] | None = None, receive: list[int] | None = None) -> None:
    """Count one collective with the axis's communicator, and write it into this rank's record. Call this before the collective.

    Engines that call torch's collectives call this too. In debug mode, compare the call with the other ranks', and raise Disagreement
    if it differs. `send`, `receive`: rows to and from each rank. The name "send" is a message between two ranks, which is not compared.
    """
    communicator = axis.communicator
    if communicator.agreement is not None and name != "send":
        shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        communicator.agreement.check(
            axis.ranks, name, axis=axis.name, label=axis.label, shape=shape, dtype=dtype, send=send, receive=receive
        )
    if communicator.record is not None and name != "send":
        communicator.record.announce(
            axis.name, axis.ranks, axis.index, name=name, label=axis.label, tensor=tensor, send=send, receive=receive
        )
    handed = tensor.numel() * tensor.element_size()
    sent = leaving(name, handed, axis.size)
    if send is not None:
        sent = (sum(send) - send[axis.index]) * (handed // len(tensor) if len(tensor) else 0)
    communicator.add(axis.name, name, handed=handed, sent=sent)


# --- without autograd -----------------------------------------------------------------------------------------------


def sum_over(tensor: Tensor, axis: Axis) -> Tensor:
    """Sum in place over the axis; return the tensor."""
    return _reduce(tensor, axis, dist.ReduceOp.SUM)


def sum_over_all(tensor: Tensor, axes: Iterable[Axis]) -> Tensor:
    """Sum in place over the axes, one after the other; return the tensor."""
    for axis in axes:
        tensor = sum_over(tensor, axis)
    return tensor


def max_over(tensor: Tensor, axis: Axis) -> Tensor:
    """Take the maximum over the axis in place; return the tensor."""
    return _reduce(tensor, axis, dist.ReduceOp.MAX)


def largest(value: float, axis: Axis) -> float:
    """Return the maximum of `value` over the axis. It is sent as a CUDA tensor if the group is NCCL, which cannot send CPU tensors."""
    nccl = axis.size > 1 and dist.get_backend(axis.group) == "nccl"
    return float(max_over(torch.tensor(value, dtype=torch.float64, device="cuda" if nccl else "cpu"), axis).item())


def _reduce(tensor: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType) -> Tensor:
    if axis.size > 1:
        count(axis, "all_reduce", tensor)
        dense = tensor.contiguous()  # gloo sums in storage order: with other strides on another rank, sums would be wrong
        with region(f"all_reduce over {axis.name}"):
            dist.all_reduce(dense, op=op, group=axis.group)
        if dense is not tensor:
            tensor.copy_(dense)
    return tensor


def gather_into(out: Tensor, mine: Tensor, axis: Axis, *, wait: bool = True) -> dist.Work | None:
    """Gather every rank's contiguous `mine` along dim 0 into `out`. With `wait=False`, return the work to wait for."""
    count(axis, "all_gather", mine)
    with region(f"all_gather over {axis.name}"):
        work: dist.Work | None = _all_gather(out, mine, group=axis.group, async_op=not wait)
    return work


def scatter_sum_into(out: Tensor, parts: Tensor, axis: Axis, *, wait: bool = True) -> dist.Work | None:
    """Sum the ranks' contiguous `parts`, and write this rank's shard along dim 0 into `out`. With `wait=False`, return the work."""
    count(axis, "reduce_scatter", parts)
    with region(f"reduce_scatter over {axis.name}"):
        work: dist.Work | None = _reduce_scatter(out, parts, group=axis.group, async_op=not wait)
    return work


class Started:
    """The result of a started collective. Before `wait`, do not read it and do not change its input (`of`, kept alive here)."""

    def __init__(self, tensor: Tensor, work: dist.Work | None, of: Tensor | None = None) -> None:
        self._tensor, self._work, self._of = tensor, work, of

    def wait(self) -> Tensor:
        if self._work is not None:
            with region("wait for a collective"):
                self._work.wait()
            self._work = self._of = None
        return self._tensor


def start_broadcast(like: Tensor, axis: Axis, *, root: int) -> Started:
    """Start to broadcast a tensor from the axis's root-th rank. `like`: that tensor on the root, elsewhere one of its shape and dtype."""
    if axis.size == 1:
        return Started(like, None)
    tensor = like.contiguous() if axis.index == root else torch.empty_like(like, memory_format=torch.contiguous_format)
    count(axis, "broadcast", tensor)
    return Started(tensor, dist.broadcast(tensor, src=axis.ranks[root], group=axis.group, async_op=True))


def start_sum_to(tensor: Tensor, axis: Axis, *, root: int) -> Started:
    """Start to sum the ranks' contiguous tensors, in place, on the root-th rank. On the others the content is then undefined."""
    if axis.size == 1:
        return Started(tensor, None)
    count(axis, "reduce", tensor)
    return Started(tensor, dist.reduce(tensor, dst=axis.ranks[root], op=dist.ReduceOp.SUM, group=axis.group, async_op=True))


def start_sum(tensor: Tensor, axis: Axis) -> Started:
    """Start to sum the ranks' contiguous tensors, in place, on all ranks."""
    if axis.size == 1:
        return Started(tensor, None)
    count(axis, "all_reduce", tensor)
    return Started(tensor, dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=axis.group, async_op=True))


def start_gather(mine: Tensor, axis: Axis) -> Started:
    """Start to gather the ranks' tensors along dim 0, on every rank."""
    mine = mine.contiguous()
    if axis.size == 1:
        return Started(mine, None)
    out = mine.new_empty((axis.size * len(mine), *mine.shape[1:]))
    return Started(out, gather_into(out, mine, axis, wait=False), mine)


def start_scatter_sum(parts: Tensor, axis: Axis) -> Started:
    """Start to sum the ranks' tensors; each rank gets its shard along dim 0."""
    parts = parts.contiguous()
    if axis.size == 1:
        return Started(parts, None)
    out = parts.new_empty((len(parts) // axis.size, *parts.shape[1:]))
    return Started(out, scatter_sum_into(out, parts, axis, wait=False), parts)


def gathered(tensor: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """Concatenate the ranks' tensors along dim, on every rank."""
    return tensor if axis.size == 1 else _gather(tensor, axis, dim)


def scattered_sum(tensor: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """Sum the ranks' tensors, and return this rank's shard along dim."""
    return tensor if axis.size == 1 else _scatter_sum(tensor, axis, dim)


def _gather(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    first = tensor.movedim(dim, 0).contiguous()
    out = first.new_empty((axis.size * first.shape[0], *first.shape[1:]))
    gather_into(out, first, axis)
    return out.movedim(0, dim).contiguous()  # one copy here instead of one in each product that reads it


def _scatter_sum(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    first = tensor.movedim(dim, 0).contiguous()
    out = first.new_empty((first.shape[0] // axis.size, *first.shape[1:]))
    scatter_sum_into(out, first, axis)
    return out.movedim(0, dim)


def _exchange(rows: Tensor, send: list[int], receive: list[int], axis: Axis) -> Tensor:
    count(axis, "all_to_all", rows, send=send, receive=receive)
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    with region(f"all_to_all over {axis.name}"):
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=axis.group)
    return out


def _shift(tensor: Tensor, axis: Axis, steps: int) -> Tensor:
    return start_shift([tensor], axis, steps=steps).wait()[0]


class Messages:
    """Started messages between ranks of an axis. Before `wait`, do not change sent tensors and do not read received ones."""

    def __init__(
        self, axis: Axis, *, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]], name: str = "send"
    ) -> None:
        """Start the messages. `send`: contiguous tensors with their destinations' indices on the axis. `receive`: buffers with sources.

        Messages between two ranks keep their order. Every rank of an exchange must start it.
        """
        self.sent, self.received = [tensor for tensor, _ in send], [tensor for tensor, _ in receive]
        for tensor in self.sent:
            count(axis, name, tensor)
        ops = [dist.P2POp(dist.isend, tensor, axis.ranks[place % axis.size], axis.group) for tensor, place in send]
        ops += [dist.P2POp(dist.irecv, tensor, axis.ranks[place % axis.size], axis.group) for tensor, place in receive]
        self.requests = dist.batch_isend_irecv(ops) if ops else []

    @staticmethod
    def none(axis: Axis, received: Sequence[Tensor] = ()) -> Messages:
        """Return a finished exchange; `wait` returns `received`."""
        found = Messages(axis, send=[], receive=[])
        found.received = list(received)
        return found

    def wait(self) -> list[Tensor]:
        """Wait for all messages and return the received tensors."""
        with region("wait for a message"):
            for request in self.requests:
                request.wait()
        self.requests, self.sent = [], []
        return self.received


def start_shift(tensors: Sequence[Tensor], axis: Axis, *, steps: int = 1) -> Messages:
    """Start to send tensors `steps` ranks further on the ring, and to receive from `steps` before. Shapes are equal on all ranks."""
    if steps % axis.size == 0:
        return Messages.none(axis, received=tensors)
    send = [(tensor.contiguous(), axis.index + steps) for tensor in tensors]
    receive = [(torch.empty_like(tensor, memory_format=torch.contiguous_format), axis.index - steps) for tensor in tensors]
    return Messages(axis, send=send, receive=receive, name="shift")


# --- with autograd ----------------------------------------------------------------------------------------------------


def _backward(axis: Axis) -> Axis:
    """Return the axis with a label that tells backward from forward in error messages."""
    return replace(axis, label=f"{axis.label} backward".lstrip())


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        return sum_over(tensor.clone(), axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ReduceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_over(grad.clone(), _backward(ctx.axis)), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _gather(tensor, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        wide = grad if grad.dtype == torch.float64 else grad.float()
        return _scatter_sum(wide, _backward(ctx.axis), ctx.dim).to(grad.dtype), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _scatter_sum(tensor, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, _backward(ctx.axis), ctx.dim), None, None


class _CutCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return tensor.chunk(axis.size, dim)[axis.index].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, _backward(ctx.axis), ctx.dim), None, None


class _JoinCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _gather(tensor, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.chunk(ctx.axis.size, ctx.dim)[ctx.axis.index].contiguous(), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], axis: Axis) -> Tensor:
        ctx.send, ctx.receive, ctx.axis = send, receive, axis
        return _exchange(rows, send, receive, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.receive, ctx.send, _backward(ctx.axis)), None, None, None


class Flight:
    """A started all_to_all, forward and later backward. Computation between start and finish overlaps with it.

    `buffer`: the tensor to be received, not to be read before `finish_all_to_all`.
    """

    def __init__(self, axis: Axis, send: list[int], receive: list[int]) -> None:
        self.axis, self.send, self.receive = axis, send, receive
        self.buffer: Tensor | None = None
        self.work: dist.Work | None = None

    def leave(self, rows: Tensor, send: list[int], receive: list[int], axis: Axis) -> Tensor:
        count(axis, "all_to_all", rows, send=send, receive=receive)
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        self.work = dist.all_to_all_single(out, rows.contiguous(), receive, send, group=self.axis.group, async_op=True)
        return out

    def land(self) -> None:
        assert self.work is not None
        with region(f"all_to_all over {self.axis.name}"):
            self.work.wait()
        self.work = None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        return flight.leave(rows, flight.send, flight.receive, flight.axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        ctx.flight.land()  # `grad` is unused: the received gradients are in the buffer
        back, ctx.flight.buffer = ctx.flight.buffer, None
        return back, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.land()
        return buffer.view_as(buffer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.flight.buffer = ctx.flight.leave(grad, ctx.flight.receive, ctx.flight.send, _backward(ctx.flight.axis))
        return grad, None


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, steps: int) -> Tensor:
        ctx.axis, ctx.steps = axis, steps
        return _shift(tensor, axis, steps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _shift(grad, _backward(ctx.axis), -ctx.steps), None, None


def all_reduce(tensor: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis forward, identity backward: every rank has the same sum and the same gradient.

    Example: `y = all_reduce(partial_y, mesh.axis("tp"))`.
    """
    out: Tensor = tensor if axis.size == 1 else _AllReduce.apply(tensor, axis)
    return out


def reduce_backward(tensor: Tensor, axis: Axis) -> Tensor:
    """Identity forward, sum over the axis backward."""
    out: Tensor = tensor if axis.size == 1 else _ReduceBackward.apply(tensor, axis)
    return out


def all_gather(tensor: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """Concatenate the ranks' tensors along dim forward, reduce_scatter backward."""
    out: Tensor = tensor if axis.size == 1 else _AllGather.apply(tensor, axis, dim)
    return out


def reduce_scatter(tensor: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """Sum over the axis and keep this rank's shard of dim forward, all_gather backward. The axis must divide the dim."""
    out: Tensor = tensor if axis.size == 1 else _ReduceScatter.apply(tensor, axis, dim)
    return out


def cut_copies(tensor: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """Keep this rank's equal shard, along dim, of a tensor that all ranks have, forward; all_gather of the gradients backward."""
    out: Tensor = tensor if axis.size == 1 else _CutCopies.apply(tensor, axis, dim)
    return out


def join_copies(tensor: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """Concatenate the ranks' shards along dim forward; keep this rank's shard of the gradient, equal on all ranks, backward."""
    out: Tensor = tensor if axis.size == 1 else _JoinCopies.apply(tensor, axis, dim)
    return out


def all_to_all(rows: Tensor, axis: Axis, *, send: list[int], receive: list[int]) -> Tensor:
    """Send rows [sum(send), ...] to the ranks of the axis in order, return rows [sum(receive), ...]. Backward sends gradients back.

    `send[i]` rows go to the axis's i-th rank, `receive[i]` rows come from it; zero is allowed. Both sides must agree, so exchange
    counts first (exchange.py). Example: `all_to_all(rows_RD, axis, send=[3, 2], receive=[3, 1])`.
    """
    out: Tensor = rows if axis.size == 1 else _AllToAll.apply(rows, send, receive, axis)
    return out


def start_all_to_all(rows: Tensor, axis: Axis, *, send: list[int], receive: list[int]) -> Flight:
    """Start an `all_to_all`. Backward, this waits for the rows' gradients.

    All ranks must start and finish the same exchanges in the same order. Backward runs in reverse order.
    """
    flight = Flight(axis, send, receive)
    flight.buffer = rows if axis.size == 1 else _Start.apply(rows, flight)
    return flight


def finish_all_to_all(flight: Flight) -> Tensor:
    """Wait for the rows [sum(receive), ...] and return them. Backward, this starts to send their gradients. Call it once for each start."""
    buffer, flight.buffer = flight.buffer, None  # a buffer kept here would keep its autograd graph alive
    assert buffer is not None
    out: Tensor = buffer if flight.axis.size == 1 else _Finish.apply(buffer, flight)
    return out


def shift(tensor: Tensor, axis: Axis, *, steps: int = 1) -> Tensor:
    """Send the tensor to the rank `steps` further on the ring forward, its gradient in the other direction backward.

    Shapes must be equal on all ranks. A multiple of the axis size returns the tensor itself.
    """
    out: Tensor = tensor if steps % axis.size == 0 else _Shift.apply(tensor, axis, steps)
    return out
