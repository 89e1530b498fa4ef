"""Measures which part of messages' time does not overlap with computation: collectives of 1D tensor parallelism, hops of a zigzag ring.

    collective, in n chunks                                                   pass       exposed: not overlapped
    all-reduce after a row-parallel product                                   forward    1/n: the last chunk
    all-gather before column-parallel products (sequence parallelism)         forward    1/n: the first chunk
    all-reduce of the gradient of a column-parallel input                     backward   0: weight gradients are computed meanwhile
    reduce-scatter of this gradient (sequence parallelism)                    backward   0: likewise

`counted`: simulated in one process. Only matrix products advance the clock, and a collective takes LINK of a product's time, so the result
is the same on any machine. `measured`: seconds on ranks, with collectives slowed to LINK_S minus without collectives, run in turn.
A ring of N ranks has 3N - 2 hops, slowed to HOP_S; only the last, with gradients, has no computation left to hide it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe.bench.timing import in_turn, slowest
from moe.launch import exit_codes
from moe.records.results import write_json
from parallel.mesh.collectives import Messages, Started, start_shift
from parallel.mesh.mesh import Axis, Degrees
from parallel.process import process
from parallel.process.fork import run_on_ranks
from parallel.sequence import ring
from parallel.sequence.order import Order
from parallel.sequence.ring import Ring
from parallel.tensor import overlapped

LINK = 0.75  # `counted`: simulated time of a whole collective, if one product takes 1
HOP_S = 0.02  # least seconds of a slowed hop; attention to one block of keys takes longer
LINK_S = 0.04  # `measured`: least seconds of a whole collective, shorter than any product below
TOKENS, HIDDEN, WIDTH = 1024, 8192, 1024  # sizes of the products; HIDDEN is summed over ranks
CHUNKS = (1, 2, 4)
HOPS_LENGTH = 2048  # tokens of a sequence
Start = Callable[[Tensor, Axis], Started]


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass with one collective, which the function `collective` of parallel/tensor/overlapped.py starts. run(axis,
    chunks): runs it; expected(chunks): exposed part.
    """

    name: str
    collective: str
    run: Callable[[Axis, int], None]
    expected: Callable[[int], float]


def main(*, nproc: int = 2, rounds: int = 15, json: str | None = None) -> int:
    """Prints the exposed parts, as shares of a collective and as a number of hops."""
    torch.set_num_threads(1)
    rows = rows_of(slowest(run_on_ranks(seconds_of, nproc, nproc, rounds, timeout_s=600)), ranks=nproc)
    times = slowest(run_on_ranks(hops_seconds, nproc, nproc, rounds, timeout_s=600))
    seen, hops = statistics.median(slow - fast for slow, fast in zip(times["slowed"], times["zigzag"], strict=True)) / HOP_S, 3 * nproc - 2
    rows.append({"race": "hops not hidden", "ranks": nproc, "hops": hops, "expected": 1, "measured": seen, "link_seconds": HOP_S})
    print(f"{'hops not hidden':<36}{nproc} ranks {seen:8.2f} of {hops}, each {HOP_S} s; expected 1 (the last one)", flush=True)
    if json:
        write_json(json, verb="measured hidden", rows=rows, rounds=rounds)
    return exit_codes.DONE


