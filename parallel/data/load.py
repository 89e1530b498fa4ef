"""Loads weights and optimizer states into an engine, a few MiB at a time, so that resuming needs no more memory than training.

load(name, kind, box) returns the values in a box (a slice for each dim) of this rank's shard of parameter `name`. kind: "weight", or the
name of an optimizer state, to read this state of the parameter instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.data.engine import Load, StateDims
from parallel.mesh.layout import Box

ELEMENTS_AT_ONCE = 2**22  # 16 MiB in fp32: larger reads are not faster on a disk


def given(states: Mapping[str, Mapping[str, Tensor]]) -> Load:
    """Return a Load that reads tensors in memory. states[parameter][kind]: a tensor; kind: "weight" or name of an optimizer state."""
    return lambda name, kind, box: states[name][kind][box]


@torch.no_grad()
def fill(into: Tensor, load: Callable[[Box], Tensor], *, start: Sequence[int] = ()) -> None:
    """Fill `into` from load(box), a few MiB at a time. start: index, in the tensor that `load` reads, of the first element of `into`; ():
    index 0 in every dim."""
    start = start or [0] * into.ndim
    for _, box in boxes(tuple(into.shape), 0, into.numel()):
        into[box].copy_(load(tuple(slice(at + part.start, at + part.stop) for at, part in zip(start, box, strict=True))))


@torch.no_grad()
def fill_run(into: Tensor, load: Callable[[Box], Tensor], *, shape: tuple[int, ...], first: int) -> None:
    """Fill the flat tensor `into` with consecutive elements, in row-major order, of a source tensor of shape `shape`. load(box) reads a box
    of the source. first: flat index in the source of the first element that is read."""
    for at, box in boxes(shape, first, first + into.numel()):
        part = load(box).reshape(-1)
        into.narrow(0, at - first, part.numel()).copy_(part)


def held_of(parameter: Tensor, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield ("weight", parameter), then (name, tensor) for each optimizer state that already exists, including step counters."""
    yield "weight", parameter.detach()
    for kind, kept in sorted(optimizer.state.get(parameter, {}).items()):
        if isinstance(kept, Tensor):
            yield kind, kept


def fill_stepped(
    parameter: nn.Parameter, optimizer: Optimizer, load: Callable[[str, Box], Tensor], *, kept: StateDims, steps: int, start: Sequence[int]
) -> None:
    """Fill a parameter of a torch optimizer with load("weight", box), and each of its optimizer states with load(state, box). `kept`: name
    of each state -> dim of the parameter over which the state is a mean; None: it has the parameter's shape. `start`: index, in
    the tensor that `load` reads, of the parameter's first element. `steps`: the optimizer's step counter."""
    fill(parameter.data, partial(load, "weight"), start=start)
    if not parameter.requires_grad:
        return  # frozen: it has no optimizer states
    state = optimizer.state[parameter]
    for kind, dim in kept.items():
        if kind not in state:
            state[kind] = parameter.new_empty(_shape(parameter, dim), requires_grad=False)
        fill(state[kind], partial(load, kind), start=[at for d, at in enumerate(start) if dim is None or d != dim % parameter.ndim])
    state["step"] = torch.tensor(float(steps), device=parameter.device)


def kept_of(parameter: nn.Parameter, optimizer: Optimizer, kept: StateDims) -> dict[str, Tensor]:
    """Return a dict: name -> tensor of the parameter's optimizer states; zeros for a state that does not exist yet. kept: name of
    each state -> dim of the parameter over which the state is a mean; None: it has the parameter's shape."""
    state = optimizer.state.get(parameter, {})
    return {kind: state[kind] if kind in state else parameter.new_zeros(_shape(parameter, dim)) for kind, dim in kept.items()}


def _shape(parameter: nn.Parameter, dim: int | None) -> list[int]:
    """Return the shape of an optimizer state: the parameter's shape, without `dim` if the state is a mean over it."""
    return [size for d, size in enumerate(parameter.shape) if dim is None or d != dim % parameter.ndim]


def boxes(shape: tuple[int, ...], first: int, end: int, *, at_once: int | None = None) -> Iterator[tuple[int, Box]]:
    """Cut elements [first, end) of a tensor, in row-major order, into boxes of at most `at_once` elements (None: ELEMENTS_AT_ONCE).
    Yield (flat index of the box's first element, box)."""
    at_once = ELEMENTS_AT_ONCE if at_once is None else at_once
    if not shape and first < end:
        yield 0, ()
        return
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]  # strides: elements from one index of a dim to the next
    while first < end:
        room = min(at_once, end - first)
        # the outermost dim along which a slice of size 1 can begin at `first` and has at most `room` elements
        dim = next(d for d, step in enumerate(steps) if first % step == 0 and step <= room)
        index = [first // step % size for step, size in zip(steps, shape, strict=True)]
        count = min(room // steps[dim], shape[dim] - index[dim])
        outer, whole = (slice(i, i + 1) for i in index[:dim]), (slice(0, size) for size in shape[dim + 1 :])
        yield first, (*outer, slice(index[dim], index[dim] + count), *whole)
        first += count * steps[dim]
