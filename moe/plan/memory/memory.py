"""Bytes that each rank of a plan needs, tensor by tensor, and whether a device has them.

    allocated = states + activations in flight + the largest of what is there for a moment

    states         parameters, gradients, optimizer            moe/plan/job/states.py of the elements in moe/plan/job/counts.py
    activations    micro-batches in flight x bytes of one      moe/plan/job/in_flight.py x moe/plan/memory/kept.py
    moments        the loss: logits in two widths and their gradients
                   a layer's backward pass, when its micro-batch's loss is done: what it computes again, the gradients inside it, of
                   the largest matrix, of T5's bias, rows on their way to experts
                   the embedding's gradient, when its micro-batch's activations are gone
                   gradients that no buffer keeps between steps come as the step's first backward pass makes them
                   with stage 3, what is gathered and summed at each of them: moe/plan/memory/gathered.py
    buffers        buckets of gradients

On the device that is more: torch's allocator reserves in blocks, and CUDA's context is no tensor.

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
from parallel.pipeline.simulator.held import Rank

NO_UNIT = Unit()
NO_EXPERTS = -1  # an index that no layer with experts has
WIDE = 4  # bytes of fp32
RESERVED = 1.10
CONTEXT_BYTES = 1.5e9
ROUNDED = 1e-9  # what sums of bytes may differ by that are taken in another order
OF_MOMENT = ("activations", "loss and logits", "embedding's gradient", "layer at work", "dispatch buffers")
PARTS = (
    *("parameters", "gradients", "optimizer", "older weights"),
    *OF_MOMENT,
    *("gathered layers", "gradient buckets"),
)


@dataclass(frozen=True)
class Memory:
    """One pipeline rank's bytes at its peak, by PARTS; `host`: by the same names, what is offloaded."""

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
        """As nvidia-smi counts."""
        return self.reserved + CONTEXT_BYTES


def memory(network: Network, plan: Plan, stack: Stack = OURS) -> tuple[Memory, ...]:
    """Of each pipeline rank; ranks of the other axes are alike. Raises BadInput for sizes that the schedule cannot have."""
    return tuple(_memory(plan, stack, rank) for rank in _ranks_of(network, plan, stack, "all"))


def peak(network: Network, plan: Plan, stack: Stack = OURS) -> Memory:
    """Of the rank that needs most."""
    ranks = _ranks_of(network, plan, stack, "fullest")
    return max([_memory(plan, stack, rank) for rank in _with_states(plan, stack, ranks)], key=lambda m: m.allocated)


def _with_states(plan: Plan, stack: Stack, ranks: Sequence[_Rank]) -> Sequence[_Rank]:
    """Those that may need most with the plan's states, which are in proportion to elements: one, or several that are alike."""
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
    """The ranks that may need most: one with the same kinds of layers, no fewer ends and as much in flight stands for those after it."""
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
    """Whether a device of so many bytes has them, with what the allocator and the context take."""
    return needed.used <= capacity


@dataclass(frozen=True, eq=False)
class _Layer:
    """One kind of layer: elements held, of them gathered at once in stage 3, and its widest `matrix`; bytes a micro-batch keeps, and more
    in its backward pass: of its `work`, and of rows that are sent and arrive (`dispatch`)."""

    elements: Elements
    gathered: Elements
    matrix: float
    kept: float
    work: float
    dispatch: float


_OF_LAYER = ("tp", "sp", "ep", "etp", "tensor", "depth", "tiles", "microbatch", "compute_bytes", "offload_activations")
_of_plan = attrgetter(*_OF_LAYER)


def _of_layer(plan: Plan, index: int) -> Plan:
    """What of a plan one of its layers depends on, so that plans which differ elsewhere share it: the same object."""
    return _shared(_of_plan(plan), recompute_of(plan, index), plan.sequence if keeps_scores(plan) else _BARE.sequence)


@lru_cache(maxsize=20_000)
def _shared(values: tuple[Any, ...], recompute: Any, sequence: Any) -> Plan:
    return _BARE.but(**dict(zip(_OF_LAYER, values, strict=True)), recompute=recompute, sequence=sequence)


_BARE = Plan()


