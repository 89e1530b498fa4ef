"""SPMD program of a graph: computation and communication of each rank, given the sharding of every tensor and every operator.

    forward     input --enter--> input as the operator reads it --compute--> result, perhaps partial sums --leave--> output
    backward    input's gradient <--enter-- perhaps partial sums <--compute-- result's gradient <--leave-- output's gradient

A tensor has one sharding between operators and may have another inside an operator. "enter": the collectives (resharding.py) from the
sharding between operators to the sharding inside; "leave": the reverse. A factor is a letter of an operator's einsum rule ("bld,df->blf").
A sharded factor that the output lacks makes the result partial sums. A sharded factor that an input lacks makes this input's gradient
partial sums. For example, a weight lacks the batch (data parallelism), and the input of a column-parallel layer lacks the hidden units (the
all-reduce f in Megatron-LM's backward pass). If several operators read a tensor with the same sharding, its "enter" runs once. Sources:
GSPMD (arXiv 2105.04663), section 4; Mesh-TensorFlow (arXiv 1811.02084), section 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

from parallel.annotations.graph import Graph, Operator
from parallel.annotations.resharding import Axes, Sharding, Sizes, Step, num_parts, reshard, sent_by

Cuts = Mapping[str, Axes]  # sharding of one operator: factor (a letter of its rule) -> mesh axes that shard it, major first
STATISTIC_BYTES = 8  # statistics of a norm or a loss for one position: two numbers in fp32


class Conflict(NamedTuple):
    """A choice between two shardings of one tensor or operator, of which only one is possible.
    where: name of the tensor or operator. kept: the chosen sharding. instead: the rejected one. kept_bytes, instead_bytes: bytes that a
    rank sends in a training step with the chosen and with the rejected sharding."""

    where: str
    kept: str
    instead: str
    kept_bytes: float
    instead_bytes: float

    def __str__(self) -> str:
        return f"{self.where}: {self.kept} ({self.kept_bytes:,.0f} bytes) rather than {self.instead} ({self.instead_bytes:,.0f} bytes)"


@dataclass(frozen=True)
class Work:
    """Sharding of one operator. cuts: factor (a letter) -> mesh axes that shard it. needs: for each input, the sharding in which the
    operator reads it. made: sharding of its result, perhaps partial sums.
    gives: for each input, the sharding of the gradient that the operator computes; None: the input has no gradient."""

    operator: Operator
    cuts: Cuts
    needs: tuple[Sharding, ...]
    made: Sharding
    gives: tuple[Sharding | None, ...]


class Communication(NamedTuple):
    """One step of communication in a program. why: "enter" or "leave" (top of this file), or the all-reduce of a "statistic", for example a
    norm's mean square. tensor: name of the tensor whose sharding changes; for a statistic, name of the operator."""

    direction: Literal["forward", "backward"]
    tensor: str
    why: Literal["enter", "leave", "statistic"]
    step: Step

    def __str__(self) -> str:
        return f"{self.direction} {self.tensor} {self.why}: {self.step}"


@dataclass(frozen=True)
class Machine:
    """Rates of a machine. flops: floating-point operations per second of a rank. bandwidth: bytes per second that a rank sends, as one
    number, or as mesh axis -> number. latency_s: seconds of each collective in addition to the time of its bytes."""

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
    """SPMD program of a graph. mesh: axis -> size. shardings: name of each tensor -> its sharding between operators. work: sharding of each
    operator, in order. conflicts: all cases in which one of two shardings was chosen and the other rejected."""

    graph: Graph
    mesh: Sizes
    shardings: Mapping[str, Sharding]
    work: tuple[Work, ...]
    conflicts: tuple[Conflict, ...] = field(default=())

    @cached_property
    def communication(self) -> tuple[Communication, ...]:
        """Return all steps of communication in order, forward and backward. Includes slices, which send nothing."""
        return (*self._forward(), *self._backward())

    @property
    def collectives(self) -> tuple[Communication, ...]:
        """Return the steps of communication that send bytes, which are all but slices."""
        return tuple(one for one in self.communication if one.step.sent)

    @property
    def sent(self) -> float:
        """Return the bytes that a rank sends in a training step."""
        return float(sum(one.step.sent for one in self.communication))

    def seconds(self, machine: Machine) -> float:
        """Return the predicted seconds of a training step, without overlap of computation and communication."""
        computed = sum(flops(work, self.mesh) for work in self.work) / machine.flops
        return computed + sum(machine.seconds(one.step) for one in self.communication)

    def bytes(self, *, of_weight: float = 16) -> float:
        """Return a rank's peak memory in bytes. of_weight: bytes of one element of a weight, with its gradient and optimizer states."""
        graph = self.graph
        held = {name: size(graph, name, self.shardings[name], self.mesh) for name in self.shardings}
        weights = of_weight * sum(held[name] for name in graph.parameters)
        return weights + graph.itemsize * peak(graph, {name: held[name] for name in held if name not in graph.parameters})

    def _steps(self, held: Sharding, wanted: Sharding, tensor: str) -> tuple[Step, ...]:
        return reshard(held, wanted, shape(self.graph, tensor), self.mesh, itemsize=self.graph.itemsize)

    def _forward(self) -> Iterator[Communication]:
        entered: set[tuple[str, Sharding]] = set()
        for work in self.work:
            op = work.operator
            for name, need in zip(op.inputs, work.needs, strict=True):
                if (name, need) not in entered:
                    entered.add((name, need))
                    yield from (Communication("forward", name, "enter", step) for step in self._steps(self.shardings[name], need, name))
            yield from (Communication("forward", op.name, "statistic", step) for step in statistics(self.graph, work, self.mesh))
            leave = self._steps(work.made, self.shardings[op.name], op.name)
            yield from (Communication("forward", op.name, "leave", step) for step in leave)

    def _backward(self) -> Iterator[Communication]:
        gives: dict[str, dict[Sharding, None]] = {}
        for work in reversed(self.work):
            op, whole = work.operator, Sharding(work.made.dims)
            yield from self._summed(op.name, gives)
            leave = self._steps(self.shardings[op.name], whole, op.name)
            yield from (Communication("backward", op.name, "leave", step) for step in leave)
            # A norm's ranks compute different parts of its output, so they all-reduce the gradients of its statistics. A loss's ranks
            # all compute the same loss from the statistics, so these gradients are equal already.
            if set(op.statistics) <= set(op.output):
                yield from (Communication("backward", op.name, "statistic", step) for step in statistics(self.graph, work, self.mesh))
            for name, given in zip(op.inputs, work.gives, strict=True):
                if given is not None:
                    gives.setdefault(name, {})[given] = None
        made = {work.operator.name for work in self.work}
        for name in gives:
            if name not in made:
                yield from self._summed(name, gives)

    def _summed(self, tensor: str, gives: Mapping[str, Iterable[Sharding]]) -> Iterator[Communication]:
        for given in gives.get(tensor, ()):
            yield from (Communication("backward", tensor, "enter", step) for step in self._steps(given, self.shardings[tensor], tensor))


