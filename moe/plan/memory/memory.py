"""Predicts the bytes that each rank of a plan needs, tensor by tensor.

    allocated = states + activations in flight + temporary tensors, at the moment of the step at which their sum is largest

    states         parameters, gradients, optimizer states     moe/plan/job/states.py x the elements in moe/plan/job/counts.py
    activations    micro-batches in flight x bytes of one      moe/plan/job/in_flight.py x moe/plan/memory/kept.py
    moments        loss: logits in two dtypes and their gradients
                   backward pass of a layer: recomputed activations, gradients inside the layer, gradients of its largest matrix and of
                   T5's bias, rows sent to experts
                   embedding: its gradient, after its micro-batch's activations are freed
                   Gradients without a buffer between steps are counted only after the step's first backward pass has made them.
                   With ZeRO stage 3, each moment also has gathered weights and unreduced gradients (moe/plan/memory/gathered.py).
    buffers        buckets of gradients

A device needs more than that: torch's allocator reserves blocks, and CUDA's context is not a tensor.

    reserved  = 1.10 allocated         the median of 16 rows that state both (1.06 to 1.15)
    used      = reserved + 1.5 GB      the context, 1.3 to 1.6 GB on A100 nodes

Sources: ZeRO (arXiv 1910.02054), Korthikanti et al. (arXiv 2205.05198), ZeRO-Infinity (arXiv 2104.07857) for tiles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter, ge, mul
from typing import Any, Literal, NamedTuple

from moe.plan.job import counts
from moe.plan.job.counts import Elements
from moe.plan.job.in_flight import in_flight
from moe.plan.job.network import Network, Plan, repeats
from moe.plan.job.states import States, model_states
from moe.plan.memory.gathered import NOTHING, Unit, at_any_moment, gathered
from moe.plan.memory.kept import (
    bias_elements,
    buffers_of,
    cast_ahead,
    cast_weights,
    casts_kept,
    ends_kept,
    inputs_kept,
    keeps_scores,
    layer_kept,
    layer_parts,
    logits,
    recompute_of,
    rows_of,
    tokens_of,
)
from moe.plan.memory.stack import OURS, Stack
from parallel.data.kinds.kind import At
from parallel.mesh.grids import GRIDS
from parallel.pipeline.simulator.held import RankPeaks

NO_UNIT = Unit()
NO_EXPERTS = -1  # layer number for a layer without experts
WIDE = 4  # bytes of fp32
RESERVED = 1.10
CONTEXT_BYTES = 1.5e9
ROUNDED = 1e-9  # relative tolerance for sums of bytes in another order
OF_MOMENT = ("activations", "loss and logits", "embedding's gradient", "layer at work", "dispatch buffers")
PARTS = (
    *("parameters", "gradients", "optimizer", "older weights"),
    *OF_MOMENT,
    *("gathered layers", "gradient buckets"),
)


@dataclass(frozen=True)
class Memory:
    """Peak bytes of one pipeline rank, by the names in PARTS. host: offloaded bytes, by the same names."""

    rank: int
    parts: dict[str, float]
    host: dict[str, float] = field(default_factory=dict)

    @property
    def allocated(self) -> float:
        return sum(self.parts.values())

    @property
    def reserved(self) -> float:
        return RESERVED * self.allocated

    @property
    def used(self) -> float:
        """Bytes as nvidia-smi counts them: reserved by the allocator, plus CUDA's context."""
        return self.reserved + CONTEXT_BYTES


def memory(network: Network, plan: Plan, stack: Stack = OURS) -> tuple[Memory, ...]:
    """Memory of each pipeline rank. (Ranks that differ only on other axes need the same.) Raises BadInput for impossible schedule sizes."""
    return tuple(_memory(plan, stack, rank) for rank in _ranks_of(network, plan, stack, "all"))


def peak(network: Network, plan: Plan, stack: Stack = OURS) -> Memory:
    """Memory of the pipeline rank that needs most."""
    ranks = _ranks_of(network, plan, stack, "fullest")
    return max([_memory(plan, stack, rank) for rank in _with_states(plan, stack, ranks)], key=lambda m: m.allocated)


