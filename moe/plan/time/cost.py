"""Seconds of one training step of a plan on a cluster, by purpose, without a device.

    step_time(network, plan, cluster)
        stage i, one micro-batch    t_i = forward + backward + recompute, each the slower of device and host (layer_time.py)
        pipeline                    closed forms of t_i, else the project's simulator (pipeline_time.py)
        + gradients and parameters  what the backward pass does not hide
        + optimizer                 bytes of states over the memory's (or the host's) bandwidth

The identity for 1F1B is exact where stages are alike or the last is the slowest, as with a head; else it is too long. The breakdown is of
the slowest stage; its entries add up to the step. Sources: Narayanan et al. (arXiv 2104.04473) for pipelines, ZeRO (1910.02054) section 7
for volumes, GShard (2006.16668) for experts.
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

OVERLAP_SLOWDOWN = 0.126  # of products while collectives run beside them: Galvatron's measured coefficient, 1.126
ACCUMULATE_BYTES = 2  # per element and micro-batch beside the sum's own: the new gradient in 16 bits
ADAM_BYTES = 26  # per element: two moments and the master copy read and written, parameters written; the gradient is read twice more


@dataclass(frozen=True)
class Time:
    """Seconds of a step of the slowest stage, by purpose; they add up to `step`.

    `launch`: of the host, where it is slower than its device, and of the engine. `cores`: what ranks of one host wait for a core, negative
    where they have several each. `gradients`, `parameters`: sums and gathers that nothing hides; `hidden`: seconds of both that are beside
    products (not part of the sum). `joules`: of all devices.
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
        """The seconds that add up to the step."""
        return {name: getattr(self, name) for name in PARTS}


Counts = tuple[int, ...]  # dense layers, sparse layers; of an encoder-decoder those of the encoder before those of the decoder
PARTS = tuple(f.name for f in fields(Time) if f.name not in ("hidden", "joules"))


@dataclass(frozen=True)
class Stage:
    """One micro-batch on one stage. `again`: what is computed again in the backward pass; `weights`: seconds of weights' gradients."""

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
        """Of `total`, what is computed and not sent."""
        parts = (self.forward, self.backward, self.again)
        return sum(one.compute for one in parts) + self.launch_forward + self.launch_backward


def step_time(
    network: Network, plan: Plan, cluster: Cluster, program: Program | None = None, *, imbalance: float = 1.0, pipeline: How = "simulated"
) -> Time:
    """Time of one step of `program`, this project's own if not given. `imbalance`: rows of the busiest rank's experts over the mean.

    `pipeline`: `least` takes a bound where a schedule would be simulated; the step is then never longer than the simulated one. `alone`
    leaves out sums of gradients and gathers of parameters as well, and needs no order of actions. The cluster's number of nodes is not
    checked.
    """
    program = program or own_program(cluster)
    ranks, last = rank_layers(network, plan), head_rank(plan)
    again = ranks if plan.recompute_every == 1 else rank_layers(network, plan, every=plan.recompute_every)
    kinds = [(*both, i == 0, i == last) for i, both in enumerate(zip(ranks, again, strict=True))]  # few: what they share is computed once
    held = {kind: _held(network, plan, kind[0], first=kind[2], last=kind[3]) for kind in dict.fromkeys(kinds)}
    adds = {kind: _accumulated(plan, cluster, program, *own) for kind, own in held.items()}
    if last != plan.pp - 1:  # both ends are here: a matrix that they share is added to by each
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
    sums = max(shared, key=lambda found: found[0] + found[1], default=(0.0, 0.0, 0.0))  # what is hidden delays nobody
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
    """Seconds of a micro-batch's forward and backward pass on each stage, of which ranks have several."""
    sizes = sizes_of(network.depth, plan.pp * plan.chunks, plan.stage_layers)
    kinds = [(*both, i == 0, i == len(sizes) - 1) for i, both in enumerate(_kinds(network, plan, sizes))]
    made = {}
    for kind in dict.fromkeys(kinds):
        layers, again, first, last = kind
        adds = _accumulated(plan, cluster, program, *_held(network, plan, layers, first=first, last=last))
        made[kind] = _stage(network, plan, cluster, program, imbalance, layers, again, last, adds)
    return [made[kind].ahead for kind in kinds], [made[kind].back for kind in kinds]


