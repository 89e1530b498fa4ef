"""EnvPipe's energy plans keep the makespan, and their energy is near the optimum. Profiles come from PowerModel."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from parallel.errors import BadInput
from parallel.pipeline.energy.clocks import Clock, PowerModel, Profile
from parallel.pipeline.energy.energy import ClockedGraph, EnergyPlan, Graph, envelope, envpipe, extra_warmup, plan_clocks
from parallel.pipeline.energy.plan_file import write_plan
from parallel.pipeline.schedule import Action, Node, Op, Schedule
from parallel.pipeline.schedules import SCHEDULES, make_schedule
from parallel.pipeline.schedules.one_f_one_b import one_f_one_b
from parallel.pipeline.simulator.held import peak_activations
from parallel.pipeline.simulator.simulate import costs, simulate
from tests.support.plain_simulation import needs_of

IDLE_W = 40.0
UNIT_S = 5e-4  # times are multiples of this, because lowtime's solver needs integers


def v100(seconds: float) -> list[Clock]:
    """Return PowerModel's clocks for an action of `seconds` at full clock, with times rounded to multiples of UNIT_S."""
    clocks = []
    for clock in PowerModel().clocks(seconds):
        time = round(clock.time / UNIT_S) * UNIT_S
        clocks.append(Clock(clock.mhz, time, clock.energy / clock.time * time))
    return clocks


def profiled(forward: list[float], backward: list[float]) -> Profile:
    measured = {(Op.F, s): v100(t) for s, t in enumerate(forward)} | {(Op.B, s): v100(t) for s, t in enumerate(backward)}
    return lambda rank, action: measured.get((action.op, action.stage), [Clock(0, 0, 0)])


def one_clock(F: float, B: float) -> Profile:
    return lambda rank, action: [Clock(1, {Op.F: F, Op.B: B}.get(action.op, 0), 0)]


EQUAL = profiled([0.01] * 4, [0.02] * 4)
HEAVY_HEAD = profiled([0.01, 0.01, 0.01, 0.013], [0.02, 0.02, 0.02, 0.026])  # the last stage also computes the model's head
UNEVEN = profiled([0.008, 0.012, 0.01, 0.013], [0.016, 0.024, 0.02, 0.026])
HEAVY_FIRST = profiled([0.013, 0.01, 0.01, 0.01], [0.026, 0.02, 0.02, 0.02])
PROFILES = {"equal": EQUAL, "heavy head": HEAVY_HEAD, "uneven": UNEVEN, "heavy first": HEAVY_FIRST}


def slack_of(schedule: Schedule, F: float, B: float) -> dict[Node, float]:
    clocks = {node: one_clock(F, B)(node.rank, action)[0] for node, action in schedule.nodes()}
    return {node: spare for node, spare in ClockedGraph(Graph(schedule), clocks).slack().items() if schedule.action(node).op is not Op.U}


@pytest.mark.parametrize(
    ("p", "m", "F", "B", "extra", "critical", "in_flight"),
    [
        (4, 4, 1, 2, [0, 1, 2, 0], 14, (4, 4, 4, 1)),
        (4, 8, 1, 2, [4, 4, 2, 0], 22, (8, 7, 4, 1)),
        (4, 16, 1, 2, [6, 4, 2, 0], 38, (10, 7, 4, 1)),
        (8, 16, 1, 2, [8, 9, 10, 8, 6, 4, 2, 0], 46, None),
        (4, 8, 1, 1, [3, 2, 1, 0], 22, None),
        (3, 6, 1, 2, [3, 2, 0], 16, None),
    ],
)
def test_with_extra_warmup_only_the_envelope_is_critical(
    p: int, m: int, F: int, B: int, extra: list[int], critical: int, in_flight: tuple[int, ...] | None
) -> None:
    """EnvPipe, section 4: the extra warm-up does not change the makespan, and afterwards exactly the envelope's actions have no slack."""
    assert extra_warmup(p, m, one_clock(F, B), idle_power=0) == extra
    plain, ahead = one_f_one_b(p, m), one_f_one_b(p, m, extra_warmup=extra)
    assert simulate(plain, costs(F, B)).makespan == simulate(ahead, costs(F, B)).makespan
    before, after = slack_of(plain, F, B), slack_of(ahead, F, B)
    zero = {node for node, spare in after.items() if spare == 0}
    assert zero == envelope(ahead) and len(zero) == critical
    assert sum(after.values()) > sum(before.values()) and len([s for s in before.values() if s == 0]) > critical
    if in_flight is not None:
        assert peak_activations(ahead) == in_flight


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "chimera", "dualpipe"])
def test_clocked_graph_change_equals_a_new_clocked_graph_bit_for_bit(name: str) -> None:
    """Makespan and slack are equal after each of 150 random changes of one action's time."""
    schedule, draw = make_schedule(name, ranks=4, microbatches=8), random.Random(len(name))
    graph = Graph(schedule, transfer_time=0.5)
    chosen = {node: Clock(1, 1 if action.op not in (Op.S, Op.U) else 0, 0) for node, action in schedule.nodes()}
    changing, at = ClockedGraph(graph, chosen), [node for node, action in schedule.nodes() if action.op not in (Op.S, Op.U)]
    for _ in range(150):
        node = draw.choice(at)
        chosen[node] = Clock(1, draw.choice([0.1, 0.7, 1, 2, 3.3]), 0)
        changing.change(node, chosen[node])
        assert changing.makespan == ClockedGraph(graph, chosen).makespan and changing.slack() == ClockedGraph(graph, chosen).slack()