def _with_states(plan: Plan, stack: Stack, ranks: Sequence[_Rank]) -> Sequence[_Rank]:
    """Ranks that may need most memory with the plan's states (which are proportional to the elements): one, or several equal ones."""
    if len(ranks) == 1:
        return ranks
    dense, expert = (_states(plan, one)[0].total for one in (Elements(1.0, 0.0), Elements(0.0, 1.0)))
    older, sizes = plan.storage.parameters, []
    for of in ranks:
        states = dense * of.held.dense + expert * of.held.expert + (of.versions - 1) * older * of.held.total
        sizes.append(states + _fullest_moment(plan, stack, of).total)
    least = max(sizes) * (1 - ROUNDED)
    return [of for of, size in zip(ranks, sizes, strict=True) if size >= least]


@lru_cache(maxsize=5_000)
def _fullest(
    schedule: str, pp: int, microbatches: int, chunks: int, sizes: tuple[int, ...], sparse: tuple[int, ...], every: int
) -> tuple[int, ...]:
    """Ranks that may need most memory. A rank is left out if an earlier one has equal kinds of layers, the same ends and no fewer
    micro-batches in flight."""
    ranks = in_flight(schedule, ranks=pp, microbatches=microbatches, chunks=chunks)
    bounds, last = [0, *accumulate(sizes)], len(sizes) - 1
    kinds = [[sorted((i in sparse, repeats(i, every)) for i in range(bounds[s], bounds[s + 1])) for s in rank.stages] for rank in ranks]
    ends = [[(s == 0, s == last) for s in rank.stages] for rank in ranks]

    def stands_for(a: int, b: int) -> bool:
        if kinds[a] != kinds[b] or not all(all(map(ge, *pair)) for pair in zip(ends[a], ends[b], strict=True)):
            return False
        return ranks[a].versions >= ranks[b].versions and all(any(all(map(ge, x, y)) for x in ranks[a].most) for y in ranks[b].most)

    kept: list[int] = []
    for number in range(len(ranks)):
        if not any(stands_for(before, number) for before in kept):
            kept.append(number)
    return tuple(kept)


def fits(needed: Memory, capacity: float) -> bool:
    """True if a device with `capacity` bytes has enough for the tensors, the allocator's blocks and CUDA's context."""
    return needed.used <= capacity


@dataclass(frozen=True, eq=False)
class _Layer:
    """One kind of layer.

    elements: parameters held. gathered: elements that are whole at the same time in ZeRO stage 3. matrix: elements of its widest matrix.
    kept: bytes that a micro-batch keeps. work, dispatch: temporary bytes of its backward pass, and of rows sent to and from experts.
    """

    elements: Elements
    gathered: Elements
    matrix: float
    kept: float
    work: float
    dispatch: float


_OF_LAYER = ("tp", "sp", "ep", "etp", "tensor", "depth", "tiles", "microbatch", "compute_bytes", "offload_activations")
_of_plan = attrgetter(*_OF_LAYER)


def _of_layer(plan: Plan, index: int) -> Plan:
    """Plan reduced to the settings on which a layer depends, as the same object, so that plans share cached results."""
    return _shared(_of_plan(plan), recompute_of(plan, index), plan.sequence if keeps_scores(plan) else _BARE.sequence)


@lru_cache(maxsize=20_000)
def _shared(values: tuple[Any, ...], recompute: Any, sequence: Any) -> Plan:
    return _BARE.but(**dict(zip(_OF_LAYER, values, strict=True)), recompute=recompute, sequence=sequence)


_BARE = Plan()


@lru_cache(maxsize=20_000)
def _layer(network: Network, plan: Plan, stack: Stack, sparse: bool) -> _Layer:
    """Layer with or without experts. plan.recompute is its own recompute."""
    index = network.sparse_layers[0] if sparse else NO_EXPERTS
    of = (network, plan, stack, index)
    elements = counts.layer(network, plan, index)
    at_once, matrix = _tiled(network, plan, elements, sparse=sparse), _widest(network, plan, sparse=sparse)
    if stack.gathers == "elements":  # each product gathers its own matrix
        at_once = Elements(min(at_once.total, matrix))
    dispatch = buffers_of(network, plan) if sparse else 0.0
    return _Layer(elements, at_once, matrix, layer_kept(*of, plan.recompute) * (1 - plan.offload_activations), _work(*of), dispatch)


class _Moment(NamedTuple):
    """Bytes at one moment of a step, by the names in OF_MOMENT, and their sum.

    to_come: elements without a gradient yet in the first micro-batch. waiting: elements of a tied head; autograd keeps their gradient
    separately until the embedding's gradient is added. gathered: bytes of ZeRO stage 3. at: kind of moment.
    """

    parts: tuple[float, float, float, float, float]
    total: float
    to_come: Elements
    waiting: float
    gathered: float
    at: At


