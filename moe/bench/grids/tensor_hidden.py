"""How much of a collective of 1D tensor parallelism is not hidden behind a product, on a slowed link. Part of `moe bench tensor`.

    sum of a row product                    forward: the last of n chunks cannot be hidden                   1/n
    gather before column products           forward, with slices: nor can the first                          1/n
    sum, or with slices reduce-scatter,     backward: the weights' gradients come after its last chunk       0
    of the gradient of their input

Counted with a clock of its own, which advances with each product's operations and waits for a link that takes LINK of a product's time.
This count depends only on the order of the code, on any machine. Also timed, with the collective on the slowed link and without one, in
turn: the link takes LINK_S for all chunks together, less than any of the products takes.
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

from moe.bench.timing import in_turn
from parallel.mesh.collectives import Started
from parallel.mesh.mesh import Axis, Degrees
from parallel.process import process
from parallel.process.process import World
from parallel.tensor import overlapped

LINK = 0.75  # time of the link, as a share of a whole product's time
LINK_S = 0.04  # seconds; less than 3/4 of any product below
TOKENS, HIDDEN, WIDTH = 1024, 8192, 1024  # sizes; hidden units of all ranks
CHUNKS = (1, 2, 4)
Start = Callable[[Tensor, Axis], Started]


@dataclass(frozen=True)
class Pass:
    """One pass. `collective`: a function of parallel/tensor/overlapped.py; `run(axis, chunks)` runs the pass; `seen(n)`: the expected
    share of the collective's time that is not hidden.
    """

    name: str
    collective: str
    run: Callable[[Axis, int], None]
    seen: Callable[[int], float]


def seconds_of(rank: int, ranks: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each pass by the number of chunks: without its collective, with it, and with it on the slowed link."""
    axis = process.connect(Degrees(tp=ranks), World(rank, ranks)).axis("tp")
    work: dict[str, Callable[[], None]] = {}
    for one in PASSES:
        real: Start = getattr(overlapped, one.collective)
        for chunks in CHUNKS:
            work[f"{one.name} {chunks} alone"] = partial(_timed, one, axis, chunks, lambda: _nothing)
            work[f"{one.name} {chunks}"] = partial(_timed, one, axis, chunks, lambda real=real: real)  # type: ignore[misc]
            work[f"{one.name} {chunks} slowed"] = partial(_timed, one, axis, chunks, lambda real=real: _Link(real))  # type: ignore[misc]
    return in_turn(work, rounds=rounds, device=torch.device("cpu"), warmups=1)


def rows_of(seconds: dict[str, list[float]], *, ranks: int) -> list[dict[str, Any]]:
    """Print and return the rows."""
    rows = []
    for one in PASSES:
        for chunks in CHUNKS:
            pairs = zip(seconds[f"{one.name} {chunks} slowed"], seconds[f"{one.name} {chunks} alone"], strict=True)
            seen, took = statistics.median(slow - fast for slow, fast in pairs) / LINK_S, statistics.median(seconds[f"{one.name} {chunks}"])
            row: dict[str, Any] = {"race": f"{one.name} not hidden, {chunks} chunks", "ranks": ranks, "expected": one.seen(chunks)}
            row |= {"counted": counted(one, chunks, ranks=ranks), "measured": seen, "link_seconds": LINK_S, "seconds": took}
            rows.append(row)
            share = f"{row['counted']:.3f} counted, {seen:5.2f} of {LINK_S} s timed; {one.seen(chunks):.3f} expected"
            print(f"{row['race']:<52}{ranks} ranks {took:8.3f} s   {share}", flush=True)
    return rows


def counted(one: Pass, chunks: int, *, ranks: int) -> float:
    """The share of the collective's time for which the pass waits, by the order of its products and chunks alone. In one process."""
    axis, times = Axis("tp", tuple(range(ranks))), []
    links: dict[str, Any] = dict.fromkeys((other.collective for other in PASSES), _nothing)
    for link in (LINK, 0.0):
        clock = _Clock(TOKENS * WIDTH * (HIDDEN // ranks))
        with clock, patch.multiple(overlapped, **links | {one.collective: _CountedLink(clock, link)}):
            one.run(axis, chunks)
        times.append(clock.now)
    return (times[0] - times[1]) / LINK


class _Clock(TorchDispatchMode):
    """A clock that advances only with products; the unit is one product of `whole` multiplications."""

    def __init__(self, whole: int) -> None:
        super().__init__()
        self.whole, self.now = whole, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            self.now += args[-2].numel() * args[-1].shape[-1] / self.whole
        return out


class _CountedLink:
    """Like `_Link`, but with the clock."""

    def __init__(self, clock: _Clock, seconds: float) -> None:
        self.clock, self.seconds, self.free_at = clock, seconds, 0.0

    def __call__(self, tensor: Tensor, axis: Axis) -> Started:
        self.free_at = max(self.free_at, self.clock.now) + self.seconds * tensor.numel() / _whole(tensor, axis)
        return _Counted(_nothing(tensor, axis), self.clock, self.free_at)


class _Counted(Started):
    def __init__(self, started: Started, clock: _Clock, there_at: float) -> None:
        self.started, self.clock, self.there_at = started, clock, there_at

    def wait(self) -> Tensor:
        self.clock.now = max(self.clock.now, self.there_at)
        return self.started.wait()


def _timed(one: Pass, axis: Axis, chunks: int, start: Callable[[], Start]) -> None:
    dist.barrier()
    with patch.object(overlapped, one.collective, start()):
        one.run(axis, chunks)


class _Link:
    """A slowed link: the chunks of one collective are sent one after another, each for its share of LINK_S."""

    def __init__(self, real: Start) -> None:
        self.real, self.free_at = real, 0.0

    def __call__(self, tensor: Tensor, axis: Axis) -> Started:
        self.free_at = max(self.free_at, time.perf_counter()) + LINK_S * tensor.numel() / _whole(tensor, axis)
        return _Slowed(self.real(tensor, axis), self.free_at)


class _Slowed(Started):
    def __init__(self, started: Started, there_at: float) -> None:
        self.started, self.there_at = started, there_at

    def wait(self) -> Tensor:
        time.sleep(max(0.0, self.there_at - time.perf_counter()))
        return self.started.wait()


def _whole(tensor: Tensor, axis: Axis) -> int:
    """The number of elements of all chunks together."""
    return TOKENS * WIDTH // (axis.size if _is_slice(tensor) else 1)


def _is_slice(tensor: Tensor) -> bool:
    """Whether this is a gather's input [1, B, n, I]. A reduce-scatter gets [R, B, n, I], a sum [T, I]."""
    return tensor.ndim == 4 and len(tensor) == 1


def _nothing(tensor: Tensor, axis: Axis) -> Started:
    """A result of the right shape without communication: a gather repeats its own slice, a reduce-scatter takes its first part."""
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