@lru_cache(maxsize=20_000)
def _layer(network: Network, plan: Plan, stack: Stack, sparse: bool) -> _Layer:
    """A layer with experts, or without; all are recomputed as the plan says."""
    index = network.sparse_layers[0] if sparse else NO_EXPERTS
    of = (network, plan, stack, index)
    elements = counts.layer(network, plan, index)
    at_once, matrix = _tiled(network, plan, elements, sparse=sparse), _widest(network, plan, sparse=sparse)
    if stack.gathers == "elements":  # each product gathers its own matrix
        at_once = Elements(min(at_once.total, matrix))
    dispatch = buffers_of(network, plan) if sparse else 0.0
    return _Layer(elements, at_once, matrix, layer_kept(*of, plan.recompute) * (1 - plan.offload_activations), _work(*of), dispatch)


class _Moment(NamedTuple):
    """Bytes by OF_MOMENT, and their sum. `to_come`: elements whose gradients the first micro-batch has not made by then; `waiting`: those
    of a tied head, whose gradient autograd keeps beside the table's until the embedding's is added to it; `gathered`: bytes of stage 3."""

    parts: tuple[float, float, float, float, float]
    total: float
    to_come: Elements
    waiting: float
    gathered: float
    at: At


@dataclass(frozen=True, eq=False)
class _Rank:
    """What a pipeline rank has however its states are shared: elements `held`, `gathered` at once of each kind of its layers, and those
    of the vocabulary's `table` if it has one; `moments` of which each may be the fullest."""

    number: int
    versions: int
    held: Elements
    gathered: tuple[Elements, ...]
    table: float
    moments: tuple[_Moment, ...]


def _of_activations(plan: Plan, stack: Stack) -> Plan:
    """Without what only a rank's states depend on: engines share the rest, but for what is gathered at its moments."""
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
    """Whether there is much more of stage 3 at some moments than at others. With stages all of it stays whole."""
    return plan.stage == 3 and plan.pp == 1 and plan.copies > 1 and stack.gathers == "moments"


@dataclass(frozen=True, eq=False)
class _Beside:
    """What ranks have beside their layers. By (has the first stage, has the last): elements, and bytes that a micro-batch `keeps` there.

    `crossing`: bytes of one tensor between stages; `loss`, `gathered_input`: for a moment; `table`, `ahead`: elements of the vocabulary's,
    and of what predicts one further token; `casts`: bytes of that in the compute dtype.
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
    """Of what activations depend on, what is not the pipeline's."""
    return plan.but(pp=1, schedule=_BARE.schedule, chunks=1, stage_layers=None, microbatches=1)