@dataclass(frozen=True, eq=False)
class _Rank:
    """Properties of a pipeline rank that do not depend on the sharding of its states.

    held: its parameters. gathered: for each kind of its layers, elements that are whole at the same time. table: elements of its embedding
    or head; 0 if it has none. moments: moments of which each may be the peak, depending on the states.
    """

    number: int
    versions: int
    held: Elements
    gathered: tuple[Elements, ...]
    table: float
    moments: tuple[_Moment, ...]


def _of_activations(plan: Plan, stack: Stack) -> Plan:
    """Plan without the settings on which only states depend, so that engines share cached activations. If moments of ZeRO stage 3 differ
    in gathered bytes, the engine's settings stay."""
    kept = {"dp": plan.dp, "engine": plan.engine, "reshard": plan.reshard} if _gathers(plan, stack) else {}
    without: dict[str, Any] = dict(
        dp=1,
        sequence=plan.sequence if keeps_scores(plan) else _BARE.sequence,
        order=_BARE.order,
        engine=_BARE.engine,
        storage=_BARE.storage,
        reshard=_BARE.reshard,
        offload_optimizer="none",
        offload_parameters="none",
    )
    return plan.but(**without | kept)


def _gathers(plan: Plan, stack: Stack) -> bool:
    """True if gathered bytes of ZeRO stage 3 differ between moments. With pipeline stages, weights stay whole at all moments."""
    return plan.stage == 3 and plan.pp == 1 and plan.copies > 1 and stack.gathers == "moments"


@dataclass(frozen=True, eq=False)
class _OutsideLayers:
    """Parts of the model outside of its layers.

    elements, keeps: (has the first stage, has the last stage) -> parameters, and bytes that a micro-batch keeps there. crossing: bytes of
    a tensor between stages. loss, gathered_input: temporary bytes at the loss. table: elements of the embedding. ahead, casts: elements of
    one layer of multi-token prediction, and its bytes in the compute dtype.
    """

    elements: dict[tuple[bool, bool], Elements]
    keeps: dict[tuple[bool, bool], float]
    crossing: float
    loss: float
    gathered_input: float
    table: float
    ahead: float
    casts: float


def _of_microbatch(plan: Plan) -> Plan:
    """Plan without the pipeline's settings."""
    return plan.but(pp=1, schedule=_BARE.schedule, chunks=1, stage_layers=None, microbatches=1)


@lru_cache(maxsize=20_000)
def _outside_layers(network: Network, plan: Plan, stack: Stack) -> _OutsideLayers:
    ends = [(first, last) for first in (False, True) for last in (False, True)]
    return _OutsideLayers(
        {(first, last): counts.ends(network, plan, first=first, last=last) for first, last in ends},
        {(first, last): ends_kept(network, plan, stack, first=first, last=last) for first, last in ends},
        plan.compute_bytes * network.width * sum(tokens_of(run, plan, stack).between for run in network.halves),
        _loss(network, plan, stack),
        _read_by_head(network, plan, stack),
        counts.embedding(network, plan),
        counts.ahead(network, plan).total if network.ahead else 0.0,
        cast_ahead(network, plan) if network.ahead else 0.0,
    )


def _ranks_of(network: Network, plan: Plan, stack: Stack, which: Literal["all", "fullest"]) -> tuple[_Rank, ...]:
    return _ranks(network, _of_activations(plan, stack), stack, casts_kept(plan, stack), which)


@lru_cache(maxsize=256)
def _ranks(network: Network, plan: Plan, stack: Stack, casts: bool, which: Literal["all", "fullest"]) -> tuple[_Rank, ...]:
    """Ranks of a pipeline: all, or only the ranks that may be fullest. casts: True if a micro-batch keeps weights in the compute dtype."""
    ranks = in_flight(plan.schedule, ranks=plan.pp, microbatches=plan.microbatches, chunks=plan.chunks)
    stages = counts.stages_of(network, plan, 1 + max(stage for rank in ranks for stage in rank.stages))
    job = _Job(network, plan, stack, stages, casts)
    if which == "all":
        return tuple(job.of_rank(number, rank) for number, rank in enumerate(ranks))
    sparse = network.with_experts if network.experts else ()
    fullest = _fullest(plan.schedule, plan.pp, plan.microbatches, plan.chunks, tuple(map(len, stages)), sparse, plan.recompute_every)
    return tuple(job.of_rank(number, ranks[number]) for number in fullest)


