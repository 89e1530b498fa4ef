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
from operator import add, mul
from typing import Any, Literal, NamedTuple

from moe.plan.job import counts
from moe.plan.job.counts import Elements
from moe.plan.job.in_flight import fullest_ranks, in_flight
from moe.plan.job.network import Network, Plan, repeats
from moe.plan.memory.kept import (
    FP32_BYTES,
    buffers_of,
    cast_weights,
    casts_kept,
    inputs_kept,
    keeps_scores,
    layer_kept,
    layer_pending,
    recompute_of,
)
from moe.plan.memory.stack import Stack
from moe.plan.memory.temporary import NOTHING, Unit, at_layer, gathered, of_largest, outside_of, widest
from parallel.data.kinds.kind import At
from parallel.mesh.grids import GRIDS
from parallel.pipeline.simulator.held import RankPeaks, Split

NO_EXPERTS = -1  # index that stands for a layer without experts
_DEFAULT = Plan()
_OF_LAYER = ("tp", "sp", "ep", "etp", "tensor", "depth", "tiles", "sequence", "microbatch", "compute_bytes", "offload_activations")


@dataclass(frozen=True, eq=False)
class LayerBytes:
    """Sizes of one kind of layer on a rank. elements: its parameters. matrix: number of parameters in its largest matrix.

    gathered: its parameters that ZeRO stage 3 holds whole at the same time. kept: bytes that a micro-batch keeps for the backward pass.
    pending: bytes that it keeps between I and W. work, work_of_i, work_of_w: temporary bytes of its backward pass, of I and of W.
    dispatch: bytes of the buffers for rows sent to and from experts.
    """

    elements: Elements
    gathered: Elements
    matrix: float
    kept: float
    pending: float
    work: float
    work_of_i: float
    work_of_w: float
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
        numbers = fullest_ranks(plan.schedule, plan.pp, plan.microbatches, plan.chunks, sizes, sparse, plan.recompute_every)
    return tuple(step.of_rank(number, ranks[number]) for number in numbers)


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
    kept = layer_kept(*of, plan.recompute) * (1 - plan.offload_activations)
    work_of_w = of_largest(network, plan, stack, sparse=sparse)
    work, work_of_i = (at_layer(*of, of_matrix=of_matrix) for of_matrix in (work_of_w, 0.0))
    sizes = kept, layer_pending(*of), work, work_of_i, work_of_w, buffers_of(network, plan) if sparse else 0.0
    return LayerBytes(elements, at_once, matrix, *sizes)


