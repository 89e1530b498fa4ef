"""Differentiable collectives over one mesh axis. Every call is counted.

    forward          backward
    all_reduce       identity          (g in Megatron-LM, arXiv 1909.08053)
    identity         all_reduce        (f: `reduce_backward`)
    all_gather       reduce_scatter
    reduce_scatter   all_gather
    join_copies      own shard         all_gather of a result that all ranks then use in the same way (Megatron-LM's gather)
    all_to_all       all_to_all with send and receive exchanged    (start and finish can be separate calls)
    shift            shift in the other direction

On an axis of size 1 each is the identity and costs nothing. The reduce_scatter of a backward pass sums in fp32 or wider; all other sums are
in the tensor's dtype. parallel/mesh/exchange.py has the inverse of join_copies, parallel/mesh/traffic.py counts calls and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.mesh.mesh import Axis
from parallel.mesh.regions import region

# torch 2.13 renamed these, and warns about the old names
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def device_of(axis: Axis) -> str:
    """Return the device type of tensors that the axis's process group can send: "cuda" for NCCL, else "cpu"."""
    return "cuda" if axis.size > 1 and dist.get_backend(axis.group) == "nccl" else "cpu"


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
    """Return the maximum of all ranks' values, on every rank of the axis. Collective."""
    return float(max_over(torch.tensor(value, dtype=torch.float64, device=device_of(axis)), axis).item())


def _reduce(tensor: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType) -> Tensor:
    if axis.size > 1:
        axis.count("all_reduce", tensor)
        dense = tensor.contiguous()  # gloo sums in the order of storage: with different strides on two ranks, sums would be wrong
        with region(f"all_reduce over {axis.name}"):
            dist.all_reduce(dense, op=op, group=axis.group)
        if dense is not tensor:
            tensor.copy_(dense)
    return tensor


def gather_into(out: Tensor, mine: Tensor, axis: Axis, *, wait: bool = True) -> dist.Work | None:
    """Write all ranks' contiguous tensors `mine`, concatenated along dim 0, into `out`. With `wait=False`, return the unfinished Work."""
    axis.count("all_gather", mine)
    with region(f"all_gather over {axis.name}"):
        work: dist.Work | None = _all_gather(out, mine, group=axis.group, async_op=not wait)
    return work


def scatter_sum_into(out: Tensor, parts: Tensor, axis: Axis, *, wait: bool = True) -> dist.Work | None:
    """Sum all ranks' contiguous tensors `parts`, cut the sum along dim 0, and write this rank's shard into `out`. With `wait=False`, return
    the unfinished Work."""
    axis.count("reduce_scatter", parts)
    with region(f"reduce_scatter over {axis.name}"):
        work: dist.Work | None = _reduce_scatter(out, parts, group=axis.group, async_op=not wait)
    return work


class Started:
    """A started collective. `wait` returns its result. Before `wait`, change neither the result nor `given`, the input of the
    collective. what: the collective's name in a profile."""

    def __init__(self, result: Tensor, work: dist.Work | None = None, given: Tensor | None = None, *, what: str = "") -> None:
        self.result, self._work, self._given, self._what = result, work, given, what  # `given` only keeps the input in memory

    def wait(self) -> Tensor:
        if self._work is not None:
            with region(self._what):
                self._work.wait()
            self._work = self._given = None
        return self.result


def start_broadcast(mine: Tensor, axis: Axis, *, root: int) -> Started:
    """Start to broadcast the tensor `mine` of the rank with index `root`. On other ranks, `mine` only gives the shape and dtype of the
    result."""
    if axis.size == 1:
        return Started(mine)
    tensor = mine.contiguous() if axis.index == root else torch.empty_like(mine, memory_format=torch.contiguous_format)
    axis.count("broadcast", tensor)
    work = dist.broadcast(tensor, src=axis.ranks[root], group=axis.group, async_op=True)
    return Started(tensor, work, what=f"broadcast over {axis.name}")


