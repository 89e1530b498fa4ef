"""Searches on real recipes: a plan is a recipe and back, all agree on a large model, and what each finds trains as one process does."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, pairwise, product
from math import inf
from typing import Any

import pytest
import torch

from moe.checks.together import check_run
from moe.parallelize.build import build
from moe.plan.choose.recipe_of import as_stored, recipe_of
from moe.plan.job.network import Plan
from moe.plan.job.of_recipe import plan_of
from moe.plan.job.states import MIXED
from moe.plan.machine.cluster import load_cluster
from moe.plan.operators.links import Link, Machine, machine_of
from moe.plan.operators.of_recipe import graph_of
from moe.plan.search import search as search_file
from moe.plan.search.layouts import gspmd, mesh_tf
from moe.plan.search.runnable import Runnable, fold
from moe.plan.search.search import SearchResult, alpa, flexflow
from moe.plan.search.strategies import Settings, cost_of, read_together
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.train.parts.executor import start_executor
from moe.verify.cases import Case
from parallel.annotations.graph import Graph
from parallel.errors import BadInput
from parallel.mesh.mesh import divisors
from parallel.numerics.precision import LossScale
from parallel.process import process
from parallel.process.process import World
from tests.support.ranks import run_on_ranks
from tests.support.tiny import Tiny

SEARCHES = {"alpa": alpa, "flexflow": flexflow}


def tiny(model: str = "dense") -> Run:
    """Four layers, half of them with experts where the model has them, as `moe verify` has it on one process."""
    return Case(model, "ddp", 1, 1, 1, "fp32", layers=4).run()


# --- plans are recipes --------------------------------------------------------------------------------------------------------

CASES = [
    Case("dense", "ddp", 4, 1, 3, "fp32"),
    Case("gshard", "zero1", 4, 2, 1, "fp32", recompute="selective"),
    Case("deepseek", "fsdp", 2, 2, 1, "bf16", tiles=5),
    Case("dense", "zero3+cpu-all", 2, 1, 3, "fp32"),
    Case("gshard", "ddp", 4, 2, 1, "fp32", etp=2),
    Case("dense", "ddp", 4, 1, 3, "fp32", pp=2, schedule="gpipe", layers=4),
    Case("dense", "ddp", 2, 1, 6, "fp32", pp=2, schedule="interleaved", layers=4),
    Case("dense", "fsdp", 4, 1, 3, "fp32", pp=2, layers=4),
    Case("gshard", "ddp", 4, 2, 1, "fp32", tp=2, tensor="sliced"),
    Case("dense", "zero2", 4, 1, 1, "fp32", tp=4, tensor="2d", batch=24),
    Case("deepseek", "ddp", 4, 2, 1, "fp32", sp=2, attention="ulysses", length=24),
    Case("dense", "ddp", 4, 1, 1, "fp32", sp=2, attention="striped", length=24),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.layout)
def test_a_plan_is_a_recipe_and_back(case: Case) -> None:
    """Onto a recipe of one process with the same model: the plan is the same again, and the run is one that trains."""
    run = check_run(case.run(), case.world)
    alone = replace(
        case, kind="ddp", world=1, ep=1, etp=1, pp=1, tp=1, tensor="copied", sp=1, microbatches=1, recompute="none", tiles=1
    ).run()
    plan = plan_of(run)
    made = recipe_of(plan, alone)
    assert plan_of(made) == plan and plan_of(check_run(made, case.world)) == plan
    assert made.model == alone.model and made.optimizer == alone.optimizer


def test_a_plan_of_other_bytes_is_refused() -> None:
    run = tiny()
    with pytest.raises(BadInput, match="plan.storage: got .* fix: plan with the recipe's precision"):
        recipe_of(Plan(dp=2, storage=MIXED, compute_bytes=4), run)
    assert recipe_of(as_stored(Plan(dp=2, storage=MIXED), run), run).degrees.dp == 2


# --- what they find ----------------------------------------------------------------------------------------------------------


def large() -> Graph:
    model = {"num_layers": 24, "d_model": 2048, "num_heads": 16, "d_ff": 8192, "max_length": 2048, "vocab_size": 51200}
    return graph_of(build_run({"model": model, "precision": {"compute": "bf16"}}), sequences=64)


CLUSTER = Machine(8, 8, 150e12, Link(1e-5, 1 / 200e9), Link(2e-5, 1 / 20e9), moved=1.2e12, memory_bytes=40 * 2**30)
MIXED_SETTINGS = Settings(microbatches=8, sharded=(0, 1))


def test_all_agree_on_24_layers_over_64_devices() -> None:
    """Within 5 % of each other and of the fastest of all plans, each in under a minute of one core."""
    graph, times = large(), []
    runnable = Runnable(graph, CLUSTER, MIXED_SETTINGS)
    for search in SEARCHES.values():
        began = time.process_time()
        more: dict[str, Any] = {"budget": 50} if search is flexflow else {}  # each proposal is simulated on 64 devices
        found = search(graph, CLUSTER, MIXED_SETTINGS, **more)
        assert time.process_time() - began < 60
        assert found.plan.world == 64 and runnable.seconds(found.plan) == found.seconds
        times.append(found.seconds)
    fastest = min(runnable.seconds(plan) for pp in (1, 2, 4, 8) for plan in runnable.plans(pp))
    assert max(*times, fastest) <= 1.05 * min(*times, fastest)


def test_folded_layers_cost_what_all_cost() -> None:
    """Of a plan, layer by layer: 4 of 2 kinds, with the edges between them."""
    run = tiny("gshard")
    graph, machine, settings = graph_of(run, sequences=12), Machine(1, 4, 1e9, Link(1e-6, 1e-9), Link(1e-6, 1e-9)), Settings()
    folded = fold(graph)
    assert folded.weight == {-1: 1.0, 0: 2.0, 1: 2.0, 4: 1.0}
    plan = Plan(dp=4, ep=4, microbatch=3, compute_bytes=4)
    few = Runnable(graph, machine, settings)
    every = Runnable(graph, machine, settings)
    every.folded = replace(folded, graph=graph, weight=dict.fromkeys(graph.layers, 1.0), of={layer: layer for layer in graph.layers})
    every.joined = read_together(graph)
    chosen = every.chosen(plan)
    assert chosen is not None
    whole = cost_of(every.joined, machine.mesh(1, 4, 1, 1), settings, chosen).seconds
    assert few.seconds(plan) == pytest.approx(whole, rel=1e-9) and every.seconds(plan) == pytest.approx(whole, rel=1e-9)


def test_alpa_cuts_into_stages_where_links_are_slow() -> None:
    """Stages of unequal devices, which no plan has: then the fastest of all plans, which has stages too; with no memory there is none."""
    graph = graph_of(tiny(), sequences=4)
    machine, settings = Machine(4, 1, 1e9, Link(1e-6, 1e-9), Link(1e-3, 1e-5)), Settings(microbatches=8)
    found = alpa(graph, machine, settings)
    runnable = Runnable(graph, machine, settings)
    assert len(found.stages) > 1 and found.plan.pp > 1 and sum(found.plan.stage_layers or ()) == 4
    assert found.seconds == min(runnable.seconds(plan) for pp in (1, 2, 4) for plan in runnable.plans(pp))
    assert found.free_seconds <= found.seconds * (1 + 1e-9)
    assert found.nearest or found.seconds == pytest.approx(found.free_seconds, rel=1e-6)
    with pytest.raises(BadInput, match="stages: got 4 layers on 4 devices, .* fix: give devices more memory"):
        alpa(graph, replace(machine, memory_bytes=1000), settings)


def drawn(seed: int) -> tuple[Graph, Machine, Settings, random.Random]:
    """A small model on 2 to 4 devices, without a limit of memory."""
    draw = random.Random(seed)
    width = draw.choice([32, 64])
    model = {"num_layers": draw.randint(2, 4), "d_model": width, "num_heads": draw.choice([2, 4]), "d_ff": 3 * width, "vocab_size": 96}
    run = build_run({"model": model | {"max_length": draw.choice([16, 128])}})
    nodes, size = draw.choice([(1, 2), (1, 4), (2, 2), (3, 1)])
    inside = Link(10 ** draw.uniform(-6, -4), 10 ** draw.uniform(-11, -9))
    between = Link(2 * inside.alpha_s, draw.choice([1, 10, 100]) * inside.beta_s)
    graph = graph_of(run, sequences=draw.choice([4, 12]))
    return graph, Machine(nodes, size, 1e12, inside, between), Settings(draw.choice([1, 3, 8]), sharded=(0, 1, 3)), draw


def stage_of(some: Runnable, plan: Plan, first: int, end: int, later: int) -> tuple[float, float]:
    """Seconds of a micro-batch and bytes of the blocks first to end - 1 with the ends that are theirs."""
    costs = some.costs(plan)
    if costs is None:
        return inf, inf
    layers = [some.whole.layers[0]] * (first == 0) + some.blocks[first:end] + [some.whole.layers[-1]] * (end == len(some.blocks))
    mine = [costs[some.folded.of[layer]] for layer in layers]
    in_flight = min(later + 1, some.settings.microbatches)
    return sum(c.seconds for c in mine), sum(c.state_bytes + c.output_bytes * in_flight for c in mine)


def cuts(layers: int, devices: int, sizes: tuple[int, ...]) -> Iterator[list[tuple[int, int]]]:
    """All lists of stages, each so many layers on so many devices."""
    if layers == devices == 0:
        yield []
    for count, n in product(range(1, layers + 1), sizes):
        if n <= devices:
            yield from ([(count, n), *rest] for rest in cuts(layers - count, devices - n, sizes))


@pytest.mark.parametrize("seed", range(8))
def test_alpa_finds_nothing_slower_than_a_plan_that_runs_in_any_memory(seed: int) -> None:
    """From what recomputation alone fits into to what all fit into: its optimum is the best up to its gap, and its plan is the best."""
    graph, machine, settings, draw = drawn(seed)
    free = Runnable(graph, machine, settings)
    plans = [plan for pp in divisors(machine.devices) if pp <= len(free.blocks) for plan in free.plans(pp)]

    def held(plan: Plan) -> float:
        costs = free.costs(plan)
        ends = [0, *accumulate(free.stages(plan, costs))] if costs else []
        return max((stage_of(free, plan, a, b, plan.pp - 1 - i)[1] for i, (a, b) in enumerate(pairwise(ends))), default=inf)

    least = {kind: min(held(plan) for plan in plans if plan.recompute == kind) for kind in ("none", "full")}
    for memory in (1.01 * least["full"], draw.uniform(*sorted(least.values())), 1.2 * least["none"]):
        small = replace(machine, memory_bytes=memory)
        best = min(Runnable(graph, small, settings).seconds(plan) for plan in plans)
        found = alpa(graph, small, settings)
        assert best < inf and found.seconds <= best * (1 + 1e-9) and found.free_seconds <= best * (1 + 1e-3)
        assert Runnable(graph, small, settings).seconds(found.plan) == found.seconds


@pytest.mark.parametrize("seed", range(8))
def test_stages_with_and_without_recomputation_are_those_of_brute_force(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the layouts of plans alone: every cut into stages, each with the fastest layout of its devices that fits, recomputed or not."""

    def none(*_: Any, **__: Any) -> None:
        raise BadInput("operators", got="no strategies of their own", needed="those of plans", fix="-")

    monkeypatch.setattr(search_file, "intra_op", none)
    graph, machine, settings, draw = drawn(100 + seed)
    free = Runnable(graph, machine, settings)
    sizes = tuple(n for n in machine.submeshes() if n in divisors(machine.devices))
    of = {n: list(free.plans(machine.devices // n)) for n in sizes}
    one = [stage_of(free, plan, 0, len(free.blocks), 0)[1] for n in sizes for plan in of[n]]
    memory, best = draw.uniform(0.3, 1.0) * min(one), inf
    for stages in cuts(len(free.blocks), machine.devices, sizes):
        times, first = [], 0
        for i, (count, n) in enumerate(stages):
            held = (stage_of(free, plan, first, first + count, len(stages) - 1 - i) for plan in of[n])
            times.append(min((seconds for seconds, size in held if size <= memory), default=inf))
            first += count
        if inf not in times:
            best = min(best, sum(times) + (settings.microbatches - 1) * max(times))
    try:
        found = alpa(graph, replace(machine, memory_bytes=memory), settings).free_seconds
    except BadInput as bad:
        assert best == inf or bad.what == "--search"  # stages of unequal devices, which no plan has
        return
    assert found == pytest.approx(best, rel=1e-3)


def test_a_stage_may_have_a_whole_node_of_six() -> None:
    """Two layers, so six stages cannot be; what lies between 2 and 12 devices is one node, or two."""
    run, link = tiny(), Link(1e-5, 1e-10)
    run = run.model_copy(update={"model": run.model.model_copy(update={"num_layers": 2})})
    for machine in (Machine(1, 6, 1e9, link, link), Machine(2, 6, 1e9, link, link)):
        assert machine.submeshes() == (1, 2, 6, 12)[: 2 + machine.nodes]
        assert alpa(graph_of(run, sequences=12), machine, Settings()).plan.world == machine.devices


@pytest.mark.parametrize("search", [mesh_tf, gspmd])
def test_where_nothing_divides_no_memory_is_asked_for(search: Callable[..., SearchResult]) -> None:
    """Five sequences on seven devices."""
    machine = Machine(1, 7, 1e9, Link(1e-6, 1e-10), Link(1e-6, 1e-10))
    with pytest.raises(BadInput, match="no layout that the trainer runs, needed one whose sizes the mesh divides"):
        search(graph_of(tiny(), sequences=5), machine)


def test_a_cluster_file_is_a_machine() -> None:
    """Its links carry what the file says: a ring over all devices is as fast as the share of the network that a device has."""
    cluster = load_cluster("h100-8x4")
    machine = machine_of(cluster)
    assert machine.devices == cluster.world == 32 and machine.memory_bytes < cluster.device.memory_gib * 2**30
    share = cluster.between.node_gb_s * cluster.between.share * 1e9
    gather = machine.mesh(32).all_gather(1e9, 0)  # 3 of 4 nodes' bytes come in over 8 adapters at a time
    inside = 7 / 8 * 1e9 / cluster.inside.bus(8)
    assert gather == pytest.approx(inside + 3 / 4 * 1e9 / share, rel=0.02)
    assert machine_of(cluster, kind="fp32").flops == pytest.approx(machine.flops * 67 / 989)
    host = machine_of(replace(cluster, nodes=1, cores=2))  # whose eight processes have a quarter of a core and an eighth of its memory
    assert (host.flops, host.memory_bytes) == pytest.approx((machine.flops / 4, machine.memory_bytes / 8))


# --- and train ---------------------------------------------------------------------------------------------------------------

SLOW = Machine(2, 2, 1e9, Link(1e-5, 1e-8), Link(1e-4, 1e-6))  # between two nodes
PROBLEMS = [  # on which the searches find layouts of many kinds: model, sequences of a micro-batch, micro-batches, and 4 devices
    ("dense", 4, 3, SLOW),
    ("dense", 2, 6, Machine(1, 4, 1e9, Link(1e-6, 1e-10), Link(1e-6, 1e-11), memory_bytes=260e3)),
    ("gshard", 12, 1, Machine(1, 4, 1e9, Link(1e-6, 1e-10), Link(1e-6, 1e-11), memory_bytes=700e3)),
]


def plans() -> list[tuple[str, Run]]:
    """Without DeepSpeed, whose import takes longer than all else here."""
    found: list[tuple[str, Run]] = []
    for model, sequences, microbatches, machine in PROBLEMS:
        run = tiny(model)

        def allowed(plan: Plan, run: Run = run) -> bool:
            try:
                return plan.engine != "zero1" and bool(check_run(recipe_of(as_stored(plan, run), run), 4))
            except BadInput:
                return False

        for name, search in SEARCHES.items():
            more: dict[str, Any] = {"budget": 40} if name == "flexflow" else {}
            settings = Settings(microbatches=microbatches)
            one: SearchResult = search(graph_of(run, sequences=sequences), machine, settings, allowed=allowed, **more)
            found.append((f"{name} {model} {sequences}", recipe_of(as_stored(one.plan, run), run)))
    return found


def losses(rank: int, world: int, runs: list[Run]) -> list[list[float]]:
    meshes: dict[Any, Any] = {}
    found = []
    for given in runs:
        run = check_run(given, world)
        degrees = run.mesh_degrees()
        meshes[degrees] = meshes.get(degrees) or process.connect(degrees, World(rank, world))
        model, layouts = build(run, meshes[degrees], device=torch.device("cpu"))
        one = Tiny(run, meshes[degrees], model, start_executor(run, model, layouts, meshes[degrees]), LossScale.of("none"))
        steps = []
        for step in range(2):
            steps.append(one.accumulate(step).loss)
            steps.append(one.finish().total)
        found.append(steps)
    return found


def test_what_each_finds_trains_as_one_process_does() -> None:
    """Two steps on 4 ranks: loss and gradient norm of each, to rounding."""
    named = plans()
    plans_ = [plan_of(run) for _, run in named]
    assert len({(plan.dp, plan.tp, plan.sp, plan.pp, plan.ep, plan.engine) for plan in plans_}) > 3
    assert max(plan.pp for plan in plans_) > 1 and max(plan.tp * plan.ep for plan in plans_) > 1
    # one process takes each problem's micro-batches as the ranks do: routers balance over them
    alone = run_on_ranks(losses, 1, 1, [_alone(model, microbatches) for model, _, microbatches, _ in PROBLEMS])[0]
    expected = [one for one in alone for _ in SEARCHES]
    for (name, _), got, one in zip(named, run_on_ranks(losses, 4, 4, [run for _, run in named])[0], expected, strict=True):
        assert got == pytest.approx(one, rel=2e-5), name


def _alone(model: str, microbatches: int) -> Run:
    run = tiny(model)
    return run.model_copy(update={"pipeline": run.pipeline.model_copy(update={"microbatches": microbatches})})
