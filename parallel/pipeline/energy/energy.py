"""EnvPipe (You et al., USENIX ATC 2023): lower clocks for actions that have slack, at the same makespan.

    envelope   the first micro-batch's forward passes, the last stage, the last micro-batch's backward passes: always at full clock
    the rest   at the clock of least energy (the valley: below it, power falls but the time grows more). If the step is then too long,
               clocks on the critical path are raised, cheapest first, until it fits; then clocks of actions with slack are lowered

More forward passes in the warm-up (`extra_warmup`) give actions slack, but keep more activations. Losses do not change.
The energy is the sum over actions at their clocks, plus idle power while a rank waits. Transfers cost time but no energy.

    plan = envpipe(4, 8, read_profile("profile.json"), idle_power=40)      # plan.clocks, plan.saved, plan.slowdown

Slack of an action: the seconds by which it alone could be longer without changing the makespan. `Graph` finds makespan and slack for many
choices of clocks, one after another: faster than `simulate`, with equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import floor

from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.pipeline.check import ordered_nodes
from parallel.pipeline.energy.clocks import Clock, Profile, above_idle, fastest, useful, valley
from parallel.pipeline.schedule import COMPUTE, Action, Message, Node, Op, Schedule
from parallel.pipeline.schedules.one_f_one_b import one_f_one_b
from parallel.pipeline.simulator.simulate import Timeline, simulate

_EPSILON = 1e-9  # relative to the makespan: smaller slack is rounding error


@dataclass(frozen=True)
class EnergyPlan:
    """A clock for every action, the resulting timeline, and a timeline at full clock for comparison.

    clocks: of each rank's actions, in its order. energy, full_clock_energy: joules of all ranks in one step, waits included.
    idle_power: watts of a rank that waits.
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
        """Return the saved energy as a fraction of the energy at full clock."""
        return 1 - self.energy / self.full_clock_energy

    def energy_of(self, rank: int) -> float:
        """Return the joules of one rank in one step, including its waits."""
        return sum(clock.energy for clock in self.clocks[rank]) + self.idle_power * self.timeline.idle(rank)

    @property
    def slowdown(self) -> float:
        """Return the additional time of the step as a fraction of its time at full clock."""
        return self.timeline.makespan / self.full_clock.makespan - 1


def envelope(schedule: Schedule) -> frozenset[Node]:
    """Return the nodes that stay at full clock: the last stage, the first micro-batch's forward passes, the last one's backward passes."""
    last = schedule.num_stages - 1
    return frozenset(
        node
        for node, a in schedule.nodes()
        if (a.stage == last and a.op in COMPUTE)
        or (a.op is Op.F and a.microbatch == 0)
        or (a.op in (Op.B, Op.I) and a.microbatch == schedule.microbatches - 1)
    )


def extra_warmup(ranks: int, microbatches: int, profile: Profile, *, idle_power: float, most: int | None = None) -> list[int]:
    """Return the number of additional forward passes in each rank's warm-up of 1F1B: floor(T_B(full) (p - s - 1) / T_F(valley)).

    Each rank has at most one more than the previous rank; otherwise it would wait for a forward pass that the previous rank runs only
    after its first B, a deadlock. most: additional micro-batches for which a rank has memory; None: no limit.
    """
    extra: list[int] = []
    for stage in range(ranks):
        backward = fastest(profile(stage, Action(Op.B, stage, 0)))
        forward = valley(profile(stage, Action(Op.F, stage, 0)), idle_power)
        room = min(microbatches - (ranks - stage), extra[-1] + 1 if extra else microbatches)
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
    transfer_time: float = 0,
) -> EnergyPlan:
    """Plan 1F1B with a clock for each action, and with a longer warm-up if that saves energy. The plan is compared with plain 1F1B.

    idle_power: watts of a waiting rank. most: additional micro-batches for which a rank has memory; None: no limit. slowdown: additional
    time that a step may take, as a fraction of its time at full clock. transfer_time: seconds of a message.
    """
    plain = one_f_one_b(ranks, microbatches)
    full = _at(plain, _chosen(plain, profile, fastest), transfer_time)
    limit = full.makespan * (1 + slowdown)
    ahead = one_f_one_b(ranks, microbatches, extra_warmup=extra_warmup(ranks, microbatches, profile, idle_power=idle_power, most=most))
    plans = [plan_clocks(plain, profile, idle_power=idle_power, limit=limit, transfer_time=transfer_time)]
    if _at(ahead, _chosen(ahead, profile, fastest), transfer_time).makespan <= limit * (1 + _EPSILON):
        plans.append(plan_clocks(ahead, profile, idle_power=idle_power, limit=limit, transfer_time=transfer_time))
    best = min(plans, key=lambda plan: plan.energy)
    return replace(best, full_clock=full, full_clock_energy=plans[0].full_clock_energy)