def _memory(plan: Plan, stack: Stack, rank: _Rank) -> Memory:
    """Peak memory of a rank, with its states sharded as the plan says."""
    states, host = _states(plan, rank.held)
    full = _fullest_moment(plan, stack, rank)
    activations, loss, embedding, work, dispatch = full.moment.parts
    sizes = (
        *(states.parameters, states.gradients - full.missing, states.optimizer),
        (rank.versions - 1) * rank.held.total * plan.storage.parameters,
        *(activations, loss, embedding + full.waiting, work, dispatch),
        *(full.gathered, full.bucket),
    )
    return Memory(rank.number, dict(zip(PARTS, sizes, strict=True)), host)


class _Full(NamedTuple):
    """A moment with the plan's engine. Bytes: missing: of gradients that do not exist yet. waiting: of a tied head's separate gradient.
    gathered: of ZeRO stage 3. bucket: of a bucket of gradients."""

    moment: _Moment
    missing: float
    waiting: float
    gathered: float
    bucket: float

    @property
    def total(self) -> float:
        return self.moment.total - self.missing + self.waiting + self.gathered + self.bucket


def _fullest_moment(plan: Plan, stack: Stack, rank: _Rank) -> _Full:
    """Moment of a rank with the most bytes."""
    if stack.gradients == "kept":
        return _Full(rank.moments[0], 0.0, 0.0, _gathered(plan, stack, rank, rank.moments[0]), _bucket(plan, stack, rank.moments[0].at))
    head = plan.storage.gradients if plan.stage < 3 or _gathers(plan, stack) else 0.0
    dense = expert = 0.0  # after the first micro-batch all gradients exist
    if any(one.to_come is not NOTHING for one in rank.moments):
        dense, expert = (_states(plan, one)[0].gradients for one in _freed(plan))
    found = [
        _Full(
            one,
            dense * one.to_come.trained.dense + expert * one.to_come.trained.expert,
            head * one.waiting,
            _gathered(plan, stack, rank, one),
            _bucket(plan, stack, one.at),
        )
        for one in rank.moments
    ]
    if stack.gathers == "moments" and plan.kind.gradients == "buckets" and plan.copies == 2 and plan.pp == 1:
        found.append(_new_buckets(plan, rank))
    return found[0] if len(found) == 1 else max(found, key=lambda of: of.total)


def _new_buckets(plan: Plan, rank: _Rank) -> _Full:
    """Moment at which DDP makes its buckets again, at the start of the second step: their gradients exist twice. With more than two ranks,
    this happens before the optimizer has states (parallel/data/ddp.py)."""
    of_experts = _states(plan, Elements(expert=rank.held.trained.expert * _freed(plan)[1].expert))[0].gradients
    empty = _Moment((0.0, 0.0, 0.0, 0.0, 0.0), 0.0, NOTHING, 0.0, 0.0, "forward")
    return _Full(empty, of_experts, 0.0, 0.0, _states(plan, rank.held)[0].gradients - of_experts)


def _gathered(plan: Plan, stack: Stack, rank: _Rank, moment: _Moment) -> float:
    """Bytes of ZeRO stage 3 at one of the rank's moments."""
    if plan.stage < 3 or plan.copies == 1:
        return 0.0
    if _gathers(plan, stack):
        return moment.gathered
    if stack.gathers == "moments":
        behind = max(rank.gathered, key=lambda of: of.total, default=NOTHING)
        return gathered(plan, stack, moment.at, Unit(behind=behind), held=rank.held, table=rank.table)
    return at_any_moment(plan, stack, held=rank.held.total, table=rank.table, units=[of.total for of in rank.gathered])


def _freed(plan: Plan) -> tuple[Elements, Elements]:
    """(1 dense element, 1 expert element), or 0 elements if their gradients stay in memory between steps. DDP's buckets keep the gradients
    that all its ranks sum, and DeepSpeed's stage 3 has one buffer for all shards of a rank."""
    kept = plan.kind.gradients
    stays = plan.pp == 1 and (kept == "buffer" or (kept == "buckets" and plan.copies > 1))
    experts_too = kept == "buffer" or (plan.ep, plan.etp) == (1, plan.tp)
    return Elements(0.0 if stays else 1.0), Elements(expert=0.0 if stays and experts_too else 1.0)


