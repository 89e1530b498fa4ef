"""Predicts the seconds of one training step of a plan on a cluster, by purpose, and the range in which the measured seconds may lie. Needs
no device.

    step_time(network, plan, cluster)
        stage i, one micro-batch    t_i = forward + backward + recompute, from the times of device and host (stage_time.py)
        pipeline                    time of all micro-batches from all t_i: the schedule's closed form, or the simulator (pipeline_time.py)
        + gradients, parameters     seconds of data parallelism's collectives that computation does not hide
        + optimizer, offload        bytes of model states that the update reads and writes / bandwidth of the device's memory, host or disk

The closed form of 1F1B is exact if all stages are equally slow, or if the last is the slowest; otherwise it overestimates. Sources:
Narayanan et al. (arXiv 2104.04473) for pipelines, ZeRO (1910.02054) section 7 for bytes, GShard (2006.16668) for experts.

`range_of` reads ranges.yaml: ranges of measured / predicted seconds for groups of published runs. Each range was tested on published
tables that were left out when it was computed. `python -m tests.planner ranges` writes the file; tests/planner/ranges.py describes how.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from math import inf
from pathlib import Path

from moe.plan.job.counts import Elements, sizes_of
from moe.plan.job.network import Network, Plan
from moe.plan.machine.cluster import Cluster
from moe.plan.machine.program import Program
from moe.plan.time.collective_times import OVERLAP_SLOWDOWN, Group, all_reduce, gather, group_of
from moe.plan.time.pipeline_time import How, crossings, pipeline_time, tails
from moe.plan.time.stage_time import Stage, kinds_of, own_program, stage_times, times_of, transfer_time, whole_model
from parallel import yaml_text
from parallel.pipeline.schedules import closed_form, kind_of, placed
from parallel.store.files import read_text


@dataclass(frozen=True)
class Time:
    """Seconds that the slowest stage spends in a step, by purpose. All but `hidden` add up to `step`.

    tensor, sequence, experts: collectives over tp, sp and ep that no computation hides. launch: seconds that kernel launches and the
    engine's work on the host add to the device's time. transfer: messages between pipeline stages. bubble: other idle time in the pipeline.
    cores: seconds added because ranks share the cores of a CPU host; negative if each rank has several. gradients, parameters: gradient
    reductions and parameter gathers that no computation hides. hidden: gradient reductions and parameter gathers that computation hides.
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

    @property
    def step(self) -> float:
        return float(sum(getattr(self, name) for name in PARTS))

    @property
    def parts(self) -> dict[str, float]:
        """Purpose -> seconds, which add up to `step`."""
        return {name: getattr(self, name) for name in PARTS}


PARTS = tuple(f.name for f in fields(Time) if f.name != "hidden")


def step_time(network: Network, plan: Plan, cluster: Cluster, program: Program | None = None, *, pipeline: How = "simulated") -> Time:
    """Predict the time of one step. program: the training program; None: this project's trainer. Whether the cluster has enough nodes is
    not checked.

    pipeline: `simulated`: the exact prediction. `least`: a lower bound, without simulation. `alone`: a lower bound that also leaves out
    gradient reductions and parameter gathers, and builds no schedule.
    """
    if program is None:
        program, plan = own_program(cluster), plan.carried
    kinds, m = kinds_of(network, plan), plan.microbatches
    stages = times_of(network, plan, cluster, program, kinds)
    slowest = max(stages, key=lambda stage: stage.total)
    sent = transfer_time(network, plan, cluster, program)
    times = [s.forward_seconds for s in stages], [s.backward_seconds for s in stages], [s.weights for s in stages]
    apart = None
    if plan.chunks > 1 and closed_form(plan.schedule) is None:
        sizes = sizes_of(network.depth, plan.pp * plan.chunks, plan.stage_layers)
        chunks = stage_times(network, plan, cluster, sizes, program)
        apart = [s.forward_seconds for s in chunks], [s.backward_seconds for s in chunks]
    passes = pipeline_time(plan, *times, sent, stages=apart, how=pipeline)
    some = () if pipeline == "alone" else sorted({0, len(stages) - 1, stages.index(slowest)})
    shared = [_sharing(network, plan, cluster, program, stages[i], _spare(plan, stages, i)) for i in some]
    gradients, parameters, hidden = max(shared, key=lambda found: found[0] + found[1], default=(0.0, 0.0, 0.0))
    optimizer, offload = _update(plan, cluster, program, max((s.held for s in stages), key=lambda held: held.trained.total))
    crowd = cluster.crowd(plan.world)
    equal = times_of(network.balanced, plan, cluster, program, kinds) if crowd > 1 else stages
    cores = _for_cores(crowd, m, equal, passes)
    saved = _casts_saved(plan, cluster, program, slowest)
    passes -= saved
    messages = 2 * m * sent * crossings(plan)
    busy = m * slowest.total + messages - saved
    whole = slowest.forward + slowest.backward + slowest.recompute
    return Time(
        forward=m * slowest.forward.compute - saved,
        backward=m * slowest.backward.compute,
        recompute=m * slowest.recompute.compute,
        tensor=m * whole.tensor,
        sequence=m * whole.sequence,
        experts=m * whole.experts,
        launch=m * (slowest.launch_forward + slowest.launch_backward),
        transfer=messages,
        bubble=passes - busy,
        cores=cores,
        gradients=gradients,
        parameters=parameters,
        optimizer=crowd * optimizer,
        offload=offload,
        hidden=hidden,
    )


