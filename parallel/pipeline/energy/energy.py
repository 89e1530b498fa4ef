"""EnvPipe (You et al., USENIX ATC 2023): lower GPU clocks for actions that have slack, at the same makespan.

    envelope   the first micro-batch's forward passes, the last stage, the last micro-batch's backward passes: always at full clock
    the rest   at the clock of least energy. If the step is then too long, clocks on the critical path are raised, the cheapest first,
               until the step is short enough. Then clocks of actions with slack are lowered

    plan = envpipe(4, 8, read_profile("profile.json"), idle_power=40)      # plan.clocks, plan.saved, plan.slowdown

Slack of an action: the seconds by which it could be longer without changing the makespan, if all other actions keep their lengths.
Transfers cost time but no energy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import floor

from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.pipeline.check import action_graph
from parallel.pipeline.energy.clocks import Clock, Profile, efficient_clocks, energy_above_idle, fastest, least_energy_clock
from parallel.pipeline.schedule import COMPUTE, Action, Node, Op, Schedule
from parallel.pipeline.schedules.one_f_one_b import one_f_one_b
from parallel.pipeline.simulator.simulate import Timeline, simulate

_EPSILON = 1e-9  # tolerance for rounding errors; for times, as a fraction of the makespan


@dataclass(frozen=True)
class EnergyPlan:
    """A GPU clock for every action, the resulting timeline, and the timeline at full clock for comparison.
    clocks: for each rank the clocks of its actions in order. energy, full_clock_energy: joules of a step. idle_power: watts of a rank that
    waits."""

    schedule: Schedule
    clocks: tuple[tuple[Clock, ...], ...]
    timeline: Timeline
    energy: float
    full_clock: Timeline
    full_clock_energy: float
    idle_power: float

    @property
    def saved(self) -> float:
        """Return the energy that the plan saves, as a fraction of the energy at full clock."""
        return 1 - self.energy / self.full_clock_energy

    def energy_of(self, rank: int) -> float:
        """Return the joules of one rank in one step, including its waits."""
        return sum(clock.energy for clock in self.clocks[rank]) + self.idle_power * self.timeline.idle(rank)

    @property
    def slowdown(self) -> float:
        """Return the time that the plan adds to the step, as a fraction of its time at full clock."""
        return self.timeline.makespan / self.full_clock.makespan - 1


def envelope(schedule: Schedule) -> frozenset[Node]:
    """Return the nodes (actions) that stay at full clock: all passes of the last stage; on other stages, the first micro-batch's forward
    pass and the last micro-batch's backward pass."""
    last = schedule.num_stages - 1
    return frozenset(
        node
        for node, a in schedule.nodes()
        if (a.stage == last and a.op in COMPUTE)
        or (a.op is Op.F and a.microbatch == 0)
        or (a.op in (Op.B, Op.I) and a.microbatch == schedule.microbatches - 1)
    )


def extra_warmup(ranks: int, microbatches: int, profile: Profile, *, idle_power: float, most: int | None = None) -> list[int]:
    """Return for each rank the number of forward passes that its warm-up has in addition to 1F1B's: floor(T_B (p - s - 1) / T_F) on stage s
    of p. T_B: time of a backward pass at full clock. T_F: time of a forward pass at the clock of least energy. most: limit of this number,
    given by a rank's memory; None: no limit. idle_power: watts of a rank that waits. A rank gets at most one pass more than the previous
    rank, which prevents deadlock."""
    extra: list[int] = []
    for stage in range(ranks):
        backward = fastest(profile(stage, Action(Op.B, stage, 0)))
        forward = least_energy_clock(profile(stage, Action(Op.F, stage, 0)), idle_power)
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
    """Plan the clocks of 1F1B, with a longer warm-up if that saves energy. The result compares the plan with 1F1B at full clock.
    idle_power: watts of a rank that waits. most: maximum of `extra_warmup`; None: no limit. slowdown: time that the plan may add to a step,
    as a fraction of its time at full clock. transfer_time: seconds of a message."""

    def at_full_clock(schedule: Schedule) -> Timeline:
        return _timeline(schedule, {node: fastest(profile(node.rank, action)) for node, action in schedule.nodes()}, transfer_time)

    plain = one_f_one_b(ranks, microbatches)
    full = at_full_clock(plain)
    limit = full.makespan * (1 + slowdown)
    longer = one_f_one_b(ranks, microbatches, extra_warmup=extra_warmup(ranks, microbatches, profile, idle_power=idle_power, most=most))
    plans = [plan_clocks(plain, profile, idle_power=idle_power, limit=limit, transfer_time=transfer_time)]
    if at_full_clock(longer).makespan <= limit * (1 + _EPSILON):
        plans.append(plan_clocks(longer, profile, idle_power=idle_power, limit=limit, transfer_time=transfer_time))
    best = min(plans, key=lambda plan: plan.energy)
    return replace(best, full_clock=full, full_clock_energy=plans[0].full_clock_energy)