class _Job:
    """A network, a plan and a training software. Each kind of layer is computed once, because the planner asks for thousands of plans."""

    def __init__(self, network: Network, plan: Plan, stack: Stack, stages: Sequence[range], casts: bool) -> None:
        self.network, self.plan, self.stack, self.stages, self.casts = network, plan, stack, stages, casts
        self.gathers = _gathers(plan, stack)
        self.sparse = frozenset(network.with_experts) if network.experts else frozenset()
        self.kinds: dict[tuple[bool, bool, bool], _Layer] = {}
        self.outside = _outside_layers(network, _of_microbatch(plan), stack)

    def layer(self, index: int) -> _Layer:
        kind = (index < self.network.before, index in self.sparse, repeats(index, self.plan.recompute_every))
        if kind not in self.kinds:
            run, number = self.network.at(index)
            made = _layer(run, _of_layer(self.plan, index), self.stack, kind[1])
            casts = cast_weights(self.network, self.plan, index) if self.casts else 0.0
            self.kinds[kind] = replace(made, kept=made.kept + casts) if casts else made
        return self.kinds[kind]

    def kinds_of(self, stage: range) -> list[tuple[_Layer, int]]:
        """(kind of layer, number of these layers) of a stage."""
        if not self.sparse and self.plan.recompute_every == 1 and self.network.encoder is None:
            return [(self.layer(stage.start), len(stage))] if stage else []
        return list(Counter(map(self.layer, stage)).items())

    def of_rank(self, number: int, rank: RankPeaks) -> _Rank:
        outside = self.outside
        layers = {stage: self.kinds_of(self.stages[stage]) for stage in rank.stages}
        first, last = 0 in layers, len(self.stages) - 1 in layers
        held = sum((of.elements.times(n) for mine in layers.values() for of, n in mine), outside.elements[first, last])
        return _Rank(
            number,
            rank.versions,
            held,
            (
                *(of.gathered for mine in layers.values() for of, _ in mine),
                *([Elements(outside.ahead)] if last and self.network.ahead else []),
            ),
            outside.table if first or last else 0.0,
            self._fullest(self._moments(rank, layers, held)),
        )

    def _fullest(self, moments: Iterable[_Moment]) -> tuple[_Moment, ...]:
        """Drop every moment that another moment exceeds in all respects (Pareto front)."""
        bucket = self.stack.bucket_elements * self.stack.bucket_bytes  # it may not exist yet at the loss
        kept: list[_Moment] = []
        for one in sorted(moments, key=lambda moment: moment.total + moment.gathered, reverse=True):
            if not any(
                (more.at != "loss" or one.at == "loss" or more.total + more.gathered >= one.total + one.gathered + bucket)
                and more.waiting >= one.waiting
                and more.to_come.dense <= one.to_come.dense
                and more.to_come.expert <= one.to_come.expert
                for more in kept
            ):
                kept.append(one)
        return tuple(kept)

    def _moments(self, rank: RankPeaks, layers: dict[int, list[tuple[_Layer, int]]], held: Elements) -> Iterator[_Moment]:
        """All moments of a step that may be the peak."""
        outside, last = self.outside, len(self.stages) - 1
        bodies = [sum([n * of.kept for of, n in mine]) for mine in layers.values()]
        ends = [outside.keeps[stage == 0, stage == last] for stage in layers]
        if self.casts and last in layers:
            ends[-1] += self.network.ahead * outside.casts
        of_loss = ends[-1] - outside.keeps[last == 0, False] if last in layers else 0.0
        inputs = [inputs_kept(self.plan, self.stack, self.stages[stage], first=stage == 0, last=stage == last) for stage in layers]
        ends = [end + number * outside.crossing for number, end in zip(inputs, ends, strict=True)]
        table = outside.table if 0 in layers or last in layers else 0.0
        tied = outside.table if self.network.tied and 0 in layers and last == 0 and self.network.adapters is None else 0.0
        work = max([of.work for mine in layers.values() for of, _ in mine], default=0.0)
        whole = self._gathered(held, table)
        wide = WIDE if self.stack.casts and not self.gathers else self.plan.compute_bytes  # rows are read in fp32, then cast; not in FSDP
        of_embedding = wide * (2 if tied else 1) * table if self.network.adapters is None else 0.0  # tied: also its sum with the head's

        def moment(at: At, *parts: float, to_come: Elements, waiting: float = 0.0, gathered: float | None = None) -> _Moment:
            activations, loss, embedding, at_work, dispatch = parts
            gathered = whole.get(at, 0.0) if gathered is None else gathered
            return _Moment((activations, loss, embedding, at_work, dispatch), sum(parts), to_come, waiting, gathered, at)

        counts = self._counts(rank)
        at_work = {(stage, once): self._at_work(stage, held, table, once) for once in {once for _, once in counts} for stage in layers}
        for count, once in counts:
            kept, of_ends, all_to_come = sum(map(mul, count, bodies)), sum(map(mul, count, ends)), held if once else NOTHING
            if last in layers:
                of_head = self.casts and self.plan.loss_chunks == 1 and self.plan.tensor not in GRIDS
                cast = self.plan.compute_bytes * table if of_head else 0.0
                yield moment("loss", kept, of_ends + outside.loss + cast, 0.0, outside.gathered_input, 0.0, to_come=all_to_come)
            if last in layers and self.network.ahead:  # a layer of multi-token prediction
                yield moment("loss", kept, of_ends, 0.0, work, 0.0, to_come=all_to_come)
            if not any(layers.values()):
                yield moment("loss", kept, of_ends, 0.0, 0.0, 0.0, to_come=all_to_come)
            before = outside.elements[0 in layers, False] if once else NOTHING
            for stage, body, number in zip(layers, bodies, count, strict=True):
                left = of_ends - (of_loss if stage == last and number else 0.0)
                for of, gone, to_come, bytes_at_work, bytes_of_sums in at_work[stage, once]:
                    missing = before + to_come if once else NOTHING
                    yield moment(
                        "work", kept - gone, left, 0.0, of.work, of.dispatch, to_come=missing, waiting=tied, gathered=bytes_at_work
                    )
                    if bytes_of_sums:
                        gone += of.kept
                        yield moment("sums", kept - gone, left, 0.0, 0.0, 0.0, to_come=missing, waiting=tied, gathered=bytes_of_sums)
                if "head" in whole and stage == last:
                    yield moment("head", kept, left, 0.0, 0.0, 0.0, to_come=all_to_come, waiting=0.0)
                if "bucket" in whole:
                    full = min(1.0, self.stack.bucket_elements / max(1.0, held.total))  # fraction of the backward pass that fills a bucket
                    yield moment("forward", kept, left, 0.0, 0.0, 0.0, to_come=all_to_come)
                    yield moment("bucket", kept - full * body, left, 0.0, 0.0, 0.0, to_come=before)
                if stage == 0:
                    table_to_come = Elements(tied) if once else NOTHING
                    yield moment("embedding", kept - body, left, of_embedding, 0.0, 0.0, to_come=table_to_come, waiting=tied)
                before = sum((of.elements.times(n) for of, n in layers[stage]), before) if once else NOTHING

    def _counts(self, rank: RankPeaks) -> list[tuple[Sequence[int], bool]]:
        """(micro-batches in flight by stage, True if no backward pass of the step has ended yet) for all moments that may be the peak. The
        moment after the first backward pass counts too, because gradients exist from then on."""
        microbatches = self.plan.microbatches
        found: list[tuple[Sequence[int], bool]] = [(count, microbatches == 1 or min(count) == microbatches) for count in rank.most]
        after = [([n - 1 for n in count], False) for count, first in found if first and microbatches > 1]
        return [*found, *after]

    def _gathered(self, held: Elements, table: float) -> dict[At, float]:
        """Bytes of ZeRO stage 3 at the moments outside of layers."""
        if not self.gathers:
            return {}
        moments: tuple[At, ...] = ("loss", "embedding", *self.plan.kind.moments)
        next_to_work = self.layer(self.network.depth - 1).gathered
        unit = Unit(behind=next_to_work)
        return {at: gathered(self.plan, self.stack, at, unit, held=held, table=table) for at in moments}

    def _at_work(self, stage: int, held: Elements, table: float, once: bool) -> list[tuple[_Layer, float, Elements, float, float]]:
        """Layers of a stage that may be the peak during their backward pass: the last and the first layer of each kind.

        Each is (layer, bytes that later layers kept and have freed, elements without a gradient yet in the first micro-batch, bytes of ZeRO
        stage 3 while it works, and while its gradients are summed). once: compute the elements without a gradient.
        """
        kinds = self.kinds_of(self.stages[stage])
        if len(kinds) == 1 and not self.gathers:
            ((of, n),) = kinds
            last = of, 0.0, of.elements.times(n) if once else NOTHING, 0.0, 0.0
            return [last, (of, (n - 1) * of.kept, of.elements, 0.0, 0.0)] if once else [last]
        lasts: dict[tuple[_Layer, Elements], tuple[_Layer, float, Elements]] = {}
        first: dict[_Layer, tuple[_Layer, float, Elements, Elements]] = {}
        gone, to_come = 0.0, sum((of.elements.times(n) for of, n in kinds), NOTHING) if once else NOTHING
        behind = Elements(table, frozen_dense=table if held.frozen_dense else 0.0)
        behind = behind if self.gathers and stage == len(self.stages) - 1 else NOTHING
        for of in map(self.layer, reversed(self.stages[stage])):
            lasts.setdefault((of, behind), (of, gone, to_come))
            if once:
                first[of] = of, gone, to_come, behind
                to_come += of.elements.times(-1)
            gone += of.kept
            behind = of.gathered if self.gathers else NOTHING
        found = [*((*one, behind) for (_, behind), one in lasts.items()), *first.values()]
        if not self.gathers:
            return [(of, gone, to_come, 0.0, 0.0) for of, gone, to_come, _ in found]

        def bytes_at(at: At, of: _Layer, behind: Elements) -> float:
            return gathered(self.plan, self.stack, at, Unit(of.gathered, of.matrix, behind), held=held, table=table)

        return [(of, gone, to_come, bytes_at("work", of, behind), bytes_at("sums", of, behind)) for of, gone, to_come, behind in found]