def shape(graph: Graph, tensor: str) -> tuple[int, ...]:
    return tuple(graph.dims[letter].size for letter in graph.letters(tensor))


def size(graph: Graph, tensor: str, sharding: Sharding, mesh: Sizes) -> int:
    """Return the number of elements of a rank's shard of the tensor."""
    return prod(sharding.local(shape(graph, tensor), mesh))


def tensors(graph: Graph) -> tuple[str, ...]:
    """Return the names of all inputs, parameters and operators' outputs."""
    return (*graph.inputs, *graph.parameters, *graph.named)


def indices(graph: Graph) -> frozenset[str]:
    """Return the names of the graph's inputs that are integers (tokens of a lookup, targets of a loss), and so have no gradient."""
    position = {"lookup": 0, "loss": 1}
    return frozenset(op.inputs[position[op.kind]] for op in graph.operators if op.kind in position) & frozenset(graph.inputs)


def needed(cuts: Cuts, letters: str) -> tuple[Axes, ...]:
    """Return for each dim of a tensor with these letters the mesh axes that shard it inside an operator. cuts: the operator's sharding,
    factor (a letter) -> mesh axes."""
    return tuple(cuts.get(letter, ()) for letter in letters)


def shares(cuts: Cuts, letters: str, *, but: str = "") -> Axes:
    """Return the mesh axes over which a tensor with these letters has partial sums inside an operator: axes that shard a letter that the
    tensor lacks. cuts: letter of the operator -> mesh axes that shard it. but: letters to leave out."""
    return tuple(sorted(axis for letter, axes in cuts.items() if letter not in letters + but for axis in axes))


def work_of(op: Operator, cuts: Cuts, constant: frozenset[str]) -> Work:
    """Return the Work of an operator. cuts: factor (a letter) -> mesh axes that shard it. constant: names of tensors that have no
    gradient."""
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
    """Yield the all-reduces of an operator's statistics, such as a norm's mean: one for each mesh axis that shards a factor in
    `Operator.statistics`."""
    op, cuts = work.operator, work.cuts
    positions = prod(graph.dims[f].size // num_parts(cuts.get(f, ()), mesh) for f in op.factors if f not in op.statistics)
    for axis in (axis for f in op.statistics for axis in cuts.get(f, ())):
        yield Step("all_reduce", axis, None, None, sent_by("all_reduce", mesh[axis], positions * STATISTIC_BYTES))


def flops(work: Work, mesh: Sizes) -> float:
    """Return a rank's floating-point operations of an operator, forward and backward: three products, because the backward pass of a
    product computes two."""
    return 3 * work.operator.flops / num_parts(tuple(axis for axes in work.cuts.values() for axis in axes), mesh)


def peak(graph: Graph, held: Mapping[str, float]) -> float:
    """Return the peak total size of activations and their gradients in both passes. held: name -> size of each tensor except parameters.
    An activation is freed after the backward pass of the operator that computed it; an input, after its first reader's backward pass. The
    gradient of an activation exists from the backward pass of the activation's last reader until the activation is freed."""
    change, steps = [0.0] * (2 * len(graph.operators) + 2), 2 * len(graph.operators)

    def add(first: int, last: int, amount: float) -> None:
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
        add(made, back, amount)
        if name in number:
            add(steps - 1 - max(read), back, amount)
    most = now = 0.0
    for amount in change:
        now += amount
        most = max(most, now)
    return most