@lru_cache(maxsize=20_000)
def _beside(network: Network, plan: Plan, stack: Stack) -> _Beside:
    ends = [(first, last) for first in (False, True) for last in (False, True)]
    return _Beside(
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
    """`casts`: whether a micro-batch keeps weights in the compute dtype."""
    ranks = in_flight(plan.schedule, ranks=plan.pp, microbatches=plan.microbatches, chunks=plan.chunks)
    stages = counts.stages_of(network, plan, 1 + max(stage for rank in ranks for stage in rank.stages))
    job = _Job(network, plan, stack, stages, casts)
    if which == "all":
        return tuple(job.of_rank(number, rank) for number, rank in enumerate(ranks))
    sparse = network.with_experts if network.experts else ()
    fullest = _fullest(plan.schedule, plan.pp, plan.microbatches, plan.chunks, tuple(map(len, stages)), sparse, plan.recompute_every)
    return tuple(job.of_rank(number, ranks[number]) for number in fullest)


def _memory(plan: Plan, stack: Stack, rank: _Rank) -> Memory:
    """With its states, as the plan shares them."""
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
    """A moment with the plan's engine: bytes of gradients that are not there yet (`missing`), of a head's that waits, of what is gathered,
    and of a bucket."""

    moment: _Moment
    missing: float
    waiting: float
    gathered: float
    bucket: float

    @property
    def total(self) -> float:
        return self.moment.total - self.missing + self.waiting + self.gathered + self.bucket


def _fullest_moment(plan: Plan, stack: Stack, rank: _Rank) -> _Full:
    """Of a rank's moments the one with most bytes."""
    if stack.gradients == "kept":
        return _Full(rank.moments[0], 0.0, 0.0, _gathered(plan, stack, rank, rank.moments[0]), _bucket(plan, stack, rank.moments[0].at))
    head = plan.storage.gradients if plan.stage < 3 or _gathers(plan, stack) else 0.0
    dense = expert = 0.0  # after the first micro-batch all gradients are there
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
    """DDP makes its buckets anew when the second step begins, so all that they hold is there twice. More than two ranks have it done before
    the optimizer has states (parallel/data/ddp.py)."""
    of_experts = _states(plan, Elements(expert=rank.held.trained.expert * _freed(plan)[1].expert))[0].gradients
    empty = _Moment((0.0, 0.0, 0.0, 0.0, 0.0), 0.0, NOTHING, 0.0, 0.0, "forward")
    return _Full(empty, of_experts, 0.0, 0.0, _states(plan, rank.held)[0].gradients - of_experts)


def _gathered(plan: Plan, stack: Stack, rank: _Rank, moment: _Moment) -> float:
    """Bytes of stage 3 at one of the rank's moments."""
    if plan.stage < 3 or plan.copies == 1:
        return 0.0
    if _gathers(plan, stack):
        return moment.gathered
    if stack.gathers == "moments":
        behind = max(rank.gathered, key=lambda of: of.total, default=NOTHING)
        return gathered(plan, stack, moment.at, Unit(behind=behind), held=rank.held, table=rank.table)
    return at_any_moment(plan, stack, held=rank.held.total, table=rank.table, units=[of.total for of in rank.gathered])


def _freed(plan: Plan) -> tuple[Elements, Elements]:
    """A dense element and one of an expert whose gradient is freed between steps. DDP's buckets keep what all its ranks sum, and
    DeepSpeed's stage 3 has one buffer for all of a rank's parts."""
    kept = plan.kind.gradients
    stays = plan.pp == 1 and (kept == "buffer" or (kept == "buckets" and plan.copies > 1))
    experts_too = kept == "buffer" or (plan.ep, plan.etp) == (1, plan.tp)
    return Elements(0.0 if stays else 1.0), Elements(expert=0.0 if stays and experts_too else 1.0)


class _Job:
    """A network, a plan and a software; layers of a kind are counted once, since a planner asks for thousands of plans."""

    def __init__(self, network: Network, plan: Plan, stack: Stack, stages: Sequence[range], casts: bool) -> None:
        self.network, self.plan, self.stack, self.stages, self.casts = network, plan, stack, stages, casts
        self.gathers = _gathers(plan, stack)
        self.sparse = frozenset(network.with_experts) if network.experts else frozenset()
        self.kinds: dict[tuple[bool, bool, bool], _Layer] = {}
        self.beside = _beside(network, _of_microbatch(plan), stack)

    def layer(self, index: int) -> _Layer:
        kind = (index < self.network.before, index in self.sparse, repeats(index, self.plan.recompute_every))
        if kind not in self.kinds:
            run, number = self.network.at(index)
            made = _layer(run, _of_layer(self.plan, index), self.stack, kind[1])
            casts = cast_weights(self.network, self.plan, index) if self.casts else 0.0
            self.kinds[kind] = replace(made, kept=made.kept + casts) if casts else made
        return self.kinds[kind]

    def kinds_of(self, stage: range) -> list[tuple[_Layer, int]]:
        """The kinds of layers of a stage, and how many of each."""
        if not self.sparse and self.plan.recompute_every == 1 and self.network.encoder is None:
            return [(self.layer(stage.start), len(stage))] if stage else []
        return list(Counter(map(self.layer, stage)).items())

    def of_rank(self, number: int, rank: Rank) -> _Rank:
        beside = self.beside
        layers = {stage: self.kinds_of(self.stages[stage]) for stage in rank.stages}
        first, last = 0 in layers, len(self.stages) - 1 in layers
        held = sum((of.elements.times(n) for mine in layers.values() for of, n in mine), beside.elements[first, last])
        return _Rank(
            number,
            rank.versions,
            held,
            (
                *(of.gathered for mine in layers.values() for of, _ in mine),
                *([Elements(beside.ahead)] if last and self.network.ahead else []),
            ),
            beside.table if first or last else 0.0,
            self._fullest(self._moments(rank, layers, held)),
        )

    def _fullest(self, moments: Iterable[_Moment]) -> tuple[_Moment, ...]:
        """Those of which no other has as much of all."""
        bucket = self.stack.bucket_elements * self.stack.bucket_bytes  # which may not be there at the loss
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

    def _moments(self, rank: Rank, layers: dict[int, list[tuple[_Layer, int]]], held: Elements) -> Iterator[_Moment]:
        """What a step holds for a while."""
        beside, last = self.beside, len(self.stages) - 1
        bodies = [sum([n * of.kept for of, n in mine]) for mine in layers.values()]
        ends = [beside.keeps[stage == 0, stage == last] for stage in layers]
        if self.casts and last in layers:
            ends[-1] += self.network.ahead * beside.casts
        of_loss = ends[-1] - beside.keeps[last == 0, False] if last in layers else 0.0
        ends = [end + self._inputs(stage) * beside.crossing for stage, end in zip(layers, ends, strict=True)]
        table = beside.table if 0 in layers or last in layers else 0.0
        tied = beside.table if self.network.tied and 0 in layers and last == 0 and self.network.adapters is None else 0.0
        work = max([of.work for mine in layers.values() for of, _ in mine], default=0.0)
        whole = self._gathered(held, table)
        wide = WIDE if self.stack.casts and not self.gathers else self.plan.compute_bytes  # rows are taken, then cast; FSDP's are narrow
        of_embedding = wide * (2 if tied else 1) * table if self.network.adapters is None else 0.0  # tied: and its sum with the head's

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
                yield moment("loss", kept, of_ends + beside.loss + cast, 0.0, beside.gathered_input, 0.0, to_come=all_to_come)
            if last in layers and self.network.ahead:  # a further token's layer
                yield moment("loss", kept, of_ends, 0.0, work, 0.0, to_come=all_to_come)
            if not any(layers.values()):
                yield moment("loss", kept, of_ends, 0.0, 0.0, 0.0, to_come=all_to_come)
            before = beside.elements[0 in layers, False] if once else NOTHING
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
                    full = min(1.0, self.stack.bucket_elements / max(1.0, held.total))  # the part of the backward pass that fills it
                    yield moment("forward", kept, left, 0.0, 0.0, 0.0, to_come=all_to_come)
                    yield moment("bucket", kept - full * body, left, 0.0, 0.0, 0.0, to_come=before)
                if stage == 0:
                    table_to_come = Elements(tied) if once else NOTHING
                    yield moment("embedding", kept - body, left, of_embedding, 0.0, 0.0, to_come=table_to_come, waiting=tied)
                before = sum((of.elements.times(n) for of, n in layers[stage]), before) if once else NOTHING

    def _counts(self, rank: Rank) -> list[tuple[Sequence[int], bool]]:
        """Micro-batches in flight at the fullest moments, and whether none of the step has been through its backward pass then. Where none
        has, the moment after the first one counts too: it left its gradients."""
        microbatches = self.plan.microbatches
        found: list[tuple[Sequence[int], bool]] = [(count, microbatches == 1 or min(count) == microbatches) for count in rank.most]
        after = [([n - 1 for n in count], False) for count, first in found if first and microbatches > 1]
        return [*found, *after]

    def _gathered(self, held: Elements, table: float) -> dict[At, float]:
        """Bytes of stage 3 at the moments that are no layer's."""
        if not self.gathers:
            return {}
        moments: tuple[At, ...] = ("loss", "embedding", *self.plan.kind.moments)
        next_to_work = self.layer(self.network.depth - 1).gathered
        unit = Unit(behind=next_to_work)
        return {at: gathered(self.plan, self.stack, at, unit, held=held, table=table) for at in moments}

    def _at_work(self, stage: int, held: Elements, table: float, once: bool) -> list[tuple[_Layer, float, Elements, float, float]]:
        """Layers of a stage of which one is the fullest while it works: each kind's last and first. With them what those behind kept,
        which is gone by then, the elements up to and with it, whose gradients are to come in the first micro-batch (`once`), and bytes of
        stage 3 while it works and while its gradients are summed: they depend on the layer behind it."""
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

    def _inputs(self, stage: int) -> int:
        """How many tensors of the size of a stage's input a micro-batch keeps there, beside what the layers and the last norm keep."""
        sent = int(self.stack.outputs == "kept" and self.plan.pp > 1)
        wider = self.stack.norm > self.plan.compute_bytes and self.plan.tensor not in GRIDS  # a copy is kept, not what arrived
        if self.stages[stage] or stage == len(self.stages) - 1:
            return sent + (wider and not (self.stages[stage] and self.plan.recompute == "full"))
        return sent + (stage > 0)  # the embedding alone reads tokens; a stage without anything keeps what goes through


# --- states -----------------------------------------------------------------------------------------------------------


def _states(plan: Plan, held: Elements) -> tuple[States, dict[str, float]]:
    """On the device, and on the host. The host updates what it has, so the gradients of an offloaded optimizer are there as well; with
    stages they add up on the device first, and the host gets the sums of its part."""

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
    """DeepSpeed's engine sends gradients in a bucket, which it makes whole however small the model is; here stages 1 and 2 make it when the
    first gradient is there."""
    if not stack.bucket_elements or plan.kind.bucket == "none" or plan.copies == 1:
        return 0.0
    if stack.gathers == "moments" and plan.kind.bucket == "passes" and plan.pp == 1 and at == "loss":
        return 0.0
    return stack.bucket_elements * stack.bucket_bytes


def _tiled(network: Network, plan: Plan, layer: Elements, *, sparse: bool) -> Elements:
    """Elements of a layer that are whole at once: tiles of its network are gathered one after the other."""
    if plan.tiles == 1 or sparse:
        return layer
    network_s = counts.network_elements(network, network.hidden, gated=network.gated) / counts.split_of(plan)
    return replace(layer, dense=layer.dense - network_s * (1 - 1 / plan.tiles))


# --- moments ----------------------------------------------------------------------------------------------------------


def _loss(network: Network, plan: Plan, stack: Stack) -> float:
    """Beyond the logits that are kept: their other widths and gradients. If the loss is cut, those of a chunk of the tokens, in fp32 and as
    they were computed, and beside them the table's gradient, which all chunks add to."""
    shared = plan.tp > 1 and plan.tensor != "copied"
    if plan.loss_chunks > 1:
        narrow = plan.compute_bytes if plan.compute_bytes < WIDE else 0
        one = stack.logits if plan.tensor in GRIDS else WIDE + narrow  # a grid's product is computed again by autograd
        of_table = WIDE * counts.embedding(network, plan) if network.adapters is None else 0.0
        return logits(network, plan) * one / plan.loss_chunks + of_table
    return logits(network, plan) * (stack.logits + (stack.logits_shared if shared else 0.0) - stack.logits_kept)


def _work(network: Network, plan: Plan, stack: Stack, index: int) -> float:
    """A layer's backward pass: what it computes again, the gradients of its widest tensors, and of its largest matrix."""
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
    """Of attention with T5's bias, when what the second half of the layer kept is gone: the bias' gradient of each sequence and their sum,
    or the sum in fp32 before and behind the mask."""
    parts = layer_parts(network, plan, stack, index)
    gone = parts["network"] + parts["activation"] + parts["experts"]
    return bias_elements(network, plan, stack) * max((plan.microbatch + 1) * plan.compute_bytes, 2 * WIDE) - gone


def _of_network(network: Network, plan: Plan, stack: Stack, hidden: float) -> float:
    """Of a dense one, with `hidden` bytes of all units. Here its last product is done when the activation's gradients come, two of them
    where it is gated; what it read is gone by then, but for relu, which reads its own output."""
    gradient = _gradient(network, plan, stack, sparse=False)
    if not stack.casts:
        return (2 if network.gated else 1) * hidden + gradient
    return max(hidden + gradient, (2 if network.gated or network.activation == "relu" else 1) * hidden)


def _gradient(network: Network, plan: Plan, stack: Stack, *, sparse: bool) -> float:
    """Bytes of the largest matrix's gradient before it is added. Here each matrix has a product of its own, which gives it in the compute
    dtype, then cast to that of the weights; experts' products give those of all their matrices, as wide as the weights."""
    c, e = plan.compute_bytes, network.experts
    largest = _widest(network, plan, sparse=sparse)
    if network.adapters is not None and not (sparse and network.trains("experts")):
        return 0.0  # of frozen matrices none; those of adapters are narrow
    if not stack.casts:
        return c * largest
    if e is not None and sparse:
        return WIDE * largest * (3 / 2 if e.gated else 2)
    return (WIDE + (c if c < WIDE else 0)) * largest / (2 if network.gated else 1)


def _widest(network: Network, plan: Plan, *, sparse: bool) -> float:
    """Elements of a layer's largest matrix; gate and first product are one, and so are the experts of a rank."""
    e = network.experts
    if e is not None and sparse:
        return e.count / plan.ep * network.width * e.hidden / plan.etp * (2 if e.gated else 1)
    return network.width * network.hidden / counts.split_of(plan) * (2 if network.gated else 1)


def _gathered_input(network: Network, plan: Plan, stack: Stack) -> float:
    """With sequence parallelism: a product's input for all of tp, unless that is kept, and its gradient before that is scattered."""
    return (2 if stack.reads_again else 1) * _whole_input(network, plan) if plan.tensor == "sliced" else 0.0


def _read_by_head(network: Network, plan: Plan, stack: Stack) -> float:
    """The same of the head while the loss peaks; where it is kept, that takes the place of the norm's output."""
    if plan.tensor != "sliced" or stack.reads_again:
        return _gathered_input(network, plan, stack)
    return _whole_input(network, plan) * (1 - 1 / plan.tp)


def _whole_input(network: Network, plan: Plan) -> float:
    return plan.compute_bytes * network.width * plan.microbatch * network.length / plan.sp
