"""Sizes of a step's pipeline stages and ranks: layers of each kind, bytes that a micro-batch keeps, and when a rank keeps the most.

Sizes are computed once for each kind of layer, and once for stages with equal layers. moments.py adds the temporary tensors, which gives a
rank's peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from moe.plan.job.counts import Elements
from moe.plan.job.network import Network, Plan, repeats
from moe.plan.memory.kept import between_halves, cast_weights, inputs_kept, recompute_of
from moe.plan.memory.stack import Stack
from moe.plan.memory.temporary import NOTHING, LayerBytes, forward_alone, layer_bytes, outside_of
from parallel.pipeline.simulator.held import InFlight, RankPeaks

# settings of a plan on which the size of a layer depends, in addition to the layer's recompute
_OF_LAYER = ("tp", "sp", "ep", "etp", "tensor", "depth", "tiles", "sequence", "microbatch", "compute_bytes", "offload_activations")


class _Layers(NamedTuple):
    """Sizes of a stage's layers: fields of `StageBytes` that are computed once for all stages with equal layers."""

    kinds: Sequence[tuple[LayerBytes, int]]
    elements: Elements
    kept: float
    pending: float


class StageBytes(NamedTuple):
    """Sizes of a pipeline stage on a rank. number: index of the stage. kinds: (sizes of a layer, number of such layers) for each
    kind of layer. elements: parameters of its layers.

    kept, ends_kept: bytes in the stage's layers, and outside of them, that a micro-batch keeps from its forward pass (F) until its backward
    pass (B, or I if the backward pass is split). pending, ends_pending: bytes that it keeps from I (gradients of inputs) until W (gradients
    of weights). of_loss: the part of `ends_kept` that is freed at the end of the loss's backward pass.
    """

    number: int
    kinds: Sequence[tuple[LayerBytes, int]]
    elements: Elements
    kept: float
    pending: float
    ends_kept: float
    ends_pending: float
    of_loss: float


class Now(NamedTuple):
    """A candidate for the peak of a rank's memory: the point of the step at which one of its backward actions begins. none_ended: whether
    no B or W of the step has ended yet. total: bytes that all micro-batches in flight keep."""

    in_flight: InFlight
    none_ended: bool
    total: float


_Key = tuple[bool, bool, tuple[bool, ...], tuple[int, ...]]


class Rank(NamedTuple):
    """A pipeline rank. versions: number of weight versions that it keeps. candidates: (in_flight.at_i, none_ended, in_flight.freed,
    in_flight.gradients), fields of Now -> among the points of the step at which these fields have these values, the one with the most
    kept bytes."""

    number: int
    versions: int
    stages: tuple[StageBytes, ...]
    candidates: dict[_Key, Now]

    def exceeds(self, other: Rank) -> bool:
        """Return whether, for each of the other rank's candidates, this rank's candidate with the same key keeps at least as many
        bytes. Both ranks have the same stages."""
        mine = self.candidates
        return all(key in mine and mine[key].total >= now.total for key, now in other.candidates.items())


_Kind = tuple[bool, bool, bool, int]  # (in encoder, with experts, recomputed, 0: trained, 1: frozen, 2: frozen and without backward pass)


@lru_cache(maxsize=100)
def _kinds(network: Network, every: int) -> tuple[_Kind, ...]:
    """Return the kind of each layer: layers of the same kind keep the same bytes. every: Plan.recompute_every."""
    sparse = frozenset(network.with_experts) if network.experts else frozenset[int]()
    frozen = [(i in network.frozen_layers) + (i < network.unreached) for i in range(network.depth)]
    return tuple((i < network.before, i in sparse, repeats(i, every), frozen[i]) for i in range(network.depth))


@lru_cache(maxsize=5_000)
def _counted(network: Network, every: int, stage: range) -> tuple[tuple[int, int], ...]:
    """Return (index of the first layer, number of layers) for each kind of layer in a stage."""
    kinds = [_kinds(network, every)[index] for index in stage]
    return tuple((stage[kinds.index(kind)], count) for kind, count in Counter(kinds).items())


def _candidates(moments: Iterable[tuple[InFlight, bool]], stages: Sequence[StageBytes]) -> dict[_Key, Now]:
    """Return `Rank.candidates` of a rank with these stages. moments: points of the step, each as (micro-batches in flight, whether no B or
    W has ended yet)."""
    found = dict[_Key, Now]()
    kept, pending = [of.kept + of.ends_kept for of in stages], [of.pending + of.ends_pending for of in stages]
    for of, none_ended in moments:
        total = sum(map(mul, of.kept, kept)) + sum(map(mul, of.pending, pending))
        key = of.at_i, none_ended, of.freed, of.gradients
        if key not in found or found[key].total < total:
            found[key] = Now(of, none_ended, total)
    return found