def ideal_seconds(network: Network, plan: Plan, cluster: Cluster) -> float:
    """Lower bound of the seconds of a step with any schedule and any cut of the layers: each pipeline rank computes an equal part of the
    model and never waits. Messages between stages, gradient reductions, parameter gathers and the optimizer are left out."""
    program, plan = own_program(cluster), plan.carried
    (whole,) = times_of(network, plan, cluster, program, whole_model(network, plan))
    crowd, passes = cluster.crowd(plan.world), plan.microbatches * whole.total
    equal = times_of(network.balanced, plan, cluster, program, whole_model(network, plan)) if crowd > 1 else [whole]
    cores = _for_cores(crowd, plan.microbatches, equal, passes)
    return (passes + cores) / plan.pp - _casts_saved(plan, cluster, program, whole)


def joules(network: Network, plan: Plan, cluster: Cluster, program: Program | None = None) -> float:
    """Predict the energy of all devices in one step. A device takes `watts` while it computes and `idle_watts` otherwise. All ep ranks are
    assumed to compute equally many rows (choices of tokens): the sum over ranks is the same as with unequal numbers."""
    program, device = program or own_program(cluster), cluster.device
    step = step_time(network, plan, cluster, program).step
    stages = times_of(network.balanced, plan, cluster, program, kinds_of(network, plan))
    busy = [plan.microbatches * (each.forward + each.backward + each.recompute).compute for each in stages]
    mean = sum(min(seconds, step) for seconds in busy) / len(busy)
    return plan.world * (device.idle_watts * step + (device.watts - device.idle_watts) * mean)


def _for_cores(crowd: float, microbatches: int, stages: list[Stage], pipeline: float) -> float:
    """Seconds by which the step is longer because ranks share the cores of a CPU host; negative if each rank has several cores. A rank that
    waits for a message leaves its core to other ranks, so the mean of the ranks' work decides, not the maximum. crowd: a rank's compute
    time / its time with one core of its own (Cluster.crowd). pipeline: seconds of the pipeline with one core per rank. stages: times of the
    ranks."""
    work = microbatches * sum(stage.work for stage in stages) / len(stages)
    sent = microbatches * sum(stage.total - stage.work for stage in stages) / len(stages)
    return (crowd - 1) * work if crowd < 1 else max(0.0, crowd * work + sent - pipeline)


