"""The program of all ranks: each rank's computation and communication, given the sharding of every tensor and the cuts of every operator.

    forward     tensor --enter--> sharded as the operator reads it --compute--> result, perhaps partial sums --leave--> tensor
    backward    gradient <--enter-- partial sums <--compute-- whole gradient of the result <--leave-- gradient of the tensor

"enter" and "leave" are communication: the steps from the sharding of the tensor between operators to that in the operator, or back.
A factor is a letter of an operator's einsum rule: one dimension, in all tensors that have the letter (graph.py). A cut of a factor that
the output lacks makes the result partial sums. A cut of a factor that an input lacks makes this input's gradient partial sums: the batch
for a weight (data parallelism), hidden units for a network's input (Megatron-LM's f). resharding.py finds the steps: partial sums become an
all-reduce, or a reduce-scatter if the tensor is cut anyway. A tensor that several operators read with the same sharding is communicated
once, and their partial gradients are added before they are sent.

    seconds    3 FLOPs of a rank / rate (1 forward, 2 backward)  +  for each step its latency and bytes / the axis's bandwidth
    bytes      weights with their states  +  the most activations and gradients at any time in forward and backward pass

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

Cuts = Mapping[str, Axes]  # for one operator: letter of a factor -> mesh axes that cut it, major first
STATISTIC_BYTES = 8  # bytes of a norm's or a loss's statistics for one position: two numbers in fp32


class Conflict(NamedTuple):
    """A decision between two shardings of a tensor, or two cuts of an operator, that exclude each other.

    where: name of the tensor or operator. kept, instead: the chosen one and the rejected one. kept_bytes, instead_bytes: bytes that a rank
    sends in a training step with each.
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
    """How ranks share an operator. cuts: of its factors. needs: sharding in which it reads each input. made: sharding of its result.
    gives: sharding of each input's gradient; None: the input has no gradient.
    """

    operator: Operator
    cuts: Cuts
    needs: tuple[Sharding, ...]
    made: Sharding
    gives: tuple[Sharding | None, ...]


class Move(NamedTuple):
    """A step of communication. why: "enter" or "leave" (top of this file), or a "statistic" of a cut dimension, as a norm's mean square.

    tensor: the one that changes its sharding; for a statistic, the operator.
    """

    direction: Literal["forward", "backward"]
    tensor: str
    why: Literal["enter", "leave", "statistic"]
    step: Step

    def __str__(self) -> str:
        return f"{self.direction} {self.tensor} {self.why}: {self.step}"


@dataclass(frozen=True)
class Machine:
    """Rates of a machine. flops: operations a second of a rank. bandwidth: bytes a second that a rank sends, by axis or for all axes.

    latency_s: seconds that each collective takes in addition to its bytes.
    """

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
    """The program of all ranks. mesh: axis -> size. shardings: of every tensor between operators. work: of every operator, in order.
    conflicts: decisions by which the shardings were found.
    """

    graph: Graph
    mesh: Sizes
    shardings: Mapping[str, Sharding]
    work: tuple[Work, ...]
    conflicts: tuple[Conflict, ...] = field(default=())

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """Return all steps of communication in order: forward, then backward. Slices are included, though they send nothing."""
        return (*self._forward(), *self._backward())

    @property
    def collectives(self) -> tuple[Move, ...]:
        """Return the steps of communication that send bytes: all `moves` but slices."""
        return tuple(move for move in self.moves if move.step.sent)

    @property
    def sent(self) -> float:
        """Return the bytes that a rank sends in a training step."""
        return float(sum(move.step.sent for move in self.moves))

    def seconds(self, machine: Machine) -> float:
        """Return the seconds of a training step without any overlap."""
        computed = sum(flops(work, self.mesh) for work in self.work) / machine.flops
        return computed + sum(machine.seconds(move.step) for move in self.moves)

    def bytes(self, *, of_weight: float = 16) -> float:
        """Return a rank's peak memory in bytes. of_weight: bytes of a weight's element with its gradient and optimizer states."""
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
            if set(op.statistics) <= set(op.output):  # a norm; after a loss, all ranks have the statistic's gradient
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
    """Return the number of the tensor's elements on a rank."""
    return prod(sharding.local(shape(graph, tensor), mesh))


def tensors(graph: Graph) -> tuple[str, ...]:
    """Return the names of all inputs, parameters and operators' outputs."""
    return (*graph.inputs, *graph.parameters, *graph.named)


def indices(graph: Graph) -> frozenset[str]:
    """Return the inputs that are indices of rows or classes, and so have no gradient."""
    places = {"lookup": 0, "loss": 1}
    return frozenset(op.inputs[places[op.kind]] for op in graph.operators if op.kind in places) & frozenset(graph.inputs)


def needed(cuts: Cuts, letters: str) -> tuple[Axes, ...]:
    """Return, for each dim of a tensor with these letters, the axes that cut it inside an operator with these cuts."""
    return tuple(cuts.get(letter, ()) for letter in letters)


def shares(cuts: Cuts, letters: str, *, but: str = "") -> Axes:
    """Return the axes along which a tensor with these letters is partial sums: those that cut factors neither in it nor in `but`."""
    return tuple(sorted(axis for letter, axes in cuts.items() if letter not in letters + but for axis in axes))


def work_of(op: Operator, cuts: Cuts, constant: frozenset[str]) -> Work:
    """Return the Work of an operator with these cuts. constant: names of tensors without gradients."""
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
    """Yield the all-reduces of an operator's statistics, one for each axis that cuts a factor which they cover."""
    op, cuts = work.operator, work.cuts
    places = prod(graph.dims[f].size // num_parts(cuts.get(f, ()), mesh) for f in op.factors if f not in op.statistics)
    for axis in (axis for f in op.statistics for axis in cuts.get(f, ())):
        yield Step("all_reduce", axis, None, None, sent_by("all_reduce", mesh[axis], places * STATISTIC_BYTES))


def flops(work: Work, mesh: Sizes) -> float:
    """Return a rank's floating-point operations, forward and backward. The gradients of a product are two products."""
    return 3 * work.operator.flops / num_parts(tuple(axis for axes in work.cuts.values() for axis in axes), mesh)


def peak(graph: Graph, held: Mapping[str, float]) -> float:
    """Return the largest sum of all live tensors in a forward and backward pass. held: name -> size of each tensor except parameters.

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
