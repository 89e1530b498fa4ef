"""State into an engine, a few MiB at a time, so that what resumes needs no more memory than what trains.

load(name, kind, box)        a box of one parameter's tensor, as its layout has it on this rank, from wherever it lies
fill(into, ...)              a tensor, box by box: what a rank holds whole (DDP), or cut along a dim (FSDP)
fill_run(into, ...)          a run of a tensor's elements in row-major order: what a rank has of it in a flat partition (ZeRO)
fill_stepped(parameter, ...) a parameter that torch's optimizer steps, and its state
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from parallel.data.engine import Kept, Load
from parallel.layout import Box

ELEMENTS_AT_ONCE = 2**22  # 16 MiB in fp32: a disk is as fast with it as with more


def given(states: Mapping[str, Mapping[str, Tensor]]) -> Load:
    """From tensors that are in memory."""
    return lambda name, kind, box: states[name][kind][box]


@torch.no_grad()
def fill(into: Tensor, load: Callable[[Box], Tensor], *, start: Sequence[int] = ()) -> None:
    """Every element of a tensor, which stands at `start` in what `load` reads from (nothing: at its beginning)."""
    start = start or [0] * into.ndim
    for _, box in boxes(tuple(into.shape), 0, into.numel()):
        into[box].copy_(load(tuple(slice(at + part.start, at + part.stop) for at, part in zip(start, box, strict=True))))


@torch.no_grad()
def fill_run(into: Tensor, load: Callable[[Box], Tensor], *, shape: tuple[int, ...], first: int) -> None:
    """A flat tensor: elements `first` and following of a tensor of this shape."""
    for at, box in boxes(shape, first, first + into.numel()):
        part = load(box).reshape(-1)
        into.narrow(0, at - first, part.numel()).copy_(part)


def held_of(parameter: Tensor, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """(kind, tensor) of a parameter that torch's optimizer steps: the weight, and everything kept of it so far, counters too."""
    yield "weight", parameter.detach()
    for kind, kept in sorted(optimizer.state.get(parameter, {}).items()):
        if isinstance(kept, Tensor):
            yield kind, kept


def fill_stepped(
    parameter: nn.Parameter,
    optimizer: torch.optim.Optimizer,
    load: Callable[[str, Box], Tensor],
    *,
    kept: Kept,
    steps: int,
    start: Sequence[int] = (),
) -> None:
    """New values for a parameter and what its optimizer keeps of it, which stand at `start` in what `load` reads from."""
    fill(parameter.data, partial(load, "weight"), start=start)
    if not parameter.requires_grad:
        return  # frozen: no optimizer has it
    state = optimizer.state[parameter]
    for kind, dim in kept.items():
        if kind not in state:
            state[kind] = parameter.new_empty(_shape(parameter, dim), requires_grad=False)
        fill(state[kind], partial(load, kind), start=start)
    state["step"] = torch.tensor(float(steps), device=parameter.device)


def kept_of(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, kept: Kept) -> dict[str, Tensor]:
    """What the optimizer keeps of a parameter; zeros before its first step."""
    state = optimizer.state.get(parameter, {})
    return {kind: state[kind] if kind in state else parameter.new_zeros(_shape(parameter, dim)) for kind, dim in kept.items()}


def _shape(parameter: nn.Parameter, dim: int | None) -> list[int]:
    """The parameter's, or of a mean over a dim."""
    return [size for d, size in enumerate(parameter.shape) if dim is None or d != dim % parameter.ndim]


def boxes(shape: tuple[int, ...], first: int, end: int, *, at_once: int | None = None) -> Iterator[tuple[int, Box]]:
    """A run of a tensor's elements, in row-major order, as boxes of at most `at_once` elements: (number of its first one, box)."""
    at_once = ELEMENTS_AT_ONCE if at_once is None else at_once
    if not shape and first < end:
        yield 0, ()
        return
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]  # elements from one index to the next
    while first < end:
        room = min(at_once, end - first)
        # the outermost dim of which whole indices fit, from where the run stands
        dim = next(d for d, step in enumerate(steps) if first % step == 0 and step <= room)
        index = [first // step % size for step, size in zip(steps, shape, strict=True)]
        count = min(room // steps[dim], shape[dim] - index[dim])
        walked, whole = (slice(i, i + 1) for i in index[:dim]), (slice(0, size) for size in shape[dim + 1 :])
        yield first, (*walked, slice(index[dim], index[dim] + count), *whole)
        first += count * steps[dim]