def start_sum_to(tensor: Tensor, axis: Axis, *, root: int) -> Started:
    """Start to sum the ranks' contiguous tensors, in place, on the rank with index `root`. On other ranks the content of `tensor` becomes
    undefined."""
    if axis.size == 1:
        return Started(tensor, None)
    axis.count("reduce", tensor)
    work = dist.reduce(tensor, dst=axis.ranks[root], op=dist.ReduceOp.SUM, group=axis.group, async_op=True)
    return Started(tensor, work, what=f"reduce over {axis.name}")


def start_sum(tensor: Tensor, axis: Axis) -> Started:
    """Start to sum the ranks' contiguous tensors, in place, on all ranks."""
    if axis.size == 1:
        return Started(tensor, None)
    axis.count("all_reduce", tensor)
    work = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=axis.group, async_op=True)
    return Started(tensor, work, what=f"all_reduce over {axis.name}")


def start_gather(mine: Tensor, axis: Axis) -> Started:
    """Start to concatenate the ranks' tensors along dim 0, on every rank."""
    mine = mine.contiguous()
    if axis.size == 1:
        return Started(mine, None)
    out = mine.new_empty((axis.size * len(mine), *mine.shape[1:]))
    return Started(out, gather_into(out, mine, axis, wait=False), mine, what=f"all_gather over {axis.name}")


