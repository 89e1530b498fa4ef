"""Trains sparse models and a dense model of equal FLOPs per token, to test that the sparse ones learn more (Switch, arXiv 2101.03961).

For each seed, all models read the same tokens in the same order, and their last validation losses are compared. The models are three
decoders (--only recipes), or Switch's encoder-decoder with 1 to 32 experts (--only experts), which is dense with 1 expert. Each run is one
process with one thread, and at most one run per core is active. Prints a table, and writes the loss curves as PNG and, with --json, the
rows. A run that already finished with the same settings, in the same folder, is not repeated.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moe.checks.together import check_run
from moe.recipe.load import load
from moe.recipe.sections import Run
from parallel.errors import BadInput, counted

Model = tuple[str, str, dict[str, str]]  # label, recipe, keys that differ from the recipe
Curves = dict[str, list[list[dict[str, Any]]]]  # label -> the lines of metrics.jsonl of each seed
COUNTS = (1, 2, 4, 8, 16, 32)  # numbers of experts in Switch's encoder-decoder
# The paper's optimizer, and capacity groups of all tokens of a step. Layers are small, so a dense model soon learns what it can; until then
# experts add nothing. Texts are short, so each has one hidden span: with several, a model suddenly learns which is which, sooner or
# later by chance, and this jump is larger than the gain of experts.
SHARED = {
    "model.d_model": "32",
    "model.d_ff": "64",
    "model.num_heads": "1",
    "model.num_layers": "4",
    "model.encoder_layers": "2",
    "model.max_length": "16",
    "model.init_scale": "1.0",
    "router.group": "128",
    "data.tokenizer": "bpe",
    "data.vocab_size": "512",
    "optimizer.kind": "adafactor",
    "optimizer.lr": "0.03",
    "optimizer.weight_decay": "0.0",
    "train.global_batch": "128",
}
PARTS: dict[str, list[Model]] = {  # value of --only -> models, with the dense model first
    "recipes": [(name, name, {}) for name in ("dense_tiny", "switch_tiny", "glam_tiny")],
    "experts": [(counted(n, "expert"), "switch_t5_tiny", SHARED | {"experts.num_experts": str(n)}) for n in COUNTS],
}


def main(*, steps: int = 1500, seeds: int = 3, only: str = "recipes", json: str | None = None, out: str = "runs/sparse-vs-dense") -> int:
    """`moe bench sparse-vs-dense`. only: a name in PARTS. Returns 0 if every sparse model has a lower validation loss (mean over seeds)
    than the first model, which is dense; otherwise 1."""
    if only not in PARTS:
        raise BadInput("--only", got=only, needed=f"one of {', '.join(PARTS)}", fix="--only experts")
    rows, curves = _trained(PARTS[only], steps=steps, seeds=seeds, out=out)

    from moe.records.results import write_json
    from moe.report.compare import compare, reached, scaling

    baseline = next(iter(curves))
    picture = Path(json).with_suffix(".png") if json else Path(out) / f"{only}.png"
    compare(
        curves, picture, baseline=baseline, title=f"Same tokens, same seed, equal FLOPs per token: {steps} steps, {counted(seeds, 'seed')}"
    )
    print(f"curves: {picture}")
    if only == "experts":
        gain = scaling(dict(zip(COUNTS, curves.values(), strict=True)), picture.with_stem(f"{picture.stem}-gain"))
        print(f"loss by number of experts: {gain}")
    better = _table(rows, {label: reached(curves, label, baseline) for label in curves}, baseline)
    if json:
        write_json(json, verb="bench sparse-vs-dense", rows=rows, steps=steps, seeds=seeds, sparse_is_better=better)
    return 0 if better else 1


def _trained(models: Sequence[Model], *, steps: int, seeds: int, out: str) -> tuple[list[dict[str, Any]], Curves]:
    """Train each model with each seed. Return a row for each run, and the curves. seeds: number of seeds. out: folder for the runs. Raises
    BadInput for `steps` or `seeds` below 1."""
    for what, value in (("--steps", steps), ("--seeds", seeds)):
        if value < 1:
            raise BadInput(what, got=value, needed="at least 1", fix=f"try {what} {1500 if what == '--steps' else 3}")
    jobs = [(model, seed) for seed in range(seeds) for model in models]
    _train_all([(model, seed, steps, str(_folder(out, model, seed, steps))) for model, seed in jobs])

    from moe.records.metrics import read, read_summary  # loads torch, which this process does not need while the runs train

    rows = []
    for model, seed in jobs:
        folder = _folder(out, model, seed, steps)
        summary = read_summary(folder)
        if summary is None or summary["steps"] != steps:
            raise RuntimeError(f"{folder} did not finish: see its log.txt")
        keys = ("flops_per_token", "validation_loss", "bits_per_byte", "dropped_share", "parameters_total", "parameters_active")
        rows.append({"model": model[0], "seed": seed} | {key: summary[key] for key in keys})
    return rows, {model[0]: [read(_folder(out, model, seed, steps)) for seed in range(seeds)] for model in models}


def settings(model: Model, seed: int, steps: int) -> Run:
    """Return the model's recipe with these settings, for one process, with 256 validation sequences."""
    values = {"train.steps": steps, "train.seed": seed, "train.eval_every": max(1, steps // 15), "train.save_every": 0}
    values |= {"train.eval_sequences": 256, "degrees.dp": 1, "degrees.ep": 1}
    return check_run(load(model[1], {key: str(value) for key, value in values.items()} | model[2])[0], 1)


def _folder(out: str, model: Model, seed: int, steps: int) -> Path:
    return Path(out) / f"{model[0].replace(' ', '-')}-seed{seed}-steps{steps}"


def _train_all(jobs: list[tuple[Model, int, int, str]]) -> None:
    """Run each job (model, seed, steps, folder) in a new process. At most one process per core runs at a time."""
    context = multiprocessing.get_context("spawn")

    def run(job: tuple[Model, int, int, str]) -> None:
        process = context.Process(target=_train_one, args=job)
        process.start()
        process.join()
        print(f"{job[0][0]} seed {job[1]}: {'done' if process.exitcode == 0 else f'exit {process.exitcode}'}", flush=True)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(run, jobs))


def _train_one(model: Model, seed: int, steps: int, folder: str) -> None:
    import contextlib

    import torch

    from moe.records.metrics import read_summary
    from moe.train.loop.trainer import train
    from moe.train.start.place import settle_precision
    from parallel.process.process import World

    run = settle_precision(settings(model, seed, steps), World())
    done = read_summary(Path(folder))
    if done is not None and done["steps"] == steps and done["recipe_values"] == run.model_dump(mode="json"):
        return
    torch.set_num_threads(1)
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(Path(folder) / "log.txt", "w", buffering=1) as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        train(run, name=model[1], out=Path(folder), fresh=True, world=World(), display=True)


def _table(rows: Sequence[dict[str, Any]], steps: Mapping[str, float | None], baseline: str) -> bool:
    """Print each model's losses, their differences from the baseline's, and the step at which its validation loss reaches the baseline's
    last one. Return whether every other model's mean loss is lower than the baseline's. rows: from `_trained`. steps: label of each
    model -> that step; None: it is never reached. baseline: label of the first model."""
    base = {r["seed"]: r["validation_loss"] for r in rows if r["model"] == baseline}
    print(
        f"{'model':<12} {'FLOPs/token':>12} {'parameters':>11} {'validation loss (least to most)':>32} "
        f"{'step of equal loss':>19} {f'minus {baseline}, by seed':>28}"
    )
    better = True
    for model, step in steps.items():
        found = [r for r in rows if r["model"] == model]
        losses = [r["validation_loss"] for r in found]
        deltas = [r["validation_loss"] - base[r["seed"]] for r in found]
        if model != baseline:
            better &= statistics.mean(deltas) < 0
        said = " ".join(f"{d:+.4f}" for d in deltas)
        spread = f"{statistics.mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})"
        flops, parameters = found[0]["flops_per_token"] / 1e6, found[0]["parameters_total"] / 1e6
        equal = "not reached" if step is None else f"{step:.0f}"
        print(f"{model:<12} {flops:>10.3f} M {parameters:>9.2f} M {spread:>32} {equal:>19} {said:>28}")
    return better
