"""FlexFlow's search finds the best of all placements; its delta simulation equals the full one; simulated times equal closed forms."""

from __future__ import annotations

import random
from itertools import product

import pytest

from moe.plan.operators.links import Link, Machine
from moe.plan.search.execution import JOIN, SUM, Key, Placed, Ran, Simulator, Task, run
from moe.plan.search.mcmc import data_parallel, legal, mcmc
from moe.plan.search.strategies import Settings
from parallel.annotations.graph import Dim, Graph, Operator
from tests.support.graphs import chain

MACHINE = Machine(nodes=2, node_size=2, flops=1e9, inside=Link(1e-6, 1e-9), between=Link(3e-6, 4e-9))


def simulated(graph: Graph, placement: dict[str, Placed], machine: Machine = MACHINE, settings: Settings | None = None) -> Ran:
    return run(Simulator(graph, machine, settings or Settings()).tasks(placement))


def test_data_parallelism_takes_the_time_of_products_and_all_reduces() -> None:
    """The second layer's all-reduce overlaps with the first layer's backward pass; the first layer's all-reduce follows both."""
    b, d, f = 64, 16, 48
    graph = chain(2, b=b, d=d, f=f, then="pointwise")
    work = 3 * graph.flops / 4 / 1e9
    size = d * f * 2
    each = 1e-6 + size * 1e-9 + 3e-6 + size / 2 * 4e-9  # all-reduce within each node, then of halves between the nodes
    backward = 2 * 2 * b * d * f / 4 / 1e9  # seconds of the first layer's backward pass
    assert simulated(graph, data_parallel(graph, 4)).seconds == pytest.approx(work + each + max(0.0, each - backward), rel=1e-9)


def test_tensor_parallelism_sends_one_all_reduce() -> None:
    """Hidden units are divided over one node: columns of the first matrix, rows of the second. Only the output is reduced."""
    b, d, f = 8, 16, 32
    graph = chain(2, b=b, d=d, f=f, then="pointwise")
    cut, copies = Placed((("f", 2),)), Placed((("", 2),))
    ran = simulated(graph, {"layer0": cut, "act0": cut, "layer1": cut, "act1": copies})
    fetched = 1e-6 + b * d * 2 * 1e-9  # an all-reduce sends 2 (n - 1)/n of the output, n = 2
    assert ran.seconds == pytest.approx(3 * graph.flops / 2 / 1e9 + fetched, rel=1e-9)


def test_each_gradient_is_summed_also_of_operators_with_many_inputs() -> None:
    """Of an operator with 101 weights and one with a single weight, each weight has an all-reduce on each of two devices."""
    weights = [f"w{i}" for i in range(102)]
    many = Operator("many", "pointwise", f"bd{',d' * 101}->bd", ("x", *weights[:101]))
    one = Operator("one", "pointwise", "bd,d->bd", ("many", weights[101]))
    graph = Graph({"b": Dim("batch", 4), "d": Dim("width", 3)}, {"x": "bd"}, dict.fromkeys(weights, "d"), (many, one))
    tasks = Simulator(graph, MACHINE, Settings()).tasks(dict.fromkeys(("many", "one"), Placed((("b", 2),))))
    assert sum(kind == SUM for kind, _, _ in tasks) == 2 * len(weights)
    assert sum(kind == JOIN for kind, _, _ in tasks) == 2 * len(weights)


def test_layers_on_different_devices_run_one_after_another() -> None:
    """The step takes the work of all layers and a transfer between the devices in each pass."""
    b, d, f = 8, 16, 32
    graph = chain(2, b=b, d=d, f=f, then="pointwise")
    here, there = Placed((), 0), Placed((), 2)
    ran = simulated(graph, {"layer0": here, "act0": here, "layer1": there, "act1": there})
    assert ran.seconds == pytest.approx(3 * graph.flops / 1e9 + 2 * (3e-6 + b * f * 2 * 4e-9), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [(8, 16, 32), (64, 8, 8), (4, 64, 16)])