def _sharing(network: Network, plan: Plan, cluster: Cluster, program: Program, stage: Stage, spare: Spare) -> tuple[float, float, float]:
    """Return the seconds of data parallelism's collectives in one step: (gradient reductions that no computation hides, parameter gathers
    that no computation hides, the rest of both, which computation hides). stage: times and parameters of the rank. spare: computation at
    the end of its step."""
    by_stage, m = plan.pp > 1 and program.staged == "by stage", plan.microbatches
    world, per_node = plan.world, cluster.devices_per_node
    copies = group_of(plan.dp * plan.sp, plan.tp, per_node, world)
    expert_copies = group_of(max(1, plan.edp), plan.ep * plan.etp, per_node, world) if stage.held.expert else Group(1, 1)
    trained, narrow = stage.held.trained, plan.compute_bytes
    wide = narrow if program.sent_gradients == "computed" else plan.storage.gradients
    if plan.stage == 0:
        sums = all_reduce(cluster, copies, trained.dense * wide) + all_reduce(cluster, expert_copies, trained.expert * wide)
        exposed = spare.exposed(sums) if by_stage else _after_backward(sums, stage, program, plan)
        return exposed, 0.0, max(0.0, sums - exposed)

    def gathers(of: Elements, item: int) -> float:
        limited = plan.stage == 3 and program.gather_gb_s is not None
        rate = program.gather_gb_s * 1e9 if limited and program.gather_gb_s else inf
        parts = (copies, of.dense), (expert_copies, of.expert)
        return sum(max(gather(cluster, g, n * item), (g.size - 1) / g.size * n * item / rate) for g, n in parts)

    # frozen parameters are gathered as well if ranks hold only shards of them
    reduced, gathered = gathers(trained, wide), gathers(stage.held if plan.stage == 3 else trained, narrow)
    if plan.stage == 1:
        # by stage: DeepSpeed's ZeRO-1 reduces after the rank's last action, so only what other ranks still compute (spare.others) hides it
        exposed = max(0.0, reduced - spare.others) if by_stage else _after_backward(reduced, stage, program, plan)
        waited, hidden = _overlapped(gathered, stage.forward_seconds, program) if program.parameters == "overlapped" else (gathered, 0.0)
        return exposed, waited, max(0.0, reduced - exposed) + hidden
    if plan.stage == 2:
        each, hidden = _overlapped(reduced, stage.backward_seconds, program)
        return m * each, gathered, m * hidden
    if copies.size > 1:  # add the host's time to copy to and from collectives' buffers, for the rank's layers, embedding and head
        around = max(1.0, cluster.crowd(world)) * (network.depth + 2) / plan.pp * program.gather_us * 1e-6
        reduced, gathered = reduced + around, gathered + around
    often = plan.pp == 1 or (program.shards == "micro-batch" and plan.reshard)
    if not often and not plan.reshard:  # parameters stay gathered and gradients unreduced until the last micro-batch
        exposed = _after_backward(reduced, stage, program, plan)
        return exposed, gathered, max(0.0, reduced - exposed)
    forward, hidden_forward = _overlapped(gathered, stage.forward_seconds, program)
    again = gathered if plan.reshard and not (plan.pp > 1 and often) else 0.0
    backward, hidden_backward = _overlapped(again + reduced, stage.backward_seconds, program)
    first_layer = gathered / max(1, network.depth)  # no computation hides this gather
    return m * backward, m * (forward + first_layer), m * (hidden_forward + hidden_backward)


@dataclass(frozen=True)
class Spare:
    """Seconds of computation at the end of a step that can hide a rank's gradient reductions.

    after: for each stage of the rank, the seconds of the rank's actions after the stage's gradients are complete. others: seconds from the
    end of the rank's last action to the end of the last action of any rank.
    """

    after: tuple[float, ...]
    others: float

    def exposed(self, seconds: float) -> float:
        """Seconds by which gradient reductions make the step longer. All reductions of the rank together take `seconds`; each of its stages
        takes an equal part of `seconds`, and the reductions run one after another."""
        each, queued = seconds / max(1, len(self.after)), -inf
        for window in self.after:
            queued = max(queued, -window) + each
        return max(0.0, queued - self.others)


def _spare(plan: Plan, stages: list[Stage], rank: int) -> Spare:
    """Return the spare time of a rank, as if the rank never waited in its last actions.

    `others`: after the rank's last backward pass, each earlier rank computes one more, one rank after another; then rank 0 computes its
    remaining weight gradients. This rank computes its own remaining weight gradients meanwhile, so their time is subtracted. If the
    schedule splits backward passes, a pass here is only its input gradients. `others` is 0 if each stage is on two ranks."""
    if plan.pp == 1:
        return Spare((0.0,), 0.0)
    of_ranks = tails(plan.schedule, plan.pp, plan.microbatches, plan.chunks)

    def seconds(counts: tuple[tuple[str, int], ...], of: Stage) -> float:
        each = {"F": of.forward_seconds, "B": of.backward_seconds, "I": of.backward_seconds - of.weights, "W": of.weights}
        return sum(number * each[op] for op, number in counts) / plan.chunks

    others = 0.0
    if placed(plan.schedule) != "both_ways":
        split = kind_of(plan.schedule).splits_backward
        inputs = sum(of.backward_seconds - (of.weights if split else 0.0) for of in stages[:rank]) / plan.chunks
        left = [seconds(of_ranks[r].late, stages[r]) for r in (0, rank)]
        others = max(0.0, inputs + left[0] - left[1])
    return Spare(tuple(seconds(counts, stages[rank]) for counts in of_ranks[rank].after), others)


def _overlapped(seconds: float, window: float, program: Program) -> tuple[float, float]:
    """Return (seconds that collectives add to the step, seconds that are hidden) if they may overlap with `window` seconds of matrix
    products. Overlapped collectives slow these products down."""
    if program.gathers == "waited":
        return seconds, 0.0
    hidden = min(seconds, window) if program.gathers == "overlapped" else min(seconds * 0.67, window)
    return seconds - hidden + OVERLAP_SLOWDOWN * hidden, hidden


