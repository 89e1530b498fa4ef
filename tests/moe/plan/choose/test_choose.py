"""Branch and bound ranks the same plans as a search that predicts every plan exactly.

Fails if the lower bound of a pipeline's time is too large for some schedule, so that a good plan is lost. The reference simulates every
schedule with all micro-batches and without rounding, and sorts the plans.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from moe.plan.choose.candidates import Space, candidates
from moe.plan.choose.choose import choose
from moe.plan.choose.legal import refusal
from moe.plan.job import in_flight
from moe.plan.job.network import Experts, Network, Plan
from moe.plan.job.states import FP32, FP32_AND_COPY, MIXED
from moe.plan.machine.cluster import load_cluster
from moe.plan.memory import memory as memory_module
from moe.plan.memory import moments
from moe.plan.memory.memory import memory, peak
from moe.plan.time import cost, layer_time, stage_time
from moe.plan.time import pipeline_time as pipeline_time_module
from moe.plan.time.cost import ideal_seconds, step_time
from moe.plan.time.pipeline_time import How, pipeline_time
from parallel.pipeline.schedules import SCHEDULES, make_schedule
from parallel.pipeline.simulator.simulate import costs, makespan, simulate

CLUSTER = load_cluster("a100-80-8")
SIMULATED = [name for name, kind in SCHEDULES.items() if kind.seconds is None]


def size_of(name: str, draw: random.Random) -> tuple[int, int, int]:
    """Return random (ranks, micro-batches, chunks) that the schedule allows."""
    p = draw.choice([2, 4, 6]) if name in ("chimera", "dualpipe") else draw.choice([2, 3, 5])
    m = p * draw.randint(1, 5) if name == "chimera" else 2 * p + 2 * draw.randint(0, 2 * p)
    return p, m, SCHEDULES[name].chunks or draw.choice([2, 3])


@pytest.mark.parametrize("name", SIMULATED)
def test_no_simulation_is_below_the_bound(name: str) -> None:
    """For random times of stages and messages, pipeline_time's lower bound is at most the simulated time, which equals `simulate`."""
    draw = random.Random(name)
    for _ in range(12):
        p, m, chunks = size_of(name, draw)
        plan = Plan(pp=p, microbatches=m, schedule=name, chunks=chunks)
        made = make_schedule(name, ranks=p, microbatches=m, chunks=chunks)
        stages = [float(draw.randint(200, 1000)) for _ in range(made.num_stages)]
        ways = stages, [x * draw.choice([1, 2, 3.5]) for x in stages]
        both_ways = len(made.homes[0]) > 1
        forward, backward = (way if both_ways else [sum(way[s] for s in made.stages_of(rank)) for rank in range(p)] for way in ways)
        share, sent = draw.choice([0.1, 0.5]), draw.choice([0.0, 30.0, 400.0])
        weights = [share * x for x in backward]
        least, whole = (
            pipeline_time(plan, forward, backward, weights, sent, stages=None if both_ways else ways, how=how)  # type: ignore[arg-type]
            for how in ("least", "simulated")
        )
        cost_of = costs(*ways, weight_share=share)
        plain = simulate(made, cost_of, transfer_time=sent).makespan
        assert least <= whole and least <= plain * (1 + 2e-3) and whole == pytest.approx(plain, rel=0.03)
        assert makespan(made, cost_of, transfer_time=sent) == plain


@pytest.mark.parametrize("seed", range(3))
def test_with_a_bound_the_same_plans_are_ranked(seed: int) -> None:
    draw = random.Random(seed)
    layers, world = draw.choice([12, 16, 24]), draw.choice([8, 12, 16])
    network = Network(layers=layers, width=1536, heads=12, hidden=draw.choice([4096, 6144]), vocab=draw.choice([1000, 90000]), length=512)
    schedules = (("1f1b", 1), *((name, SCHEDULES[name].chunks or 2) for name in draw.sample(SIMULATED, 3)))
    space = Space(engines=("ddp", "zero1"), tensors=("sliced",), sequences=("ring",), schedules=schedules, largest_tp=2, largest_sp=1)
    plans = list(candidates(network, world=world, global_batch=48, base=Plan(), space=replace(space, largest_microbatch=2, largest_pp=6)))
    cluster = CLUSTER.holding(world)
    asked: dict[How, list[float]] = {"alone": [], "least": [], "simulated": []}
    held = list[Plan]()

    def step(how: How) -> Callable[[Plan], float]:
        def seconds(plan: Plan) -> float:
            asked[how].append(step_time(network, plan, cluster, pipeline=how).step)
            return asked[how][-1]

        return seconds

    def held_bytes(plan: Plan) -> float:
        held.append(plan)
        return peak(network, plan).used

    how = {"held_bytes": held_bytes, "limit_bytes": 9e9, "seconds": step("simulated"), "devices_per_node": 8}
    every = choose(network, plans, top=len(plans), **how)  # type: ignore[arg-type]
    count, all_held = len(asked["simulated"]), len(held)
    held.clear()
    bounded = choose(network, plans, least=(step("alone"), step("least")), top=5, **how)  # type: ignore[arg-type]
    assert bounded.ranked == every.ranked[:5] and every.fitting > 40
    assert len(asked["simulated"]) - count < count / 2 and len(held) < all_held
    asked["simulated"].clear()
    second = every.ranked[1]
    few = choose(network, plans, least=(step("alone"), step("least")), enough=second.__eq__, top=5, **how)  # type: ignore[arg-type]
    assert few.ranked == every.ranked[:2] and few.tried == bounded.tried == every.tried and few.fitting <= bounded.fitting
    values = [[step_time(network, one.plan, cluster, pipeline=how).step for how in asked] for one in bounded.ranked]
    assert all(of == sorted(of) for of in values)