def start_scatter_sum(parts: Tensor, axis: Axis) -> Started:
    """Start to sum the ranks' tensors; each rank gets its shard of the sum along dim 0."""
    parts = parts.contiguous()
    if axis.size == 1:
        return Started(parts, None)
    out = parts.new_empty((len(parts) // axis.size, *parts.shape[1:]))
    return Started(out, scatter_sum_into(out, parts, axis, wait=False), parts, what=f"reduce_scatter over {axis.name}")


def gathered(tensor: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """Concatenate the ranks' tensors along dim, on every rank."""
    if axis.size == 1:
        return tensor
    first = tensor.movedim(dim, 0).contiguous()
    out = first.new_empty((axis.size * first.shape[0], *first.shape[1:]))
    gather_into(out, first, axis)
    return out.movedim(0, dim).contiguous()  # contiguous, because otherwise each matrix product with this tensor would copy it first


def scattered_sum(tensor: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """Sum the ranks' tensors, and return this rank's shard along dim."""
    if axis.size == 1:
        return tensor
    first = tensor.movedim(dim, 0).contiguous()
    out = first.new_empty((first.shape[0] // axis.size, *first.shape[1:]))
    scatter_sum_into(out, first, axis)
    return out.movedim(0, dim)


class Messages:
    """Started sends and receives between ranks of an axis. Before `wait`, do not change sent tensors and do not read received ones."""

    def __init__(
        self, axis: Axis, *, send: Sequence[tuple[Tensor, int]], receive: Sequence[tuple[Tensor, int]], name: str = "send"
    ) -> None:
        """Start the messages. `send`: contiguous tensors, each with its destination's index on the axis. `receive`: tensors to be filled,
        each with its source's index. `name`: the name under which sent messages are counted.

        Messages between two ranks arrive in the order in which they were started. For each message, its sender and its receiver must both
        create Messages."""
        self.sent, self.received = [tensor for tensor, _ in send], [tensor for tensor, _ in receive]
        for tensor in self.sent:
            axis.count(name, tensor)
        ops = [dist.P2POp(dist.isend, tensor, axis.ranks[place % axis.size], axis.group) for tensor, place in send]
        ops += [dist.P2POp(dist.irecv, tensor, axis.ranks[place % axis.size], axis.group) for tensor, place in receive]
        self.requests = dist.batch_isend_irecv(ops) if ops else []

    @staticmethod
    def none(axis: Axis, received: Sequence[Tensor] = ()) -> Messages:
        """Return a Messages object that sends nothing; its `wait` returns `received`."""
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
    """Start to send tensors to the rank `steps` further on the ring. The returned Messages also receive tensors of the same shapes from the
    rank `steps` before this one."""
    if steps % axis.size == 0:
        return Messages.none(axis, received=tensors)
    send = [(tensor.contiguous(), axis.index + steps) for tensor in tensors]
    receive = [(torch.empty_like(tensor, memory_format=torch.contiguous_format), axis.index - steps) for tensor in tensors]
    return Messages(axis, send=send, receive=receive, name="shift")


def ring_round(tensors: Sequence[Tensor], axis: Axis) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield (rank's index on the axis, its tensors) for this rank, then for the rank before it on the ring, and so on. While the caller
    uses one rank's tensors, the next rank's arrive."""
    held = list(tensors)
    for step in range(axis.size):
        coming = start_shift(held, axis) if step + 1 < axis.size else None
        yield (axis.index - step) % axis.size, held
        held = held if coming is None else coming.wait()


def paired(tensor: Tensor, axis: Axis, forward: Callable[..., Tensor], backward: Callable[..., Tensor], **options: Any) -> Tensor:
    """Return forward(tensor, axis, **options), with backward(gradient of the result, axis, **options) as the gradient of `tensor`."""
    out: Tensor = _Paired.apply(tensor, axis, forward, backward, options)
    return out


class _Paired(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, axis: Axis, forward: Callable[..., Tensor], backward: Callable[..., Tensor], options: dict[str, Any]
    ) -> Tensor:
        ctx.axis, ctx.of_gradient, ctx.options = axis, backward, options
        return forward(tensor, axis, **options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.of_gradient(grad, ctx.axis.backward(), **ctx.options), None, None, None, None


def _same(tensor: Tensor, axis: Axis) -> Tensor:
    return tensor


def _new_sum(tensor: Tensor, axis: Axis) -> Tensor:
    return sum_over(tensor.clone(), axis)


def _wide_scattered_sum(grad: Tensor, axis: Axis, *, dim: int) -> Tensor:
    return scattered_sum(grad.to(torch.promote_types(grad.dtype, torch.float32)), axis, dim=dim).to(grad.dtype)


def _own_shard(tensor: Tensor, axis: Axis, *, dim: int) -> Tensor:
    return tensor.chunk(axis.size, dim)[axis.index].contiguous()


def _exchange(rows: Tensor, axis: Axis, *, send: list[int], receive: list[int]) -> Tensor:
    return _start_exchange(rows, axis, send=send, receive=receive).wait()


def _exchange_back(grad: Tensor, axis: Axis, *, send: list[int], receive: list[int]) -> Tensor:
    return _exchange(grad, axis, send=receive, receive=send)


def _start_exchange(rows: Tensor, axis: Axis, *, send: list[int], receive: list[int]) -> Started:
    axis.count("all_to_all", rows, send=send, receive=receive)
    given, out = rows.contiguous(), rows.new_empty((sum(receive), *rows.shape[1:]))
    work = dist.all_to_all_single(out, given, receive, send, group=axis.group, async_op=True)
    return Started(out, work, given, what=f"all_to_all over {axis.name}")


def _shifted(tensor: Tensor, axis: Axis, *, steps: int) -> Tensor:
    return start_shift([tensor], axis, steps=steps).wait()[0]


def _shifted_back(grad: Tensor, axis: Axis, *, steps: int) -> Tensor:
    return _shifted(grad, axis, steps=-steps)


def all_reduce(tensor: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis forward, identity backward. Example: `y = all_reduce(partial_y, mesh.axis("tp"))`."""
    return tensor if axis.size == 1 else paired(tensor, axis, _new_sum, _same)


def reduce_backward(tensor: Tensor, axis: Axis) -> Tensor:
    """Identity forward, sum over the axis backward."""
    return tensor if axis.size == 1 else paired(tensor, axis, _same, _new_sum)


def all_gather(tensor: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """Concatenate the ranks' tensors along dim forward, reduce_scatter backward."""
    return tensor if axis.size == 1 else paired(tensor, axis, gathered, _wide_scattered_sum, dim=dim)


def reduce_scatter(tensor: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """Forward: sum over the axis and keep this rank's shard of dim. Backward: all_gather. The axis's size must divide the size of dim."""
    return tensor if axis.size == 1 else paired(tensor, axis, scattered_sum, gathered, dim=dim)


def join_copies(tensor: Tensor, axis: Axis, *, dim: int = 0) -> Tensor:
    """Forward: concatenate the ranks' shards along dim. Backward: all ranks have the same gradient; keep this rank's shard of it."""
    return tensor if axis.size == 1 else paired(tensor, axis, gathered, _own_shard, dim=dim)


def all_to_all(rows: Tensor, axis: Axis, *, send: list[int], receive: list[int]) -> Tensor:
    """Send rows [sum(send), ...] to the ranks of the axis in order, return rows [sum(receive), ...]. Backward sends gradients back.

    `send[i]` rows go to the axis's i-th rank, `receive[i]` rows come from it; zero is allowed. `send` of the sender and `receive` of the
    receiver must agree, so exchange counts first (exchange.py). Example: `all_to_all(rows_RD, axis, send=[3, 2], receive=[3, 1])`."""
    return rows if axis.size == 1 else paired(rows, axis, _exchange, _exchange_back, send=send, receive=receive)


def shift(tensor: Tensor, axis: Axis, *, steps: int = 1) -> Tensor:
    """In the forward pass, send the tensor to the rank `steps` further on the ring; in the backward pass, send its gradient back. Shapes
    must be equal on all ranks."""
    return tensor if steps % axis.size == 0 else paired(tensor, axis, _shifted, _shifted_back, steps=steps)


class StartedRows:
    """A started all_to_all of rows or, in the backward pass, of their gradients. send, receive: numbers of rows to and from each rank of
    the axis in the forward pass. buffer: the tensor that is being received. NCCL uses a CUDA stream of its own: until `wait`, no kernel may
    read or write `buffer`, or write the tensor that is being sent. `work` keeps both tensors in memory."""

    def __init__(self, axis: Axis, send: list[int], receive: list[int]) -> None:
        self.axis, self.send, self.receive = axis, send, receive
        self.buffer: Tensor | None = None
        self.work: Started | None = None

    def wait(self) -> None:
        assert self.work is not None
        self.work.wait()
        self.work = None

    def there(self, rows: Tensor) -> Tensor:
        """Start the forward pass's collective, and return the tensor that is being received."""
        self.work = _start_exchange(rows, self.axis, send=self.send, receive=self.receive)
        return self.work.result

    def back(self, grad: Tensor) -> Tensor:
        """Start the backward pass's collective of the rows' gradients, and return the tensor that is being received."""
        self.work = _start_exchange(grad, self.axis.backward(), send=self.receive, receive=self.send)
        return self.work.result


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, started: StartedRows) -> Tensor:
        ctx.started = started
        return started.there(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        ctx.started.wait()  # the values of `grad` are unused: the gradients that other ranks sent back are in the buffer
        received, ctx.started.buffer = ctx.started.buffer, None
        return received.to(grad.dtype), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Tensor, started: StartedRows) -> Tensor:
        ctx.started = started
        started.wait()
        return buffer.view_as(buffer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.started.buffer = ctx.started.back(grad)
        return grad, None


def start_all_to_all(rows: Tensor, axis: Axis, *, send: list[int], receive: list[int]) -> StartedRows:
    """Start an `all_to_all`, for which `finish_rows` waits. In the backward pass, the backward of `finish_rows` starts to send the rows'
    gradients back, and the backward of this function waits for them. All ranks must start and finish exchanges in the same order."""
    return begun(rows, StartedRows(axis, send, receive))


def begun(rows: Tensor, started: StartedRows) -> StartedRows:
    """Start the collective that `started` describes with these rows, as an operation that autograd records. Return `started`."""
    started.buffer = rows if started.axis.size == 1 else _Start.apply(rows, started)
    return started


def finish_rows(started: StartedRows) -> Tensor:
    """Wait for the rows [sum(receive), ...] and return them. The backward of this function starts to send the rows' gradients back."""
    buffer, started.buffer = started.buffer, None  # a buffer that `started` kept would keep its autograd graph alive
    assert buffer is not None
    out: Tensor = buffer if started.axis.size == 1 else _Finish.apply(buffer, started)
    return out
