"""Predicts the seconds of one training step of a plan on a cluster, by purpose. Needs no device.

    step_time(network, plan, cluster)
        stage i, one micro-batch    t_i = forward + backward + recompute, each the slower of device and host (layer_time.py)
        pipeline                    closed forms of t_i, else the project's simulator (pipeline_time.py)
        + gradients and parameters  time of sums and gathers that the backward pass does not hide
        + optimizer                 bytes of states divided by the memory's (or the host's) bandwidth

The closed form of 1F1B is exact if all stages are equal or the last is the slowest, as with a head; otherwise it is too long. The
breakdown is for the slowest stage; its entries add up to the step. Sources: Narayanan et al. (arXiv 2104.04473) for pipelines, ZeRO
(1910.02054) section 7 for volumes, GShard (2006.16668) for experts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import product
from math import inf

from moe.plan.job import counts
from moe.plan.job.counts import sizes_of
from moe.plan.job.network import Network, Plan, Recomputed, repeats
from moe.plan.machine.cluster import Cluster
from moe.plan.machine.program import OWN, OWN_ON_CPU, Program
from moe.plan.time.collective_times import Group, all_reduce, gather, group_of, send
from moe.plan.time.layer_time import Layer, Pass, head_time, join_time, layer_time, of_layer, tokens_of
from moe.plan.time.pipeline_time import How, crossings, head_rank, homes_at, pipeline_time, tails
from parallel.pipeline.schedules.catalog import closed_form, kind_of, placed
from parallel.pipeline.schedules.kind import Placed

OVERLAP_SLOWDOWN = 0.126  # slowdown of products while collectives run at the same time: Galvatron measured a factor of 1.126
ACCUMULATE_BYTES = 2  # an element and micro-batch, in addition to the running sum: reading the new gradient in 16 bits
ADAM_BYTES = 26  # an element: read and write two moments and the master copy, write the parameter (plus two reads of its gradient)


@dataclass(frozen=True)
class Time:
    """Seconds of a step of the slowest stage, by purpose; they add up to `step`.

    launch: time that the host needs beyond the device's, and time of the engine. cores: time that ranks of a CPU host wait for a core;
    negative if each has several. gradients, parameters: sums and gathers that are not hidden by computation. hidden: seconds of these
    that are hidden (not part of the sum). joules: energy of all devices.
    """

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    sequence: float = 0.0
    experts: float = 0.0
    launch: float = 0.0
    transfer: float = 0.0
    bubble: float = 0.0
    cores: float = 0.0
    gradients: float = 0.0
    parameters: float = 0.0
    optimizer: float = 0.0
    offload: float = 0.0
    hidden: float = 0.0
    joules: float = 0.0

    @property
    def step(self) -> float:
        return float(sum(getattr(self, name) for name in PARTS))

    @property
    def parts(self) -> dict[str, float]:
        """Purpose -> seconds. They add up to the step."""
        return {name: getattr(self, name) for name in PARTS}


Counts = tuple[int, ...]  # (dense layers, sparse layers); with an encoder-decoder, first the encoder's two, then the decoder's
PARTS = tuple(f.name for f in fields(Time) if f.name not in ("hidden", "joules"))


@dataclass(frozen=True)
class Stage:
    """Times of one micro-batch on one stage. again: recompute in the backward pass. weights: seconds of weight gradients in `backward`.
    launch_forward, launch_backward: seconds of the host and the engine beyond the device's."""

    forward: Pass
    backward: Pass
    again: Pass
    weights: float
    launch_forward: float
    launch_backward: float

    @cached_property
    def ahead(self) -> float:
        return self.forward.device + self.launch_forward

    @cached_property
    def back(self) -> float:
        return self.backward.device + self.again.device + self.launch_backward

    @cached_property
    def total(self) -> float:
        return self.ahead + self.back

    @cached_property
    def work(self) -> float:
        """Part of `total` that is computation, without communication."""
        parts = (self.forward, self.backward, self.again)
        return sum(one.compute for one in parts) + self.launch_forward + self.launch_backward


