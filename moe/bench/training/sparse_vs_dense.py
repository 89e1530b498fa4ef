"""Trains sparse models and a dense model of equal FLOPs per token, to test that the sparse ones learn more (Switch, arXiv 2101.03961).

For each seed, three recipes read the same tokens in the same order, and their last validation losses are compared. Each run is one process
with one thread, and at most one run per core is active. Prints a table, and writes the loss curves as PNG and, with --json, the rows. A run
that already finished with the same settings, in the same folder, is not repeated.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moe.checks.together import check_run
from moe.recipe.load import load
from moe.recipe.sections import Run
from parallel.errors import BadInput

RECIPES = ("dense_tiny", "switch_tiny", "glam_tiny")
BASELINE = "dense_tiny"


def main(*, steps: int = 1500, seeds: int = 3, json: str | None = None, out: str = "runs/sparse-vs-dense") -> int:
    """`moe bench sparse-vs-dense`. Returns 1 if a sparse recipe's validation loss, mean over seeds, is not below the dense one's."""
    for what, value in (("--steps", steps), ("--seeds", seeds)):
        if value < 1:
            raise BadInput(what, got=value, needed="at least 1", fix=f"try {what} {1500 if what == '--steps' else 3}")
    jobs = [(recipe, seed) for seed in range(seeds) for recipe in RECIPES]
    _train_all([(recipe, seed, steps, str(_folder(out, recipe, seed, steps))) for recipe, seed in jobs])

    # imported after all runs: these modules load torch, which this process does not need while the runs train
    from moe.records.metrics import read, read_summary
    from moe.records.results import write_json
    from moe.report import compare

    rows = []
    for recipe, seed in jobs:
        folder = _folder(out, recipe, seed, steps)
        summary = read_summary(folder)
        if summary is None or summary["steps"] != steps:
            raise RuntimeError(f"{folder} did not finish: see its log.txt")
        keys = ("flops_per_token", "validation_loss", "bits_per_byte", "dropped_share", "parameters_total", "parameters_active")
        rows.append({"recipe": recipe, "seed": seed} | {key: summary[key] for key in keys})
    picture = Path(json).with_suffix(".png") if json else Path(out) / "sparse-vs-dense.png"
    curves = {recipe: [read(_folder(out, recipe, seed, steps)) for seed in range(seeds)] for recipe in RECIPES}
    compare(curves, picture, baseline=BASELINE, title=f"Same tokens, same seed, equal FLOPs per token: {steps} steps, {seeds} seeds")
    better = _table(rows)
    print(f"curves: {picture}")
    if json:
        write_json(json, verb="bench sparse-vs-dense", rows=rows, steps=steps, seeds=seeds, sparse_is_better=better)
    return 0 if better else 1


def settings(recipe: str, seed: int, steps: int) -> Run:
    """Return the recipe with these settings, for one process, with 256 validation sequences."""
    values = {"train.steps": steps, "train.seed": seed, "train.eval_every": max(1, steps // 15), "train.save_every": 0}
    values |= {"train.eval_sequences": 256, "degrees.dp": 1, "degrees.ep": 1}
    return check_run(load(recipe, {key: str(value) for key, value in values.items()})[0], 1)


def _folder(out: str, recipe: str, seed: int, steps: int) -> Path:
    return Path(out) / f"{recipe}-seed{seed}-steps{steps}"


def _train_all(jobs: list[tuple[str, int, int, str]]) -> None:
    """Run each job (recipe, seed, steps, folder) in a new process. At most one process per core runs at a time."""
    context = multiprocessing.get_context("spawn")

    def run(job: tuple[str, int, int, str]) -> None:
        process = context.Process(target=_train_one, args=job)
        process.start()
        process.join()
        print(f"{job[0]} seed {job[1]}: {'done' if process.exitcode == 0 else f'exit {process.exitcode}'}", flush=True)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(run, jobs))


def _train_one(recipe: str, seed: int, steps: int, folder: str) -> None:
    import contextlib

    import torch

    from moe.records.metrics import read_summary
    from moe.train.loop.trainer import train
    from moe.train.start.place import settle_precision
    from parallel.process.process import World

    run = settle_precision(settings(recipe, seed, steps), World())
    done = read_summary(Path(folder))
    if done is not None and done["steps"] == steps and done["recipe_values"] == run.model_dump(mode="json"):
        return
    torch.set_num_threads(1)
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(Path(folder) / "log.txt", "w", buffering=1) as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        train(run, name=recipe, out=Path(folder), fresh=True, world=World(), display=True)


def _table(rows: Sequence[dict[str, Any]]) -> bool:
    """Print each recipe's losses and their differences from the dense recipe. Return whether every sparse recipe's mean is lower."""
    by: dict[str, list[dict[str, Any]]] = {recipe: [r for r in rows if r["recipe"] == recipe] for recipe in RECIPES}
    base = {r["seed"]: r["validation_loss"] for r in by[BASELINE]}
    print(f"{'recipe':<12} {'FLOPs/token':>12} {'parameters':>11} {'validation loss (least to most)':>32} {'minus dense, by seed':>28}")
    better = True
    for recipe, found in by.items():
        losses = [r["validation_loss"] for r in found]
        deltas = [r["validation_loss"] - base[r["seed"]] for r in found]
        if recipe != BASELINE:
            better &= statistics.mean(deltas) < 0
        said = " ".join(f"{d:+.4f}" for d in deltas)
        spread = f"{statistics.mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})"
        flops, parameters = found[0]["flops_per_token"] / 1e6, found[0]["parameters_total"] / 1e6
        print(f"{recipe:<12} {flops:>10.3f} M {parameters:>9.2f} M {spread:>32} {said:>28}")
    return better