def test_mcmc_finds_the_best_of_all_placements(seed: int, sizes: tuple[int, int, int]) -> None:
    """For two products and two pointwise operators on two devices."""
    b, d, f = sizes
    machine = Machine(nodes=1, node_size=2, flops=1e9, inside=Link(1e-6, 1e-9), between=Link(1e-6, 1e-9))
    graph = chain(2, b=b, d=d, f=f, then="pointwise")
    simulator = Simulator(graph, machine, Settings())
    options = {op.name: legal(op, graph, 2) for op in graph.operators}
    assert all(len(some) <= 16 for some in options.values())
    every = (dict(zip(options, some, strict=True)) for some in product(*options.values()))
    least = min(run(simulator.tasks(placement)).seconds for placement in every)
    found = mcmc(simulator, budget=1500, seed=seed, alpha=20.0)
    assert found.seconds == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_delta_simulation_equals_the_full_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All end times of tasks are equal to the bit after each proposal, also after accepted slower ones."""
    compared = []

    def both(tasks: dict[Key, Task], before: Ran | None = None) -> Ran:
        delta, full = run(tasks, before), run(tasks)
        assert full.ends == delta.ends and full.order == delta.order
        compared.append(before is not None)
        return delta

    monkeypatch.setattr("moe.plan.search.mcmc.run", both)
    mcmc(Simulator(chain(3, b=16, d=8, f=16, then="pointwise"), MACHINE, Settings()), budget=120, seed=seed, alpha=0.5)
    assert compared == [False, *[True] * 120]


def test_slower_placements_are_accepted_less_the_larger_alpha_is() -> None:
    graph, shares = chain(2, b=16, d=8, f=16, then="pointwise"), []
    for alpha in (0.0, 1.0, 10.0, 1e6):
        walk = mcmc(Simulator(graph, MACHINE, Settings()), budget=300, seed=1, alpha=alpha)
        shares.append(walk.slower_accepted / walk.slower)
    assert shares[0] == 1.0 and shares[-1] == 0.0 and shares == sorted(shares, reverse=True)


def test_walk_begins_with_data_parallelism_and_never_ends_worse() -> None:
    graph = chain(3, b=64, d=8, f=16, then="pointwise")
    simulator = Simulator(graph, MACHINE, Settings())
    start = run(simulator.tasks(data_parallel(graph, 4))).seconds
    assert mcmc(simulator, budget=0).seconds == start and mcmc(simulator, budget=100).seconds <= start


def test_a_placement_that_exceeds_memory_gets_a_penalty() -> None:
    """Its seconds are larger than its simulated time."""
    graph = chain(2, b=1024, d=16, f=16, then="pointwise")
    small = Machine(nodes=1, node_size=2, flops=1e9, inside=Link(1e-6, 1e-9), between=Link(1e-6, 1e-9), memory_bytes=50_000)
    simulator = Simulator(graph, small, Settings())
    placement = data_parallel(graph, 2)
    held = 2 * 16 * 16 * 18 + 4 * 1024 * 16 * 2 / 2
    assert simulator.excess(placement) == held - 50_000
    assert simulator.seconds(placement, run(simulator.tasks(placement))) > run(simulator.tasks(placement)).seconds


def test_run_resumes_after_a_change_of_one_task() -> None:
    """For random tasks: the end times that `run` resumes from an earlier run equal those of a new run."""
    draw = random.Random(3)

    def tasks(seed: int, changed: int) -> dict[tuple[int, int, int], Task]:
        one = random.Random(seed)
        made = {}
        for i in range(60):
            after = tuple((0, j, 0) for j in sorted(one.sample(range(i), min(i, 3))))
            made[0, i, 0] = Task(one.randrange(4), one.choice([0.0, 1.0, 2.5]) + (i == changed) * 0.7, after)
        return made

    for seed in range(40):
        before = run(tasks(seed, -1))
        there = tasks(seed, draw.randrange(60))
        assert run(there, before).ends == run(there).ends
