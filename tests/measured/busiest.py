"""Measures how many times the mean number of rows the busiest rank of ep gets, with each way to balance a router (Method.excess).

Small recipes train in one process; other layouts route alike. A step's loads give the share for each ep:

    step     mean over layers of (largest rank / mean): a step waits for the busiest rank of each layer
    rank     largest rank of (mean over layers / mean): the rank with the most rows keeps them until its backward pass

Loads are counted before choices are dropped. `python -m tests.measured busiest --steps 200 --json FILE`.
"""

from __future__ import annotations

import json as json_format
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from moe import load, train
from moe.calibrate.own_runs import shares
from moe.cli import hash_table
from moe.cli.verbs import HashTable
from moe.records.results import write_json

SMALL = {
    **{"model.d_model": "64", "model.d_ff": "256", "model.max_length": "128", "train.eval_sequences": "8", "train.eval_every": "0"},
    **{"train.save_every": "0", "train.report": "false", "train.measure_speed": "false", "train.sample_tokens": "0"},
    "optimizer.warmup_steps": "20",
}
UNBALANCED = {"router.balance_weight": "0"}
TABLE = "table.json"
CASES: dict[str, tuple[str, dict[str, str]]] = {
    "balance loss, top-1": ("switch_tiny", {}),
    "balance loss, top-2": ("glam_tiny", {}),
    "balance loss, 32 experts": ("switch_tiny", {"experts.num_experts": "32"}),
    "small balance loss": ("glam_tiny", {"router.balance_weight": "0.001"}),
    "selection bias": ("switch_tiny", UNBALANCED | {"router.bias_rate": "0.001"}),
    "no balance, top-1": ("switch_tiny", UNBALANCED),
    "no balance, top-2": ("glam_tiny", UNBALANCED),
    "sinkhorn": ("switch_tiny", UNBALANCED | {"router.select": "sinkhorn", "router.allow_noncausal": "true"}),
    "hash": ("switch_tiny", UNBALANCED | {"router.select": "hash", "router.jitter": "0"}),
    "hash, table": ("switch_tiny", UNBALANCED | {"router.select": "hash", "router.jitter": "0", "router.hash_table": TABLE}),
    "expert choice": (
        "switch_tiny",
        UNBALANCED | {"router.select": "expert_choice", "router.allow_noncausal": "true", "router.eval_capacity_factor": "1"},
    ),
}
RANKS = (2, 4, 8, 16, 32)


def of_step(loads: list[list[float]], ranks: int) -> tuple[float, float]:
    """Return (`step`, `rank`) of the top of this file. loads: each layer's experts' loads."""
    layers = [shares(load_E, ranks) for load_E in loads]
    return statistics.mean(map(max, layers)), max(map(statistics.mean, zip(*layers, strict=True)))


def main(*, steps: int = 200, only: str = "", json: str | None = None) -> int:
    """Print the shares of each case: medians and largest of the first quarter of the steps and of the second half. Returns 0."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for case, (recipe, changes) in CASES.items():
        if only not in case:
            continue
        with tempfile.TemporaryDirectory() as name:
            if "router.hash_table" in changes:
                changes = changes | {"router.hash_table": str(Path(name) / TABLE)}
                hash_table.main(HashTable(recipe, Path(name) / TABLE), SMALL | changes)
            run, _ = load(recipe, SMALL | changes | {"train.steps": str(steps)})
            train(run, out=Path(name) / "run")
            lines = map(json_format.loads, (Path(name) / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines())
            loads = [[layer["load"] for layer in line["moe"]] for line in lines if line["kind"] == "train"]
        for ranks in (n for n in RANKS if n <= len(loads[0][0])):
            found = [of_step(step, ranks) for step in loads]
            row: dict[str, Any] = {"case": case, "recipe": recipe, "changes": CASES[case][1], "steps": steps, "ep": ranks}
            for when, some in (("first", found[: steps // 4]), ("later", found[steps // 2 :])):
                for kind, values in zip(("step", "rank"), zip(*some, strict=True), strict=True):
                    row |= {f"{when}_{kind}_median": statistics.median(values), f"{when}_{kind}_largest": max(values)}
            rows.append(row)
            said = [f"{key.replace('_', ' ')} {value:.2f}" for key, value in row.items() if "_" in key]
            print(f"{case:<20} ep {ranks}: {', '.join(said)}", flush=True)
    if json:
        write_json(json, verb="measured busiest", rows=rows)
    return 0