def step_time(
    network: Network, plan: Plan, cluster: Cluster, program: Program | None = None, *, imbalance: float = 1.0, pipeline: How = "simulated"
) -> Time:
    """Predict the time of one step.

    program: properties of the training program; default: this project's trainer. imbalance: rows of the busiest rank's experts, divided by
    the mean. pipeline: `simulated`; `least` uses a lower bound instead of a simulation; `alone` also leaves out sums of gradients and
    gathers of parameters, so that no order of actions is needed. The cluster's number of nodes is not checked.
    """
    program = program or own_program(cluster)
    ranks, last = rank_layers(network, plan), head_rank(plan)
    again = ranks if plan.recompute_every == 1 else rank_layers(network, plan, every=plan.recompute_every)
    kinds = [(*both, i == 0, i == last) for i, both in enumerate(zip(ranks, again, strict=True))]  # few kinds; each is computed once
    held = {kind: _held(network, plan, kind[0], first=kind[2], last=kind[3]) for kind in dict.fromkeys(kinds)}
    adds = {kind: _accumulated(plan, cluster, program, *own) for kind, own in held.items()}
    if last != plan.pp - 1:  # both ends are on this rank: each adds a gradient to a tied embedding
        both = _held(_untied(network), plan, ranks[last], first=True, last=True)
        adds[kinds[last]] = _accumulated(plan, cluster, program, *both)
    made = {kind: _stage(network, plan, cluster, program, imbalance, *kind[:2], kind[3], more) for kind, more in adds.items()}
    stages = [made[kind] for kind in kinds]
    slowest = max(made.values(), key=lambda stage: stage.total)
    sent = transfer_time(network, plan, cluster, program)
    m = plan.microbatches
    times = [s.ahead for s in stages], [s.back for s in stages], [s.weights for s in stages]
    apart = None if plan.chunks == 1 or closed_form(plan.schedule) is not None else _by_stage(network, plan, cluster, program, imbalance)
    passes = pipeline_time(plan, *times, sent, stages=apart, how=pipeline)
    some = () if pipeline == "alone" else sorted({0, len(ranks) - 1, stages.index(slowest)})
    shared = [_sharing(network, plan, cluster, program, *held[kinds[i]], stages[i], _spare(plan, stages, i)) for i in some]
    sums = max(shared, key=lambda found: found[0] + found[1], default=(0.0, 0.0, 0.0))  # hidden communication delays no rank
    optimizer, offload = _update(plan, cluster, program, *max(held.values(), key=sum))
    crowd = cluster.crowd(plan.world)
    waits = _for_cores(crowd, m, stages, passes)
    busy = m * (slowest.total + 2 * sent * crossings(plan))
    whole = slowest.forward + slowest.backward + slowest.again
    return Time(
        forward=m * slowest.forward.compute,
        backward=m * slowest.backward.compute,
        recompute=m * slowest.again.compute,
        tensor=m * whole.tensor,
        sequence=m * whole.sequence,
        experts=m * whole.experts,
        launch=m * (slowest.launch_forward + slowest.launch_backward),
        transfer=busy - m * slowest.total,
        bubble=passes - busy,
        cores=waits,
        gradients=sums[0],
        parameters=sums[1],
        optimizer=crowd * optimizer,
        offload=offload,
        hidden=sums[2],
        joules=_energy(plan, cluster, m * whole.compute, passes + waits + sums[0] + sums[1] + optimizer + offload),
    )


def _by_stage(network: Network, plan: Plan, cluster: Cluster, program: Program, imbalance: float) -> tuple[list[float], list[float]]:
    """Seconds of a micro-batch's forward and backward pass on each stage, for schedules with several stages a rank."""
    sizes = sizes_of(network.depth, plan.pp * plan.chunks, plan.stage_layers)
    kinds = [(*both, i == 0, i == len(sizes) - 1) for i, both in enumerate(_kinds(network, plan, sizes))]
    made = {}
    for kind in dict.fromkeys(kinds):
        layers, again, first, last = kind
        adds = _accumulated(plan, cluster, program, *_held(network, plan, layers, first=first, last=last))
        made[kind] = _stage(network, plan, cluster, program, imbalance, layers, again, last, adds)
    return [made[kind].ahead for kind in kinds], [made[kind].back for kind in kinds]