def plan_clocks(
    schedule: Schedule, profile: Profile, *, idle_power: float, limit: float | None = None, transfer_time: float = 0, rule: str = "envelope"
) -> EnergyPlan:
    """Choose a clock for each action of any schedule, such that the makespan is at most `limit` seconds (None: the makespan at full clock).
    rule: `envelope` (top of this file), or `uniform`: every action at its clock of least energy, without a limit on the makespan.
    idle_power, transfer_time: as in `envpipe`. Raises BadInput if `limit` is shorter than the makespan at full clock, or if the profile has
    no clock for an action."""
    graph = Graph(schedule, transfer_time)
    options = {node: efficient_clocks(profile(node.rank, action), idle_power, action) for node, action in schedule.nodes()}
    # S, an all-reduce, computes nothing
    options |= {node: clocks[:1] for node, clocks in options.items() if schedule.action(node).op is Op.S}
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
        clocked = ClockedGraph(graph, chosen)
        _raise(clocked, options, chosen, limit, idle_power)
        _lower(clocked, options, chosen, limit, idle_power)
    timeline, full_clock = _timeline(schedule, chosen, transfer_time), _timeline(schedule, fast, transfer_time)
    energies = [
        sum(clock.energy for clock in clocks.values()) + idle_power * sum(run.idle(rank) for rank in range(schedule.num_ranks))
        for clocks, run in ((chosen, timeline), (fast, full_clock))
    ]
    clocks = tuple(tuple(chosen[Node(rank, at)] for at in range(len(order))) for rank, order in enumerate(schedule.orders))
    return EnergyPlan(schedule, clocks, timeline, energies[0], full_clock, energies[1], idle_power)


def _timeline(schedule: Schedule, clocks: Mapping[Node, Clock], transfer_time: float) -> Timeline:
    times = {(node.rank, schedule.action(node)): clock.time for node, clock in clocks.items()}
    return simulate(schedule, lambda rank, action: times[rank, action], transfer_time=transfer_time)


def _raise(at: ClockedGraph, options: dict[Node, list[Clock]], chosen: dict[Node, Clock], limit: float, idle_power: float) -> None:
    """Raise clocks in `chosen` and `at` until the makespan is at most `limit`. Each iteration raises one action to its next higher clock:
    the action on the critical path that costs the least energy for each second gained. options: clocks of each node, the fastest first.
    chosen: node -> its clock. at: the graph with these clocks."""

    def price(node: Node) -> float:
        faster = _faster(options[node], chosen[node])
        gain = chosen[node].time - faster.time
        return (energy_above_idle(faster, idle_power) - energy_above_idle(chosen[node], idle_power)) / gain

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


def _lower(at: ClockedGraph, options: dict[Node, list[Clock]], chosen: dict[Node, Clock], limit: float, idle_power: float) -> None:
    """Lower clocks in `chosen` and `at` while any action has enough slack. Each iteration sets one action to its next lower clock: the
    action that saves most energy. options: clocks of each node, the fastest first. chosen: node -> its clock. at: the graph with these
    clocks."""
    while True:
        spare = limit - at.makespan
        slack = at.slack()
        best: tuple[float, Node, Clock] | None = None
        for node, clocks in options.items():
            now = clocks.index(chosen[node])
            if now + 1 < len(clocks) and clocks[now + 1].time - chosen[node].time <= slack[node] + spare + _EPSILON * limit / len(options):
                saved = energy_above_idle(chosen[node], idle_power) - energy_above_idle(clocks[now + 1], idle_power)
                best = max(best, (saved, node, clocks[now + 1])) if best else (saved, node, clocks[now + 1])
        if best is None:
            return
        chosen[best[1]] = best[2]
        at.change(best[1], best[2])


