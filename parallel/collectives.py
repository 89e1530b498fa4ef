"""Differentiable collectives over one mesh axis, forward and backward side by side, every call counted.

    forward          backward
    all_reduce       identity          (g in Megatron-LM, arXiv 1909.08053)
    identity         all_reduce        (f: `reduce_backward`)
    all_gather       reduce_scatter
    reduce_scatter   all_gather
    cut_copies       all_gather        of a tensor that all ranks have: each goes on with its part (Megatron-LM's scatter)
    join_copies      cut_copies        ... and then all have all again (its gather)
    all_to_all       all_to_all with the splits exchanged          (also started and finished apart, both ways)
    shift            shift the other way

On an axis of size 1 each is the identity and costs nothing. The reduce_scatter of a backward pass sums in fp32 at least; the other sums
are in the tensor's dtype.
Bytes are counted logically, never from time, per axis and collective: calls, bytes handed to the collective, and bytes that leave
this rank. The counts belong to the axis's communicator (parallel/communicator.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.mesh import Axis
from parallel.regions import region

# torch 2.13 gives them these names, and warns of the old ones
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def count(axis: Axis, name: str, tensor: Tensor, *, send: list[int] | None = None, receive: list[int] | None = None) -> None:
    """Note one collective with the axis's communicator and in this rank's record before it is made, and in debug mode compare it: for
    those too that an engine makes.

    `send`, `receive`: rows to and from each rank. "send" is one rank's to another, and nobody else's. Raises Disagreement.
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
    handed = sent = tensor.numel() * tensor.element_size()
    if send is not None:
        sent = (sum(send) - send[axis.index]) * (handed // len(tensor) if len(tensor) else 0)
    elif name == "all_gather":
        sent *= axis.size - 1
    elif name not in ("shift", "send"):
        sent = sent * (axis.size - 1) * (2 if name == "all_reduce" else 1) // axis.size
    communicator.add(axis.name, name, handed=handed, sent=sent)


# --- plain, in place or returning a new tensor; no autograd ---------------------------------------------------------


def sum_over(tensor: Tensor, axis: Axis) -> Tensor:
    """Sum in place over the axis; returns the tensor."""
    return _reduce(tensor, axis, dist.ReduceOp.SUM)


def sum_over_all(tensor: Tensor, axes: Iterable[Axis]) -> Tensor:
    """Sum in place over the axes, one after the other; returns the tensor."""
    for axis in axes:
        tensor = sum_over(tensor, axis)
    return tensor


def max_over(tensor: Tensor, axis: Axis) -> Tensor:
    """Maximum in place over the axis; returns the tensor."""
    return _reduce(tensor, axis, dist.ReduceOp.MAX)


def largest(value: float, axis: Axis) -> float:
    """The largest of the ranks' numbers, sent from the device that their group speaks for: NCCL takes nothing of the host's."""
    nccl = axis.size > 1 and dist.get_backend(axis.group) == "nccl"
    return float(max_over(torch.tensor(value, dtype=torch.float64, device="cuda" if nccl else "cpu"), axis).item())


def _reduce(tensor: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType) -> Tensor:
    if axis.size > 1:
        count(axis, "all_reduce", tensor)
        whole = tensor.contiguous()  # gloo reduces memory as it lies: ranks with other strides would get other sums, and no error
        with region(f"all_reduce over {axis.name}"):
            dist.all_reduce(whole, op=op, group=axis.group)
        if whole is not tensor:
            tensor.copy_(whole)
    return tensor


def gather_into(out: Tensor, mine: Tensor, axis: Axis, *, wait: bool = True) -> dist.Work | None:
    """Every rank's contiguous `mine`, one after another along dim 0, into `out`; what to wait for, where it is not waited for here."""
    count(axis, "all_gather", mine)
    with region(f"all_gather over {axis.name}"):
        work: dist.Work | None = _all_gather(out, mine, group=axis.group, async_op=not wait)
    return work


def scatter_sum_into(out: Tensor, parts: Tensor, axis: Axis, *, wait: bool = True) -> dist.Work | None:
    """This rank's part along dim 0 of the sum of the ranks' contiguous `parts` into `out`; what to wait for, where it is not here."""
    count(axis, "reduce_scatter", parts)
    with region(f"reduce_scatter over {axis.name}"):
        work: dist.Work | None = _reduce_scatter(out, parts, group=axis.group, async_op=not wait)
    return work


class Started:
    """A tensor that a collective is on its way to: not to be read, nor what it comes from (`of`, kept alive) changed, before `wait`."""

    def __init__(self, tensor: Tensor, work: dist.Work | None, of: Tensor | None = None) -> None:
        self._tensor, self._work, self._of = tensor, work, of

    def wait(self) -> Tensor:
        if self._work is not None:
            with region("wait for a collective"):
                self._work.wait()
            self._work = self._of = None
        return self._tensor


def start_broadcast(like: Tensor, axis: Axis, *, root: int) -> Started:
    """The tensor of the axis's root-th rank to all of them; `like`: that tensor there, and one of its shape and dtype elsewhere."""
    if axis.size == 1:
        return Started(like, None)
    tensor = like.contiguous() if axis.index == root else torch.empty_like(like, memory_format=torch.contiguous_format)
    count(axis, "broadcast", tensor)
    return Started(tensor, dist.broadcast(tensor, src=axis.ranks[root], group=axis.group, async_op=True))


def start_sum_to(tensor: Tensor, axis: Axis, *, root: int) -> Started:
    """The sum of the ranks' contiguous tensors, in place, on the root-th alone; what the others have then means nothing."""
    if axis.size == 1:
        return Started(tensor, None)
    count(axis, "reduce", tensor)
    return Started(tensor, dist.reduce(tensor, dst=axis.ranks[root], op=dist.ReduceOp.SUM, group=axis.group, async_op=True))


def start_sum(tensor: Tensor, axis: Axis) -> Started:
    """The sum of the ranks' contiguous tensors, in place, on all of them."""
    if axis.size == 1:
        return Started(tensor, None)
    count(axis, "all_reduce", tensor)
    return Started(tensor, dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=axis.group, async_op=True))