def stage_times(network: Network, plan: Plan, cluster: Cluster, counts: tuple[int, ...], program: Program | None = None) -> list[Stage]:
    """Times of one micro-batch on each stage. counts: number of layers of each stage; the last stage has the head."""
    program = program or own_program(cluster)
    found = []
    for i, (layers, again) in enumerate(_kinds(network, plan, counts)):
        last = i == len(counts) - 1
        held = _held(network, plan, layers, first=i == 0, last=last)
        found.append(_stage(network, plan, cluster, program, 1.0, layers, again, last, _accumulated(plan, cluster, program, *held)))
    return found


def _for_cores(crowd: float, microbatches: int, stages: list[Stage], pipeline: float) -> float:
    """Additional seconds of a pipeline because its ranks share cores: while one rank waits, another can compute, but all work must be
    done. Negative if a rank has several cores."""
    work = microbatches * sum(stage.work for stage in stages) / len(stages)
    sent = microbatches * sum(stage.total - stage.work for stage in stages) / len(stages)
    if crowd < 1:
        return (crowd - 1) * work
    return max(0.0, crowd * work + sent - pipeline)


@lru_cache(maxsize=100)
def own_program(cluster: Cluster) -> Program:
    """Properties of this project's trainer on such devices, with those measured on this cluster."""
    return replace(OWN_ON_CPU if cluster.cores else OWN, **cluster.program)  # type: ignore[arg-type]


@lru_cache(maxsize=100)
def _untied(network: Network) -> Network:
    return replace(network, tied=False)


def rank_layers(network: Network, plan: Plan, *, every: int = 1) -> tuple[Counts, ...]:
    """Number of layers of each kind on each rank of a pipeline, all of its stages together. If two ranks hold each stage: of each stage.

    every: count only layers 0, `every`, 2 `every`, ...
    """
    where = placed(plan.schedule)
    layers = network.depth, network.with_experts, network.before
    if where == "both_ways":
        return _of_ranks(*layers, plan.stage_layers, "line", plan.pp, 1, every)
    return _of_ranks(*layers, plan.stage_layers, where, plan.pp, plan.chunks, every)


@lru_cache(maxsize=5_000)
def _of_ranks(
    layers: int, sparse: tuple[int, ...], before: int, given: tuple[int, ...] | None, where: Placed, pp: int, chunks: int, every: int
) -> tuple[Counts, ...]:
    homes = homes_at(where, pp, chunks)
    found, at = [[0] * (4 if before else 2) for _ in range(1 + max(max(ranks) for ranks in homes))], 0
    with_experts = set(sparse)
    for size, (rank,) in zip(sizes_of(layers, len(homes), given), homes, strict=True):
        for layer in range(at, at + size):
            found[rank][(layer in with_experts) + (2 if 0 < before <= layer else 0)] += repeats(layer, every)
        at += size
    return tuple(map(tuple, found))


def _kinds(network: Network, plan: Plan, counts: tuple[int, ...]) -> list[tuple[Counts, Counts]]:
    """For each stage, with these numbers of layers: number of layers of each kind, and number of recomputed layers."""
    layers = network.depth, network.with_experts, network.before
    whole, again = (_of_ranks(*layers, counts, "line", len(counts), 1, n) for n in (1, plan.recompute_every))
    return list(zip(whole, again, strict=True))