def stage_times(network: Network, plan: Plan, cluster: Cluster, counts: tuple[int, ...], program: Program | None = None) -> list[Stage]:
    """One micro-batch on each of the stages that have so many layers; the last has the head."""
    program = program or own_program(cluster)
    found = []
    for i, (layers, again) in enumerate(_kinds(network, plan, counts)):
        last = i == len(counts) - 1
        held = _held(network, plan, layers, first=i == 0, last=last)
        found.append(_stage(network, plan, cluster, program, 1.0, layers, again, last, _accumulated(plan, cluster, program, *held)))
    return found


def _for_cores(crowd: float, microbatches: int, stages: list[Stage], pipeline: float) -> float:
    """Seconds that a pipeline (or one stage) takes longer because its ranks share cores: all their work has to be done, and what one of
    them waits for is time in which another computes. Negative where a rank has several cores."""
    work = microbatches * sum(stage.work for stage in stages) / len(stages)
    sent = microbatches * sum(stage.total - stage.work for stage in stages) / len(stages)
    if crowd < 1:
        return (crowd - 1) * work
    return max(0.0, crowd * work + sent - pipeline)


@lru_cache(maxsize=100)
def own_program(cluster: Cluster) -> Program:
    """This project's trainer on such devices, with what was measured of it there."""
    return replace(OWN_ON_CPU if cluster.cores else OWN, **cluster.program)  # type: ignore[arg-type]


@lru_cache(maxsize=100)
def _untied(network: Network) -> Network:
    return replace(network, tied=False)


def rank_layers(network: Network, plan: Plan, *, every: int = 1) -> tuple[Counts, ...]:
    """Layers of each kind on each rank of a pipeline, whose stages count together; of each stage where two ranks hold it.

    Of layers 0, `every`, 2 `every`, ... alone.
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
    """Layers of each kind in each of so many stages one after another, and of those that are computed again."""
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
    """`repeated`: of its layers those that are computed again; `ahead`: of further tokens' layers those that are."""
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
    if head and network.ahead:  # of each further token the layer, what joins its inputs, and the head again
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
    """What is computed again of one layer. Fused attention does so by itself, within its backward pass."""
    if recompute != "selective":
        return layer.forward if recompute == "full" else Pass()
    if program.selective == "second":
        return layer.second
    if program.selective == "half":
        return layer.forward.times(0.5)
    return layer.core if program.attention == "scores" else Pass()


def _together(host: float, device: float, program: Program) -> float:
    """Seconds of a pass that a host launches and a device computes: the slower of the two, and the part of the other in which neither
    helps, because the host waits for a result or the device has run out of work."""
    return max(host, device) + program.alone * min(host, device)


def _accumulated(plan: Plan, cluster: Cluster, program: Program, dense: float, expert: float) -> float:
    """Seconds in which the gradients of one micro-batch are added to those before."""
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
    """Seconds of one message between stages that a rank waits for."""
    if plan.pp == 1 or (plan.chunks > 1 and program.interleaved_transfers == "beside"):
        return 0.0
    stride = plan.tp * plan.sp * plan.dp
    size = tokens_of(network, plan) * network.width * plan.compute_bytes
    parted = plan.tp > 1 and (program.transfers == "parts" or plan.tensor == "sliced")
    one = send(cluster, size / (plan.tp if parted else 1), stride=stride, sharing=cluster.devices_per_node)
    if parted and plan.tensor != "sliced":
        one += gather(cluster, group_of(plan.tp, 1, cluster.devices_per_node, plan.world), size)
    return one


def _held(network: Network, plan: Plan, layers: Counts, *, first: bool, last: bool) -> tuple[float, float]:
    """(dense, expert) parameters of a rank with so many layers of each kind and these ends, as tp and ep cut them."""
    found = _counted(network, of_layer(plan), layers, first, last)
    return found.dense, found.expert


@lru_cache(maxsize=20_000)
def _counted(network: Network, plan: Plan, layers: Counts, first: bool, last: bool) -> counts.Elements:
    found = counts.ends(network, plan, first=first, last=last)
    for number, (run, sparse) in zip(layers, product(network.halves, (False, True)), strict=True):  # layers of a kind are alike
        found += counts.layer(run, plan, run.sparse_layers[0] if number and sparse else -1).times(number)
    return found


