"""Compares the plan that `moe plan` ranks first with every plan that it could try, for random recipes and clusters.

`python -m tests.planner best --json FILE`. `moe plan` works in two rounds, of which the second tries only the fastest degrees of the first
(moe/plan/choose/planned.py), and it skips plans by lower bounds. `faster` does neither: it predicts plan by plan. A draw passes if no plan
that fits is faster than the first plan, the recipe's own plan included.
"""

from __future__ import annotations

import random
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from moe.checks.together import check_run
from moe.plan.choose.candidates import Space, candidates
from moe.plan.choose.choose import TIGHT, Ranked, described
from moe.plan.choose.legal import advice, refusal
from moe.plan.choose.planned import Planned, planned
from moe.plan.choose.predicted import held_bytes, settled
from moe.plan.choose.recipe_of import as_stored, recipe_of
from moe.plan.job.network import Plan
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import Cluster, load_cluster
from moe.plan.time.cost import step_time
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from parallel.errors import BadInput

DRAWS, SEED = 200, 31
CLUSTERS = ("h100-8", "a100-40-8", "v100-8", "a100-80-8", "h100-8x2", "v100-8x2")
ROUNDED = 1 + 1e-9


class Draw(NamedTuple):
    """A random recipe and a random cluster."""

    run: Run
    cluster: Cluster


def drawn(draw: random.Random, clusters: tuple[str, ...] = CLUSTERS) -> Draw:
    """Return a random recipe without a layout of its own, dense or with experts in every other layer, and a random cluster."""
    heads = draw.choice((4, 8, 12, 16, 32))
    width, batch = heads * draw.choice((64, 128)), draw.choice((8, 16, 32, 48, 64, 128, 256, 512, 1024))
    model: dict[str, Any] = {"num_layers": draw.choice((4, 6, 8, 12, 16, 24)), "d_model": width, "num_heads": heads}
    model |= {"num_kv_heads": draw.choice((heads, max(1, heads // 4))), "d_ff": width * draw.choice((2, 4))}
    model |= {"ffn": draw.choice(("gelu", "swiglu")), "max_length": draw.choice((256, 512, 1024, 2048, 4096))}
    model |= {"tied_embeddings": draw.choice((True, False)), "moe_every": draw.choice((0, 0, 0, 2))}
    values: dict[str, Any] = {"model": model, "data": {"tokenizer": "bpe", "vocab_size": draw.choice((8192, 32000, 128000))}}
    values |= {"train": {"global_batch": batch, "eval_sequences": batch}, "experts": {"num_experts": draw.choice((4, 8, 16, 64))}}
    values |= {"precision": {"compute": "auto", "master": "fp32"}}
    cluster = load_cluster(draw.choice(clusters))
    return Draw(settled(build_run(values), cluster), cluster)


def faster(of: Draw, first: Ranked) -> Ranked | None:
    """Return a plan that fits, passes the recipe's checks and is faster than `first`; None without one. If `first` is recommended, so must
    the plan be. If `first` is not tight, a tight plan counts only if it is faster in the printed digits."""
    run, cluster = of.run.resolve(of.cluster.world), of.cluster
    network, least = network_of(run), first.seconds / ROUNDED
    stored = dict[str, Plan]()  # a plan of each engine, with its bytes per element
    plans = candidates(network, world=cluster.world, global_batch=run.train.global_batch, base=plan_of(run), space=Space())
    for made in (made for made in plans if refusal(network, made) is None):
        if (name := made.carrier.name) not in stored:
            stored[name] = as_stored(made, run)
        kept = made.but(storage=stored[name].storage, compute_bytes=stored[name].compute_bytes)
        against = advice(kept, devices_per_node=cluster.devices_per_node)
        if against and not first.advice or step_time(network, kept.but(recompute="none"), cluster, pipeline="alone").step >= least:
            continue
        for plan in (kept.but(recompute=kind) for kind in ("none", "selective", "full")):
            seconds, held = step_time(network, plan, cluster).step, held_bytes(network, plan, cluster)
            worse = held > TIGHT * cluster.memory_bytes() >= first.held_bytes and _printed(seconds) >= _printed(first.seconds)
            if seconds < least and held <= cluster.memory_bytes() and not worse and _passes(recipe_of(plan, run), cluster.world):
                return Ranked(plan, seconds, held, against)
    return None


def _printed(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _passes(run: Run, world: int) -> bool:
    try:
        check_run(run, world)
    except BadInput:
        return False
    return True


def row_of(of: Draw) -> dict[str, Any] | None:
    """Return one draw's row of the JSON; None if no plan fits the cluster or can run."""
    run, cluster = of
    try:
        made = planned(run, cluster, checked=check_run, top=1)
    except BadInput:
        return None
    first = made.found.ranked[0]
    better, own = faster(of, first), _own_seconds(made)
    return {
        "cluster": cluster.name,
        "devices": cluster.world,
        "tried": made.found.tried,
        "first": described(first.plan),
        "first_seconds": first.seconds,
        "faster": better and described(better.plan),
        "faster_seconds": better and better.seconds,
        "own_seconds": own,
        "passed": better is None and _printed(first.seconds) <= _printed(own or first.seconds),
    }


def _own_seconds(made: Planned) -> float | None:
    """Return the seconds of the recipe's own plan; None if it cannot run or does not fit."""
    own = made.own
    fits = own is not None and held_bytes(made.network, own, made.cluster) <= made.cluster.memory_bytes()
    return made.time(own).step if own is not None and fits else None


def rows(draws: int = DRAWS) -> list[dict[str, Any]]:
    """Print and return a row for each draw that can be planned. One process for each core."""
    draw, found = random.Random(SEED), list[dict[str, Any]]()
    print(f"{'cluster':<11}{'devices':>8}{'plans':>8}{'first s':>10}  first")
    with ProcessPoolExecutor() as pool:
        for row in filter(None, pool.map(row_of, [drawn(draw) for _ in range(draws)])):
            found.append(row)
            slower = "" if row["passed"] else f"  FAIL: {row['faster'] or 'own plan'}, {row['faster_seconds'] or row['own_seconds']:.4g} s"
            numbers = f"{row['devices']:>8}{row['tried']:>8,}{row['first_seconds']:>10.4g}"
            print(f"{row['cluster']:<11}{numbers}  {row['first']}{slower}", flush=True)
    print(
        f"{len(found)} of {draws} draws can be planned; in {sum(row['passed'] for row in found)} nothing that fits is faster than the first"
    )
    return found
