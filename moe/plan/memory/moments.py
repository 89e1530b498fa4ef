"""Lists the moments of a step at which the memory of a pipeline rank may be at its peak, without the states of its parameters.

    loss        logits in two dtypes and their gradients
    work        backward pass of a layer: recomputed activations, gradients inside the layer and of its largest matrix, dispatched rows
    embedding   gradient of the embedding, after the activations of the micro-batch are freed
    sums, head, bucket, forward     further moments of ZeRO stage 3, with other gathered weights and unreduced gradients (temporary.py)

At each moment, the micro-batches in flight keep their activations (in_flight.py, kept.py). Gradients that are freed between steps exist
only after the first backward pass. The result is cached. Only with ZeRO stage 3 does it depend on the data-parallel engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from operator import ge, mul
from typing import Any, Literal, NamedTuple

from moe.plan.job import counts
from moe.plan.job.counts import Elements
from moe.plan.job.in_flight import in_flight
from moe.plan.job.network import Network, Plan, repeats
from moe.plan.memory.kept import (
    FP32_BYTES,
    buffers_of,
    cast_ahead,
    cast_weights,
    casts_kept,
    ends_kept,
    inputs_kept,
    keeps_scores,
    layer_kept,
    recompute_of,
    tokens_of,
)
from moe.plan.memory.stack import Stack
from moe.plan.memory.temporary import NOTHING, Unit, at_layer, at_loss, gathered, head_input, widest
from parallel.data.kinds.kind import At
from parallel.mesh.grids import GRIDS
from parallel.pipeline.simulator.held import RankPeaks

NO_EXPERTS = -1  # index that stands for a layer without experts
_DEFAULT = Plan()
_OF_LAYER = ("tp", "sp", "ep", "etp", "tensor", "depth", "tiles", "sequence", "microbatch", "compute_bytes", "offload_activations")


@dataclass(frozen=True, eq=False)
class LayerBytes:
    """Sizes of one kind of layer on a rank. elements: its parameters. matrix: number of parameters in its largest matrix.

    gathered: its parameters that ZeRO stage 3 holds whole at the same time. kept: bytes that a micro-batch keeps for the backward pass.
    deferred: bytes that it keeps between I and W, about the same as without recomputation. work: temporary bytes of its backward pass.
    dispatch: bytes of the buffers for rows sent to and from experts.
    """

    elements: Elements
    gathered: Elements
    matrix: float
    kept: float
    deferred: float
    work: float
    dispatch: float


class Moment(NamedTuple):
    """Bytes of a rank at one moment of a step. at: kind of moment. total: sum of the first five.

    work: temporary bytes of the layer that is in its backward pass. to_come: parameters whose gradient does not exist yet.
    waiting: parameters of a tied head, whose gradient autograd holds separately until it adds the embedding's.
    gathered: bytes of gathered weights and unreduced gradients with ZeRO stage 3.
    """

    activations: float
    loss: float
    embedding: float
    work: float
    dispatch: float
    total: float
    to_come: Elements
    waiting: float
    gathered: float
    at: At


@dataclass(frozen=True, eq=False)
class RankMoments:
    """Sizes of pipeline rank `number` before its states are sharded. versions: number of versions of the weights that it keeps.

    held: its parameters. gathered: for each kind of its layers, the parameters that ZeRO stage 3 holds whole at the same time.
    table: parameters of its embedding or head; none without them. moments: the moments of a step that may be its memory peak.
    """

    number: int
    versions: int
    held: Elements
    gathered: tuple[Elements, ...]
    table: Elements
    moments: tuple[Moment, ...]


def ranks_of(network: Network, plan: Plan, stack: Stack, which: Literal["all", "fullest"]) -> tuple[RankMoments, ...]:
    """Return the sizes of all pipeline ranks, or only of the ranks that may need most memory."""
    engine: dict[str, Any] = {} if differs_by_moment(plan, stack) else {"dp": 1, "engine": _DEFAULT.engine, "reshard": _DEFAULT.reshard}
    offload: dict[str, Any] = {"offload_optimizer": "none", "offload_parameters": "none"}
    without_states = without_order(plan).but(storage=_DEFAULT.storage, **engine, **offload)
    return _ranks(network, without_states, stack, casts_kept(plan, stack), which)


def without_order(plan: Plan) -> Plan:
    """Return the plan with only the settings on which memory depends: with most methods of sequence parallelism, memory is the same."""
    if plan.sp == 1:
        return plan
    return plan.but(sequence=plan.sequence if keeps_scores(plan) else _DEFAULT.sequence, order=_DEFAULT.order)


def differs_by_moment(plan: Plan, stack: Stack) -> bool:
    """Return whether the gathered weights and unreduced gradients of ZeRO stage 3 differ between moments, which needs pp = 1."""
    return plan.stage == 3 and plan.pp == 1 and plan.copies > 1 and stack.gathers == "moments"


@lru_cache(maxsize=256)
def _ranks(network: Network, plan: Plan, stack: Stack, casts: bool, which: Literal["all", "fullest"]) -> tuple[RankMoments, ...]:
    """Return the result of `ranks_of`. casts: micro-batches keep copies of the weights in the compute dtype."""
    ranks = in_flight(plan.schedule, ranks=plan.pp, microbatches=plan.microbatches, chunks=plan.chunks)
    stages = counts.stages_of(network, plan, 1 + max(stage for rank in ranks for stage in rank.stages))
    step = _Step(network, plan, stack, stages, casts)
    numbers: Iterable[int] = range(len(ranks))
    if which == "fullest":
        sparse = network.with_experts if network.experts else ()
        sizes = tuple(map(len, stages))
        numbers = _fullest(plan.schedule, plan.pp, plan.microbatches, plan.chunks, sizes, sparse, plan.recompute_every)
    return tuple(step.of_rank(number, ranks[number]) for number in numbers)


@lru_cache(maxsize=5_000)
def _fullest(
    schedule: str, pp: int, microbatches: int, chunks: int, sizes: tuple[int, ...], sparse: tuple[int, ...], every: int
) -> tuple[int, ...]:
    """Return the ranks that may need most memory. Leaves out a rank if an earlier rank has the same layers, and at least the same
    micro-batches in flight, embedding and head. sizes: number of layers of each stage. sparse: layers with experts."""
    ranks = in_flight(schedule, ranks=pp, microbatches=microbatches, chunks=chunks)
    bounds, last = [0, *accumulate(sizes)], len(sizes) - 1
    kinds = [[sorted((i in sparse, repeats(i, every)) for i in range(bounds[s], bounds[s + 1])) for s in rank.stages] for rank in ranks]
    ends = [[(s == 0, s == last) for s in rank.stages] for rank in ranks]

    def covers(a: int, b: int) -> bool:
        if kinds[a] != kinds[b] or not all(all(map(ge, *pair)) for pair in zip(ends[a], ends[b], strict=True)):
            return False
        if ranks[a].versions < ranks[b].versions or not all(map(ge, ranks[a].deferred, ranks[b].deferred)):
            return False
        return all(any(all(map(ge, x, y)) for x in ranks[a].most) for y in ranks[b].most)

    found: list[int] = []
    for number in range(len(ranks)):
        if not any(covers(before, number) for before in found):
            found.append(number)
    return tuple(found)


@lru_cache(maxsize=20_000)
def _layer(network: Network, plan: Plan, stack: Stack, sparse: bool) -> LayerBytes:
    """Return the sizes of a layer, with experts if it is `sparse`. plan.recompute is the kind of recompute of this layer."""
    index = network.sparse_layers[0] if sparse else NO_EXPERTS
    of = (network, plan, stack, index)
    elements, matrix = counts.layer(network, plan, index), widest(network, plan, sparse=sparse)
    at_once = elements
    if plan.tiles > 1 and not sparse:  # ZeRO stage 3 gathers one tile after another
        of_network = counts.network_elements(network, network.hidden, gated=network.gated) / plan.grid.matrix
        at_once = elements + counts.dense(network, -of_network * (1 - 1 / plan.tiles), "dense")
    if stack.gathers == "elements":  # each product gathers its own matrix
        at_once = Elements(min(at_once.total, matrix))
    kept, deferred = (layer_kept(*of, kind) * (1 - plan.offload_activations) for kind in (plan.recompute, "none"))
    return LayerBytes(elements, at_once, matrix, kept, deferred, at_layer(*of), buffers_of(network, plan) if sparse else 0.0)


@dataclass(frozen=True, eq=False)
class _Outside:
    """Sizes of a rank outside of its layers: embedding, head, final norms, loss.

    elements: (has the rank the first stage, has it the last stage) -> its parameters. keeps: same pair -> bytes that a micro-batch keeps.
    crossing: bytes of a tensor sent between stages. loss, head_input: temporary bytes at the loss. embedding, head: their parameters.
    ahead: parameters of multi-token prediction per further token. casts: bytes of their copies in the compute dtype.
    """

    elements: dict[tuple[bool, bool], Elements]
    keeps: dict[tuple[bool, bool], float]
    crossing: float
    loss: float
    head_input: float
    embedding: Elements
    head: Elements
    ahead: float
    casts: float


@lru_cache(maxsize=20_000)
def _outside(network: Network, plan: Plan, stack: Stack) -> _Outside:
    ends = [(first, last) for first in (False, True) for last in (False, True)]
    return _Outside(
        {(first, last): counts.ends(network, plan, first=first, last=last) for first, last in ends},
        {(first, last): ends_kept(network, plan, stack, first=first, last=last) for first, last in ends},
        plan.compute_bytes * network.width * sum(tokens_of(run, plan, stack).between for run in network.halves),
        at_loss(network, plan, stack),
        head_input(network, plan, stack),
        counts.table(network, plan, "embedding"),
        counts.table(network, plan, network.head),
        counts.ahead(network, plan).total if network.ahead else 0.0,
        cast_ahead(network, plan) if network.ahead else 0.0,
    )


class _Step:
    """Computes the moments of a step on each rank. Each kind of layer is computed once."""

    def __init__(self, network: Network, plan: Plan, stack: Stack, stages: Sequence[range], casts: bool) -> None:
        self.network, self.plan, self.stack, self.stages, self.casts = network, plan, stack, stages, casts
        self.gathers, self.last = differs_by_moment(plan, stack), len(stages) - 1
        self.sparse = frozenset(network.with_experts) if network.experts else frozenset()
        self.kinds: dict[tuple[bool, bool, bool, int], LayerBytes] = {}
        of_microbatch = plan.but(pp=1, schedule=_DEFAULT.schedule, chunks=1, stage_layers=None, microbatches=1)
        self.outside = _outside(network, of_microbatch, stack)

    def layer(self, index: int) -> LayerBytes:
        n = self.network
        frozen = (index in n.frozen_layers) + (index < n.unreached)
        kind = (index < n.before, index in self.sparse, repeats(index, self.plan.recompute_every), frozen)
        if kind not in self.kinds:
            run, _ = n.at(index)
            own = self.plan.only(_OF_LAYER, recompute=recompute_of(self.plan, index))
            made = _layer(run, own, self.stack, kind[1])
            casts = cast_weights(n, self.plan, index) if self.casts else 0.0
            made = replace(made, kept=made.kept + casts, deferred=made.deferred + casts) if casts else made
            self.kinds[kind] = replace(made, kept=0.0, deferred=0.0, work=0.0) if index < n.unreached else made
        return self.kinds[kind]

    def kinds_of(self, stage: range) -> list[tuple[LayerBytes, int]]:
        """Return (sizes of one layer, number of layers of this kind) for each kind of layer in a stage."""
        if not self.sparse and not self.network.frozen_layers and self.plan.recompute_every == 1 and self.network.encoder is None:
            return [(self.layer(stage.start), len(stage))] if stage else []
        return list(Counter(map(self.layer, stage)).items())

    def of_rank(self, number: int, rank: RankPeaks) -> RankMoments:
        outside = self.outside
        layers = {stage: self.kinds_of(self.stages[stage]) for stage in rank.stages}
        first, last = 0 in layers, self.last in layers
        held = sum((of.elements.times(n) for mine in layers.values() for of, n in mine), outside.elements[first, last])
        whole = [of.gathered for mine in layers.values() for of, _ in mine]
        whole += [Elements(outside.ahead)] if last and self.network.ahead else []
        table = outside.embedding if first else outside.head if last else NOTHING
        return RankMoments(number, rank.versions, held, tuple(whole), table, self._largest(self._moments(rank, layers, held)))

    def _largest(self, moments: Iterable[Moment]) -> tuple[Moment, ...]:
        """Return the moments that no other moment exceeds in all respects (Pareto front). With stages, only moments of one kind are
        compared: FSDP adds other bytes to each kind, which are not counted yet."""
        bucket = self.stack.bucket_elements * self.stack.bucket_bytes  # bytes of a gradient bucket, which may not exist at the loss
        found: list[Moment] = []
        for one in sorted(moments, key=lambda moment: moment.total + moment.gathered, reverse=True):
            if not any(
                (self.plan.pp == 1 or more.at == one.at)
                and (more.at != "loss" or one.at == "loss" or more.total + more.gathered >= one.total + one.gathered + bucket)
                and more.waiting >= one.waiting
                and more.to_come.dense <= one.to_come.dense
                and more.to_come.expert <= one.to_come.expert
                for more in found
            ):
                found.append(one)
        return tuple(found)

    def _moments(self, rank: RankPeaks, layers: dict[int, list[tuple[LayerBytes, int]]], held: Elements) -> Iterator[Moment]:
        """Yield all moments of a step that may be the rank's peak. layers: stage -> [(sizes of one layer, number of such layers)]."""
        outside, last, network, plan = self.outside, self.last, self.network, self.plan
        bodies = [sum([n * of.kept for of, n in mine]) for mine in layers.values()]
        ends = [outside.keeps[stage == 0, stage == last] for stage in layers]
        if self.casts and last in layers:
            ends[-1] += network.ahead * outside.casts
        of_loss = ends[-1] - outside.keeps[last == 0, False] if last in layers else 0.0
        inputs = [inputs_kept(plan, self.stack, self.stages[stage], first=stage == 0, last=stage == last) for stage in layers]
        ends = [end + number * outside.crossing for number, end in zip(inputs, ends, strict=True)]
        tied = outside.embedding.trained.dense if network.tied and 0 in layers and last == 0 else 0.0
        work = max([of.work for mine in layers.values() for of, _ in mine], default=0.0)
        whole = self._gathered(held)
        # The embedding is read in fp32 and then cast, except by FSDP. If it is tied, its gradient and the head's are two tensors.
        wide = FP32_BYTES if self.stack.casts and not self.gathers else plan.compute_bytes
        of_embedding = wide * (2 if tied else 1) * outside.embedding.trained.dense

        def moment(
            at: At,
            activations: float,
            loss: float,
            *,
            to_come: Elements,
            embedding: float = 0.0,
            work: float = 0.0,
            dispatch: float = 0.0,
            waiting: float = 0.0,
            gathered: float | None = None,
        ) -> Moment:
            total = activations + loss + embedding + work + dispatch
            sharded = whole.get(at, 0.0) if gathered is None else gathered
            return Moment(activations, loss, embedding, work, dispatch, total, to_come, waiting, sharded, at)

        counts = self._counts(rank)
        at_work = {
            (stage, once): self._at_work(stage, held, once, bool(rank.deferred))
            for once in {once for _, once in counts}
            for stage in layers
        }
        later_bytes = [sum([n * (of.deferred - of.kept) for of, n in mine]) for mine in layers.values()]  # added by I, until W
        for count, once in counts:
            kept, of_ends, none_yet = sum(map(mul, count, bodies)), sum(map(mul, count, ends)), held if once else NOTHING
            kept += sum(map(mul, map(min, count, rank.deferred), later_bytes))
            if last in layers:
                of_head = self.casts and plan.loss_chunks == 1 and plan.tensor not in GRIDS
                cast = plan.compute_bytes * outside.head.total if of_head else 0.0
                yield moment("loss", kept, of_ends + outside.loss + cast, work=outside.head_input, to_come=none_yet)
            if last in layers and network.ahead:  # backward pass of a layer of multi-token prediction
                yield moment("loss", kept, of_ends, work=work, to_come=none_yet)
            if not any(layers.values()):
                yield moment("loss", kept, of_ends, to_come=none_yet)
            before = outside.elements[0 in layers, False] if once else NOTHING
            for stage, body, more, number in zip(layers, bodies, later_bytes, count, strict=True):
                left = of_ends - (of_loss if stage == last and number else 0.0)
                for of, gone, later, bytes_at_work, bytes_of_sums in at_work[stage, once]:
                    to_come = before + later if once else NOTHING
                    total = kept - gone + left + of.work + of.dispatch
                    yield Moment(kept - gone, left, 0.0, of.work, of.dispatch, total, to_come, tied, bytes_at_work, "work")
                    if bytes_of_sums:
                        kept_then = kept - (gone + of.kept)
                        yield moment("sums", kept_then, left, gathered=bytes_of_sums, to_come=to_come, waiting=tied)
                if "head" in whole and stage == last:
                    yield moment("head", kept, left, to_come=none_yet)
                if "bucket" in whole:
                    full = min(1.0, self.stack.bucket_elements / max(1.0, held.total))  # fraction of the layers that fills a bucket
                    yield moment("forward", kept, left, to_come=none_yet)
                    yield moment("bucket", kept - full * body, left, to_come=before)
                if stage == 0:
                    table_to_come = Elements(tied) if once else NOTHING
                    of_first = kept + more if rank.deferred else kept - body
                    yield moment("embedding", of_first, left, embedding=of_embedding, to_come=table_to_come, waiting=tied)
                before = sum((of.elements.times(n) for of, n in layers[stage]), before) if once else NOTHING

    def _counts(self, rank: RankPeaks) -> list[tuple[Sequence[int], bool]]:
        """Return candidates for the peak as (micro-batches in flight on each stage, whether no backward pass of the step has ended yet).
        The moment after the first backward pass is a candidate, because gradients exist from then on."""
        microbatches = self.plan.microbatches
        found: list[tuple[Sequence[int], bool]] = [(count, microbatches == 1 or min(count) == microbatches) for count in rank.most]
        after = [([n - 1 for n in count], False) for count, first in found if first and microbatches > 1]
        return [*found, *after]

    def _gathered(self, held: Elements) -> dict[At, float]:
        """Return the bytes of gathered weights and unreduced gradients with ZeRO stage 3, for each kind of moment outside of layers."""
        if not self.gathers:
            return {}
        moments: tuple[At, ...] = ("loss", "embedding", *self.plan.kind.moments)
        unit = Unit(next=self.layer(self.network.depth - 1).gathered)
        tables = {at: self.outside.embedding if at == "embedding" else self.outside.head for at in moments}
        return {at: gathered(self.plan, self.stack, at, unit, held=held, table=table) for at, table in tables.items()}

    def _at_work(self, stage: int, held: Elements, once: bool, splits: bool) -> list[tuple[LayerBytes, float, Elements, float, float]]:
        """Return the last and the first layer of each kind in a stage, whose backward pass may be the memory peak. Each as (sizes of the
        layer, bytes already freed by later layers, parameters whose gradient does not exist yet, gathered bytes of ZeRO stage 3 during its
        backward pass, the same while its gradients are reduced). once: no backward pass has ended yet. splits: I keeps what W needs."""
        kinds = self.kinds_of(self.stages[stage])
        if len(kinds) == 1 and not self.gathers:
            ((of, n),) = kinds
            last = of, 0.0, of.elements.times(n) if once else NOTHING, 0.0, 0.0
            gone = (n - 1) * (of.kept - (of.deferred if splits else 0.0))
            return [last, (of, gone, of.elements if once else NOTHING, 0.0, 0.0)] if once or splits else [last]
        lasts: dict[tuple[LayerBytes, Elements], tuple[LayerBytes, float, Elements]] = {}
        first: dict[LayerBytes, tuple[LayerBytes, float, Elements, Elements]] = {}
        gone, to_come = 0.0, sum((of.elements.times(n) for of, n in kinds), NOTHING) if once else NOTHING
        before = self.outside.head if self.gathers and stage == self.last else NOTHING
        for of in map(self.layer, reversed(self.stages[stage])):
            lasts.setdefault((of, before), (of, gone, to_come))
            if once or splits:
                first[of] = of, gone, to_come, before
            if once:
                to_come += of.elements.times(-1)
            gone += of.kept - (of.deferred if splits else 0.0)
            before = of.gathered if self.gathers else NOTHING
        found = [*((*one, before) for (_, before), one in lasts.items()), *first.values()]
        if not self.gathers:
            return [(of, gone, to_come, 0.0, 0.0) for of, gone, to_come, _ in found]

        def bytes_at(at: At, of: LayerBytes, before: Elements) -> float:
            return gathered(self.plan, self.stack, at, Unit(of.gathered, of.matrix, before), held=held, table=self.outside.head)

        return [(of, gone, to_come, bytes_at("work", of, before), bytes_at("sums", of, before)) for of, gone, to_come, before in found]
