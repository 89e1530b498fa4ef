"""Strategies to cut one operator over a mesh of devices, with their costs, from which the searches choose.

    a strategy     for each axis of the mesh the dim that it cuts, as a letter of the operator's einsum rule; without a letter, all ranks
                   along the axis do the same work
    State          sharding of a tensor: for each axis the index of the cut dim, WHOLE, or LATER (whole, but its gradient is a partial sum)

    w2 "blf,fd->bld" cut by (b, f): reads x with the sharding (0, 2) and its matrix with (LATER, 0), and gives partial sums over the
    second axis. An all-reduce gives the sharding (0, WHOLE). A reduce-scatter over l gives (0, 1), as in Megatron-LM's sequence parallelism

Costs are for one micro-batch, forward and backward. If an axis cuts a dim that an input does not have, each rank has a partial sum of this
input's gradient. Gradients of parameters are summed once a step, gradients of activations whenever the sharding changes (`change`). The
strategies are Alpa's (arXiv 2201.12023, section 4.2), with reduce-scatters and sharded optimizer states added. Here they are derived from
the operator's rule instead of listed by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import inf, prod
from typing import Literal

from moe.plan.job.states import MIXED_FP32_GRADIENTS, Storage, model_states
from moe.plan.operators.links import Mesh
from parallel.annotations.graph import Graph, Operator

WHOLE, LATER = -1, -2
AGAIN = 4 / 3  # seconds of a layer with recomputation / without it: the forward pass, a third of the seconds, runs twice
State = tuple[int, ...]
Sharded = Literal[0, 1, 3]  # ZeRO stage


@dataclass(frozen=True)
class Strategy:
    """Strategy of one operator on a mesh, with its costs. cut: letter of the dim that each mesh axis cuts, "" for none. scatter: for each
    axis the letter of the dim over which partial sums are reduce-scattered; "": they are all-reduced. sharded: ZeRO stage. state_bytes:
    bytes of model states: parameters, gradients, optimizer states. reads: sharding of each input. gives: sharding of the output."""

    cut: tuple[str, ...]
    scatter: tuple[str, ...]
    sharded: Sharded
    seconds: float
    state_bytes: float
    output_bytes: float
    reads: tuple[State, ...]
    gives: State


@dataclass(frozen=True)
class Settings:
    """Settings of a search. microbatches: number of micro-batches in a step; parameters' gradients are summed over ranks after the last.
    storage: bytes of a parameter, its gradient and its optimizer states. gradient_bytes: bytes of an element of a sent gradient. sharded:
    ZeRO stages that may be chosen."""

    microbatches: int = 1
    storage: Storage = MIXED_FP32_GRADIENTS
    gradient_bytes: int = 2
    sharded: tuple[Sharded, ...] = (0,)


def strategies(op: Operator, graph: Graph, mesh: Mesh, settings: Settings) -> tuple[Strategy, ...]:
    """Return the strategies of an operator. Of strategies that read and give equal shardings, keep the best trade-offs between time and
    memory (`_unbeaten`)."""
    found: dict[tuple[tuple[State, ...], State], list[Strategy]] = {}
    free = ["", *(letter for letter in op.factors if letter not in op.whole)]
    for cut in product(free, repeat=len(mesh.sizes)):
        if not all(size > 1 or letter == "" for letter, size in zip(cut, mesh.sizes, strict=True)) or not divides(graph, mesh, cut):
            continue
        for scatter in product(*(_scatters(op, letter) for letter in cut)):
            for sharded in settings.sharded:
                made = strategy(op, graph, mesh, settings, cut=cut, scatter=scatter, sharded=sharded)
                if made is not None:
                    found.setdefault((made.reads, made.gives), []).append(made)
    return tuple(s for group in found.values() for s in _unbeaten(group))


def divides(graph: Graph, mesh: Mesh, cut: Sequence[str]) -> bool:
    """Return whether every cut dim's size is a multiple of the number of ranks over which it is cut."""
    return all(graph.dims[a].size % prod(n for b, n in zip(cut, mesh.sizes, strict=True) if a == b) == 0 for a in set(cut) if a)


def _scatters(op: Operator, letter: str) -> tuple[str, ...]:
    """Return the values that `Strategy.scatter` may have for a mesh axis that cuts the dim `letter` ("": none). If the output is then a
    partial sum: "" (all-reduce) and each dim of the output (reduce-scatter). Otherwise: only ""."""
    partial = letter in op.summed and letter not in op.statistics
    return ("", *op.output) if letter and partial else ("",)


def _unbeaten(group: list[Strategy]) -> list[Strategy]:
    """Drop every strategy that another one matches or beats in both seconds and bytes of model states."""
    kept: list[Strategy] = []
    for s in sorted(group, key=lambda s: (s.seconds, s.state_bytes)):
        if not kept or s.state_bytes < kept[-1].state_bytes:
            kept.append(s)
    return kept