@lru_cache(maxsize=50_000)
def _cached(
    network: Network,
    plan: Plan,
    cluster: Cluster,
    program: Program,
    imbalance: float,
    recompute: Recomputed,
    layers: Counts,
    repeated: Counts,
    head: bool,
    ahead: int,
) -> Stage:
    """Times of a stage. repeated: number of its layers of each kind that are recomputed. ahead: number of its multi-token prediction layers
    that are recomputed."""
    forward, backward, again, weights = Pass(), Pass(), Pass(), 0.0
    for count, times, (run, sparse) in zip(layers, repeated, product(network.halves, (False, True)), strict=True):
        if count == 0:
            continue
        layer = layer_time(run, plan, cluster, program, sparse=sparse, imbalance=imbalance)
        forward, backward, weights = (
            forward + layer.forward.times(count),
            backward + layer.backward.times(count),
            weights + count * layer.weights,
        )
        again += _repeated(layer, program, recompute).times(times)
    if head:
        last = head_time(network, plan, cluster, program)
        forward, backward, weights = forward + last[0], backward + last[1], weights + last[2]
    if head and network.ahead:  # multi-token prediction: for each further token a layer, a product that joins its inputs, and a head
        layer, joined = layer_time(network, plan, cluster, program, sparse=False), join_time(network, plan, cluster, program)
        for part in (joined, last, (layer.forward, layer.backward, layer.weights)):
            forward, backward = forward + part[0].times(network.ahead), backward + part[1].times(network.ahead)
            weights += network.ahead * part[2]
        again += _repeated(layer, program, recompute).times(ahead)
    launch = program.launch_us * 1e-6
    parts = recompute == "full" or (recompute == "selective" and program.selective == "second")
    nested = (sum(repeated) + ahead) * program.checkpoint_us * 1e-6 if parts else 0.0
    host_forward = launch * forward.kernels + nested
    host_backward = launch * (program.backward_launch * backward.kernels + again.kernels) + nested
    return Stage(
        forward,
        backward,
        again,
        weights,
        (1 + program.engine) * _together(host_forward, forward.device, program) - forward.device,
        (1 + program.engine) * _together(host_backward, backward.device + again.device, program) - backward.device - again.device,
    )


def _repeated(layer: Layer, program: Program, recompute: Recomputed) -> Pass:
    """Recompute of one layer. Fused attention's own recompute is part of its backward pass."""
    if recompute != "selective":
        return layer.forward if recompute == "full" else Pass()
    if program.selective == "second":
        return layer.second
    if program.selective == "half":
        return layer.forward.times(0.5)
    return layer.core if program.attention == "scores" else Pass()


def _together(host: float, device: float, program: Program) -> float:
    """Seconds of a pass that a host launches and a device computes: the slower of the two, plus the fraction `alone` of the other, in which
    the host waits for a result or the device has no work."""
    return max(host, device) + program.alone * min(host, device)


def _accumulated(plan: Plan, cluster: Cluster, program: Program, dense: float, expert: float) -> float:
    """Seconds to add the gradients of one micro-batch to the running sums."""
    if plan.microbatches == 1:
        return 0.0
    g = plan.storage.gradients
    each = g if program.accumulates == "within" else 2 * g + ACCUMULATE_BYTES
    return each * (dense + expert) / cluster.device.bandwidth


def _stage(
    network: Network,
    plan: Plan,
    cluster: Cluster,
    program: Program,
    imbalance: float,
    layers: Counts,
    repeated: Counts,
    head: bool,
    adds: float,
) -> Stage:
    ahead = sum(repeats(network.layers + depth, plan.recompute_every) for depth in range(network.ahead)) if head else 0
    made = _cached(network, of_layer(plan), cluster, program, imbalance, plan.recompute, layers, repeated, head, ahead)
    if not adds:
        return made
    backward = made.backward + Pass(compute=adds)
    return Stage(made.forward, backward, made.again, made.weights, made.launch_forward, made.launch_backward)


def transfer_time(network: Network, plan: Plan, cluster: Cluster, program: Program) -> float:
    """Seconds that a rank waits for one message between stages."""
    if plan.pp == 1 or (plan.chunks > 1 and program.interleaved_transfers == "overlapped"):
        return 0.0
    stride = plan.tp * plan.sp * plan.dp
    size = tokens_of(network, plan) * network.width * plan.compute_bytes
    parted = plan.tp > 1 and (program.transfers == "parts" or plan.tensor == "sliced")
    one = send(cluster, size / (plan.tp if parted else 1), stride=stride, sharing=cluster.devices_per_node)
    if parted and plan.tensor != "sliced":
        one += gather(cluster, group_of(plan.tp, 1, cluster.devices_per_node, plan.world), size)
    return one


def _held(network: Network, plan: Plan, layers: Counts, *, first: bool, last: bool) -> tuple[float, float]:
    """(dense, expert) parameters of a rank with these numbers of layers and these ends, after the cuts by tp and ep."""
    found = _counted(network, of_layer(plan), layers, first, last)
    return found.dense, found.expert


