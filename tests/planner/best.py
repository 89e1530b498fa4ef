"""Compares the plan that `moe plan` ranks first with the plans of all combinations of degrees, for random recipes and clusters.

`python -m tests.planner best --json FILE`. `moe plan` works in two rounds, of which the second tries only the fastest degrees of the first
(moe/plan/choose/planned.py). So this measures what the first round loses. A draw passes if no plan that fits is faster than the first plan,
and if the first plan is no slower than the recipe's own plan, if that fits.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from moe.checks.together import check_run
from moe.plan.choose.choose import described
from moe.plan.choose.planned import Planned, planned
from moe.plan.choose.predicted import held_bytes, settled
from moe.plan.machine.cluster import Cluster, load_cluster
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


def row_of(of: Draw) -> dict[str, Any] | None:
    """Return one draw's row of the JSON; None if no plan fits the cluster or can run."""
    run, cluster = of
    try:
        usual = planned(run, cluster, checked=check_run, top=1)
    except BadInput:
        return None
    whole = planned(run, cluster, checked=check_run, top=1, num_degrees=None)
    first, best = usual.found.ranked[0], whole.found.ranked[0]
    own = _own_seconds(usual)
    return {
        "cluster": cluster.name,
        "devices": cluster.world,
        "tried": usual.found.tried,
        "tried_whole": whole.found.tried,
        "first": described(first.plan),
        "first_seconds": first.seconds,
        "best": described(best.plan),
        "best_seconds": best.seconds,
        "own_seconds": own,
        "passed": bool(best.advice) >= bool(first.advice) and first.seconds <= min(best.seconds, own or best.seconds) * ROUNDED,
    }


def _own_seconds(made: Planned) -> float | None:
    """Return the seconds of the recipe's own plan; None if it cannot run or does not fit."""
    own = made.own
    fits = own is not None and held_bytes(made.network, own, made.cluster) <= made.cluster.memory_bytes()
    return made.time(own).step if own is not None and fits else None


def rows(draws: int = DRAWS) -> list[dict[str, Any]]:
    """Print and return a row for each draw."""
    draw, found = random.Random(SEED), list[dict[str, Any]]()
    print(f"{'cluster':<11}{'devices':>8}{'plans':>8}{'of':>8}{'first s':>10}{'best s':>10}  first")
    for _ in range(draws):
        row = row_of(drawn(draw))
        if row is None:
            continue
        found.append(row)
        numbers = f"{row['devices']:>8}{row['tried']:>8,}{row['tried_whole']:>8,}{row['first_seconds']:>10.4g}{row['best_seconds']:>10.4g}"
        print(f"{row['cluster']:<11}{numbers}  {row['first']}{'' if row['passed'] else '  FAIL: ' + row['best']}", flush=True)
    print(
        f"{len(found)} of {draws} draws can be planned; in {sum(row['passed'] for row in found)} nothing that fits is faster than the first"
    )
    return found
