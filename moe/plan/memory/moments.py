"""Lists the points in time of a step at which a pipeline rank's memory may be at its peak ("moments"), with the bytes at each. Bytes of
model states are added elsewhere (memory.py); a moment only notes the parameters whose gradient does not exist yet.

    loss        logits in two dtypes and their gradients
    work        backward pass of a layer: its recomputed activations, the gradients of its largest activations and of its largest matrix,
                and its dispatched rows
    embedding   gradient of the embedding, after the activations of the micro-batch are freed
    sums        gradients of weights: their reduction with ZeRO stage 3, or action W if a schedule splits the backward pass into I and W
    head, bucket, forward     only with ZeRO stage 3, for its gathered weights and unreduced gradients: backward pass of the head, reduction
                              of a bucket of gradients, forward pass (temporary.py)

At each moment, the micro-batches in flight keep their activations (in_flight.py, kept.py). Gradients that are freed between steps exist
only after the first backward pass. The list is cached. It depends on the data-parallel engine only with ZeRO stage 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from moe.plan.job import counts
from moe.plan.job.counts import Elements
from moe.plan.job.in_flight import fullest_ranks, in_flight, moments_of
from moe.plan.job.network import Network, Plan
from moe.plan.memory.kept import casts_kept, keeps_scores
from moe.plan.memory.rows import FP32_BYTES
from moe.plan.memory.stack import Stack
from moe.plan.memory.stages import Now, Rank, StageBytes, Stages, differs_by_moment
from moe.plan.memory.temporary import NOTHING, LayerBytes, Unit, gathered
from parallel.data.kinds.kind import At
from parallel.mesh.grids import GRIDS
from parallel.pipeline.simulator.held import InFlight

_DEFAULT = Plan()
MOST_STARTED = 8  # at most this number of buckets of DDP or ZeRO-1 are summed at the same time (parallel/data/buckets.py)


class Moment(NamedTuple):
    """Memory of a rank at one moment of a step. `activations` to `dispatch` and `gathered` are bytes, the others numbers of parameters.
    at: kind of moment (top of this file).

    activations: bytes that micro-batches keep in layers. loss: bytes kept outside of layers; at the loss, also its temporary tensors.
    embedding: the embedding's gradient. work: temporary bytes of the layer that is in its backward pass. dispatch: that layer's buffers for
    rows sent to and from experts. to_come: trained parameters whose gradient does not exist yet.
    waiting: parameters of a tied head, whose gradient autograd holds separately until it adds the embedding's.
    gathered: bytes of gathered weights and unreduced gradients with ZeRO stage 3, without pipeline stages.
    freed: parameters with gathered weights that have been freed. reducing: parameters with gradients being reduced. Both are read only
    with ZeRO stage 3 and pipeline stages.
    summed: in the last backward pass, trained parameters with a complete gradient, which engines with buckets may be summing.
    """

    at: At
    activations: float = 0.0
    loss: float = 0.0
    embedding: float = 0.0
    work: float = 0.0
    dispatch: float = 0.0
    to_come: Elements = NOTHING
    waiting: float = 0.0
    gathered: float = 0.0
    freed: Elements = NOTHING
    reducing: Elements = NOTHING
    summed: Elements = NOTHING

    @property
    def total(self) -> float:
        """Sum of all bytes but `gathered`."""
        return self.activations + self.loss + self.embedding + self.work + self.dispatch


@dataclass(frozen=True, eq=False)
class RankMoments:
    """Sizes of pipeline rank `number` before its model states are sharded. versions: number of weight versions that the schedule keeps.

    held: its parameters. gathered: for each kind of its layers, the parameters that ZeRO stage 3 gathers at the same time.
    table: parameters of its embedding or head; none without them. moments: the moments of a step that may be its memory peak.
    """

    number: int
    versions: int
    held: Elements
    gathered: tuple[Elements, ...]
    table: Elements
    moments: tuple[Moment, ...]

    @cached_property
    def largest(self) -> Elements:
        """The largest entry of `gathered`."""
        return max(self.gathered, key=lambda of: of.total, default=NOTHING)


class _AtWork(NamedTuple):
    """A layer in its backward pass. Later layers are those above it in its stage, which have ended their backward pass. gone: bytes of
    activations that later layers have freed. to_come: parameters of the stage that have no gradient yet. freed: parameters of later layers
    that FSDP had gathered and has freed. behind: parameters with gradients being reduced. done: parameters with complete gradients: those
    of later layers and, on the last stage, an untied head's."""

    of: LayerBytes
    gone: float
    to_come: Elements
    freed: Elements
    behind: Elements
    done: Elements