def test_plain_1f1b_has_more_than_its_envelope_critical() -> None:
    slack = slack_of(one_f_one_b(4, 8), 1, 2)
    assert sum(spare == 0 for spare in slack.values()) == 52 and len(envelope(one_f_one_b(4, 8))) == 22 and sum(slack.values()) == 30


def test_extra_warmup_stays_within_memory() -> None:
    assert extra_warmup(4, 16, one_clock(1, 2), idle_power=0, most=3) == [3, 3, 2, 0]
    slow_forward = [Clock(2, 1, 8), Clock(1, 2, 1)]
    found = extra_warmup(4, 16, lambda r, a: slow_forward if a.op is Op.F else [Clock(1, 2, 1)], idle_power=0)
    assert found == [3, 2, 1, 0]  # computed with F's time at its clock of least energy, 2, not at its full clock, 1


def test_extra_warmup_never_deadlocks() -> None:
    """1,000 random stage times give no deadlock. Some would, if a rank had over one warm-up micro-batch more than the previous rank."""
    draw = random.Random(3)
    ahead = 0
    for _ in range(1000):
        p, m = draw.randint(2, 7), draw.randint(1, 20)
        F, B = ([draw.choice([1, 2, 3, 5, 9]) for _ in range(p)] for _ in range(2))
        most = draw.choice([None, None, 2, 5])
        profile = lambda rank, action, F=F, B=B: [Clock(1, (F if action.op is Op.F else B)[action.stage], 0)]  # noqa: E731
        extra = extra_warmup(p, m, profile, idle_power=0, most=most)
        warm = [min(m, p - 1 - s + extra[s]) for s in range(p)]
        orders = [[a for a in order if a.op is not Op.U] for order in one_f_one_b(p, m, extra_warmup=extra).orders]
        assert [sum(1 for _ in itertools.takewhile(lambda a: a.op is Op.F, order)) for order in orders] == [min(m, w + 1) for w in warm]
        done: set[tuple[Op, int, int]] = set()
        while any(orders):
            ready = [order for order in orders if order and _neighbors(order[0], p) <= done]
            assert ready, (p, m, F, B, extra)
            for order in ready:
                done.add(order.pop(0)[:3])
        ahead += any(extra)
    assert ahead > 500


def _neighbors(action: Action, p: int) -> set[tuple[Op, int, int]]:
    op, stage, j = action[:3]
    if op is Op.F:
        return {(op, stage - 1, j)} if stage else set()
    return {(Op.F, stage, j)} | ({(op, stage + 1, j)} if stage + 1 < p else set())


@pytest.mark.parametrize("backward", [[2, 5, 5, 5], [1, 9, 9, 1]])
def test_a_plan_for_unequal_backward_passes_keeps_the_makespan(backward: list[int]) -> None:
    profile = profiled([0.01] * 4, [b / 100 for b in backward])
    plan = envpipe(4, 16, profile, idle_power=IDLE_W)
    assert plan.saved > 0 and plan.slowdown <= 1e-6


def check_plan(plan: EnergyPlan, profile: Profile, limit: float) -> None:
    """Assert that the plan's makespan is at most `limit`, and that no single action could take a clock of less energy within its slack."""
    schedule, clocks = plan.schedule, {Node(r, i): c for r, row in enumerate(plan.clocks) for i, c in enumerate(row)}
    graph = Graph(schedule)
    assert plan.timeline.makespan == pytest.approx(ClockedGraph(graph, clocks).makespan) and plan.timeline.makespan <= limit * (1 + 1e-6)
    for (node, action), row in zip(schedule.nodes(), itertools.chain(*plan.timeline.spans), strict=True):
        options = profile(node.rank, action)
        assert clocks[node] in options and row.end - row.start == pytest.approx(clocks[node].time)
    spare = {node: s + limit - plan.timeline.makespan for node, s in ClockedGraph(graph, clocks).slack().items()}
    assert min(spare.values()) > -1e-9
    for node, action in schedule.nodes():
        cheaper = [
            c for c in profile(node.rank, action) if c.energy - IDLE_W * c.time < clocks[node].energy - IDLE_W * clocks[node].time - 1e-9
        ]
        assert all(c.time - clocks[node].time > spare[node] - 1e-9 for c in cheaper if c.time > clocks[node].time)
    waits = IDLE_W * sum(plan.timeline.idle(r) for r in range(schedule.num_ranks))
    assert plan.energy == pytest.approx(sum(c.energy for c in clocks.values()) + waits)