def _sharing(
    network: Network, plan: Plan, cluster: Cluster, program: Program, dense: float, expert: float, stage: Stage, spare: Spare
) -> tuple[float, float, float]:
    """Seconds of gradients' sums and of parameters' gathers that nothing hides, and of both that products hide."""
    by_stage = plan.pp > 1 and program.staged == "by stage"
    world, per_node = plan.world, cluster.devices_per_node
    copies = group_of(plan.dp * plan.sp, plan.tp, per_node, world)
    apart = plan.ep * plan.etp
    expert_copies = group_of(max(1, plan.edp), apart, per_node, world) if expert else Group(1, 1)
    wide, narrow = plan.storage.gradients, plan.compute_bytes
    wide = narrow if program.sent_gradients == "computed" else wide
    if plan.stage == 0:
        sums = all_reduce(cluster, copies, dense * wide) + all_reduce(cluster, expert_copies, expert * wide)
        exposed = spare.left(sums) if by_stage else _beside_backward(sums, stage, program, plan)
        return exposed, 0.0, max(0.0, sums - exposed)
    parts = ((copies, dense), (expert_copies, expert))
    reduced = sum(_limited(program, gather(cluster, g, p * wide), g, p * wide, plan) for g, p in parts)
    gathered = sum(_limited(program, gather(cluster, g, p * narrow), g, p * narrow, plan) for g, p in parts)
    m = plan.microbatches
    if plan.stage == 1:  # by stage: DeepSpeed sums after the rank's last action
        exposed = max(0.0, reduced - spare.others) if by_stage else _beside_backward(reduced, stage, program, plan)
        if program.parameters == "beside":
            waited, hidden = _beside(gathered, stage.ahead, program)
            return exposed, waited, max(0.0, reduced - exposed) + hidden
        return exposed, gathered, max(0.0, reduced - exposed)
    if plan.stage == 2:
        each, hidden = _beside(reduced, stage.back, program)
        return m * each, gathered, m * hidden
    if copies.size > 1:
        around = max(1.0, cluster.crowd(world)) * (network.depth + 2) / plan.pp * program.gather_us * 1e-6  # of layers and both ends
        reduced, gathered = reduced + around, gathered + around
    forward, hidden_forward = _beside(gathered, stage.ahead, program)
    often = plan.pp == 1 or program.shards == "micro-batch"
    if not often and not plan.reshard:  # parameters and gradients stay whole for all micro-batches of the step
        exposed = _beside_backward(reduced, stage, program, plan)
        return exposed, gathered, max(0.0, reduced - exposed)
    again = gathered if plan.reshard and not (plan.pp > 1 and often) else 0.0
    backward, hidden_backward = _beside(again + reduced, stage.back, program)
    first = gathered / max(1, network.depth)
    return m * backward, m * (forward + first), m * (hidden_forward + hidden_backward)


@dataclass(frozen=True)
class Spare:
    """Seconds that pass on a rank before the step's last action ends: `after` each of its stages is done, in order; and after all of its
    own actions are, when `others` still have some."""

    after: tuple[float, ...]
    others: float

    def left(self, seconds: float) -> float:
        """Of sums of so many seconds, a share for each stage, one after another: what the last action does not hide."""
        each, queued = seconds / max(1, len(self.after)), -inf
        for window in self.after:
            queued = max(queued, -window) + each
        return max(0.0, queued - self.others)


def _spare(plan: Plan, stages: list[Stage], rank: int) -> Spare:
    """By the order of actions, without their waits. A rank's last input gradient is followed by one on each rank before it, and there by
    what weights' gradients are left; not where ranks hold stages twice."""
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


def _beside(seconds: float, window: float, program: Program) -> tuple[float, float]:
    """(waited for, hidden) of collectives beside so many seconds of products, which they slow down meanwhile."""
    if program.gathers == "waited":
        return seconds, 0.0
    share = 1.0 if program.gathers == "beside" else 0.67
    hidden = min(seconds, window * share) if share == 1.0 else min(seconds * share, window)
    return seconds - hidden + OVERLAP_SLOWDOWN * hidden, hidden


def _beside_backward(seconds: float, stage: Stage, program: Program, plan: Plan) -> float:
    """Waited for, of sums once a step: the last bucket, about a tenth of the backward pass, has nothing left to hide it."""
    waits = program.gradients == "after" or not plan.kind.overlaps
    return seconds if waits else _beside(seconds, 0.9 * stage.back, program)[0]


def _update(plan: Plan, cluster: Cluster, program: Program, dense: float, expert: float) -> tuple[float, float]:
    """Seconds of the optimizer on the device, and of what is offloaded: messages to the host and back, its AdamW, the disk."""
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
    """Joules of all devices: idle power for the step, and what products add while they run."""
    device = cluster.device
    return plan.world * (device.idle_watts * step + (device.watts - device.idle_watts) * min(busy, step))