class _Pass(NamedTuple):
    """A backward pass of one micro-batch on a stage. at_i: it is an I (gradients of inputs), whose W (gradients of weights) follows later.
    none_ended: before it, no B or W of the step has ended. gradients: those of the stage that exist before it: 0 for none, 1 for those that
    I computes (embedding, LoRA), 2 for all. last: no other micro-batch is in flight, so it may be the rank's last of the step."""

    at_i: bool
    none_ended: bool
    gradients: int
    last: bool


def ranks_of(network: Network, plan: Plan, stack: Stack, which: Literal["all", "fullest"]) -> tuple[RankMoments, ...]:
    """Return a RankMoments for each pipeline rank. which: all ranks, or only the fullest, which may need the most memory."""
    engine: dict[str, Any] = {} if differs_by_moment(plan, stack) else {"dp": 1, "engine": _DEFAULT.engine, "reshard": _DEFAULT.reshard}
    offload: dict[str, Any] = {"offload_optimizer": "none", "offload_parameters": "none"}
    without_states = without_order(plan).but(storage=_DEFAULT.storage, **engine, **offload)
    return _ranks(network, without_states, stack, casts_kept(plan, stack), which)


def without_order(plan: Plan) -> Plan:
    """Return the plan with default values for settings that do not change its memory: the positions that each sp rank holds, and the
    sequence-parallel method unless it keeps attention scores."""
    if plan.sp == 1:
        return plan
    return plan.but(sequence=plan.sequence if keeps_scores(plan) else _DEFAULT.sequence, order=_DEFAULT.order)


@lru_cache(maxsize=256)
def _ranks(network: Network, plan: Plan, stack: Stack, casts: bool, which: Literal["all", "fullest"]) -> tuple[RankMoments, ...]:
    """Return the result of `ranks_of`. casts: micro-batches keep copies of the weights in the compute dtype."""
    size = plan.schedule, plan.pp, plan.microbatches, plan.chunks
    ranks = in_flight(plan.schedule, ranks=plan.pp, microbatches=plan.microbatches, chunks=plan.chunks)
    stages = counts.stages_of(network, plan, 1 + max(stage for rank in ranks for stage in rank.stages))
    sizes = Stages(network, plan, stack, stages, casts)
    step = _Moments(sizes)
    now = _in_flight(*size)
    if which == "all":
        return tuple(step.moments_of(sizes.rank(number, of, now[number])) for number, of in enumerate(ranks))
    sparse, lengths = network.with_experts if network.experts else (), tuple(map(len, stages))
    numbers = fullest_ranks(*size, lengths, sparse, network.before, plan.recompute_every)
    return tuple(map(step.moments_of, sizes.fullest([sizes.rank(number, ranks[number], now[number]) for number in numbers])))


@lru_cache(maxsize=5_000)
def _in_flight(schedule: str, pp: int, microbatches: int, chunks: int) -> tuple[tuple[tuple[InFlight, bool], ...], ...]:
    """Return for each rank the moments that may be its peak: (micro-batches in flight, whether no gradients of weights exist yet)."""
    ranks = in_flight(schedule, ranks=pp, microbatches=microbatches, chunks=chunks)
    return tuple([moments_of(rank, microbatches) for rank in ranks])