@lru_cache(maxsize=20_000)
def _counted(network: Network, plan: Plan, layers: Counts, first: bool, last: bool) -> counts.Elements:
    found = counts.ends(network, plan, first=first, last=last)
    for number, (run, sparse) in zip(layers, product(network.halves, (False, True)), strict=True):  # layers of a kind are equal
        found += counts.layer(run, plan, run.sparse_layers[0] if number and sparse else -1).times(number)
    return found


def _sharing(
    network: Network, plan: Plan, cluster: Cluster, program: Program, dense: float, expert: float, stage: Stage, spare: Spare
) -> tuple[float, float, float]:
    """(exposed seconds of gradient sums, exposed seconds of parameter gathers, seconds of both that computation hides)."""
    by_stage = plan.pp > 1 and program.staged == "by stage"
    world, per_node = plan.world, cluster.devices_per_node
    copies = group_of(plan.dp * plan.sp, plan.tp, per_node, world)
    apart = plan.ep * plan.etp
    expert_copies = group_of(max(1, plan.edp), apart, per_node, world) if expert else Group(1, 1)
    wide, narrow = plan.storage.gradients, plan.compute_bytes
    wide = narrow if program.sent_gradients == "computed" else wide
    if plan.stage == 0:
        sums = all_reduce(cluster, copies, dense * wide) + all_reduce(cluster, expert_copies, expert * wide)
        exposed = spare.left(sums) if by_stage else _overlapped_with_backward(sums, stage, program, plan)
        return exposed, 0.0, max(0.0, sums - exposed)
    parts = ((copies, dense), (expert_copies, expert))
    reduced = sum(_limited(program, gather(cluster, g, p * wide), g, p * wide, plan) for g, p in parts)
    gathered = sum(_limited(program, gather(cluster, g, p * narrow), g, p * narrow, plan) for g, p in parts)
    m = plan.microbatches
    if plan.stage == 1:  # by stage: DeepSpeed sums after the rank's last action
        exposed = max(0.0, reduced - spare.others) if by_stage else _overlapped_with_backward(reduced, stage, program, plan)
        if program.parameters == "overlapped":
            waited, hidden = _overlapped(gathered, stage.ahead, program)
            return exposed, waited, max(0.0, reduced - exposed) + hidden
        return exposed, gathered, max(0.0, reduced - exposed)
    if plan.stage == 2:
        each, hidden = _overlapped(reduced, stage.back, program)
        return m * each, gathered, m * hidden
    if copies.size > 1:
        around = max(1.0, cluster.crowd(world)) * (network.depth + 2) / plan.pp * program.gather_us * 1e-6  # layers and both ends
        reduced, gathered = reduced + around, gathered + around
    forward, hidden_forward = _overlapped(gathered, stage.ahead, program)
    often = plan.pp == 1 or program.shards == "micro-batch"
    if not often and not plan.reshard:  # parameters and gradients stay whole during all micro-batches of the step
        exposed = _overlapped_with_backward(reduced, stage, program, plan)
        return exposed, gathered, max(0.0, reduced - exposed)
    again = gathered if plan.reshard and not (plan.pp > 1 and often) else 0.0
    backward, hidden_backward = _overlapped(again + reduced, stage.back, program)
    first = gathered / max(1, network.depth)
    return m * backward, m * (forward + first), m * (hidden_forward + hidden_backward)


@dataclass(frozen=True)
class Spare:
    """Seconds in which a rank's gradient sums can overlap. after: from the end of each of its stages to the end of its own actions, in
    order of the stages. others: from the end of its own actions to the end of all ranks' actions."""

    after: tuple[float, ...]
    others: float

    def left(self, seconds: float) -> float:
        """Exposed part of sums that take `seconds` in all, an equal part for each stage, one after another."""
        each, queued = seconds / max(1, len(self.after)), -inf
        for window in self.after:
            queued = max(queued, -window) + each
        return max(0.0, queued - self.others)