def plan_clocks(
    schedule: Schedule, profile: Profile, *, idle_power: float, limit: float | None = None, transfer_time: float = 0, rule: str = "envelope"
) -> EnergyPlan:
    """Choose a clock for each action of any schedule, such that its makespan is at most `limit` seconds (default: that at full clock).

    rule: `envelope` (top of this file), or `uniform`: every action at its valley, however long the step becomes. Raises BadInput if no
    clocks keep the limit, or if the profile has no clock for an action.
    """
    graph = Graph(schedule, transfer_time)
    options = {node: useful(profile(node.rank, action), idle_power, action) for node, action in schedule.nodes()}
    options |= {node: clocks[:1] for node, clocks in options.items() if schedule.action(node).op is Op.S}  # S is no work of a GPU
    fast = {node: clocks[0] for node, clocks in options.items()}
    full = ClockedGraph(graph, fast).makespan
    limit = full if limit is None else limit
    if full > limit * (1 + _EPSILON):
        needed = f"at least {full:g}, the makespan at full clock"
        raise BadInput("limit", got=f"{limit:g}", needed=needed, fix=Set("it", full, said=f"{full:g}"))
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


def _at(schedule: Schedule, chosen: Mapping[Node, Clock], transfer_time: float) -> Timeline:
    times = {(node.rank, schedule.action(node)): clock.time for node, clock in chosen.items()}
    return simulate(schedule, lambda rank, action: times[rank, action], transfer_time=transfer_time)


def _chosen(schedule: Schedule, profile: Profile, choose: Callable[[Sequence[Clock]], Clock]) -> dict[Node, Clock]:
    return {node: choose(profile(node.rank, action)) for node, action in schedule.nodes()}


def _raise(graph: Graph, options: dict[Node, list[Clock]], chosen: dict[Node, Clock], limit: float, idle_power: float) -> None:
    """Raise clocks in `chosen` until the makespan is at most `limit`: each time, on the critical path, the one of least joules per second
    gained. options: clocks of each node, the fastest first.
    """

    def price(node: Node) -> float:
        faster = _faster(options[node], chosen[node])
        gain = chosen[node].time - faster.time
        return (above_idle(faster, idle_power) - above_idle(chosen[node], idle_power)) / gain

    at = ClockedGraph(graph, chosen)
    prices = {node: price(node) for node, clocks in options.items() if chosen[node] != clocks[0]}
    while at.makespan > limit * (1 + _EPSILON):
        node = min(at.critical(prices, _EPSILON * limit), key=lambda node: (prices[node], node))
        chosen[node] = _faster(options[node], chosen[node])
        at.change(node, chosen[node])
        if chosen[node] == options[node][0]:
            del prices[node]
        else:
            prices[node] = price(node)


def _faster(clocks: list[Clock], than: Clock) -> Clock:
    return clocks[clocks.index(than) - 1]


def _lower(graph: Graph, options: dict[Node, list[Clock]], chosen: dict[Node, Clock], limit: float, idle_power: float) -> None:
    """Lower clocks in `chosen`, one step at a time, while any action's slack allows it: each time the one that saves most energy.

    options: clocks of each node, the fastest first.
    """
    at = ClockedGraph(graph, chosen)
    while True:
        spare = limit - at.makespan
        slack = at.slack()
        best: tuple[float, Node, Clock] | None = None
        for node, clocks in options.items():
            now = clocks.index(chosen[node])
            if now + 1 < len(clocks) and clocks[now + 1].time - chosen[node].time <= slack[node] + spare + _EPSILON * limit / len(options):
                saved = above_idle(chosen[node], idle_power) - above_idle(clocks[now + 1], idle_power)
                best = max(best, (saved, node, clocks[now + 1])) if best else (saved, node, clocks[now + 1])
        if best is None:
            return
        chosen[best[1]] = best[2]
        at.change(best[1], best[2])