@pytest.mark.parametrize("name", PROFILES)
def test_only_slack_is_used_and_the_step_is_not_longer(name: str) -> None:
    plan = envpipe(4, 8, PROFILES[name], idle_power=IDLE_W)
    check_plan(plan, PROFILES[name], plan.full_clock.makespan)
    assert plan.slowdown <= 1e-9 and plan.saved > 0.05
    assert plan.full_clock.schedule == one_f_one_b(4, 8)


def test_a_heavier_last_stage_saves_a_fifth_of_the_energy() -> None:
    """EnvPipe reports up to 25.2 % for less than 1 % slowdown on 4 GPUs with measured profiles."""
    plan = envpipe(4, 16, HEAVY_HEAD, idle_power=IDLE_W, slowdown=0.01)
    assert plan.saved >= 0.20 and plan.slowdown < 0.01


def test_a_longer_step_saves_more_energy_and_the_uniform_rule_costs_time() -> None:
    saved = [envpipe(4, 6, EQUAL, idle_power=IDLE_W, slowdown=s).saved for s in (0, 0.05, 0.2)]
    assert saved == sorted(saved) and saved[0] < saved[-1]
    uniform = plan_clocks(one_f_one_b(4, 6), EQUAL, idle_power=IDLE_W, rule="uniform")
    assert uniform.slowdown > 0.5 and {c.mhz for row in uniform.clocks for c in row} == {810, 0}


@pytest.mark.parametrize("name", [n for n, kind in SCHEDULES.items() if not kind.continuous])
def test_plan_clocks_keeps_the_makespan_of_every_schedule(name: str) -> None:
    """With transfer times. Includes schedules with I and W, and schedules with replicas of stages."""
    schedule = make_schedule(name, ranks=2, microbatches=4)
    third = {Op.F: v100(0.01), Op.B: v100(0.02), Op.I: v100(0.01), Op.W: v100(0.01), Op.S: [Clock(0, 0.002, 0.1)], Op.U: [Clock(0, 0, 0)]}
    assert ClockedGraph(Graph(schedule, 0.001), {node: third[a.op][0] for node, a in schedule.nodes()}).makespan == pytest.approx(
        simulate(schedule, lambda r, a: third[a.op][0].time, transfer_time=0.001).makespan
    )
    full = plan_clocks(schedule, lambda r, a: third[a.op][-1:], idle_power=IDLE_W, transfer_time=0.001)
    plan = plan_clocks(schedule, lambda r, a: third[a.op], idle_power=IDLE_W, transfer_time=0.001)
    assert full.saved == 0 and plan.full_clock_energy == pytest.approx(full.energy)
    assert plan.saved >= 0 and plan.timeline.makespan <= full.timeline.makespan * (1 + 1e-6)


def least_energy(schedule: Schedule, profile: Profile, limit: float) -> float:
    """Return the smallest energy of all choices of clocks with a makespan of at most `limit`, if each step then waits until `limit`."""
    graph, nodes = Graph(schedule), [node for node, _ in schedule.nodes()]
    best = float("inf")
    for clocks in itertools.product(*(profile(node.rank, schedule.action(node)) for node in nodes)):
        if ClockedGraph(graph, dict(zip(nodes, clocks, strict=True))).makespan <= limit * (1 + 1e-9):
            best = min(best, sum(c.energy - IDLE_W * c.time for c in clocks))
    return best + IDLE_W * schedule.num_ranks * limit


@pytest.mark.parametrize(("first", "last"), [(0.01, 0.01), (0.01, 0.014), (0.015, 0.01)])
def test_a_plans_energy_is_within_three_percent_of_the_optimum(first: float, last: float) -> None:
    """The optimum is the best of all 3^8 plans for two ranks, two micro-batches and three clocks."""
    every = profiled([first, last], [2 * first, 2 * last])

    def profile(rank: int, action: Action) -> list[Clock]:
        return list(every(rank, action))[::4]

    plan = plan_clocks(one_f_one_b(2, 2), profile, idle_power=IDLE_W)
    limit = plan.full_clock.makespan
    waits = IDLE_W * 2 * (limit - plan.timeline.makespan)  # idle energy from the plan's end until the limit
    assert plan.energy + waits <= 1.03 * least_energy(plan.schedule, profile, limit)


