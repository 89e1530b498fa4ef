"""The program of all ranks: each rank's computation and communication, given the sharding of every tensor and the cuts of every operator.

    tensor --enter--> sharded as the operator reads it --its part--> result, perhaps partial sums --leave--> tensor      forward
    gradient <--sum-- partial sums <--gradients of the part-- <--gather--                    <-- gradient                backward

A factor is a letter of an operator's einsum rule: one dimension, in all tensors that have the letter (graph.py).
An operator with a cut of a factor that its output lacks gives partial sums. A gradient is a partial sum if a factor is cut that the input
lacks: the batch for a weight (data parallelism), hidden units for a network's input (Megatron-LM's f). resharding.py finds the steps:
partial sums become an all-reduce, or a reduce-scatter if the tensor is cut anyway. A tensor that several operators read with the same
sharding is communicated once, and their partial gradients are added before they are sent.

    seconds    3 FLOPs of the part / rate (1 forward, 2 backward)  +  for each step its latency and bytes / the axis's bandwidth
    bytes      weights with their states  +  the most activations and gradients at any moment of forward and backward pass

Sources: GSPMD (arXiv 2105.04663), section 4; Mesh-TensorFlow (arXiv 1811.02084), section 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

from parallel.annotations.graph import Graph, Operator
from parallel.annotations.resharding import Axes, Sharding, Sizes, Step, num_parts, reshard, sent_by

Cuts = Mapping[str, Axes]  # for one operator: letter of a factor (a dimension in its einsum rule) -> axes that cut it, major first
STATISTIC_BYTES = 8  # bytes of a statistic for one position: two numbers in fp32


class Conflict(NamedTuple):
    """Two shardings or cuts that exclude each other at `where`, a tensor or an operator: the one `kept`, the one that was possible
    `instead`, and the bytes that a rank sends in a step with each.
    """

    where: str
    kept: str
    instead: str
    kept_bytes: float
    instead_bytes: float

    def __str__(self) -> str:
        return f"{self.where}: {self.kept} ({self.kept_bytes:,.0f} bytes) rather than {self.instead} ({self.instead_bytes:,.0f} bytes)"


@dataclass(frozen=True)
class Work:
    """A rank's part of an operator. needs: sharding in which it reads each input. made: sharding of its result. gives: sharding of the
    gradient of each input; None: it has no gradient."""

    operator: Operator
    cuts: Cuts
    needs: tuple[Sharding, ...]
    made: Sharding
    gives: tuple[Sharding | None, ...]


class Move(NamedTuple):
    """A step of communication in the forward or backward pass. why: the tensor enters or leaves an operator, or the operator needs a
    statistic (such as a norm's mean square) over a dimension that is cut.
    """

    direction: Literal["forward", "backward"]
    tensor: str
    why: Literal["enter", "leave", "statistic"]
    step: Step

    def __str__(self) -> str:
        return f"{self.direction} {self.tensor} {self.why}: {self.step}"


@dataclass(frozen=True)
class Machine:
    """Rates of a machine. flops: operations a second of a rank. bandwidth: bytes a second that a rank sends, by axis or for all axes."""

    flops: float = 1e14
    bandwidth: Mapping[str, float] | float = 1e11
    latency_s: float = 1e-5

    def seconds(self, step: Step) -> float:
        if step.kind == "slice":
            return 0.0
        rate = self.bandwidth if isinstance(self.bandwidth, int | float) else self.bandwidth[step.axis]
        return self.latency_s + float(step.sent) / rate


@dataclass(frozen=True)
class Program:
    """The program of all ranks. shardings: of every tensor between operators. conflicts: choices that were made, with the rejected ones."""

    graph: Graph
    mesh: Sizes
    shardings: Mapping[str, Sharding]
    work: tuple[Work, ...]
    conflicts: tuple[Conflict, ...] = field(default=())

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """All changes of sharding between operators, in order: forward, then backward. Slices are included, though they send nothing."""
        return (*self._forward(), *self._backward())

    @property
    def collectives(self) -> tuple[Move, ...]:
        """Moves that send bytes."""
        return tuple(move for move in self.moves if move.step.sent)

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a step."""
        return float(sum(move.step.sent for move in self.moves))

    def seconds(self, machine: Machine) -> float:
        """Seconds of a step without any overlap."""
        computed = sum(flops(work, self.mesh) for work in self.work) / machine.flops
        return computed + sum(machine.seconds(move.step) for move in self.moves)

    def bytes(self, *, of_weight: float = 16) -> float:
        """Most bytes of a rank in a step. of_weight: bytes of a weight's element with its gradient and optimizer states."""
        graph = self.graph
        held = {name: size(graph, name, self.shardings[name], self.mesh) for name in self.shardings}
        weights = of_weight * sum(held[name] for name in graph.parameters)
        return weights + graph.itemsize * peak(graph, {name: held[name] for name in held if name not in graph.parameters})

    def _steps(self, held: Sharding, wanted: Sharding, tensor: str) -> tuple[Step, ...]:
        return reshard(held, wanted, shape(self.graph, tensor), self.mesh, itemsize=self.graph.itemsize)

    def _forward(self) -> Iterator[Move]:
        entered: set[tuple[str, Sharding]] = set()
        for work in self.work:
            op = work.operator
            for name, need in zip(op.inputs, work.needs, strict=True):
                if (name, need) not in entered:
                    entered.add((name, need))
                    yield from (Move("forward", name, "enter", step) for step in self._steps(self.shardings[name], need, name))
            yield from (Move("forward", op.name, "statistic", step) for step in statistics(self.graph, work, self.mesh))
            yield from (Move("forward", op.name, "leave", step) for step in self._steps(work.made, self.shardings[op.name], op.name))

    def _backward(self) -> Iterator[Move]:
        gives: dict[str, dict[Sharding, None]] = {}
        for work in reversed(self.work):
            op, whole = work.operator, Sharding(work.made.dims)
            yield from self._summed(op.name, gives)
            yield from (Move("backward", op.name, "leave", step) for step in self._steps(self.shardings[op.name], whole, op.name))
            if set(op.statistics) <= set(op.output):  # otherwise all ranks have the statistic's gradient, as for a loss
                yield from (Move("backward", op.name, "statistic", step) for step in statistics(self.graph, work, self.mesh))
            for name, given in zip(op.inputs, work.gives, strict=True):
                if given is not None:
                    gives.setdefault(name, {})[given] = None
        made = {work.operator.name for work in self.work}
        for name in gives:
            if name not in made:
                yield from self._summed(name, gives)

    def _summed(self, tensor: str, gives: Mapping[str, Iterable[Sharding]]) -> Iterator[Move]:
        for given in gives.get(tensor, ()):
            yield from (Move("backward", tensor, "enter", step) for step in self._steps(given, self.shardings[tensor], tensor))


def shape(graph: Graph, tensor: str) -> tuple[int, ...]:
    return tuple(graph.dims[letter].size for letter in graph.letters(tensor))


def size(graph: Graph, tensor: str, sharding: Sharding, mesh: Sizes) -> int:
    """Number of the tensor's elements on a rank."""
    return prod(sharding.local(shape(graph, tensor), mesh))


def tensors(graph: Graph) -> tuple[str, ...]:
    """Names of all inputs, parameters and operators' outputs."""
    return (*graph.inputs, *graph.parameters, *graph.named)


def indices(graph: Graph) -> frozenset[str]:
    """Inputs that are indices of rows or classes, and so have no gradient."""
    places = {"lookup": 0, "loss": 1}
    return frozenset(op.inputs[places[op.kind]] for op in graph.operators if op.kind in places) & frozenset(graph.inputs)


def needed(cuts: Cuts, letters: str) -> tuple[Axes, ...]:
    """Axes of each dim of a tensor with these letters, as an operator with these cuts reads or makes it."""
    return tuple(cuts.get(letter, ()) for letter in letters)


def shares(cuts: Cuts, letters: str, *, but: str = "") -> Axes:
    """Axes that cut factors which a tensor with these letters lacks: ranks along them have partial sums. but: factors that do not count."""
    return tuple(sorted(axis for letter, axes in cuts.items() if letter not in letters + but for axis in axes))


def work_of(op: Operator, cuts: Cuts, constant: frozenset[str]) -> Work:
    """A rank's part of an operator with these cuts. constant: tensors without gradients."""
    return Work(
        op,
        cuts,
        tuple(Sharding(needed(cuts, term)) for term in op.terms),
        Sharding(needed(cuts, op.output), shares(cuts, op.output, but=op.statistics)),
        tuple(
            None if name in constant else Sharding(needed(cuts, term), shares(cuts, term))
            for name, term in zip(op.inputs, op.terms, strict=True)
        ),
    )


def statistics(graph: Graph, work: Work, mesh: Sizes) -> Iterator[Step]:
    """Small all-reduces of an operator that needs a statistic over a cut factor, as a norm does."""
    op, cuts = work.operator, work.cuts
    places = prod(graph.dims[f].size // num_parts(cuts.get(f, ()), mesh) for f in op.factors if f not in op.statistics)
    for axis in (axis for f in op.statistics for axis in cuts.get(f, ())):
        yield Step("all_reduce", axis, None, None, sent_by("all_reduce", mesh[axis], places * STATISTIC_BYTES))


def flops(work: Work, mesh: Sizes) -> float:
    """Operations of a rank, forward and backward. The gradients of a product are two products."""
    return 3 * work.operator.flops / num_parts(tuple(axis for axes in work.cuts.values() for axis in axes), mesh)


def peak(graph: Graph, held: Mapping[str, float]) -> float:
    """Largest sum of all live tensors in a forward and backward pass. held: size of each tensor except parameters.

    An activation lives until the backward pass of the first operator that reads it, or of its own operator if that is later. Its gradient
    lives from the backward pass of the last reader to its own operator's.
    """
    change, steps = [0.0] * (2 * len(graph.operators) + 2), 2 * len(graph.operators)

    def lives(first: int, last: int, amount: float) -> None:
        change[first] += amount
        change[last + 1] -= amount

    number = {op.name: i for i, op in enumerate(graph.operators)}
    readers: dict[str, list[int]] = {}
    for i, op in enumerate(graph.operators):
        for name in op.inputs:
            readers.setdefault(name, []).append(i)
    for name, amount in held.items():
        made, read = number.get(name, 0), readers.get(name, [number.get(name, 0)])
        back = steps - 1 - (made if name in number else min(read))
        lives(made, back, amount)
        if name in number:
            lives(steps - 1 - max(read), back, amount)
    most = now = 0.0
    for amount in change:
        now += amount
        most = max(most, now)
    return most
