"""Predicts the seconds of a pipeline stage for one micro-batch, and the timeline of all stages.

    layers of a stage   number of layers x seconds of a layer (layer_time.py); the last stage also has the head
    host and device     a pass takes the longer of its times on both, plus a fraction (Program.alone) of the shorter
    timeline            the schedule's order of actions with these seconds, simulated

A timeline has only forward and backward passes, not the work done once per step, such as gradient reductions and the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple

from moe.plan.job import counts
from moe.plan.job.network import Network, Plan, Recomputed, repeats
from moe.plan.machine.cluster import Cluster
from moe.plan.machine.program import OWN, OWN_ON_CPU, Program
from moe.plan.time.collective_times import gather, group_of, send
from moe.plan.time.layer_messages import Pass, Passes, tokens_of
from moe.plan.time.layer_time import Layer, head_time, join_time, layer_time, of_layer
from moe.plan.time.pipeline_time import homes_at
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.schedules import SCHEDULES, make_schedule, placed
from parallel.pipeline.schedules.kind import Placed
from parallel.pipeline.simulator.simulate import Cost, Timeline, costs, simulate

ACCUMULATE_BYTES = 2  # bytes per element of a micro-batch's gradient, which is read in 16 bits and added to the running sum
MOST_ACTIONS = 4000  # limit for the number of actions in a picture, above which their bars are too narrow

Counts = tuple[int, ...]  # numbers of layers: (dense, with experts); in an encoder-decoder: the encoder's two, then the decoder's two
Kind = tuple[Counts, Counts, bool, bool]  # kind of a stage: (its layers, its recomputed layers, whether it is the first, the last)


class Kinds(NamedTuple):
    """Kinds of a plan's pipeline ranks, or of its stages. distinct: each kind once. of: for each rank or stage, the index of its kind."""

    distinct: tuple[Kind, ...]
    of: tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    """Seconds of one micro-batch on one stage. recompute: recomputation in the backward pass, which `backward` does not include.

    weights: seconds of weight gradients, which are part of `backward`. launch_forward, launch_backward: seconds that kernel launches and
    the engine's work on the host add to the device's time. held: numbers of parameters of the rank.
    """

    forward: Pass
    backward: Pass
    recompute: Pass
    weights: float
    launch_forward: float
    launch_backward: float
    held: counts.Elements = counts.Elements()

    @cached_property
    def forward_seconds(self) -> float:
        return self.forward.device + self.launch_forward

    @cached_property
    def backward_seconds(self) -> float:
        return self.backward.device + self.recompute.device + self.launch_backward

    @cached_property
    def total(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @cached_property
    def work(self) -> float:
        """Seconds of `total` without communication."""
        computed = sum(one.compute for one in (self.forward, self.backward, self.recompute))
        return computed + self.launch_forward + self.launch_backward


@lru_cache(maxsize=100)
def own_program(cluster: Cluster) -> Program:
    """Return the Program of this project's trainer. Values that were measured on this cluster replace the defaults."""
    return replace(OWN_ON_CPU if cluster.cores else OWN, **cluster.program)  # type: ignore[arg-type]


def stage_times(network: Network, plan: Plan, cluster: Cluster, sizes: tuple[int, ...], program: Program | None = None) -> list[Stage]:
    """Return the times of one micro-batch on each stage. sizes: number of layers of each stage. The last stage has the head."""
    kinds = _kinds(network, sizes, "line", len(sizes), 1, plan.recompute_every)
    return times_of(network, plan, cluster, program or own_program(cluster), kinds)


def times_of(network: Network, plan: Plan, cluster: Cluster, program: Program, kinds: Kinds) -> list[Stage]:
    """Return the times of one micro-batch on each rank (or stage) that `kinds` lists, in its order. Equal kinds are computed once."""
    added = 0 if plan.microbatches == 1 else plan.storage.gradients
    # only what a stage's time depends on: plans that differ otherwise, for example in the engine, share cached stages
    alike = network, of_layer(plan), cluster, program, plan.recompute, plan.recompute_every, added, plan.pp > 1
    made = [_stage(*alike, kind) for kind in kinds.distinct]
    return [made[number] for number in kinds.of]


def kinds_of(network: Network, plan: Plan) -> Kinds:
    """Return the Kinds of the pipeline ranks. The Kind of a rank counts the layers of all its stages. If two ranks hold each stage
    (bidirectional schedules), return the Kinds of the stages instead."""
    where, chunks = placed(plan.schedule), plan.chunks
    if where == "both_ways":
        where, chunks = "line", 1
    return _kinds(network, plan.stage_layers, where, plan.pp, chunks, plan.recompute_every)


def whole_model(network: Network, plan: Plan) -> Kinds:
    """Return the kind of one stage with all layers."""
    return _kinds(network, None, "line", 1, 1, plan.recompute_every)


def rank_layers(network: Network, plan: Plan) -> tuple[Counts, ...]:
    """Return the Counts of each pipeline rank or, if two ranks hold each stage (bidirectional schedules), of each stage."""
    kinds = kinds_of(network, plan)
    return tuple(kinds.distinct[number][0] for number in kinds.of)


@lru_cache(maxsize=5_000)
def _kinds(network: Network, given: tuple[int, ...] | None, where: Placed, pp: int, chunks: int, every: int) -> Kinds:
    """Return the Kinds of the ranks. A rank's Kind has all that its time depends on: its numbers of layers, and whether it has the first or
    last stage. given: Plan.stage_layers. where: placement of `pp` * `chunks` stages on the ranks. every: Plan.recompute_every (1: all)."""
    whole, again = (_of_ranks(network, given, homes_at(where, pp, chunks), n) for n in (1, every))
    first, last = 0, 0 if where == "v" else len(whole) - 1  # with `v`, rank 0 has the first and the last stage
    kinds = [(*both, i == first, i == last) for i, both in enumerate(zip(whole, again, strict=True))]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    return Kinds(tuple(numbers), tuple(numbers[kind] for kind in kinds))


def _of_ranks(network: Network, given: tuple[int, ...] | None, homes: Sequence[Sequence[int]], every: int) -> list[Counts]:
    """Return the Counts of each rank. Only layers with an index divisible by `every` are counted. homes: for each stage, a tuple
    of its only rank. given: Plan.stage_layers."""
    before, sparse = network.before, set(network.with_experts)
    found, at = [[0] * (4 if before else 2) for _ in range(1 + max(map(max, homes)))], 0
    for size, (rank,) in zip(counts.sizes_of(network.depth, len(homes), given), homes, strict=True):
        for layer in range(at, at + size):
            found[rank][(layer in sparse) + (2 if 0 < before <= layer else 0)] += repeats(layer, every)
        at += size
    return list(map(tuple, found))


@lru_cache(maxsize=50_000)
def _stage(
    network: Network,
    small: Plan,
    cluster: Cluster,
    program: Program,
    recompute: Recomputed,
    every: int,
    added: int,
    staged: bool,
    kind: Kind,
) -> Stage:
    """Return the times of a stage or rank. small: the plan with only the settings that layer times depend on (`of_layer`). added: bytes
    of an element of the gradients' running sums, to which each micro-batch adds; 0 if there is one micro-batch. staged: the plan has
    pipeline stages. recompute, every: Plan.recompute and Plan.recompute_every. kind: kind of the stage or rank."""
    layers, repeated, first, last = kind
    held = _held(network, small.only(counts.DIVIDES), layers, first, last)
    ahead = sum(repeats(network.layers + depth, every) for depth in range(network.ahead)) if last else 0
    made = _passes(network, small, cluster, program, recompute, layers, repeated, last, ahead)
    backward = made.backward
    if added:
        summed = _held(_untied(network), small.only(counts.DIVIDES), layers, first, last) if first and last and staged else held
        each = added if program.accumulates == "within" else 2 * added + ACCUMULATE_BYTES
        backward += Pass(compute=each * summed.trained.total / cluster.device.bandwidth)
    return replace(made, backward=backward, held=held)


@lru_cache(maxsize=100)
def _untied(network: Network) -> Network:
    return replace(network, tied=False)


@lru_cache(maxsize=50_000)
def _passes(
    network: Network,
    plan: Plan,
    cluster: Cluster,
    program: Program,
    recompute: Recomputed,
    layers: Counts,
    repeated: Counts,
    head: bool,
    ahead: int,
) -> Stage:
    """Return the times of a stage with these layers, without the accumulation of gradients. repeated: number of recomputed layers of each
    kind. head: the stage has the head. ahead: number of recomputed layers of multi-token prediction."""
    passes, again = Passes(), Pass()
    for count, times, (run, sparse) in zip(layers, repeated, product(network.halves, (False, True)), strict=True):
        if count:
            layer = layer_time(run, plan, cluster, program, sparse=sparse)
            passes += layer.passes.times(count)
            again += _repeated(layer, program, recompute).times(times)
    if head:
        passes += (last := head_time(network, plan, cluster))
    if head and network.ahead:  # multi-token prediction
        layer = layer_time(network, plan, cluster, program, sparse=False)
        for part in (join_time(network, plan, cluster, program), last, layer.passes):
            passes += part.times(network.ahead)
        again += _repeated(layer, program, recompute).times(ahead)
    forward, backward, launch = passes.forward, passes.backward, program.launch_us * 1e-6
    parts = recompute == "full" or (recompute == "selective" and program.selective == "second")
    nested = (sum(repeated) + ahead) * program.checkpoint_us * 1e-6 if parts else 0.0
    host_forward = launch * forward.kernels + nested
    host_backward = launch * (backward.kernels + again.kernels) + nested

    def beyond(host: float, device: float) -> float:
        return (1 + program.engine) * (max(host, device) + program.alone * min(host, device))

    launch_forward = beyond(host_forward, forward.device) - forward.device
    launch_backward = beyond(host_backward, backward.device + again.device) - backward.device - again.device
    return Stage(forward, backward, again, passes.weights, launch_forward, launch_backward)


def _repeated(layer: Layer, program: Program, recompute: Recomputed) -> Pass:
    """Return the part of a layer's forward pass that this kind of recompute repeats in the backward pass."""
    if recompute != "selective":
        return layer.passes.forward if recompute == "full" else Pass()
    if program.selective == "second":
        return layer.second
    if program.selective == "half":
        return layer.passes.forward.times(0.5)
    return layer.core if program.attention == "scores" else Pass()


@lru_cache(maxsize=20_000)
def _held(network: Network, plan: Plan, layers: Counts, first: bool, last: bool) -> counts.Elements:
    """Numbers of parameters of a rank with these layers. first, last: whether the rank has the model's first stage, its last stage."""
    found = counts.ends(network, plan, first=first, last=last)
    for number, (run, sparse) in zip(layers, product(network.halves, (False, True)), strict=True):
        found += counts.layer(run, plan, run.sparse_layers[0] if number and sparse else -1).times(number)  # -1: a layer without experts
    return found


def transfer_time(network: Network, plan: Plan, cluster: Cluster, program: Program) -> float:
    """Seconds that a rank waits for one message from another stage."""
    if plan.pp == 1 or (plan.chunks > 1 and program.interleaved_transfers == "overlapped"):
        return 0.0
    size = sum(tokens_of(half, plan) for half in network.halves) * network.width * plan.compute_bytes
    parted = plan.tp > 1 and (program.transfers == "parts" or plan.tensor == "sliced")
    stride = plan.tp * plan.sp * plan.dp
    one = send(cluster, size / (plan.tp if parted else 1), stride=stride, sharing=cluster.devices_per_node)
    if parted and plan.tensor != "sliced":
        one += gather(cluster, group_of(plan.tp, 1, cluster.devices_per_node, plan.world), size)
    return one


# --- timeline -----------------------------------------------------------------------------------------------------------


def timeline(network: Network, plan: Plan, cluster: Cluster, *, microbatches: int | None = None) -> Timeline:
    """Return the timeline of a step, in seconds. microbatches: their number; None: as in the plan. Raises BadInput if the schedule does not
    allow these numbers of stages and micro-batches."""
    made, times, transfer = priced(network, plan, cluster, microbatches=microbatches)
    return simulate(made, times, transfer_time=transfer)


def priced(network: Network, plan: Plan, cluster: Cluster, *, microbatches: int | None = None) -> tuple[Schedule, Cost, float]:
    """Return (the plan's schedule, its actions' costs in seconds, seconds of a message between stages). microbatches: as in `timeline`."""
    chunks = plan.chunks if plan.chunks > 1 else None
    made = make_schedule(plan.schedule, ranks=plan.pp, microbatches=microbatches or plan.microbatches, chunks=chunks)
    sizes = counts.sizes_of(network.depth, made.num_stages, plan.stage_layers)
    stages = stage_times(network, plan, cluster, sizes)
    forward, backward = [stage.forward_seconds for stage in stages], [stage.backward_seconds for stage in stages]
    share = sum(stage.weights for stage in stages) / sum(backward)
    return made, costs(forward, backward, weight_share=min(0.99, share)), transfer_time(network, plan, cluster, own_program(cluster))


def pictured(plan: Plan) -> int:
    """Return a number of micro-batches for a readable picture: the plan's, but at most 4 per rank, or 3 or 2 if the picture would have more
    than MOST_ACTIONS actions."""
    kind = SCHEDULES.get(plan.schedule)
    splits = 3 if kind is not None and kind.splits_backward else 2
    for each in (4, 3, 2):
        if plan.pp * plan.pp * each * plan.chunks * splits <= MOST_ACTIONS:
            break
    return min(plan.microbatches, each * plan.pp)