def strategy(
    op: Operator, graph: Graph, mesh: Mesh, settings: Settings, *, cut: tuple[str, ...], scatter: tuple[str, ...], sharded: Sharded
) -> Strategy | None:
    """Return a strategy with its costs; None if the mesh does not divide a size. cut: letter of the dim that each mesh axis cuts, or "".
    scatter: letter of the dim over which each axis reduce-scatters partial sums, or "". sharded: ZeRO stage."""
    last = [letter if letter in op.output else to for letter, to in zip(cut, scatter, strict=True)]
    gives = tuple(_place(op.output, letter) for letter in last)
    reads = tuple(tuple(_place(term, a) if not a or a in term else LATER for a in cut) for term in op.terms)
    if not divides(graph, mesh, cut) or not divides(graph, mesh, last):
        return None
    seconds = _work(op, graph, mesh, cut) + _sums(op, graph, mesh, cut, scatter)
    state_bytes = 0.0
    for name, term in zip(op.inputs, op.terms, strict=True):
        if name in graph.parameters:
            sent, held = _parameter(graph.size(term), term, mesh, settings, cut, sharded)
            seconds, state_bytes = seconds + sent / graph.readers_of[name], state_bytes + held / graph.readers_of[name]
    output = graph.size(op.output) * graph.itemsize / _ways(op.output, last, mesh)
    return Strategy(cut, scatter, sharded, seconds, state_bytes, output, reads, gives)


def _place(term: str, letter: str) -> int:
    """Return the index of the dim `letter` among the dims `term`; WHOLE if it is not one of them."""
    return term.index(letter) if letter and letter in term else WHOLE


def _ways(term: str, cut: Sequence[str], mesh: Mesh) -> int:
    """Return the number of shards into which `cut` divides a tensor with the dims `term`."""
    return prod(n for letter, n in zip(cut, mesh.sizes, strict=True) if letter and letter in term)


def _work(op: Operator, graph: Graph, mesh: Mesh, cut: Sequence[str]) -> float:
    """Return the seconds of a rank's part of the work. The backward pass takes twice as long as the forward pass. Each tensor is read or
    written once. cut: as in `strategy`."""
    moved = sum(graph.size(term) / _ways(term, cut, mesh) for term in (*op.terms, op.output)) * graph.itemsize
    return mesh.work(op.flops / _ways(op.factors, cut, mesh), moved) * 3


def _sums(op: Operator, graph: Graph, mesh: Mesh, cut: Sequence[str], scatter: Sequence[str]) -> float:
    """Return the seconds of collectives that sum the operator's partial results, and that gather the gradient of a scattered result. cut,
    scatter: as in `strategy`."""
    held, seconds = graph.size(op.output) * graph.itemsize / _ways(op.output, cut, mesh), 0.0
    for axis, (letter, to) in enumerate(zip(cut, scatter, strict=True)):
        if not letter:
            continue
        if letter in op.statistics:  # partial sums of a norm or a loss, in fp32
            rest = "".join(a for a in op.output if a not in op.statistics)
            seconds += 2 * mesh.all_reduce(graph.size(rest) * 4 / _ways(rest, cut, mesh), axis)
        elif letter in op.summed and to:
            seconds += mesh.reduce_scatter(held, axis) + mesh.all_gather(held, axis)
            held /= mesh.sizes[axis]
        elif letter in op.summed:
            seconds += mesh.all_reduce(held, axis)
    return seconds


def _parameter(size: float, term: str, mesh: Mesh, settings: Settings, cut: Sequence[str], sharded: Sharded) -> tuple[float, float]:
    """Return (seconds per micro-batch to sum a parameter's gradient and to gather the parameter, bytes of its model states on a rank).
    size: number of its elements. term: letters of its dims. cut: for each mesh axis the letter that it cuts, or "". sharded: ZeRO stage."""
    mine = size / _ways(term, cut, mesh)
    copies = [axis for axis, letter in enumerate(cut) if mesh.sizes[axis] > 1 and (not letter or letter not in term)]
    summed = [axis for axis in copies if cut[axis]]  # ranks along other axes already have the whole gradient
    held = model_states(mine, stage=sharded, copies=prod(mesh.sizes[a] for a in copies), storage=settings.storage).total
    seconds, sent = 0.0, mine * settings.gradient_bytes
    for axis in reversed(copies):  # nearest ranks first, so that distant ranks exchange less
        if sharded == 0 and (axis not in summed or axis == summed[0]):
            seconds += mesh.all_reduce(sent, axis) / settings.microbatches if axis in summed else 0.0
            continue
        gathers = 2.0 if sharded == 3 else 1 / settings.microbatches
        scattered = mesh.reduce_scatter(sent, axis) / settings.microbatches if axis in summed else 0.0
        seconds += scattered + gathers * mesh.all_gather(sent, axis)
        sent /= mesh.sizes[axis]
    return seconds, held