@pytest.mark.parametrize("name", ["equal", "heavy head", "uneven"])
def test_within_three_percent_of_lowtimes_frontier(name: str) -> None:
    """lowtime (Perseus, SOSP 2024) finds the smallest energy for each makespan, if any clock between the given ones is allowed."""
    pytest.importorskip("lowtime", reason="lowtime is not installed: pip install lowtime")
    plan = envpipe(4, 6, PROFILES[name], idle_power=IDLE_W)
    least = frontier(plan.schedule, PROFILES[name], plan.full_clock.makespan) + IDLE_W * 4 * plan.full_clock.makespan
    assert 0.995 * least <= plan.energy <= 1.03 * least


def frontier(schedule: Schedule, profile: Profile, limit: float) -> float:
    """Return the smallest energy above idle for a makespan of at most `limit`, computed by lowtime on the schedule's dependency graph."""
    import networkx
    from lowtime.operation import CandidateExecutionOptions, DummyOperation, ExecutionOption, Operation, OperationSpec
    from lowtime.solver import PhillipsDessouky

    graph = networkx.DiGraph()
    nodes = {node: at for at, (node, _) in enumerate(schedule.nodes(), start=1)}
    ends = (0, len(nodes) + 1)
    graph.add_nodes_from(ends, op=None)
    for at in ends:
        graph.nodes[at]["op"] = DummyOperation()
    for node, action in schedule.nodes():
        above_idle = {c: c.energy - IDLE_W * c.time for c in profile(node.rank, action)}
        op = DummyOperation()
        if len(above_idle) > 1:
            useful = [c for c in above_idle if all(above_idle[d] > above_idle[c] for d in above_idle if d.time < c.time)]
            options = [ExecutionOption(c.time + UNIT_S / 100, UNIT_S, above_idle[c], c.mhz) for c in useful]
            cost = between([(round(c.time / UNIT_S), above_idle[c]) for c in useful])
            op = Operation(OperationSpec(CandidateExecutionOptions(options), cost))
        graph.add_node(nodes[node], op=op)
        graph.add_edge(nodes[Node(node.rank, node.at - 1)] if node.at else 0, nodes[node])
        graph.add_edges_from((nodes[need], nodes[node]) for need in needs_of(schedule, node))
    graph.add_edges_from((nodes[Node(rank, len(order) - 1)], ends[1]) for rank, order in enumerate(schedule.orders))
    graph.graph.update(source_node=0, sink_node=ends[1])
    return min(point.cost for point in PhillipsDessouky(graph).run() if point.real_time <= limit + UNIT_S / 2) / 1e4


def between(points: list[tuple[int, float]]) -> object:
    """Return lowtime's cost model of points (time units, joules): their lower convex hull, with energy in units of 0.1 mJ."""
    from lowtime.cost_model import CostModel

    hull = [min(points)]
    while hull[-1][0] < max(points)[0]:
        at, energy = hull[-1]
        hull.append(min((p for p in points if p[0] > at), key=lambda p: ((p[1] - energy) / (p[0] - at), p[0])))
    cost = {hull[0][0]: round(1e4 * hull[0][1])}
    for (at, energy), (end, least) in itertools.pairwise(hull):
        slope = round(1e4 * (least - energy) / (end - at))
        cost |= {t: cost[at] + slope * (t - at) for t in range(at + 1, end + 1)}

    class Convex(CostModel):  # type: ignore[misc]
        def __call__(self, quant_time: int) -> float:
            return cost[quant_time]

    return Convex()


def test_a_plan_file_has_a_clock_for_every_action(tmp_path: Path) -> None:
    plan = envpipe(4, 8, HEAVY_HEAD, idle_power=IDLE_W)
    write_plan(plan, tmp_path / "plan.json")
    value = json.loads((tmp_path / "plan.json").read_text())
    assert [[entry["action"] for entry in rank] for rank in value["ranks"]] == [[str(a) for a in order] for order in plan.schedule.orders]
    assert value["saved"] == plan.saved and value["energy_j"] == plan.energy
    with pytest.raises(BadInput, match="needed a file that can be written"):
        write_plan(plan, tmp_path)


def test_plan_clocks_refuses_a_limit_that_is_too_short_and_a_missing_clock() -> None:
    schedule = one_f_one_b(2, 2)
    with pytest.raises(BadInput, match="limit: got 0.01, needed at least 0.09, the makespan at full clock; fix: set it to 0.09"):
        plan_clocks(schedule, profiled([0.01] * 2, [0.02] * 2), idle_power=IDLE_W, limit=0.01)
    with pytest.raises(BadInput, match="profile: got no clock for 0F0, needed at least one"):
        plan_clocks(schedule, lambda rank, action: [], idle_power=IDLE_W)