# --- states -----------------------------------------------------------------------------------------------------------


def _states(plan: Plan, held: Elements) -> tuple[States, dict[str, float]]:
    """(states on the device, offloaded bytes on the host by kind). With an offloaded optimizer, its gradients are on the host too. With
    pipeline stages, gradients are first summed on the device, and the host has the sums of its shard."""

    def states(stage: int) -> States:
        return (
            _of(held.trained, stage) + replace(_of(held.frozen, stage), gradients=0.0, optimizer=0.0)
            if held.frozen_dense
            else _of(held, stage)
        )

    def _of(elements: Elements, stage: int) -> States:
        dense = model_states(elements.dense, stage=stage, copies=plan.copies, storage=plan.storage)
        if not elements.expert:
            return dense
        return dense + model_states(elements.expert, stage=stage, copies=max(1, plan.edp), storage=plan.storage.expert)

    whole = states(plan.stage)
    if plan.offload_parameters == plan.offload_optimizer == "none":
        return whole, {}
    moved = States(
        whole.parameters if plan.offload_parameters != "none" else 0.0,
        whole.gradients if plan.offload_optimizer != "none" else 0.0,
        whole.optimizer if plan.offload_optimizer != "none" else 0.0,
    )
    left = States(whole.parameters - moved.parameters, whole.gradients - moved.gradients, whole.optimizer - moved.optimizer)
    if plan.pp > 1 and plan.offload_optimizer != "none":
        moved, left = replace(moved, gradients=states(2).gradients), replace(left, gradients=whole.gradients)
    return left, {name: size for name, size in vars(moved).items() if size}


