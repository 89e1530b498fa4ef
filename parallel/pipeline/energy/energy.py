"""EnvPipe (You et al., USENIX ATC 2023): slower clocks for the actions that have time to spare, at the same makespan.

    envelope   forward of the first micro-batch, the last stage, backward of the last micro-batch: these cannot wait, so at full clock
    the rest   at the clock of least energy (the valley: a slower clock draws less power, but for longer). If that makes the step longer,
               the cheapest actions of the critical path are raised until the step is short enough; then whatever has slack left is lowered

Running more forwards ahead (`extra_warmup`) gives actions slack, at the cost of activations. Losses do not change.
Energy counts each action at its clock, and idle power while a rank waits; transfers cost only time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import floor

from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.pipeline.energy.clocks import Clock, Profile, above_idle, fastest, useful, valley
from parallel.pipeline.energy.slack import Clocked, Graph
from parallel.pipeline.schedule import COMPUTE, Action, Node, Op, Schedule
from parallel.pipeline.schedules.one_f_one_b import one_f_one_b
from parallel.pipeline.simulator.simulate import Timeline, simulate

_EPSILON = 1e-9  # relative to the makespan: smaller slack is rounding error


@dataclass(frozen=True)
class EnergyPlan:
    """A clock for every action, the resulting timeline, and the same schedule at full clock for comparison.

    idle_power: watts of each rank while it waits. Both energies include it, each over its own makespan.
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
        """Energy saved, as a share of the energy at full clock."""
        return 1 - self.energy / self.full_clock_energy

    def energy_of(self, rank: int) -> float:
        """Joules of one rank in one step, including its waits."""
        return sum(clock.energy for clock in self.clocks[rank]) + self.idle_power * self.timeline.idle(rank)

    @property
    def slowdown(self) -> float:
        """How much longer the step is than at full clock, as a share."""
        return self.timeline.makespan / self.full_clock.makespan - 1


def envelope(schedule: Schedule) -> frozenset[Node]:
    """The actions that EnvPipe keeps at full clock: the whole last stage, the first micro-batch's forwards, the last one's backwards."""
    last = schedule.num_stages - 1
    return frozenset(
        node
        for node, a in schedule.nodes()
        if (a.stage == last and a.op in COMPUTE)
        or (a.op is Op.F and a.microbatch == 0)
        or (a.op in (Op.B, Op.I) and a.microbatch == schedule.microbatches - 1)
    )


def extra_warmup(ranks: int, microbatches: int, profile: Profile, *, idle_power: float, most: int | None = None) -> list[int]:
    """Additional forwards that each rank of 1F1B runs ahead: floor(T_B(full) (p - s - 1) / T_F(valley)), none on the last rank.

    At most one more than the rank before: one that waited for more forwards than that rank runs before its first B would wait forever.
    most: how many activations beyond 1F1B's a rank has memory for.
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
    """1F1B with a clock for each action, and with forwards pulled ahead if that saves energy; compared with plain 1F1B at full clock.

    slowdown: how much longer than at full clock a step may take, as a share.
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
    schedule: Schedule,
    profile: Profile,
    *,
    idle_power: float,
    limit: float | None = None,
    transfer_time: float = 0,
    rule: str = "envelope",
) -> EnergyPlan:
    """A clock for each action of any schedule, such that its makespan is at most `limit`; by default the makespan at full clock.

    rule: `envelope` as above; `uniform`: every action at its valley, whatever that costs in time. Raises BadInput for a limit that no
    clocks reach, and for a profile without clocks.
    """
    graph = Graph(schedule, transfer_time)
    options = {node: useful(profile(node.rank, action), idle_power, action) for node, action in schedule.nodes()}
    options |= {node: clocks[:1] for node, clocks in options.items() if schedule.action(node).op is Op.S}  # the network has no clock to set
    fast = {node: clocks[0] for node, clocks in options.items()}
    full = graph.makespan(fast)
    limit = full if limit is None else limit
    if full > limit * (1 + _EPSILON):
        raise BadInput(
            "limit", got=f"{limit:g}", needed=f"at least {full:g}, the makespan at full clock", fix=Set("it", full, said=f"{full:g}")
        )
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


def _raise(graph: Graph, options: dict[Node, list[Clock]], chosen: dict[Node, Clock], limit: float, idle_power: float) -> None:
    """Speed up the critical path's cheapest action per time gained, until the limit holds."""

    def price(node: Node) -> float:
        faster = _faster(options[node], chosen[node])
        gain = chosen[node].time - faster.time
        return (above_idle(faster, idle_power) - above_idle(chosen[node], idle_power)) / gain

    at = Clocked(graph, chosen)
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
    """Slow down, one clock at a time, the action that saves most and still fits into its slack, until none fits."""
    at = Clocked(graph, chosen)
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