ENCODER = Network(layers=6, width=512, heads=8, hidden=1536, vocab=3000, length=256, sees="all")
NETWORKS = {
    "dense": Network(layers=12, width=512, heads=8, hidden=1536, vocab=60_000, length=512),
    "frozen": Network(layers=8, width=512, heads=8, hidden=1536, vocab=3000, length=512, frozen=("embedding", "norms")),
    "further tokens": Network(layers=8, width=512, heads=8, hidden=1536, vocab=9000, length=512, ahead=2, tied=False),
    "two halves": replace(ENCODER, sees="past", encoder=ENCODER),
    "experts": Network(
        layers=9,
        width=512,
        heads=8,
        hidden=1536,
        vocab=3000,
        length=512,
        sparse_layers=(1, 2, 5, 8),
        experts=Experts(count=8, choices=2, hidden=640),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_no_plan_is_faster_than_its_bounds(name: str) -> None:
    """The ideal time and the bound without recompute, which come before a plan's memory is known, are at most the exact seconds of the
    plan with each kind of recompute, each schedule and each cut. pipeline_time rounds times to a thousandth."""
    draw, network = random.Random(name), NETWORKS[name]
    space = Space(schedules=(("1f1b", 1), *((one, SCHEDULES[one].chunks or 2) for one in SIMULATED)), largest_microbatch=4)
    for cluster in (load_cluster("a100-80-8x2"), replace(load_cluster("a100-80-8x2"), cores=24)):
        plans = candidates(network, world=cluster.world, global_batch=48, base=Plan(), space=space)
        legal = [plan for plan in plans if refusal(network, plan) is None]
        for plan in draw.sample(legal, 40):
            of_none = ideal_seconds(network, plan, cluster), step_time(network, plan, cluster, pipeline="alone").step
            for kind in ("none", "selective", "full"):
                exact = step_time(network, plan.but(recompute=kind, recompute_every=draw.choice([1, 2])), cluster).step
                assert max(of_none) <= exact * (1 + 1e-3), (plan, kind)


def test_of_plans_with_equal_printed_seconds_tight_ones_come_last() -> None:
    """Below 9 tenths of the memory a plan is not tight. Faster plans come first, tight or not."""
    seconds = {1: 1.00001, 2: 1.00002, 4: 1.00003, 8: 2.0, 16: 0.9}
    held = {1: 95.0, 2: 89.0, 4: 91.0, 8: 10.0, 16: 99.0}
    plans = [Plan(microbatch=n, microbatches=16 // n) for n in seconds]
    for least in ((), (lambda plan: 0.9 * seconds[plan.microbatch],)):
        found = choose(
            Network(layers=2, width=64, heads=2, hidden=128, vocab=100, length=32),
            plans,
            held_bytes=lambda plan: held[plan.microbatch],
            limit_bytes=100.0,
            seconds=lambda plan: seconds[plan.microbatch],
            least=least,
        )
        assert [one.plan.microbatch for one in found.ranked] == [16, 2, 1, 4, 8]


def test_peak_is_the_largest_memory_of_all_ranks() -> None:
    """`peak` computes only ranks that no earlier rank exceeds. It must not skip a rank with more layers or more micro-batches in flight."""
    draw = random.Random(1)
    for _ in range(60):
        layers, pp = draw.randint(17, 40), draw.choice([2, 4, 6])
        name = draw.choice([name for name in SCHEDULES if name != "looped_bfs"])
        network = Network(layers=layers, width=96, heads=6, hidden=384, vocab=draw.choice([64, 6400]), length=32, tied=draw.random() < 0.5)
        if draw.random() < 0.4:
            sparse = tuple(sorted(draw.sample(range(layers), draw.randint(1, layers))))
            network = replace(network, experts=Experts(count=4, choices=2, hidden=draw.choice([64, 800])), sparse_layers=sparse)
        elif draw.random() < 0.3 and layers % 2 == 0:
            half = replace(network, layers=layers // 2)
            network = replace(half, length=8, encoder=replace(half, sees="all", length=draw.choice([4, 64])))
        many = {"pipedream": 1, "dualpipe": 4 * pp, "dualpipe_v": 4 * pp}.get(name, pp * draw.choice([1, 2, 5]))
        how = {"recompute": draw.choice(["none", "selective", "full"]), "recompute_every": draw.choice([1, 2])}
        plan = Plan(dp=2, pp=pp, schedule=name, chunks=SCHEDULES[name].chunks or 2, microbatches=many, engine="zero1", **how)
        stages = pp * plan.chunks
        if draw.random() < 0.5:  # a random cut, which may have stages without layers
            places = sorted(draw.randint(0, layers) for _ in range(stages - 1))
            plan = replace(plan, stage_layers=tuple(b - a for a, b in pairwise([0, *places, layers])))
        assert peak(network, plan) == max(memory(network, plan), key=lambda rank: rank.allocated)


def test_caches_do_not_change_bytes_or_seconds() -> None:
    """Plans share cached times of layers and cached schedules. With empty caches, each plan has the same bytes and seconds."""
    draw, cluster = random.Random(2), CLUSTER.holding(16)
    experts = Experts(count=4, choices=2, hidden=512)
    network = Network(layers=12, width=256, heads=8, hidden=1024, vocab=5000, length=128, experts=experts, sparse_layers=(1, 2, 5, 7, 11))
    base, space = Plan(recompute_every=2), Space(schedules=(("1f1b", 1), ("interleaved", 2), ("zb_v", 2)), largest_pp=4)
    plans = [plan for plan in candidates(network, world=16, global_batch=48, base=base, space=space) if refusal(network, plan) is None]
    plans = [
        plan.but(recompute=draw.choice(["none", "selective", "full"]), loss_chunks=draw.choice([1, 2])) for plan in draw.sample(plans, 40)
    ]
    engines = {"fsdp": FP32, "zero1": FP32_AND_COPY, "ddp": MIXED}
    plans += [plan.but(engine=engine, storage=engines[engine]) for plan in plans[:8] for engine in draw.sample(sorted(engines), 2)]
    together = [(peak(network, plan), step_time(network, plan, cluster)) for plan in plans]
    caches = [
        getattr(module, name)
        for module in (cost, in_flight, layer_time, stage_time, memory_module, moments, pipeline_time_module)
        for name in dir(module)
    ]
    for plan, found in zip(plans, together, strict=True):
        for cached in caches:
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()
        assert (peak(network, plan), step_time(network, plan, cluster)) == found


@pytest.mark.parametrize("seed", range(2))
def test_the_first_kind_of_recompute_that_fits_is_taken(seed: int) -> None:
    """`choose`, which skips kinds of recompute, returns the same ranking as a search that tries each kind of every plan."""
    draw = random.Random(seed)
    network = Network(layers=8, width=512, heads=8, hidden=2048, vocab=3000, length=1024)
    plans = list(candidates(network, world=8, global_batch=16, base=Plan(), space=Space(tensors=("1d",), sequences=("ring",))))
    draw.shuffle(plans)
    plans = plans[:150]
    kinds = ("none", "selective", "full")
    held = {
        plan: peak(network, plan).used for one in plans if refusal(network, one) is None for plan in (one.but(recompute=k) for k in kinds)
    }
    for limit in draw.sample(sorted(held.values()), 4):
        found = choose(network, plans, held_bytes=held.__getitem__, limit_bytes=limit, seconds=lambda plan: float(plan.tp), top=len(plans))
        plain = [
            next((one.but(recompute=k) for k in kinds if held[one.but(recompute=k)] <= limit), None)
            for one in plans
            if one.but(recompute="none") in held
        ]
        assert sorted(map(repr, (r.plan for r in found.ranked))) == sorted(repr(plan) for plan in plain if plan is not None)
        worst = [
            held[one.but(recompute="full")]
            for one in plans
            if one.but(recompute="none") in held and held[one.but(recompute="full")] > limit
        ]
        assert found.nearest is None if not worst else found.nearest is not None and found.nearest.over_bytes == min(worst) - limit