class _Moments:
    """Lists the moments of a step (top of this file) on each rank."""

    def __init__(self, stages: Stages) -> None:
        self.sizes, self.outside, self.gathers, self.last = stages, stages.outside, stages.gathers, stages.last
        self.network, self.plan, self.stack, self.casts = stages.network, stages.plan, stages.stack, stages.casts

    def moments_of(self, rank: Rank) -> RankMoments:
        """Return the rank's sizes at the moments that may be its peak."""
        outside, first, last = self.outside, rank.stages[0].number == 0, rank.stages[-1].number == self.last
        whole = [of.gathered for stage in rank.stages for of, _ in stage.kinds]
        whole += [Elements(outside.ahead)] if last and self.network.ahead else []
        table = outside.embedding if first else outside.head if last else NOTHING
        held = sum([stage.elements for stage in rank.stages], outside.elements[first, last])
        return RankMoments(rank.number, rank.versions, held, tuple(whole), table, self._largest(self._moments(rank, held)))

    def _largest(self, moments: Iterable[Moment]) -> tuple[Moment, ...]:
        """Return the moments that no other moment exceeds in all respects (Pareto front). With pipeline stages, only moments of the same
        kind are compared, because FSDP's bytes, which are added later, differ by kind."""
        # bytes of a gradient bucket. A moment "loss" exceeds one of another kind only if it is larger by these bytes, because at a loss the
        # bucket may not exist yet
        bucket = self.stack.bucket_elements * self.stack.bucket_bytes
        found: list[Moment] = []
        for one in sorted(moments, key=lambda moment: moment.total + moment.gathered, reverse=True):
            if not any(
                (self.plan.pp == 1 or more.at == one.at)
                and (more.at != "loss" or one.at == "loss" or more.total + more.gathered >= one.total + one.gathered + bucket)
                and more.waiting >= one.waiting
                and more.to_come.dense <= one.to_come.dense
                and more.to_come.expert <= one.to_come.expert
                and more.freed.total <= one.freed.total
                and more.reducing.total >= one.reducing.total
                and more.summed.dense >= one.summed.dense
                and more.summed.expert >= one.summed.expert
                for more in found
            ):
                found.append(one)
        return tuple(found)

    def _moments(self, rank: Rank, held: Elements) -> Iterator[Moment]:
        """Yield all moments of a step that may be the rank's peak."""
        whole = self._gathered(held)
        for (at_i, none_ended, *_), now in rank.candidates.items():
            count, pending = now.in_flight.kept, now.in_flight.pending
            kept = sum([n * of.kept for n, of in zip(count, rank.stages, strict=True)])
            kept += sum([n * of.pending for n, of in zip(pending, rank.stages, strict=True)])
            ends = sum([n * of.ends_kept for n, of in zip(count, rank.stages, strict=True)])
            ends += sum([n * of.ends_pending for n, of in zip(pending, rank.stages, strict=True)])
            freed = [stage for stage, freed in zip(rank.stages, now.in_flight.freed, strict=False) if freed]
            fresh = sum(map(self._missing, rank.stages, self._gradients(rank, now, len(count))), NOTHING)
            yield from self._at_loss(rank, fresh, kept, ends, whole, none_ended=none_ended)
            last = sum(count) == len(count) == 1 and not at_i and (not none_ended or self.plan.microbatches == 1)
            for at, (number, stage) in enumerate(zip(count, rank.stages, strict=True)):
                if number or not at_i:
                    left = ends - (stage.of_loss - at_i * stage.ends_pending if number else 0.0)
                    others = sum([of.elements for of in freed if of is not stage], NOTHING)
                    gradients = self._gradients(rank, now, at)
                    rest = sum([self._missing(of, n) for of, n in zip(rank.stages, gradients, strict=True) if of is not stage], NOTHING)
                    yield from self._in_stage(stage, held, kept, left, whole, rest, others, _Pass(at_i, none_ended, gradients[at], last))
                    # the stage's first W has ended, and other micro-batches still wait for theirs
                    if at_i and self._missing(stage, max(gradients[at], 1)).total:
                        yield Moment("sums", kept - stage.kept, ends - stage.ends_kept, to_come=rest.trained)

    def _gradients(self, rank: Rank, now: Now, at: int) -> tuple[int, ...]:
        """Return which gradients (0, 1 or 2, as in _Pass) each stage of the rank has when the stage at index `at` begins a backward pass.
        If these are not known: 2 for all stages; before the step's first B or W ends, 2 for stages after index `at`, 0 for the others."""
        return now.in_flight.gradients or tuple([2 * (not now.none_ended or i > at) for i in range(len(rank.stages))])

    def _missing(self, stage: StageBytes, gradients: int, *, head: bool = True) -> Elements:
        """Return the parameters of a stage that have no gradient yet. gradients: 0, 1 or 2, as in _Pass. head: whether to count the
        head and last norm."""
        if gradients == 2 or (gradients and self.network.adapters is not None):
            return NOTHING
        return stage.elements + self.outside.elements[stage.number == 0 and not gradients, stage.number == self.last and head]

    def _at_loss(
        self, rank: Rank, fresh: Elements, kept: float, ends: float, whole: dict[At, float], *, none_ended: bool
    ) -> Iterator[Moment]:
        """Yield the moments "loss": before the backward pass of the layers. fresh: parameters that have no gradients yet. kept, ends: bytes
        that all micro-batches in flight keep, in layers and outside of them. whole: kind of moment -> bytes of gathered weights and
        unreduced gradients with ZeRO stage 3. none_ended: no B or W of the step has ended yet."""
        outside, plan = self.outside, self.plan
        named: dict[str, Any] = {"to_come": fresh.trained, "gathered": whole.get("loss", 0.0)}
        if rank.stages[-1].number == self.last:
            of_head = self.casts and plan.loss_chunks == 1 and plan.tensor not in GRIDS
            cast = plan.compute_bytes * outside.head.total if of_head else 0.0
            behind = NOTHING if none_ended else self._reduced_last(rank.stages[-1])
            yield Moment("loss", kept, ends + outside.loss + cast, work=outside.head_input, reducing=behind, **named)
            if self.network.ahead:  # backward pass of a layer of multi-token prediction
                work = max([of.work for stage in rank.stages for of, _ in stage.kinds], default=0.0)
                yield Moment("loss", kept, ends, work=work, **named)
        if not any(stage.kinds for stage in rank.stages):
            yield Moment("loss", kept, ends, **named)

    def _in_stage(
        self,
        stage: StageBytes,
        held: Elements,
        kept: float,
        ends: float,
        whole: dict[At, float],
        rest: Elements,
        others: Elements,
        now: _Pass,
    ) -> Iterator[Moment]:
        """Yield the moments of a stage's backward pass. held: parameters of the rank. rest: parameters of its other stages that have no
        gradient yet. others: parameters of its other stages with weights that FSDP has freed. kept, ends, whole: as for `_at_loss`."""
        outside, (at_i, none_ended, gradients, last) = self.outside, now
        tied = outside.embedding.trained.dense if self.network.tied and self.last == 0 else 0.0
        for of, gone, to_come, freed, behind, done in self._at_work(stage, now):
            work = of.work_of_i if at_i else of.work
            named: dict[str, Any] = {"to_come": (rest + to_come).trained, "waiting": tied, "summed": done.trained if last else NOTHING}
            if not self.gathers:
                yield Moment("work", kept - gone, ends, 0.0, work, of.dispatch, freed=others + freed, reducing=behind, **named)
                continue
            bytes_at = gathered(self.plan, self.stack, Unit(of.gathered, of.matrix, behind), held=held, table=self.outside.head)
            yield Moment("work", kept - gone, ends, 0.0, work, of.dispatch, gathered=bytes_at("work"), **named)
            if size := bytes_at("sums"):
                yield Moment("sums", kept - (gone + of.kept), ends, gathered=size, **named)
        left = kept - stage.kept + at_i * stage.pending  # after this backward pass
        after = self._missing(stage, max(gradients, 1 if at_i else 2))
        others += stage.elements
        if at_i:  # W frees the activations of one layer after the other, beginning with the first layer
            layers = self.sizes.layers_in(stage.number)
            ended = accumulate((of.pending for of in layers), initial=0.0)
            work = max([of.work_of_w - size for of, size in zip(layers, ended, strict=False)], default=0.0)
            scattered = layers[-1].gathered if layers else NOTHING
            to_come = (rest + after).trained
            yield Moment("sums", left, ends, work=work, to_come=to_come, waiting=tied, freed=others, reducing=scattered.times(2))
        if "head" in whole and stage.number == self.last:
            yield Moment("head", kept, ends, to_come=held.trained if none_ended else NOTHING, gathered=whole["head"])
        if "bucket" in whole:
            yield Moment("forward", kept, ends, to_come=held.trained if none_ended else NOTHING, gathered=whole.get("forward", 0.0))
            before = outside.elements[True, False] if none_ended else NOTHING
            full = min(1.0, self.stack.bucket_elements / max(1.0, held.total))  # fraction of the layers that fills a bucket
            yield Moment("bucket", kept - full * stage.kept, ends, to_come=before.trained, gathered=whole["bucket"])
        if stage.number == 0:
            # The embedding is read in fp32 and then cast, except by FSDP. If it is tied, its gradient and the head's are two tensors.
            wide = FP32_BYTES if self.stack.casts and not self.gathers else self.plan.compute_bytes
            size = wide * (2 if tied else 1) * outside.embedding.trained.dense
            # gradients that may not exist yet: of other stages and, after an I, of this stage's layers
            to_come, sharded = (rest + after).trained + Elements(tied if gradients < 2 else 0.0), whole.get("embedding", 0.0)
            summed = stage.elements.trained if last else NOTHING
            yield Moment("embedding", left, ends, size, to_come=to_come, waiting=tied, gathered=sharded, freed=others, summed=summed)

    def _gathered(self, held: Elements) -> dict[At, float]:
        """Return the bytes that ZeRO stage 3 adds (gathered weights, unreduced gradients), as a dict: kind of moment, such as "loss" or
        "embedding", -> bytes. Only moments outside of the layers' backward passes. held: the rank's parameters."""
        if not self.gathers:
            return {}
        unit = Unit(next=self.sizes.layer(self.network.depth - 1).gathered)
        first, last = (gathered(self.plan, self.stack, unit, held=held, table=of) for of in (self.outside.embedding, self.outside.head))
        return {"embedding": first("embedding"), **{at: last(at) for at in ("loss", *self.plan.kind.moments)}}

    def _reduced_last(self, stage: StageBytes) -> Elements:
        """Return the parameters whose gradients FSDP reduces last in a stage's backward pass: the embedding or the first layer."""
        return self.outside.embedding if stage.number == 0 else stage.kinds[0][0].gathered if stage.kinds else NOTHING

    def _at_work(self, stage: StageBytes, now: _Pass) -> list[_AtWork]:
        """Return the layers of a stage whose backward pass may be the peak: the last layer of each kind, and the first one if memory may
        grow during the pass. In the rank's last pass (now.last), also the layer nearest to the stage's end for which MOST_STARTED gradient
        buckets are already full, because that many may be summed at the same time."""
        at_i, none_ended, gradients, last = now
        fresh = self._missing(stage, gradients).total > 0
        completes = fresh and not self._missing(stage, max(gradients, 1 if at_i else 2)).total  # this pass makes all missing gradients
        last_reduced = NOTHING if none_ended else self._reduced_last(stage)
        lasts: dict[tuple[LayerBytes, int], _AtWork] = {}
        first: dict[LayerBytes, _AtWork] = {}
        gone, freed, to_come = 0.0, NOTHING, self._missing(stage, gradients, head=not completes)
        done = self.outside.head if stage.number == self.last and not self.network.tied else NOTHING
        full: list[_AtWork] = []
        before = last_reduced if not self.gathers else self.outside.head if stage.number == self.last else NOTHING
        for of in reversed(self.sizes.layers_in(stage.number)):
            here = _AtWork(of, gone, to_come, freed, before, done)
            lasts.setdefault((of, id(before)), here)
            if fresh or at_i or last:
                first[of] = here
            if last and not full and done.total >= MOST_STARTED * self.stack.bucket_elements:
                full.append(here)
            if completes:
                to_come += of.elements.times(-1)
            done += of.elements
            gone, freed = gone + of.kept - at_i * of.pending, freed + of.gathered
            before = before if at_i and not self.gathers else of.gathered
        return [*lasts.values(), *first.values(), *full]
