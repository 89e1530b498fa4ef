"""Searches on recipes: recipe_of and plan_of are inverse, all searches agree on a large model, and found plans train like one process."""

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
from moe.plan.job import counts
from moe.plan.job.network import Plan
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.job.states import MIXED, model_states
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


def tiny(model: str = "dense", layers: int = 4) -> Run:
    """Return the recipe that `moe verify` has for this model on one process."""
    run = Case(model, "ddp", 1, 1, 1, "fp32", layers=layers).run()
    halves = {"encoder_layers": None if run.model.encoder_layers is None else layers // 2}
    return run.model_copy(update={"model": run.model.model_copy(update={"num_layers": layers, **halves})})


# --- plans and recipes --------------------------------------------------------------------------------------------------------

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
def test_recipe_of_and_plan_of_are_inverse(case: Case) -> None:
    """A recipe's plan, put on the same model's recipe for one process, is the plan of the result, which the checks accept."""
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


# --- results of the searches --------------------------------------------------------------------------------------------------


def large() -> Graph:
    model = {"num_layers": 24, "d_model": 2048, "num_heads": 16, "d_ff": 8192, "max_length": 2048, "vocab_size": 51200}
    return graph_of(build_run({"model": model, "precision": {"compute": "bf16"}}), sequences=64)


CLUSTER = Machine(8, 8, 150e12, Link(1e-5, 1 / 200e9), Link(2e-5, 1 / 20e9), moved=1.2e12, memory_bytes=40 * 2**30)
MIXED_SETTINGS = Settings(microbatches=8, sharded=(0, 1))


def test_all_searches_agree_on_24_layers_over_64_devices() -> None:
    """Their plans take equally long to 5 %, also compared with the fastest of all plans. Each search takes less than a minute."""
    graph, times = large(), []
    runnable = Runnable(graph, CLUSTER, MIXED_SETTINGS)
    for search in SEARCHES.values():
        began = time.process_time()
        more: dict[str, Any] = {"budget": 50} if search is flexflow else {}  # few proposals, because each is simulated on 64 devices
        found = search(graph, CLUSTER, MIXED_SETTINGS, **more)
        assert time.process_time() - began < 60
        assert found.plan.world == 64 and runnable.seconds(found.plan) == found.seconds
        times.append(found.seconds)
    fastest = min(runnable.seconds(plan) for pp in (1, 2, 4, 8) for plan in runnable.plans(pp))
    assert max(*times, fastest) <= 1.05 * min(*times, fastest)


@pytest.mark.parametrize(
    ("model", "layers", "weight"),
    [("gshard", 4, {-1: 1.0, 0: 2.0, 1: 2.0, 4: 1.0}), ("t5_untied", 6, {-1: 1.0, 0: 2.0, 2: 1.0, 3: 3.0, 6: 1.0})],
)
def test_folding_equal_layers_does_not_change_a_plans_seconds(model: str, layers: int, weight: dict[int, float]) -> None:
    """The folded graph with weights gives the same seconds as the whole graph. An encoder's last layer has a norm of its own."""
    run = tiny(model, layers)
    graph, machine, settings = graph_of(run, sequences=12), Machine(1, 4, 1e9, Link(1e-6, 1e-9), Link(1e-6, 1e-9)), Settings()
    folded = fold(graph)
    assert folded.weight == weight
    plan = Plan(dp=4, ep=4, microbatch=3, compute_bytes=4)
    few = Runnable(graph, machine, settings)
    every = Runnable(graph, machine, settings)
    every.folded = replace(folded, graph=graph, weight=dict.fromkeys(graph.layers, 1.0), of={layer: layer for layer in graph.layers})
    every.joined = read_together(graph)
    chosen = every.chosen(plan)
    assert chosen is not None
    whole = cost_of(every.joined, machine.mesh(1, 4, 1, 1), chosen).seconds
    assert few.seconds(plan) == pytest.approx(whole, rel=1e-9) and every.seconds(plan) == pytest.approx(whole, rel=1e-9)


def test_alpa_cuts_into_stages_if_links_are_slow() -> None:
    """Its optimum may have stages with different numbers of devices. It then returns the fastest plan. Too little memory is refused."""
    graph = graph_of(tiny(), sequences=4)
    machine, settings = Machine(4, 1, 1e9, Link(1e-6, 1e-9), Link(1e-3, 1e-5)), Settings(microbatches=8)
    found = alpa(graph, machine, settings)
    runnable = Runnable(graph, machine, settings)
    assert len(found.stages) > 1 and found.plan.pp > 1 and sum(found.plan.stage_layers or ()) == 4
    assert found.seconds == min(runnable.seconds(plan) for pp in (1, 2, 4) for plan in runnable.plans(pp))
    assert found.free_seconds <= found.seconds * (1 + 1e-9)
    assert found.nearest or found.seconds == pytest.approx(found.free_seconds, rel=1e-6)
    with pytest.raises(BadInput, match="stages: got none that fit into memory, for 4 layers .* fix: give devices more memory"):
        alpa(graph, replace(machine, memory_bytes=1000), settings)


def drawn(seed: int) -> tuple[Graph, Machine, Settings, random.Random]:
    """Return a random small model on 2 to 4 devices with unlimited memory."""
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
    """Return (seconds of a micro-batch, bytes) of a stage with blocks `first` to `end` - 1; `later` stages come after it."""
    costs = some.costs(plan)
    if costs is None:
        return inf, inf
    layers = [some.whole.layers[0]] * (first == 0) + some.blocks[first:end] + [some.whole.layers[-1]] * (end == len(some.blocks))
    mine = [costs[some.folded.of[layer]] for layer in layers]
    in_flight = min(later + 1, some.settings.microbatches)
    return sum(c.seconds for c in mine), sum(c.state_bytes + c.output_bytes * in_flight for c in mine)


def cuts(layers: int, devices: int, sizes: tuple[int, ...]) -> Iterator[list[tuple[int, int]]]:
    """Yield all lists of stages (number of layers, number of devices) that use all layers and devices."""
    if layers == devices == 0:
        yield []
    for count, n in product(range(1, layers + 1), sizes):
        if n <= devices:
            yield from ([(count, n), *rest] for rest in cuts(layers - count, devices - n, sizes))


@pytest.mark.parametrize("seed", range(3))
def test_alpas_plan_is_the_fastest_plan_for_any_memory_limit(seed: int) -> None:
    """Limits go from memory in which only recomputation fits to memory in which all plans fit. Its optimum is at most as slow, to 0.1 %."""
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


@pytest.mark.parametrize("seed", range(5))
def test_alpas_stages_equal_brute_force(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brute force: all cuts into stages, each with its fastest layout that fits, with or without recomputation. `intra_op` is switched off,
    so that both only try layouts of plans."""

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
        assert best == inf or bad.what == "--search"  # no plan has stages with different numbers of devices
        return
    assert found == pytest.approx(best, rel=1e-3)


def test_a_stage_may_have_a_whole_node_of_six() -> None:
    """On nodes of six devices, a stage has 1 or 2 devices, or one or two whole nodes. Two layers do not allow six stages."""
    run, link = tiny(), Link(1e-5, 1e-10)
    run = run.model_copy(update={"model": run.model.model_copy(update={"num_layers": 2})})
    for machine in (Machine(1, 6, 1e9, link, link), Machine(2, 6, 1e9, link, link)):
        assert machine.submeshes() == (1, 2, 6, 12)[: 2 + machine.nodes]
        assert alpa(graph_of(run, sequences=12), machine, Settings()).plan.world == machine.devices


@pytest.mark.parametrize("search", [mesh_tf, gspmd])
def test_without_a_legal_layout_the_error_names_sizes_and_not_memory(search: Callable[..., SearchResult]) -> None:
    """Five sequences on seven devices have no legal layout."""
    machine = Machine(1, 7, 1e9, Link(1e-6, 1e-10), Link(1e-6, 1e-10))
    with pytest.raises(BadInput, match="no layout that the trainer runs, needed one with sizes that the mesh divides"):
        search(graph_of(tiny(), sequences=5), machine)


def test_machine_of_has_the_rates_of_the_cluster_file() -> None:
    """An all-gather over all devices takes as long as the node's links and network allow; processes of a CPU host share its cores."""
    cluster = load_cluster("h100-8x4")
    machine = machine_of(cluster)
    assert machine.devices == cluster.world == 32 and machine.memory_bytes < cluster.device.memory_gib * 2**30
    share = cluster.between.node_gb_s * cluster.between.share * 1e9
    gather = machine.mesh(32).all_gather(1e9, 0)  # a node receives the bytes of the other three over its 8 adapters
    inside = 7 / 8 * 1e9 / cluster.inside.bus(8)
    assert gather == pytest.approx(inside + 3 / 4 * 1e9 / share, rel=0.02)
    assert machine_of(cluster, kind="fp32").flops == pytest.approx(machine.flops * 67 / 989)
    host = machine_of(replace(cluster, nodes=1, cores=2))  # eight processes share 2 cores and the memory
    assert (host.flops, host.memory_bytes) == pytest.approx((machine.flops / 4, machine.memory_bytes / 8))


# --- training with the plans that were found ----------------------------------------------------------------------------------

SLOW = Machine(2, 2, 1e9, Link(1e-5, 1e-8), Link(1e-4, 1e-6))  # a slow network between two nodes
PROBLEMS = [  # (model, sequences in a micro-batch, micro-batches, machine of 4 devices) for which plans of different kinds are best
    ("dense", 4, 3, SLOW),
    ("t5_untied", 4, 3, SLOW),
    ("dense", 2, 6, Machine(1, 4, 1e9, Link(1e-6, 1e-10), Link(1e-6, 1e-11), memory_bytes=260e3)),
    ("gshard", 12, 1, Machine(1, 4, 1e9, Link(1e-6, 1e-10), Link(1e-6, 1e-11), memory_bytes=700e3)),
]


def plans() -> list[tuple[str, Run]]:
    """Return (name, recipe of the plan that was found) for each search and problem, without DeepSpeed, whose import is slow."""
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


def test_plans_of_all_searches_train_like_one_process() -> None:
    """Loss and gradient norm of two steps on 4 ranks equal those of one process, to rounding."""
    named = plans()
    plans_ = [plan_of(run) for _, run in named]
    assert len({(plan.dp, plan.tp, plan.sp, plan.pp, plan.ep, plan.engine) for plan in plans_}) > 3
    assert max(plan.pp for plan in plans_) > 1 and max(plan.tp * plan.ep for plan in plans_) > 1
    # one process uses the same micro-batches as the ranks, because a router's balance loss depends on them
    alone = run_on_ranks(losses, 1, 1, [_alone(model, microbatches) for model, _, microbatches, _ in PROBLEMS])[0]
    expected = [one for one in alone for _ in SEARCHES]
    for (name, _), got, one in zip(named, run_on_ranks(losses, 4, 4, [run for _, run in named])[0], expected, strict=True):
        assert got == pytest.approx(one, rel=2e-5), name


def _alone(model: str, microbatches: int) -> Run:
    run = tiny(model)
    return run.model_copy(update={"pipeline": run.pipeline.model_copy(update={"microbatches": microbatches})})


@pytest.mark.parametrize("query_rank", [None, 14])
def test_a_plan_of_latents_and_predicted_tokens_has_the_planners_bytes(query_rank: int | None) -> None:
    """A rank's parameters are as many as the planner counts. A layer all-reduces two outputs forward, and backward the network's input
    and all that heads read, as moe/plan/time/layer_messages.py counts: the queries' latents or x, the keys' latents and the rotary key."""
    latent = {"key_rank": 10, "query_rank": query_rank, "rotary_size": 4, "value_size": 5}
    model = {"num_layers": 2, "d_model": 24, "num_heads": 4, "d_ff": 40, "max_length": 12, "vocab_size": 52, "ahead": 1, "latent": latent}
    run = build_run({"model": model})
    machine = Machine(1, 2, inf, Link(0.0, 1.0), Link(0.0, 1.0))  # one second a byte
    runnable, plan = Runnable(graph_of(run, sequences=3), machine, Settings()), Plan(tp=2, microbatch=3, compute_bytes=4)
    costs = runnable.costs(plan)
    assert costs is not None
    of_one = model_states(1.0, stage=0, copies=1, storage=Settings().storage).total
    found = sum(runnable.folded.weight[layer] * cost.state_bytes for layer, cost in costs.items()) / of_one
    assert found == pytest.approx(counts.held(network_of(run), plan, (range(2),), (0,)).parameters, rel=1e-12)
    read = (query_rank or 24) + 10 + 4
    assert costs[0].seconds == pytest.approx(4 * 3 * 12 * (3 * 24 + read), rel=1e-12)