@lru_cache(maxsize=1 << 18)
def change(size_bytes: float, mesh: Mesh, gives: State, reads: State) -> float:
    """Return the seconds to reshard a tensor of `size_bytes` (on all ranks together) from `gives` to `reads`, and its gradient back.
    WHOLE: not cut along the axis. LATER: whole too, but its gradient comes back as partial sums.

    Collectives for the tensor / for its gradient on each axis:
        WHOLE to cut          none / all-gather             cut to WHOLE      all-gather / none
        cut to another dim    all-to-all / all-to-all       cut to LATER      all-gather / reduce-scatter
        LATER to others       impossible: inf               WHOLE to LATER    none / all-reduce
    """
    seconds, now = 0.0, list(gives)
    for axis, (a, b) in enumerate(zip(gives, reads, strict=True)):
        others = prod(n for i, n in enumerate(mesh.sizes) if i != axis and now[i] >= 0)
        whole, now[axis] = size_bytes / others, b
        if a == b:
            continue
        if a == LATER:
            return inf
        if a == WHOLE and b == LATER:
            seconds += mesh.all_reduce(whole, axis)
        elif a == WHOLE:
            seconds += mesh.all_gather(whole, axis)
        elif b >= 0:
            seconds += 2 * mesh.all_to_all(whole / mesh.sizes[axis], axis)
        else:
            seconds += mesh.all_gather(whole, axis) + (mesh.reduce_scatter(whole, axis) if b == LATER else 0.0)
    return seconds


def read_together(graph: Graph) -> Graph:
    """Return the graph with an operator `NAME.read` between a tensor NAME and several products of a layer that read it, so that they share
    one resharding. (An encoder's output is read by each layer of the decoder: `NAME.read.LAYER`.)"""
    made: list[Operator] = []
    added: dict[tuple[str, int], str] = {}  # (tensor, layer of its readers) -> name of the operator
    for op in graph.operators:
        made.append(op)
        readers = {edge.reader for edge in graph.readers[op.name] if graph.named[edge.reader].kind in ("product", "dispatch")}
        for layer, count in sorted(Counter(graph.named[reader].layer for reader in readers).items()):
            if count > 1:
                name = added[op.name, layer] = f"{op.name}.read" if layer == op.layer else f"{op.name}.read.{layer}"
                made.append(Operator(name, "pointwise", f"{op.output}->{op.output}", (op.name,), layer=layer, whole="read"))
    together = [
        replace(op, inputs=tuple(added.get((x, op.layer), x) for x in op.inputs)) if op.kind in ("product", "dispatch") else op
        for op in made
    ]
    return replace(graph, operators=tuple(together))


def reading(op: Operator, graph: Graph, mesh: Mesh) -> tuple[Strategy, ...]:
    """Return the strategies of an operator `NAME.read` (see `read_together`): one for each sharding of its tensor, without costs."""
    found = []
    for state in product([WHOLE, LATER, *range(len(op.output))], repeat=len(mesh.sizes)):
        cut = tuple(op.output[place] if place >= 0 else "" for place in state)
        if divides(graph, mesh, cut) and all(n > 1 or place == WHOLE for place, n in zip(state, mesh.sizes, strict=True)):
            found.append(Strategy(cut, ("",) * len(cut), 0, 0.0, 0.0, 0.0, (state,), state))
    return tuple(found)


def candidates(graph: Graph, mesh: Mesh, settings: Settings) -> dict[str, tuple[Strategy, ...]]:
    """Return a dict: name -> strategies of each operator. graph: made by `read_together`, which adds operators with whole == "read"."""
    return {op.name: reading(op, graph, mesh) if op.whole == "read" else strategies(op, graph, mesh, settings) for op in graph.operators}


@dataclass(frozen=True)
class Cost:
    """Cost of a graph or a layer on one device: seconds of a micro-batch, bytes of model states, bytes of a micro-batch's outputs."""

    seconds: float
    state_bytes: float
    output_bytes: float


def cost_of(graph: Graph, mesh: Mesh, chosen: Mapping[str, Strategy]) -> Cost:
    """Return the cost of the graph with the strategies `chosen`. Seconds are inf if a tensor cannot be resharded as its reader needs."""
    seconds = sum(s.seconds for s in chosen.values())
    for edge in graph.edges:
        gives, reads = chosen[edge.writer].gives, chosen[edge.reader].reads[edge.place]
        size = graph.size(graph.letters(edge.writer)) * graph.itemsize
        seconds += change(size, mesh, gives, reads)
    return Cost(seconds, sum(s.state_bytes for s in chosen.values()), sum(s.output_bytes for s in chosen.values()))