def differs_by_moment(plan: Plan, stack: Stack) -> bool:
    """Return whether gathered weights and unreduced gradients (ZeRO stage 3) are counted separately for each moment of a step. This is so
    for this project's trainer without pipeline stages."""
    return plan.stage == 3 and plan.pp == 1 and plan.copies > 1 and stack.gathers == "moments"


class Stages:
    """Computes the bytes of a step's pipeline stages and ranks. Each kind of layer is computed once. stages: the layers of each stage.
    casts: whether micro-batches keep copies of the weights in the compute dtype."""

    def __init__(self, network: Network, plan: Plan, stack: Stack, stages: Sequence[range], casts: bool) -> None:
        self.network, self.plan, self.stack, self.stages, self.casts = network, plan, stack, stages, casts
        self.gathers, self.last = differs_by_moment(plan, stack), len(stages) - 1
        self.kind_of_layer = _kinds(network, plan.recompute_every)
        self.kinds: dict[_Kind, LayerBytes] = {}
        self.alike: dict[tuple[tuple[int, int], ...], _Layers] = {}
        of_microbatch = plan.but(pp=1, schedule=Plan().schedule, chunks=1, stage_layers=None, microbatches=1)
        self.outside = outside_of(network, of_microbatch, stack)

    def layer(self, index: int) -> LayerBytes:
        """Return the sizes of layer `index` of the model."""
        n, kind = self.network, self.kind_of_layer[index]
        if kind not in self.kinds:
            run, _ = n.at(index)
            own = self.plan.only(_OF_LAYER, recompute=recompute_of(self.plan, index))
            made = layer_bytes(run, own, self.stack, kind[1])
            made = replace(made, kept=made.kept + (cast_weights(n, self.plan, index) if self.casts else 0.0))
            self.kinds[kind] = forward_alone(run, own, self.stack, made, sparse=kind[1]) if index < n.unreached else made
        return self.kinds[kind]

    def layers_in(self, number: int) -> list[LayerBytes]:
        """Return the sizes of the layers of stage `number`, in order."""
        return list(map(self.layer, self.stages[number]))

    def layers_of(self, stage: range) -> _Layers:
        kinds = [(self.layer(index), count) for index, count in _counted(self.network, self.plan.recompute_every, stage)]
        key = tuple([(id(of), n) for of, n in kinds])
        if key not in self.alike:
            elements = sum((of.elements.times(n) for of, n in kinds), NOTHING)
            self.alike[key] = _Layers(kinds, elements, sum([n * of.kept for of, n in kinds]), sum([n * of.pending for of, n in kinds]))
        return self.alike[key]

    def stage(self, number: int) -> StageBytes:
        network, plan, stack, outside, layers = self.network, self.plan, self.stack, self.outside, self.stages[number]
        first, last = number == 0, number == self.last
        ends = outside.keeps[first, last]
        if last and self.casts:
            ends += network.ahead * outside.casts
        of_loss = ends - outside.keeps[first, False] if last else 0.0
        whole = inputs_kept(plan, stack, layers, first=first, last=last)
        ends += whole * outside.crossing + between_halves(network, plan, stack, layers, first=first, whole=whole > 0)
        return StageBytes(number, *self.layers_of(layers), ends, outside.head_pending * last, of_loss)

    def rank(self, number: int, peaks: RankPeaks, moments: Iterable[tuple[InFlight, bool]]) -> Rank:
        """Return the sizes of pipeline rank `number`. peaks: the rank's stages and number of weight versions. moments: the
        rank's, as (micro-batches in flight, whether no B or W has ended yet)."""
        stages = tuple(map(self.stage, peaks.stages))
        return Rank(number, peaks.versions, stages, _candidates(moments, stages))

    def fullest(self, ranks: Sequence[Rank]) -> list[Rank]:
        """Return the ranks that may need the most memory. A rank is left out if another one with the same layers needs at least as much
        memory in each case (`exceeds`); of equal ranks, one is returned."""
        if len(ranks) == 1:
            return list(ranks)
        alike: dict[object, list[Rank]] = {}
        for rank in ranks:
            ends = [stage.number for stage in rank.stages if stage.number in (0, self.last)]
            layers = sorted([tuple([(id(of), n) for of, n in stage.kinds]) for stage in rank.stages])
            alike.setdefault((rank.versions, *ends, *layers), []).append(rank)
        found: list[Rank] = []
        for group in alike.values():
            most = sorted(group, key=lambda rank: max([now.total for now in rank.candidates.values()]), reverse=True)
            found += [rank for i, rank in enumerate(most) if not any(more.exceeds(rank) for more in most[:i])]
        return sorted(found, key=lambda rank: rank.number)
