"""The time of planning: `moe plan` of each well-known run (recipes/published/) on the devices of its run, in processor seconds.

`python -m tests.planner speed --json FILE`. Each recipe is planned in its own process, so that nothing is cached from another; loading
Python's modules is not counted. A row passes within 10 s up to 1,024 devices and within 60 s beyond. Processor time leaves out other work
on the machine, except for shared caches and the clock rate: on an idle machine it is lower.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from moe.checks.together import check_run
from moe.plan.choose.choose import described
from moe.plan.choose.planned import planned
from moe.plan.machine.cluster import load_cluster
from moe.recipe.load import load
from tests.planner.published import RUNS

SMALL, ALLOWED = 1_024, (10.0, 60.0)  # number of devices; seconds allowed up to this number, and beyond
HEAD = f"{'run':<14}{'cluster':<14}{'devices':>8}{'plans':>9}{'fit':>8}{'seconds':>9}{'at most':>9}  the best"


def rows(only: str | None = None) -> list[dict[str, Any]]:
    """Print and return a row for each recipe. only: those with this text in their name."""
    print(HEAD)
    found = []
    for run in sorted((run for run in RUNS if only is None or only in run.recipe), key=lambda run: load_cluster(run.cluster).world):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
            row = fresh.submit(row_of, run.recipe, run.cluster).result()
        numbers = f"{row['devices']:>8,}{row['tried']:>9,}{row['fitting']:>8,}{row['seconds']:>9.1f}{row['seconds_allowed']:>9.0f}"
        print(f"{row['run']:<14}{row['cluster']:<14}{numbers}  {row['plan']}", flush=True)
        found.append(row)
    return found


def row_of(recipe: str, cluster: str) -> dict[str, Any]:
    """Plan one recipe and return its row of the JSON."""
    run, machines = load(f"published/{recipe}")[0], load_cluster(cluster)
    began = time.process_time()
    made = planned(run, machines, checked=check_run)
    seconds = time.process_time() - began
    allowed = ALLOWED[machines.world > SMALL]
    return {
        "run": recipe,
        "cluster": cluster,
        "devices": machines.world,
        "tried": made.found.tried,
        "fitting": made.found.fitting,
        "seconds": seconds,
        "seconds_allowed": allowed,
        "plan": described(made.found.ranked[0].plan),
        "step_seconds": made.found.ranked[0].seconds,
        "passed": seconds <= allowed,
    }