def _bucket(plan: Plan, stack: Stack, at: At) -> float:
    """Bytes of DeepSpeed's bucket of gradients, which has its full size even for a small model. In this project, stages 1 and 2 make it
    with the first gradient, after the loss."""
    if not stack.bucket_elements or plan.kind.bucket == "none" or plan.copies == 1:
        return 0.0
    if stack.gathers == "moments" and plan.kind.bucket == "passes" and plan.pp == 1 and at == "loss":
        return 0.0
    return stack.bucket_elements * stack.bucket_bytes


def _tiled(network: Network, plan: Plan, layer: Elements, *, sparse: bool) -> Elements:
    """Elements of a layer that are whole at the same time, if its network's tiles are gathered one after another."""
    if plan.tiles == 1 or sparse:
        return layer
    network_s = counts.network_elements(network, network.hidden, gated=network.gated) / plan.grid.matrix
    return replace(layer, dense=layer.dense - network_s * (1 - 1 / plan.tiles))


# --- moments ----------------------------------------------------------------------------------------------------------


def _loss(network: Network, plan: Plan, stack: Stack) -> float:
    """Temporary bytes at the loss: copies of the logits in other dtypes, and their gradients. With `loss_chunks`, only one chunk's bytes,
    and the gradient of the head, to which all chunks add."""
    shared = plan.tp > 1 and plan.tensor != "copied"
    if plan.loss_chunks > 1:
        narrow = plan.compute_bytes if plan.compute_bytes < WIDE else 0
        one = stack.logits if plan.tensor in GRIDS else WIDE + narrow  # on a grid, autograd recomputes a chunk's whole loss
        of_table = WIDE * counts.embedding(network, plan) if network.adapters is None else 0.0
        return logits(network, plan) * one / plan.loss_chunks + of_table
    return logits(network, plan) * (stack.logits + (stack.logits_shared if shared else 0.0) - stack.logits_kept)