class Graph:
    """Dependency graph of a schedule, in topological order. Vertices are its actions and messages. An all-reduce S is one vertex for all
    replicas of its stage, and runs in parallel with the next actions of the replicas' ranks. A message also needs the previous message
    between its two ranks.

    Vertices are numbered. vertices: position of an action in the schedule -> its vertex. before, after: for each vertex, the vertices
    that it needs, and the vertices that need it. transfers: vertices of messages."""

    def __init__(self, schedule: Schedule, transfer_time: float = 0) -> None:
        self.vertices: dict[Node, int] = {}
        self.before: list[list[int]] = []
        self.transfers: list[int] = []
        self.transfer_time = transfer_time
        # (stage, version) of an S -> node of S on each replica's rank that has reached it -> vertices that this node needs
        self._reached: dict[tuple[int, int], dict[Node, set[int]]] = {}
        # ("rank", R, 0): last vertex of rank R so far, without S; ("S", R, 0): its last S; ("link", A, B): last message from rank A to B
        last: dict[tuple[str, int, int], int] = {}
        arrives: dict[int, int] = {}  # number of the sending action -> vertex of its message
        graph, nodes = action_graph(schedule), [node for node, _ in schedule.nodes()]
        for n in graph.order:
            node, here, received = nodes[n], ("rank", graph.ranks[n], 0), graph.received(n)
            if graph.actions[n].op is Op.S:
                self._all_reduce(schedule, node, last)
                continue
            others = {self.vertices[nodes[m]] for m in graph.more.get(n, ()) if m not in received}
            before = others | {arrives[m] for m in received} | ({last[here]} if here in last else set())
            self.vertices[node] = last[here] = self._vertex(before)
            for m in graph.sent(n):
                link = ("link", graph.ranks[m], graph.target[m])
                last[link] = arrives[m] = self._vertex({self.vertices[node], *([last[link]] if link in last else [])})
                self.transfers.append(arrives[m])
        self.after: list[list[int]] = [[] for _ in self.before]
        for i, before_i in enumerate(self.before):
            for j in before_i:
                self.after[j].append(i)

    def _all_reduce(self, schedule: Schedule, node: Node, last: dict[tuple[str, int, int], int]) -> None:
        """Record that one rank has reached the all-reduce S `node`. Once the ranks of all replicas have reached it, add one vertex for all.
        It needs the last action and the last S of each of these ranks. last: ("rank", rank, 0) -> vertex of the rank's last action;
        ("S", rank, 0) -> of its last S."""
        _, stage, _, version = schedule.action(node)
        reached = self._reached.setdefault((stage, version), {})
        reached[node] = {last[kind, node.rank, 0] for kind in ("rank", "S") if (kind, node.rank, 0) in last}
        if len(reached) == len(schedule.homes[stage]):
            vertex = self._vertex(set().union(*reached.values()))
            for replica in reached:
                self.vertices[replica] = last["S", replica.rank, 0] = vertex

    def _vertex(self, before: set[int]) -> int:
        self.before.append(sorted(before))
        return len(self.before) - 1


class ClockedGraph:
    """Makespan and slack of a graph at given clocks: like `simulate`, but one clock can be changed without simulating everything again.
    Each list has an entry for each vertex, in seconds. times: its duration. ends: its end. tails: longest path from its end to the end of
    the step."""

    def __init__(self, graph: Graph, clocks: Mapping[Node, Clock]) -> None:
        self.graph, self.times, self.ends = graph, [0.0] * len(graph.before), list[float]()
        for i in graph.transfers:
            self.times[i] = graph.transfer_time
        for node, i in graph.vertices.items():
            self.times[i] = max(self.times[i], clocks[node].time)
        for before, time in zip(graph.before, self.times, strict=True):
            self.ends.append(time + max((self.ends[j] for j in before), default=0.0))
        self.tails = [0.0] * len(self.times)
        for i in reversed(range(len(self.times))):
            self.tails[i] = self._tail(i)

    @property
    def makespan(self) -> float:
        return max(self.ends)

    def slack(self) -> dict[Node, float]:
        most, ends, tails = self.makespan, self.ends, self.tails
        return {node: most - ends[i] - tails[i] for node, i in self.graph.vertices.items()}

    def critical(self, nodes: Iterable[Node], spare: float) -> list[Node]:
        """Return the `nodes` that have a slack of at most `spare` seconds."""
        longest, ends, tails, vertices = self.makespan - spare, self.ends, self.tails, self.graph.vertices
        return [node for node in nodes if ends[vertices[node]] + tails[vertices[node]] >= longest]

    def change(self, node: Node, clock: Clock) -> None:
        """Set the clock of one action, which must not be an all-reduce (S). Recomputes only the times that depend on it."""
        changed = self.graph.vertices[node]
        was, self.times[changed] = self.times[changed], clock.time
        times, ends, tails, before, after = self.times, self.ends, self.tails, self.graph.before, self.graph.after
        later = [changed]
        while later:
            i = heappop(later)  # the lowest number, so that the ends of all vertices that i needs are final
            then, now = ends[i], times[i] + max([ends[j] for j in before[i]], default=0.0)
            ends[i] = now
            if now != then:
                for j in after[i]:
                    if then + times[j] == ends[j] or now + times[j] > ends[j]:  # j started at the old end of i, or now starts later
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