def start_gather(mine: Tensor, axis: Axis) -> Started:
    """The ranks' tensors one after another along dim 0, on every rank."""
    mine = mine.contiguous()
    if axis.size == 1:
        return Started(mine, None)
    out = mine.new_empty((axis.size * len(mine), *mine.shape[1:]))
    return Started(out, gather_into(out, mine, axis, wait=False), mine)


def start_scatter_sum(parts: Tensor, axis: Axis) -> Started:
    """This rank's part along dim 0 of the sum of the ranks' tensors."""
    parts = parts.contiguous()
    if axis.size == 1:
        return Started(parts, None)
    out = parts.new_empty((len(parts) // axis.size, *parts.shape[1:]))
    return Started(out, scatter_sum_into(out, parts, axis, wait=False), parts)


def gathered(tensor: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """The ranks' tensors one after another along dim, on every rank."""
    return tensor if axis.size == 1 else _gather(tensor, axis, dim)


def scattered_sum(tensor: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """This rank's part along dim of the sum of the ranks' tensors."""
    return tensor if axis.size == 1 else _scatter_sum(tensor, axis, dim)


def _gather(tensor: Tensor, axis: Axis, dim: int) -> Tensor:
    first = tensor.movedim(dim, 0).contiguous()
    out = first.new_empty((axis.size * first.shape[0], *first.shape[1:]))
    gather_into(out, first, axis)
    return out.movedim(0, dim).contiguous()  # once here, and not in each product that reads it


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
    """Tensors on their way between ranks of an axis; what is sent must not change, nor what comes be read, before `wait`."""

    def __init__(
        self, axis: Axis, *, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]], name: str = "send"
    ) -> None:
        """`send`: tensors and the places on the axis that they go to; `receive`: what they come into, and from where. Contiguous.

        Between two ranks messages keep their order. Every rank of an exchange starts it at once with the others.
        """
        self.sent, self.received = [tensor for tensor, _ in send], [tensor for tensor, _ in receive]
        for tensor in self.sent:
            count(axis, name, tensor)
        ops = [dist.P2POp(dist.isend, tensor, axis.ranks[place % axis.size], axis.group) for tensor, place in send]
        ops += [dist.P2POp(dist.irecv, tensor, axis.ranks[place % axis.size], axis.group) for tensor, place in receive]
        self.requests = dist.batch_isend_irecv(ops) if ops else []

    @staticmethod
    def none(axis: Axis, there: Sequence[Tensor] = ()) -> Messages:
        """Nothing on its way; `there`: what `wait` gives."""
        found = Messages(axis, send=[], receive=[])
        found.received = list(there)
        return found

    def wait(self) -> list[Tensor]:
        """What came."""
        with region("wait for a message"):
            for request in self.requests:
                request.wait()
        self.requests, self.sent = [], []
        return self.received


def start_shift(tensors: Sequence[Tensor], axis: Axis, *, steps: int = 1) -> Messages:
    """Each rank's tensors to the rank `steps` further round the axis, and another's from as far behind; equal shapes on all ranks."""
    if steps % axis.size == 0:
        return Messages.none(axis, there=tensors)
    send = [(tensor.contiguous(), axis.index + steps) for tensor in tensors]
    come = [(torch.empty_like(tensor, memory_format=torch.contiguous_format), axis.index - steps) for tensor in tensors]
    return Messages(axis, send=send, receive=come, name="shift")


# --- with autograd ----------------------------------------------------------------------------------------------------


def _backward(axis: Axis) -> Axis:
    """The same axis; where ranks disagree, the line tells forward from backward."""
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
    """An all_to_all on its way, forward and later backward: between start and finish, others may compute.

    `buffer` is what arrives, not to be read before `finish_all_to_all`.
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
        ctx.flight.land()  # `grad` is what _Finish was given; what it sent for has come
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
    """Sum over the axis forward, identity backward: every rank goes on with the same sum and the same gradient."""
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
    """Sum over the axis and keep this rank's part of dim forward, all_gather backward. The dim must divide by the axis."""
    out: Tensor = tensor if axis.size == 1 else _ReduceScatter.apply(tensor, axis, dim)
    return out


def cut_copies(tensor: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """This rank's equal part, along dim, of what every rank of the axis has, forward; all_gather of the parts' gradients backward."""
    out: Tensor = tensor if axis.size == 1 else _CutCopies.apply(tensor, axis, dim)
    return out


def join_copies(tensor: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """Concatenate the ranks' parts along dim forward; this rank's part of the gradient backward, which must be the same on every rank."""
    out: Tensor = tensor if axis.size == 1 else _JoinCopies.apply(tensor, axis, dim)
    return out


def all_to_all(rows: Tensor, axis: Axis, *, send: list[int], receive: list[int]) -> Tensor:
    """Rows [sum(send), ...] to the ranks of the axis in order, rows [sum(receive), ...] back; backward exchanges the splits.

    `send[i]` rows go to the axis's i-th rank, `receive[i]` come from it; zero is fine. Both sides must agree: the counts
    are exchanged before (see `exchange.py`).
    """
    out: Tensor = rows if axis.size == 1 else _AllToAll.apply(rows, send, receive, axis)
    return out


def start_all_to_all(rows: Tensor, axis: Axis, *, send: list[int], receive: list[int]) -> Flight:
    """`all_to_all` up to where its rows are on their way; backward, this is where the gradients have arrived.

    Every rank must start and finish the same ones in the same order. Backward runs in the opposite order of the calls.
    """
    flight = Flight(axis, send, receive)
    flight.buffer = rows if axis.size == 1 else _Start.apply(rows, flight)
    return flight


def finish_all_to_all(flight: Flight) -> Tensor:
    """The rows [sum(receive), ...] that arrived; backward, this is where their gradients set out. Once for each start."""
    buffer, flight.buffer = flight.buffer, None  # a buffer kept here would keep its own graph alive
    assert buffer is not None
    out: Tensor = buffer if flight.axis.size == 1 else _Finish.apply(buffer, flight)
    return out


def shift(tensor: Tensor, axis: Axis, *, steps: int = 1) -> Tensor:
    """Each rank's tensor to the rank `steps` further round the axis forward, the other way backward.

    Equal shapes on all ranks. A whole turn leaves every tensor where it is.
    """
    out: Tensor = tensor if steps % axis.size == 0 else _Shift.apply(tensor, axis, steps)
    return out
