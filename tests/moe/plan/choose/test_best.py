"""`planned` ranks the fastest plan first: compared with every plan of a small cluster, and with the recipe's own plan.

Fails if the planner does not try a setting (large micro-batches, the recipe's own layout), or if its first round drops the best degrees.
`python -m tests.planner best` compares 200 random recipes.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import cycle, pairwise

import pytest

from moe.checks.together import check_run
from moe.plan.choose.candidates import Space, candidates
from moe.plan.choose.legal import refusal
from moe.plan.choose.planned import planned
from moe.plan.choose.predicted import held_bytes
from moe.plan.job.network import Plan
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import load_cluster
from moe.plan.time.cost import step_time
from moe.recipe.load import build_run
from tests.planner.best import SEED, Draw, drawn, faster

FOUR = replace(load_cluster("h100-8"), devices_per_node=4)


@pytest.mark.parametrize("seed", (0, 10))
def test_nothing_that_fits_is_faster_than_the_first(seed: int) -> None:
    """The plans are predicted one by one, which finds a faster plan than every plan but the first."""
    of = Draw(drawn(random.Random(seed)).run, FOUR)
    made = planned(*of, checked=check_run, top=1)
    (first,) = made.found.ranked
    assert faster(of, first) is None
    assert first.seconds == step_time(made.network, first.plan, FOUR).step
    assert first.held_bytes == held_bytes(made.network, first.plan, FOUR) <= FOUR.memory_bytes()
    found = faster(of, replace(first, seconds=first.seconds * (1 + 1e-6)))
    assert found is not None and found.seconds <= first.seconds * (1 + 1e-6)


def test_degrees_that_are_fast_only_with_zero_bubble_are_tried() -> None:
    """Draw 186 of `python -m tests.planner best`. With 1F1B, dp 8 and pp 2 are not among the 40 fastest degrees of 16 V100."""
    draw = random.Random(SEED)
    of = [drawn(draw) for _ in range(187)][-1]
    (first,) = planned(*of, checked=check_run, top=1).found.ranked
    assert first.plan.schedule in ("zb_h1", "zb_v") and (first.plan.dp, first.plan.pp) == (8, 2)
    every = replace(first.plan, schedule="1f1b", chunks=1, stage_layers=None)
    network = network_of(of.run.resolve(of.cluster.world))
    assert step_time(network, every, of.cluster).step > first.seconds * 1.02


def test_the_recipes_own_plan_is_ranked_among_the_others() -> None:
    """The planner ranks the recipe's own plan even if it would not try it: a micro-batch of 64 sequences, and needless recomputation."""
    model = {"num_layers": 1, "d_model": 128, "num_heads": 2, "d_ff": 256, "max_length": 64, "vocab_size": 512}
    values = {"model": model, "train": {"global_batch": 256, "eval_sequences": 256}, "precision": {"compute": "bf16"}}
    for recompute in ("none", "full"):
        run = build_run(values | {"recompute": {"kind": recompute}})
        made = planned(run, FOUR, checked=check_run, top=10_000)
        (place,) = (n for n, one in enumerate(made.found.ranked) if one.plan == made.own)
        assert made.own is not None and (made.own.microbatch, made.own.recompute) == (64, recompute)
        assert plan_of(made.runs[place]) == made.own
        times = [one.seconds for one in made.found.ranked if one.advice is None]
        assert times == sorted(times) and max(one.plan.microbatch for one in made.found.ranked) >= 64


def test_speeds_are_of_the_models_flops_and_the_last_tenth_of_the_memory_is_tight() -> None:
    model = {"num_layers": 2, "d_model": 128, "num_heads": 2, "d_ff": 256, "max_length": 64, "vocab_size": 512}
    run = build_run({"model": model, "train": {"global_batch": 16, "eval_sequences": 16}, "precision": {"compute": "bf16"}})
    made = planned(run, FOUR, checked=check_run, top=1)
    (one,), limit = made.found.ranked, FOUR.memory_bytes()
    speed, tokens = made.speed(one), 16 * 64
    assert speed.tokens_per_s * one.seconds == pytest.approx(tokens)
    layer = 4 * 128**2 + 2 * 128 * 256
    flops = 6 * (2 * layer + 512 * 128) + 2 * 12 * 128 * 64
    assert speed.tflops == pytest.approx(flops * tokens / one.seconds / 4 / 1e12, rel=1e-6)
    assert speed.mfu == pytest.approx(speed.tflops / FOUR.device.peak_tflops["bf16"])
    full = [made.tight(replace(one, held_bytes=share * limit)) for share in (0.89, 0.91)]
    assert full == [False, True]


def test_a_larger_micro_batch_needs_no_less_memory() -> None:
    """So the planner may skip larger micro-batches of a plan that does not fit with a kind of recompute. (Not true if a step has only one
    micro-batch.)"""
    kinds = cycle(("none", "selective", "full"))
    groups: dict[Plan, list[float]] = {}
    for seed in range(3):
        run = drawn(random.Random(seed)).run.resolve(4)
        network = network_of(run)
        plans = candidates(network, world=4, global_batch=run.train.global_batch, base=plan_of(run), space=Space(etp=(1,)))
        legal = [plan for plan in plans if refusal(network, plan) is None and plan.microbatches > 1]
        groups.clear()
        for plan in random.Random(seed).sample(legal, min(1000, len(legal))):
            groups.setdefault(plan.but(microbatch=1, microbatches=1), []).append(plan.microbatch)
        for alike, sizes in groups.items():
            whole = run.train.global_batch // alike.dp
            kind = next(kinds)
            made = [alike.but(microbatch=n, microbatches=whole // n, recompute=kind) for n in sorted(sizes)]
            held = [held_bytes(network, one, FOUR) for one in made]
            assert all(a <= b * (1 + 1e-9) for a, b in pairwise(held)), (seed, alike, sizes, held)