def _work(network: Network, plan: Plan, stack: Stack, index: int) -> float:
    """Temporary bytes of a layer's backward pass: recomputed activations, gradients of its widest tensors and of its largest matrix."""
    again = layer_kept(network, plan, stack, index, "none") - layer_kept(network, plan, stack, index, recompute_of(plan, index))
    at, c, e = tokens_of(network, plan, stack), plan.compute_bytes, network.experts
    sparse = e is not None and index in network.sparse_layers
    if e is not None and sparse:
        wide = c * rows_of(network, plan) * ((2 if e.gated else 1) * e.hidden / plan.etp + network.width)
        wide += _gradient(network, plan, stack, sparse=True)
    else:
        wide = _of_network(network, plan, stack, c * at.inside * network.hidden)
    if network.buckets and plan.sp == 1 and stack.biased == "fused":
        scores = _of_bias(network, plan, stack, index)
    else:
        scores = 2 * c * network.heads * network.length * at.inside if stack.core == "scores" or keeps_scores(plan) else 0.0
    return again + max(wide, scores) + 2 * c * network.width * at.between + _gathered_input(network, plan, stack)


def _of_bias(network: Network, plan: Plan, stack: Stack, index: int) -> float:
    """Temporary bytes of attention with T5's bias, less the bytes that the layer's second half has freed: the bias's gradients of all
    sequences and their sum, or the sum in fp32 before and after masking."""
    parts = layer_parts(network, plan, stack, index)
    gone = parts["network"] + parts["activation"] + parts["experts"]
    return bias_elements(network, plan, stack) * max((plan.microbatch + 1) * plan.compute_bytes, 2 * WIDE) - gone


def _of_network(network: Network, plan: Plan, stack: Stack, hidden: float) -> float:
    """Temporary bytes of a dense network's backward pass. hidden: bytes of one tensor of the hidden size.

    In this project the gradients of the activation (two with a gate) come after the last product, whose input is freed by then, except
    for relu, which reads its own output.
    """
    gradient = _gradient(network, plan, stack, sparse=False)
    if not stack.casts:
        return (2 if network.gated else 1) * hidden + gradient
    return max(hidden + gradient, (2 if network.gated or network.activation == "relu" else 1) * hidden)


def _gradient(network: Network, plan: Plan, stack: Stack, *, sparse: bool) -> float:
    """Bytes of the largest matrix's gradient before it is added to the sum.

    In this project each matrix has its own product, with a result in the compute dtype that is then cast to the weights' dtype. Products of
    experts give the gradients of all their matrices in the weights' dtype.
    """
    c, e = plan.compute_bytes, network.experts
    largest = _widest(network, plan, sparse=sparse)
    if network.adapters is not None and not (sparse and network.trains("experts")):
        return 0.0  # frozen matrices have no gradient, and adapters are small
    if not stack.casts:
        return c * largest
    if e is not None and sparse:
        return WIDE * largest * (3 / 2 if e.gated else 2)
    return (WIDE + (c if c < WIDE else 0)) * largest / (2 if network.gated else 1)


def _widest(network: Network, plan: Plan, *, sparse: bool) -> float:
    """Elements of a layer's largest matrix. Gate and first product count as one matrix, and so do all experts of a rank."""
    e = network.experts
    if e is not None and sparse:
        return e.count / plan.ep * network.width * e.hidden / plan.etp * (2 if e.gated else 1)
    return network.width * network.hidden / plan.grid.matrix * (2 if network.gated else 1)


def _gathered_input(network: Network, plan: Plan, stack: Stack) -> float:
    """Temporary bytes with sequence parallelism: a product's input gathered over tp (if it is not kept), and its gradient before the
    reduce-scatter."""
    return (2 if stack.reads_again else 1) * _whole_input(network, plan) if plan.tensor == "sliced" else 0.0


def _read_by_head(network: Network, plan: Plan, stack: Stack) -> float:
    """Temporary bytes of the head's gathered input at the loss. If it is kept, it replaces the norm's output."""
    if plan.tensor != "sliced" or stack.reads_again:
        return _gathered_input(network, plan, stack)
    return _whole_input(network, plan) * (1 - 1 / plan.tp)


def _whole_input(network: Network, plan: Plan) -> float:
    return plan.compute_bytes * network.width * plan.microbatch * network.length / plan.sp
