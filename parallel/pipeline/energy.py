"""EnvPipe (You et al., USENIX ATC 2023): slower clocks for the actions that have time to spare, at the same makespan.

    envelope   forward of the first micro-batch, the last stage, backward of the last micro-batch: nothing there can wait
    the rest   at the clock of least energy (the valley: a slower clock draws less power for longer); where that makes the step longer, the
               cheapest actions of the critical path are raised until it is back; then whatever still has slack is lowered into it

More forwards ahead (`extra_warmup`) give an action its slack, at the price of activations. No order within a rank and no number changes.
Energy here: of each action at its clock, and idle power while a rank waits; transfers cost time alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import floor
from pathlib import Path
from typing import NamedTuple

from parallel.errors import BadInput
from parallel.pipeline.check import linear
from parallel.pipeline.one_f_one_b import one_f_one_b
from parallel.pipeline.schedule import COMPUTE, Action, Message, Node, Op, Schedule
from parallel.pipeline.simulate import Timeline, simulate

_EPSILON = 1e-9  # of the makespan: what rounding may take for slack


class Clock(NamedTuple):
    """One action at one clock: seconds and joules."""

    mhz: float
    time: float
    energy: float


Profile = Callable[[int, Action], Sequence[Clock]]  # what a rank measured for an action; one clock for what cannot be slowed


@dataclass(frozen=True)
class EnergyPlan:
    """A clock for every action, the timeline that follows, and the same schedule at full clock to compare with.

    idle_power: watts of each rank while it waits. Both energies include it, over the makespan of each.
    """

    schedule: Schedule
    clocks: tuple[tuple[Clock, ...], ...]
    timeline: Timeline
    energy: float
    full_clock: Timeline
    full_clock_energy: float
    idle_power: float

    @property
    def saved(self) -> float:
        """Share of the energy at full clock."""
        return 1 - self.energy / self.full_clock_energy

    @property
    def slowdown(self) -> float:
        """By how much the step is longer, as a share."""
        return self.timeline.makespan / self.full_clock.makespan - 1


def envelope(schedule: Schedule) -> frozenset[Node]:
    """What EnvPipe keeps at full clock: all of the last stage, the first micro-batch's forwards, the last one's backwards."""
    last = schedule.num_stages - 1
    return frozenset(
        node
        for node, a in schedule.nodes()
        if (a.stage == last and a.op in COMPUTE)
        or (a.op is Op.F and a.microbatch == 0)
        or (a.op in (Op.B, Op.I) and a.microbatch == schedule.microbatches - 1)
    )


def extra_warmup(ranks: int, microbatches: int, profile: Profile, *, idle_power: float, most: int | None = None) -> list[int]:
    """Forwards further ahead on each rank of 1F1B: floor(T_B(full) (p - s - 1) / T_F(valley)), none on the last.

    most: more activations than 1F1B keeps that a rank has memory for.
    """
    extra = []
    for stage in range(ranks):
        backward = _fastest(profile(stage, Action(Op.B, stage, 0)))
        forward = _valley(profile(stage, Action(Op.F, stage, 0)), idle_power)
        room = microbatches - (ranks - stage)
        wanted = floor(backward.time * (ranks - stage - 1) / forward.time + _EPSILON)
        extra.append(max(0, min(wanted, room, wanted if most is None else most)))
    return extra


def envpipe(
    ranks: int,
    microbatches: int,
    profile: Profile,
    *,
    idle_power: float,
    most: int | None = None,
    slowdown: float = 0.0,
) -> EnergyPlan:
    """1F1B with forwards pulled ahead where that saves energy, and a clock for each action; compared with plain 1F1B at full clock.

    slowdown: how much longer than at full clock a step may be, as a share.
    """
    plain = one_f_one_b(ranks, microbatches)
    full = _at(plain, _chosen(plain, profile, _fastest))
    limit = full.makespan * (1 + slowdown)
    ahead = one_f_one_b(ranks, microbatches, extra_warmup=extra_warmup(ranks, microbatches, profile, idle_power=idle_power, most=most))
    plans = [plan_clocks(plain, profile, idle_power=idle_power, limit=limit)]
    if _at(ahead, _chosen(ahead, profile, _fastest)).makespan <= limit * (1 + _EPSILON):
        plans.append(plan_clocks(ahead, profile, idle_power=idle_power, limit=limit))
    best = min(plans, key=lambda plan: plan.energy)
    return replace(best, full_clock=full, full_clock_energy=plans[0].full_clock_energy)


def plan_clocks(
    schedule: Schedule,
    profile: Profile,
    *,
    idle_power: float,
    limit: float | None = None,
    transfer_time: float = 0,
    rule: str = "envelope",
) -> EnergyPlan:
    """A clock for each action of any schedule, so that its makespan is at most `limit`, by default that at full clock.

    rule: `envelope` as above; `uniform`: everything at its valley, whatever that costs in time. Raises BadInput for a limit that no clock
    reaches, and for a profile without clocks.
    """
    graph = Graph(schedule, transfer_time)
    options = {node: _useful(profile(node.rank, action), idle_power, action) for node, action in schedule.nodes()}
    options |= {node: clocks[:1] for node, clocks in options.items() if schedule.action(node).op is Op.S}  # the network has no clock here
    fast = {node: clocks[0] for node, clocks in options.items()}
    full = graph.makespan(fast)
    limit = full if limit is None else limit
    if full > limit * (1 + _EPSILON):
        raise BadInput("limit", got=f"{limit:g}", needed=f"at least {full:g}, the makespan at full clock", fix=f"set limit to {full:g}")
    if rule == "uniform":
        chosen = {node: clocks[-1] for node, clocks in options.items()}
    else:
        kept = envelope(schedule)
        chosen = {node: clocks[0] if node in kept else clocks[-1] for node, clocks in options.items()}
        _raise(graph, options, chosen, limit, idle_power)
        _lower(graph, options, chosen, limit, idle_power)
    timeline, full_clock = _at(schedule, chosen, transfer_time), _at(schedule, fast, transfer_time)
    energies = [
        sum(clock.energy for clock in clocks.values()) + idle_power * sum(run.idle(rank) for rank in range(schedule.num_ranks))
        for clocks, run in ((chosen, timeline), (fast, full_clock))
    ]
    clocks = tuple(tuple(chosen[Node(rank, at)] for at in range(len(order))) for rank, order in enumerate(schedule.orders))
    return EnergyPlan(schedule, clocks, timeline, energies[0], full_clock, energies[1], idle_power)


def _at(schedule: Schedule, chosen: dict[Node, Clock], transfer_time: float = 0) -> Timeline:
    times = {(node.rank, schedule.action(node)): clock.time for node, clock in chosen.items()}
    return simulate(schedule, lambda rank, action: times[rank, action], transfer_time=transfer_time)


def _chosen(schedule: Schedule, profile: Profile, choose: Callable[[Sequence[Clock]], Clock]) -> dict[Node, Clock]:
    return {node: choose(profile(node.rank, action)) for node, action in schedule.nodes()}


def _fastest(clocks: Sequence[Clock]) -> Clock:
    return min(clocks, key=lambda clock: (clock.time, clock.energy))


def _valley(clocks: Sequence[Clock], idle_power: float) -> Clock:
    return min(clocks, key=lambda clock: (_above_idle(clock, idle_power), clock.time))


def _above_idle(clock: Clock, idle_power: float) -> float:
    """What an action costs beside the power that its rank would draw while it waits."""
    return clock.energy - idle_power * clock.time


def _useful(clocks: Sequence[Clock], idle_power: float, action: Action) -> list[Clock]:
    """From the fastest to the valley, without clocks that are slower and cost no less."""
    if not clocks:
        raise BadInput("profile", got=f"no clock for {action}", needed="at least one", fix="measure it, or give it one clock")
    kept: list[Clock] = []
    for clock in sorted(clocks, key=lambda clock: (clock.time, clock.energy)):
        if not kept or _above_idle(clock, idle_power) < _above_idle(kept[-1], idle_power):
            kept.append(clock)
    return kept


class Graph:
    """Everything that takes time in a schedule, in an order that keeps to `needs`, for makespan and slack under many times.

    The same times as `simulate` gives: a message is a vertex of its own behind the one before it on its link, the sum of a stage's
    replicas is one vertex behind all of them and beside what their ranks do.
    """

    def __init__(self, schedule: Schedule, transfer_time: float = 0) -> None:
        self._place: dict[Node, int] = {}
        self._before: list[list[int]] = []
        self._fixed: dict[int, float] = {}  # times of messages
        self._waiting: dict[Node, set[int]] = {}  # S whose other replicas have not come to it yet
        last: dict[tuple[str, int, int], int] = {}  # the last vertex of a rank's compute, of its sums, of a link
        arrives: dict[Message, int] = {}
        for node in linear(schedule):
            action, here = schedule.action(node), ("rank", node.rank, 0)
            if action.op is Op.S:
                self._sum(schedule, node, last)
                continue
            needs = [need for need in schedule.needs(node) if need.rank == node.rank or action.op is Op.U]
            before = {*(self._place[need] for need in needs), *(arrives[message] for message in schedule.receives(node))}
            self._place[node] = last[here] = self._vertex(before | ({last[here]} if here in last else set()))
            for message in schedule.sends(node):
                link = ("link", message.source, message.target)
                last[link] = arrives[message] = self._vertex({self._place[node], *([last[link]] if link in last else [])})
                self._fixed[arrives[message]] = transfer_time
        self._after: list[list[int]] = [[] for _ in self._before]
        for i, before_i in enumerate(self._before):
            for j in before_i:
                self._after[j].append(i)

    def _sum(self, schedule: Schedule, node: Node, last: dict[tuple[str, int, int], int]) -> None:
        """S: one vertex for all replicas, behind what each of them had done when it came to it; the last to come makes it."""
        self._waiting[node] = {last[kind, node.rank, 0] for kind in ("rank", "sums") if (kind, node.rank, 0) in last}
        replicas = schedule.replicas(node)
        if all(replica in self._waiting for replica in replicas):
            place = self._vertex({i for replica in replicas for i in self._waiting[replica]})
            for replica in replicas:
                self._place[replica] = last["sums", replica.rank, 0] = place

    def _vertex(self, before: set[int]) -> int:
        self._before.append(sorted(before))
        return len(self._before) - 1

    def makespan(self, clocks: dict[Node, Clock]) -> float:
        return max(self._ends(self._times(clocks)))

    def slack(self, clocks: dict[Node, Clock]) -> dict[Node, float]:
        """By how much each action alone can take longer without moving the makespan."""
        times = self._times(clocks)
        ends = self._ends(times)
        latest = [max(ends)] * len(ends)
        for i in reversed(range(len(ends))):
            for j in self._after[i]:
                latest[i] = min(latest[i], latest[j] - times[j])
        return {node: latest[i] - ends[i] for node, i in self._place.items()}

    def _times(self, clocks: dict[Node, Clock]) -> list[float]:
        times = [0.0] * len(self._before)
        for i, time in self._fixed.items():
            times[i] = time
        for node, i in self._place.items():
            times[i] = max(times[i], clocks[node].time)
        return times

    def _ends(self, times: list[float]) -> list[float]:
        ends: list[float] = []
        for before, time in zip(self._before, times, strict=True):
            ends.append(time + max((ends[j] for j in before), default=0.0))
        return ends


def _raise(graph: Graph, options: dict[Node, list[Clock]], chosen: dict[Node, Clock], limit: float, idle_power: float) -> None:
    """Speed up the cheapest action of the critical path, for the time that it gives, until the limit holds."""
    while graph.makespan(chosen) > limit * (1 + _EPSILON):
        slack = graph.slack(chosen)
        critical = [node for node, spare in slack.items() if spare <= _EPSILON * limit and chosen[node] != options[node][0]]

        def price(node: Node) -> float:
            faster = options[node][options[node].index(chosen[node]) - 1]
            gain = chosen[node].time - faster.time
            return (_above_idle(faster, idle_power) - _above_idle(chosen[node], idle_power)) / gain

        node = min(critical, key=lambda node: (price(node), node))
        chosen[node] = options[node][options[node].index(chosen[node]) - 1]


def _lower(graph: Graph, options: dict[Node, list[Clock]], chosen: dict[Node, Clock], limit: float, idle_power: float) -> None:
    """Slow down by one clock what saves most and still fits into its slack, until nothing fits."""
    while True:
        spare = limit - graph.makespan(chosen)
        slack = graph.slack(chosen)
        best: tuple[float, Node, Clock] | None = None
        for node, clocks in options.items():
            at = clocks.index(chosen[node])
            if at + 1 < len(clocks) and clocks[at + 1].time - chosen[node].time <= slack[node] + spare + _EPSILON * limit / len(options):
                saved = _above_idle(chosen[node], idle_power) - _above_idle(clocks[at + 1], idle_power)
                best = max(best, (saved, node, clocks[at + 1])) if best else (saved, node, clocks[at + 1])
        if best is None:
            return
        chosen[best[1]] = best[2]


def write_plan(plan: EnergyPlan, path: str | Path) -> None:
    """The clocks in order, rank by rank, as JSON; what sets clocks reads this. Raises BadInput where it cannot be written."""
    value = {
        "schedule": plan.schedule.name,
        "makespan_s": plan.timeline.makespan,
        "energy_j": plan.energy,
        "full_clock": {"makespan_s": plan.full_clock.makespan, "energy_j": plan.full_clock_energy},
        "saved": plan.saved,
        "slowdown": plan.slowdown,
        "idle_power_w": plan.idle_power,
        "ranks": [
            [{"action": str(action), "mhz": clock.mhz} for action, clock in zip(order, clocks, strict=True)]
            for order, clocks in zip(plan.schedule.orders, plan.clocks, strict=True)
        ],
    }
    try:
        Path(path).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BadInput("--out", got=f"{path}: {error.strerror}", needed="a file that can be written", fix="choose another path") from None