def hops_seconds(rank: int, ranks: int, rounds: int) -> dict[str, list[float]]:
    """Time zigzag attention, forward and backward. Return "zigzag" and "slowed" (each hop takes HOP_S) -> seconds of each round."""
    axis = process.connect(Degrees(sp=ranks), process.World(rank, ranks)).axis("sp")
    q, k, v = (torch.randn(1, heads, HOPS_LENGTH // ranks, 64).requires_grad_() for heads in (8, 4, 4))

    def zigzag() -> None:
        dist.barrier()
        Ring(axis, Order("zigzag", ranks, HOPS_LENGTH))(q, k, v).sum().backward()

    def slowed() -> None:
        with patch.object(ring, "start_shift", _slowed_shift):
            zigzag()

    return in_turn({"zigzag": zigzag, "slowed": slowed}, rounds=rounds, warmups=1)


class _Late(Messages):
    """Messages that arrive at least HOP_S seconds after they were sent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()
        super().__init__(*args, **kwargs)

    def wait(self) -> list[Tensor]:
        time.sleep(max(0.0, self.began + HOP_S - time.perf_counter()))
        return super().wait()


def _slowed_shift(tensors: list[Tensor], axis: Axis, *, steps: int = 1) -> Messages:
    with patch("parallel.mesh.collectives.Messages", _Late):
        return start_shift(tensors, axis, steps=steps)


def seconds_of(rank: int, ranks: int, rounds: int) -> dict[str, list[float]]:
    """Time every pass with each number of chunks. Return "PASS CHUNKS" -> seconds of each round, also with " alone" (without the
    collective) and with " slowed" (the collective takes LINK_S).
    """
    axis = process.connect(Degrees(tp=ranks), process.World(rank, ranks)).axis("tp")
    work: dict[str, Callable[[], None]] = {}
    for one in PASSES:
        real: Start = getattr(overlapped, one.collective)
        for chunks in CHUNKS:
            work[f"{one.name} {chunks} alone"] = partial(_run, one, axis, chunks, _nothing)
            work[f"{one.name} {chunks}"] = partial(_run, one, axis, chunks, real)
            work[f"{one.name} {chunks} slowed"] = partial(_run, one, axis, chunks, real, slowed=True)
    return in_turn(work, rounds=rounds, warmups=1)


def _run(one: Pass, axis: Axis, chunks: int, start: Start, *, slowed: bool = False) -> None:
    dist.barrier()
    with patch.object(overlapped, one.collective, _Link(start, LINK_S, _WallClock()) if slowed else start):
        one.run(axis, chunks)


def rows_of(seconds: dict[str, list[float]], *, ranks: int) -> list[dict[str, Any]]:
    """Print and return a table row for each pass and number of chunks. seconds: what `seconds_of` returns, of the slowest rank."""
    rows = []
    for one in PASSES:
        for chunks in CHUNKS:
            pairs = zip(seconds[f"{one.name} {chunks} slowed"], seconds[f"{one.name} {chunks} alone"], strict=True)
            seen, took = statistics.median(slow - fast for slow, fast in pairs) / LINK_S, statistics.median(seconds[f"{one.name} {chunks}"])
            row: dict[str, Any] = {"race": f"{one.name} not hidden, {chunks} chunks", "ranks": ranks, "expected": one.expected(chunks)}
            row |= {"counted": _counted(one, chunks, ranks=ranks), "measured": seen, "link_seconds": LINK_S, "seconds": took}
            rows.append(row)
            share = f"{row['counted']:.3f} counted, {seen:5.2f} of {LINK_S} s timed; {row['expected']:.3f} expected"
            print(f"{row['race']:<52}{ranks} ranks {took:8.3f} s   {share}", flush=True)
    return rows


def _counted(one: Pass, chunks: int, *, ranks: int) -> float:
    """Simulate the pass in one process. Return the exposed part of the collective's time."""
    axis, times = Axis("tp", tuple(range(ranks))), []
    links: dict[str, Any] = dict.fromkeys((other.collective for other in PASSES), _nothing)
    for seconds in (LINK, 0.0):
        clock = _ProductClock(TOKENS * WIDTH * (HIDDEN // ranks))
        with clock, patch.multiple(overlapped, **links | {one.collective: _Link(_nothing, seconds, clock)}):
            one.run(axis, chunks)
        times.append(clock.now())
    return (times[0] - times[1]) / LINK


class _WallClock:
    now = staticmethod(time.perf_counter)

    def wait_until(self, when: float) -> None:
        time.sleep(max(0.0, when - time.perf_counter()))


class _ProductClock(TorchDispatchMode):
    """A simulated clock that only matrix products advance: by 1 for `whole` multiplications."""

    def __init__(self, whole: int) -> None:
        super().__init__()
        self.whole, self.time = whole, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            self.time += args[-2].numel() * args[-1].shape[-1] / self.whole
        return out

    def now(self) -> float:
        return self.time

    def wait_until(self, when: float) -> None:
        self.time = max(self.time, when)


class _Link:
    """Replaces a function that starts a collective. Chunks finish one after another; all chunks of a collective together take `seconds`."""

    def __init__(self, start: Start, seconds: float, clock: _WallClock | _ProductClock) -> None:
        self.start, self.seconds, self.clock, self.free_at = start, seconds, clock, 0.0

    def __call__(self, tensor: Tensor, axis: Axis) -> Started:
        whole = TOKENS * WIDTH // (axis.size if _is_slice(tensor) else 1)  # elements of all chunks together
        self.free_at = max(self.free_at, self.clock.now()) + self.seconds * tensor.numel() / whole
        return _Slowed(self.start(tensor, axis), self.clock, self.free_at)


class _Slowed(Started):
    def __init__(self, started: Started, clock: _WallClock | _ProductClock, done_at: float) -> None:
        self.started, self.clock, self.done_at = started, clock, done_at

    def wait(self) -> Tensor:
        self.clock.wait_until(self.done_at)
        return self.started.wait()


def _is_slice(tensor: Tensor) -> bool:
    """Whether the tensor is the input of an all-gather, [1, B, n, I]. A reduce-scatter gets [ranks, B, n, I], an all-reduce [T, I]."""
    return tensor.ndim == 4 and len(tensor) == 1


def _nothing(tensor: Tensor, axis: Axis) -> Started:
    """Replace a collective, without sending: an all-gather repeats this rank's slice, a reduce-scatter returns slice 0 of its input."""
    if _is_slice(tensor):
        return Started(tensor.expand(axis.size, *tensor.shape[1:]), None)
    return Started(tensor[:1] if tensor.ndim == 4 else tensor, None)


def _row(axis: Axis, chunks: int) -> None:
    h, weight = torch.ones(1, TOKENS, HIDDEN // axis.size), torch.ones(WIDTH, HIDDEN // axis.size)
    overlapped.row_product(h, weight, axis=axis, chunks=chunks, sliced=False)


def _columns(axis: Axis, chunks: int, *, sliced: bool, backward: bool) -> None:
    x = torch.ones(1, TOKENS // (axis.size if sliced else 1), WIDTH, requires_grad=backward)
    weight = torch.ones(HIDDEN // axis.size, WIDTH, requires_grad=backward)
    (y,) = overlapped.column_products(x, [weight], axis=axis, chunks=chunks, sliced=sliced)
    if backward:
        y.backward(torch.ones_like(y))


PASSES = (
    Pass("sum of a row product", "start_sum", _row, lambda n: 1 / n),
    Pass("gather before columns", "start_gather", partial(_columns, sliced=True, backward=False), lambda n: 1 / n),
    Pass("sum of their input's gradient", "start_sum", partial(_columns, sliced=False, backward=True), lambda n: 0.0),
    Pass("its reduce-scatter", "start_scatter_sum", partial(_columns, sliced=True, backward=True), lambda n: 0.0),
)