def _after_backward(seconds: float, stage: Stage, program: Program, plan: Plan) -> float:
    """Seconds of gradient reductions that a backward pass does not hide. Only nine tenths of the pass can hide them, because the last
    bucket is reduced after it. seconds: time of all reductions."""
    after = program.gradients == "after" or not plan.kind.overlaps
    return seconds if after else _overlapped(seconds, 0.9 * stage.backward_seconds, program)[0]


def _casts_saved(plan: Plan, cluster: Cluster, program: Program, stage: Stage) -> float:
    """Seconds to subtract if the program's times include casts of weights at each use, but the engine casts them only once a step. Each
    micro-batch after the first then saves, for each parameter, reading 4 bytes and writing 2."""
    held = program.casts == "use" and plan.stage == 0 and plan.storage.parameters == plan.compute_bytes < plan.storage.gradients
    return (plan.microbatches - 1) * 6 * stage.held.parameters / cluster.device.bandwidth if held else 0.0


def _update(plan: Plan, cluster: Cluster, program: Program, held: Elements) -> tuple[float, float]:
    """Return (seconds of the optimizer on the device, seconds of offloading). Offloading consists of transfers to the host and back, AdamW
    on the host, and reading and writing the disk. Frozen parameters have no gradients and no optimizer states. held: parameters of the
    rank."""
    trained, update, replicas = held.trained, plan.storage.update, max(1, plan.edp)
    shared = plan.dp * plan.sp if plan.stage >= 1 else 1
    updated = trained.dense / shared, trained.expert / (replicas if plan.stage >= 1 else 1)
    elements = sum(updated)
    flops = update.flops[0] * trained.dense / (plan.dp * plan.sp) + update.flops[1] * trained.expert / replicas
    g, ranks = plan.storage.gradients, min(cluster.devices_per_node, plan.world)
    step, host, disk = program.step_ms * 1e-3, cluster.host_gb_s * 1e9, cluster.disk_gb_s * 1e9
    moved = g * trained.total / (shared if plan.stage >= 2 else 1)  # bytes of gradients that are zeroed
    offload = 0.0
    if plan.offload_optimizer == "none":
        of_dense, of_expert = program.updates.moved(update)
        moved += of_dense * updated[0] + of_expert * updated[1] + 2 * g * elements
    else:
        offload += elements * (g + plan.compute_bytes) / host + elements * ranks / cluster.host_adam_per_s
    if plan.offload_optimizer == "nvme":
        offload += 2 * elements * ranks * plan.storage.optimizer / disk
    if plan.offload_parameters != "none":
        once = held.parameters / shared * plan.compute_bytes
        offload += 2 * plan.microbatches * once / (host if plan.offload_parameters == "cpu" else disk / ranks)
    return moved / cluster.device.bandwidth + flops / cluster.device.rate(program.updates.products) + step, offload


FILE = Path(__file__).with_name("ranges.yaml")


@dataclass(frozen=True)
class Range:
    """Range of measured / predicted seconds in a group of published runs.

    runs: description of the group. devices: the group has devices whose name contains one of these words; empty: all devices. across:
    whether data parallelism crosses nodes (None: both). low, high: ends of the range. held_out: fraction of a published table's runs that
    lie within the range computed from all other tables, as a mean over tables. tables: number of tables in the group. rows: number of runs.
    """

    runs: str
    devices: tuple[str, ...]
    across: bool | None
    low: float
    high: float
    held_out: float
    tables: int
    rows: int

    def holds(self, device: str, *, across: bool) -> bool:
        """Return whether a run belongs to this Range's group. device: the name of its devices. across: whether its data parallelism crosses
        nodes."""
        known = not self.devices or any(word in device.lower() for word in self.devices)
        return known and self.across in (None, across)

    def said(self, seconds: float) -> str:
        """Return the range of a predicted time as text."""
        return (
            f"{self.low * seconds:.3g} to {self.high * seconds:.3g} s: {int(10 * self.held_out)} of 10 published runs "
            f"{self.runs} were in a range computed from other tables"
        )


@lru_cache
def ranges() -> tuple[Range, ...]:
    """Return the Range of each group of published runs, the most specific group first."""
    return tuple(Range(**{**each, "devices": tuple(each["devices"])}) for each in yaml_text.load(read_text(FILE)))


def range_of(cluster: Cluster, plan: Plan) -> Range | None:
    """Return the Range (measured / predicted seconds of a step) of published runs that are similar to this plan on this cluster. None for
    CPU hosts, because there are no published runs on them."""
    if cluster.cores:
        return None
    return next(each for each in ranges() if each.holds(cluster.device.name, across=crosses_nodes(cluster, plan)))


def crosses_nodes(cluster: Cluster, plan: Plan) -> bool:
    """Return whether gradients are summed over several nodes."""
    return group_of(plan.dp * plan.sp, plan.tp, cluster.devices_per_node, plan.world).nodes > 1
