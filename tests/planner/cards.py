"""Cards of well-known models (recipes/published/): the fastest plan on 1, 8 and 64 H100, next to the printed speed.

`python -m tests.planner cards --json FILE`. A row is `moe plan published/NAME --cluster CLUSTER` with the values of FULL. If no such plan
fits, the row has the GiB that the smallest one needs, and a second row is the same with the values of ADAPTERS. Printed speeds:
tests/planner/published.py.
"""

from __future__ import annotations

from typing import Any

from moe.checks.together import check_run
from moe.plan.choose.choose import described
from moe.plan.choose.planned import TooLarge, planned
from moe.plan.job.flops import size
from moe.plan.machine.cluster import load_cluster
from moe.recipe.load import load
from tests.planner.published import GIB, RUNS, Published, published_seconds, resolved

MODELS = ("qwen3_30b_a3b", "gpt_oss_20b", "olmoe_1b_7b", "deepseek_v2_lite", "moonlight_16b", "mixtral_8x7b", "switch_base")
CLUSTERS = ("h100-1", "h100-8", "h100-8x8")
FULL = {"train.global_batch": "512", "train.eval_sequences": "512", "precision.master": "fp32"}
ADAPTERS = FULL | {"precision.master": "bf16", "lora.rank": "16"}
HEAD = ("model", "GPUs", "GiB", "tokens/s a GPU", "plan")


def rows() -> list[dict[str, Any]]:
    """Print and return the rows of all models."""
    print(_cells(HEAD), "|---" * len(HEAD) + "|", sep="\n")
    found = []
    for name in MODELS:
        for cluster in CLUSTERS:
            for row in rows_of(name, cluster):
                print(line(row), flush=True)
                found.append(row)
    print(*(f"{name}: printed {speed:,.0f} tokens/s a GPU, {of}" for name in MODELS for speed, of in [printed(name)] if speed), sep="\n")
    return found


def rows_of(name: str, cluster: str) -> list[dict[str, Any]]:
    """Return the row of full training; if it does not fit, also the row of adapters."""
    full = _row(name, cluster, "all", FULL)
    return [full] if full["fits"] else [full, _row(name, cluster, "LoRA", ADAPTERS)]


def _row(name: str, cluster: str, trained: str, values: dict[str, str]) -> dict[str, Any]:
    run, machines = load(f"published/{name}", values)[0], load_cluster(cluster)
    row = {"model": name, "devices": machines.world, "trained": trained, "parameters": size(run.resolve(machines.world)).total}
    row |= {"printed_tokens_per_s": printed(name)[0], "passed": True}
    try:
        made = planned(run, machines, checked=check_run, top=1)
    except TooLarge as none:
        return row | {"fits": False, "gib": (machines.memory_bytes() + none.over_bytes) / GIB, "tokens_per_s": None, "plan": None}
    best = made.found.ranked[0]
    speed = made.speed(best).tokens_per_s / machines.world
    return row | {"fits": True, "gib": best.held_bytes / GIB, "tokens_per_s": speed, "plan": described(best.plan)}


def printed(name: str) -> tuple[float | None, str]:
    """Return the printed tokens a second of one GPU, None if there is no such print, and the number and name of its GPUs."""
    of: Published = next(run for run in RUNS if run.recipe == name)
    run, machines = resolved(of), load_cluster(of.cluster)
    seconds = published_seconds(of, run, machines.world)
    speed = None if seconds is None else run.train.global_batch * run.model.read_length / seconds / machines.world
    return speed, f"{machines.world} x {machines.device.name}"


def line(row: dict[str, Any]) -> str:
    """Return a row as a line of a Markdown table."""
    numbers = (f"{row['gib']:.0f}", f"{row['tokens_per_s']:,.0f}") if row["fits"] else (f"needs {row['gib']:.0f}", "")
    plan = ": ".join(["LoRA"] * (row["trained"] == "LoRA") + [row["plan"]] * row["fits"])
    return _cells((f"`{row['model']}`", row["devices"], *numbers, plan))


def _cells(cells: tuple[Any, ...]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