def _spare(plan: Plan, stages: list[Stage], rank: int) -> Spare:
    """Spare time of a rank, from the order of actions without their waits. After a rank's last input gradient, each earlier rank still has
    one, and then its remaining weight gradients. `others` is 0 if ranks hold stages twice."""
    if plan.pp == 1:
        return Spare((0.0,), 0.0)
    of_ranks = tails(plan.schedule, plan.pp, plan.microbatches, plan.chunks)

    def seconds(counts: tuple[tuple[str, int], ...], of: Stage) -> float:
        each = {"F": of.ahead, "B": of.back, "I": of.back - of.weights, "W": of.weights}
        return sum(number * each[op] for op, number in counts) / plan.chunks

    others = 0.0
    if placed(plan.schedule) != "both_ways":
        split = kind_of(plan.schedule).splits_backward
        inputs = sum(of.back - (of.weights if split else 0.0) for of in stages[:rank]) / plan.chunks
        left = [seconds(of_ranks[r].late, stages[r]) for r in (0, rank)]
        others = max(0.0, inputs + left[0] - left[1])
    return Spare(tuple(seconds(counts, stages[rank]) for counts in of_ranks[rank].after), others)


def _limited(program: Program, seconds: float, group: Group, num_bytes: float, plan: Plan) -> float:
    if plan.stage < 3 or program.gather_gb_s is None or group.size == 1:
        return seconds
    return max(seconds, (group.size - 1) / group.size * num_bytes / (program.gather_gb_s * 1e9))


def _overlapped(seconds: float, window: float, program: Program) -> tuple[float, float]:
    """(exposed seconds, hidden seconds) of collectives during `window` seconds of products, which the collectives slow down."""
    if program.gathers == "waited":
        return seconds, 0.0
    share = 1.0 if program.gathers == "overlapped" else 0.67
    hidden = min(seconds, window * share) if share == 1.0 else min(seconds * share, window)
    return seconds - hidden + OVERLAP_SLOWDOWN * hidden, hidden


def _overlapped_with_backward(seconds: float, stage: Stage, program: Program, plan: Plan) -> float:
    """Exposed seconds of sums once a step. The last bucket, about a tenth of the backward pass, is never hidden."""
    exposed = program.gradients == "after" or not plan.kind.overlaps
    return seconds if exposed else _overlapped(seconds, 0.9 * stage.back, program)[0]


def _update(plan: Plan, cluster: Cluster, program: Program, dense: float, expert: float) -> tuple[float, float]:
    """(seconds of the optimizer on the device, seconds of offloading: transfers to the host and back, AdamW on the host, the disk)."""
    shared = plan.dp * plan.sp if plan.stage >= 1 else 1
    expert_shared = max(1, plan.edp) if plan.stage >= 1 else 1
    elements = dense / shared + expert / expert_shared
    g = plan.storage.gradients
    whole = g * (dense + expert) / (shared if plan.stage >= 2 else 1)  # gradients set to zero
    step, host = program.step_ms * 1e-3, cluster.host_gb_s * 1e9
    on_device = ((ADAM_BYTES + 2 * g) * elements + whole) / cluster.device.bandwidth + step
    ranks = min(cluster.devices_per_node, plan.world)
    offload = 0.0
    if plan.offload_optimizer != "none":
        on_device = whole / cluster.device.bandwidth + step
        offload += elements * (plan.storage.gradients + plan.compute_bytes) / host + elements * ranks / cluster.host_adam_per_s
        if plan.offload_optimizer == "nvme":
            offload += 2 * elements * ranks * plan.storage.optimizer / (cluster.disk_gb_s * 1e9)
    if plan.offload_parameters != "none":
        once = (dense + expert) / shared * plan.compute_bytes
        rate = host if plan.offload_parameters == "cpu" else cluster.disk_gb_s * 1e9 / ranks
        offload += 2 * plan.microbatches * once / rate
    return on_device, offload


def _energy(plan: Plan, cluster: Cluster, busy: float, step: float) -> float:
    """Joules of all devices: idle power during the whole step, and full power during the `busy` seconds."""
    device = cluster.device
    return plan.world * (device.idle_watts * step + (device.watts - device.idle_watts) * min(busy, step))