class Graph:
    """Graph of a schedule. Each action and each message is a vertex; a vertex's number is higher than those of all vertices that it needs.

    A message needs the previous message of its link. The sum of a stage's replicas is one vertex for all of them, in parallel with the
    next actions of their ranks.

    place: node -> its vertex. before, after: for each vertex the vertices that it needs, and those that need it.
    """

    def __init__(self, schedule: Schedule, transfer_time: float = 0) -> None:
        self.place: dict[Node, int] = {}
        self.before: list[list[int]] = []
        self._transfers: dict[int, float] = {}  # vertex of a message -> its time
        self._reached: dict[Node, set[int]] = {}  # S that its rank has reached -> vertices that it needs
        last: dict[tuple[str, int, int], int] = {}  # ("rank" or "sums", rank, 0) or ("link", source, target) -> its last vertex so far
        arrives: dict[Message, int] = {}
        for node in ordered_nodes(schedule):
            action, here = schedule.action(node), ("rank", node.rank, 0)
            if action.op is Op.S:
                self._sum(schedule, node, last)
                continue
            sums = schedule.replicas(node) if action.op is Op.U else ()
            before = {*(self.place[s] for s in sums), *(arrives[message] for message in schedule.receives(node))}
            self.place[node] = last[here] = self._vertex(before | ({last[here]} if here in last else set()))
            for message in schedule.sends(node):
                link = ("link", message.source, message.target)
                last[link] = arrives[message] = self._vertex({self.place[node], *([last[link]] if link in last else [])})
                self._transfers[arrives[message]] = transfer_time
        self.after: list[list[int]] = [[] for _ in self.before]
        for i, before_i in enumerate(self.before):
            for j in before_i:
                self.after[j].append(i)

    def _sum(self, schedule: Schedule, node: Node, last: dict[tuple[str, int, int], int]) -> None:
        """Record that a replica reaches its S. If it is the last one, add one vertex for all, after all their previous actions and sums."""
        self._reached[node] = {last[kind, node.rank, 0] for kind in ("rank", "sums") if (kind, node.rank, 0) in last}
        replicas = schedule.replicas(node)
        if all(replica in self._reached for replica in replicas):
            place = self._vertex({i for replica in replicas for i in self._reached[replica]})
            for replica in replicas:
                self.place[replica] = last["sums", replica.rank, 0] = place

    def _vertex(self, before: set[int]) -> int:
        self.before.append(sorted(before))
        return len(self.before) - 1

    def times(self, clocks: Mapping[Node, Clock]) -> list[float]:
        times = [0.0] * len(self.before)
        for i, time in self._transfers.items():
            times[i] = time
        for node, i in self.place.items():
            times[i] = max(times[i], clocks[node].time)
        return times

    def ends(self, times: list[float]) -> list[float]:
        ends: list[float] = []
        for before, time in zip(self.before, times, strict=True):
            ends.append(time + max((ends[j] for j in before), default=0.0))
        return ends


class ClockedGraph:
    """A graph's times at given clocks. After a change of one clock, only the times that depend on it are computed again.

    times: duration of each vertex. ends: its end. tails: longest time from its end to the end of the step.
    """

    def __init__(self, graph: Graph, clocks: Mapping[Node, Clock]) -> None:
        self.graph, self.times = graph, graph.times(clocks)
        self.ends, self.tails = graph.ends(self.times), [0.0] * len(self.times)
        for i in reversed(range(len(self.times))):
            self.tails[i] = self._tail(i)

    @property
    def makespan(self) -> float:
        return max(self.ends)

    def slack(self) -> dict[Node, float]:
        most, ends, tails = self.makespan, self.ends, self.tails
        return {node: most - ends[i] - tails[i] for node, i in self.graph.place.items()}

    def critical(self, nodes: Iterable[Node], spare: float) -> list[Node]:
        """Return the given nodes with a slack of at most `spare` seconds."""
        longest, ends, tails, place = self.makespan - spare, self.ends, self.tails, self.graph.place
        return [node for node in nodes if ends[place[node]] + tails[place[node]] >= longest]

    def change(self, node: Node, clock: Clock) -> None:
        """Set the clock of one action, which must not be S."""
        changed = self.graph.place[node]
        was, self.times[changed] = self.times[changed], clock.time
        times, ends, tails, before, after = self.times, self.ends, self.tails, self.graph.before, self.graph.after
        later = [changed]
        while later:  # in ascending order, so that all vertices that i needs are final
            i = heappop(later)
            then, now = ends[i], times[i] + max([ends[j] for j in before[i]], default=0.0)
            ends[i] = now
            if now != then:
                for j in after[i]:
                    if then + times[j] == ends[j] or now + times[j] > ends[j]:  # j started at i's old end, or starts later now
                        heappush(later, j)
        earlier: list[int] = []
        then, now = was + tails[changed], clock.time + tails[changed]
        while True:
            for j in before[changed] if now != then else ():
                if then == tails[j] or now > tails[j]:
                    heappush(earlier, -j)
            if not earlier:
                return
            changed = -heappop(earlier)
            then, tails[changed] = times[changed] + tails[changed], self._tail(changed)
            now = times[changed] + tails[changed]

    def _tail(self, i: int) -> float:
        return max([self.times[j] + self.tails[j] for j in self.graph.after[i]], default=0.0)