class _Step:
    """Computes the moments of a step on each rank. Each kind of layer is computed once."""

    def __init__(self, network: Network, plan: Plan, stack: Stack, stages: Sequence[range], casts: bool) -> None:
        self.network, self.plan, self.stack, self.stages, self.casts = network, plan, stack, stages, casts
        self.gathers, self.last = differs_by_moment(plan, stack), len(stages) - 1
        self.sparse = frozenset(network.with_experts) if network.experts else frozenset()
        self.kinds: dict[tuple[bool, bool, bool, int], LayerBytes] = {}
        self.sizes: dict[tuple[tuple[int, int], ...], Elements] = {}
        of_microbatch = plan.but(pp=1, schedule=_DEFAULT.schedule, chunks=1, stage_layers=None, microbatches=1)
        self.outside = outside_of(network, of_microbatch, stack)

    def layer(self, index: int) -> LayerBytes:
        n = self.network
        frozen = (index in n.frozen_layers) + (index < n.unreached)
        kind = (index < n.before, index in self.sparse, repeats(index, self.plan.recompute_every), frozen)
        if kind not in self.kinds:
            run, _ = n.at(index)
            own = self.plan.only(_OF_LAYER, recompute=recompute_of(self.plan, index))
            made = _layer(run, own, self.stack, kind[1])
            made = replace(made, kept=made.kept + (cast_weights(n, self.plan, index) if self.casts else 0.0))
            self.kinds[kind] = replace(made, kept=0.0, pending=0.0, work=0.0, work_of_i=0.0, work_of_w=0.0) if index < n.unreached else made
        return self.kinds[kind]

    def kinds_of(self, stage: range) -> list[tuple[LayerBytes, int]]:
        """Return (sizes of one layer, number of layers of this kind) for each kind of layer in a stage."""
        if not self.sparse and not self.network.frozen_layers and self.plan.recompute_every == 1 and self.network.encoder is None:
            return [(self.layer(stage.start), len(stage))] if stage else []
        return list(Counter(map(self.layer, stage)).items())

    def size_of(self, kinds: Sequence[tuple[LayerBytes, int]]) -> Elements:
        """Return the parameters of layers, given as by `kinds_of`."""
        key = tuple([(id(of), n) for of, n in kinds])
        if key not in self.sizes:
            self.sizes[key] = sum((of.elements.times(n) for of, n in kinds), NOTHING)
        return self.sizes[key]

    def of_rank(self, number: int, rank: RankPeaks) -> RankMoments:
        outside = self.outside
        layers = {stage: self.kinds_of(self.stages[stage]) for stage in rank.stages}
        first, last = 0 in layers, self.last in layers
        sizes = {stage: self.size_of(mine) for stage, mine in layers.items()}
        held = sum(sizes.values(), outside.elements[first, last])
        whole = [of.gathered for mine in layers.values() for of, _ in mine]
        whole += [Elements(outside.ahead)] if last and self.network.ahead else []
        table = outside.embedding if first else outside.head if last else NOTHING
        return RankMoments(number, rank.versions, held, tuple(whole), table, self._largest(self._moments(rank, layers, sizes, held)))

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

    def _moments(
        self, rank: RankPeaks, layers: dict[int, list[tuple[LayerBytes, int]]], sizes: dict[int, Elements], held: Elements
    ) -> Iterator[Moment]:
        """Yield all moments of a step that may be the rank's peak. sizes: stage -> its layers' parameters. held: the rank's."""
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

        after_i = [sum([n * of.pending for of, n in mine]) for mine in layers.values()]
        ends_after_i = [outside.head_pending * (stage == last) for stage in layers]
        counts = self._counts(rank, list(map(add, bodies, ends)), list(map(add, after_i, ends_after_i)))
        keys = {(stage, once, one.splits) for one, once in counts for stage in layers}
        at_work = {key: self._at_work(key[0], held, *key[1:]) for key in keys}
        for (count, pending, splits), once in counts:
            kept = sum(map(mul, count, bodies)) + sum(map(mul, pending, after_i))
            of_ends = sum(map(mul, count, ends)) + sum(map(mul, pending, ends_after_i))
            none_yet = held if once else NOTHING
            if last in layers:
                of_head = self.casts and plan.loss_chunks == 1 and plan.tensor not in GRIDS
                cast = plan.compute_bytes * outside.head.total if of_head else 0.0
                yield moment("loss", kept, of_ends + outside.loss + cast, work=outside.head_input, to_come=none_yet)
            if last in layers and network.ahead:  # backward pass of a layer of multi-token prediction
                yield moment("loss", kept, of_ends, work=work, to_come=none_yet)
            if not any(layers.values()):
                yield moment("loss", kept, of_ends, to_come=none_yet)
            before = outside.elements[0 in layers, False] if once else NOTHING
            for stage, body, after, number in zip(layers, bodies, after_i, count, strict=True):
                if splits and not number:
                    continue
                left = of_ends - (of_loss - splits * outside.head_pending if stage == last and number else 0.0)
                for of, gone, later, bytes_at_work, bytes_of_sums in at_work[stage, once, splits]:
                    to_come = before + later if once else NOTHING
                    own = of.work_of_i if splits else of.work
                    total = kept - gone + left + own + of.dispatch
                    yield Moment(kept - gone, left, 0.0, own, of.dispatch, total, to_come, tied, bytes_at_work, "work")
                    if bytes_of_sums:
                        kept_then = kept - (gone + of.kept)
                        yield moment("sums", kept_then, left, gathered=bytes_of_sums, to_come=to_come, waiting=tied)
                if splits:
                    of_layers = list(map(self.layer, self.stages[stage]))  # in the order of W
                    done = accumulate((of.pending for of in of_layers), initial=0.0)
                    own = max([of.work_of_w - size for of, size in zip(of_layers, done, strict=False)], default=0.0)
                    none = before + sizes[stage] if once else NOTHING
                    yield moment("sums", kept - body + after, left, work=own, to_come=none, waiting=tied)
                if "head" in whole and stage == last:
                    yield moment("head", kept, left, to_come=none_yet)
                if "bucket" in whole:
                    yield moment("forward", kept, left, to_come=none_yet)
                    full = min(1.0, self.stack.bucket_elements / max(1.0, held.total))  # fraction of the layers that fills a bucket
                    yield moment("bucket", kept - full * body, left, to_come=before)
                if stage == 0:
                    table_to_come = Elements(tied) if once else NOTHING
                    then = kept - body + splits * after
                    yield moment("embedding", then, left, embedding=of_embedding, to_come=table_to_come, waiting=tied)
                before = before + sizes[stage] if once else NOTHING

    def _counts(self, rank: RankPeaks, kept: Sequence[float], pending: Sequence[float]) -> list[tuple[Split, bool]]:
        """Return candidates for the peak as (micro-batches on each stage, whether no backward pass of the step has ended yet), also after
        the first backward pass, because gradients exist from then on. kept, pending: each stage's bytes of a micro-batch before and after
        I, by which the largest moments are chosen."""
        microbatches, fullest = self.plan.microbatches, dict[tuple[bool, bool], tuple[float, Split]]()
        moments = rank.split or [Split(count, (0,) * len(count), False) for count in rank.most]
        found = [(one, microbatches == 1 or min(one.kept) == microbatches) for one in moments]
        found += [(one._replace(kept=tuple(n - 1 for n in one.kept)), False) for one, first in found if first and microbatches > 1]
        for one, first in found:
            size = sum(map(mul, one.kept, kept)) + sum(map(mul, one.pending, pending))
            key = one.splits, first
            if key not in fullest or fullest[key][0] < size:
                fullest[key] = size, one
        return [(one, first) for (_, first), (_, one) in fullest.items()]

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
            gone = (n - 1) * (of.kept - splits * of.pending)
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
            gone += of.kept - splits * of.pending
            before = of.gathered if self.gathers else NOTHING
        found = [*((*one, before) for (_, before), one in lasts.items()), *first.values()]
        if not self.gathers:
            return [(of, gone, to_come, 0.0, 0.0) for of, gone, to_come, _ in found]

        def bytes_at(at: At, of: LayerBytes, before: Elements) -> float:
            return gathered(self.plan, self.stack, at, Unit(of.gathered, of.matrix, before), held=held, table=self.outside.head)

        return [(of, gone, to_come, bytes_at("work", of, before), bytes_at("sums", of, before)) for of, gone, to_come, before in found]
