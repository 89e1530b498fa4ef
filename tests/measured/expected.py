"""Predicts, before any GPU, the speed of an H100: of each kernel of published MoE layers, and of steps on one and on eight of them.

Kernels: `expected` of moe/bench/gpu/layer.py. Steps: the planner's seconds (moe/plan/time/) of fixed plans in bf16, on one GPU of the steps
of `python -m moe.bench.gpu`. A model that does not fit has fewer layers. `python -m tests.measured expected --json FILE`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from moe.bench.gpu.layer import KERNELS, SHAPES, expected, flops_of
from moe.bench.gpu.step import MODELS
from moe.checks.together import check_run
from moe.plan.choose.predicted import stack_on
from moe.plan.job.flops import counted_training
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import load_cluster
from moe.plan.memory.memory import peak
from moe.plan.time.cost import step_time
from moe.recipe.load import build_run, load
from moe.recipe.sections import Run
from moe.records.results import write_json


class Step(NamedTuple):
    """`model`: a recipe, or a model of moe/bench/gpu/step.py. `sequences`: of a rank's micro-batch. `more`: changed keys of `model`."""

    model: str
    gpus: int
    sequences: int
    microbatches: int
    experts: int | None = None
    more: dict[str, Any] = {}


QWEN = "Qwen3-30B-A3B, 4 layers"
STEPS = {
    "dense 1.3B": Step("dense 1.3B", 1, 8, 1),
    QWEN: Step(QWEN, 1, 4, 1),
    "dense_8b, 8 layers": Step("dense_8b", 1, 8, 4, more={"num_layers": 8}),
    "Mixtral 8x7B, 2 layers": Step("published/mixtral_8x7b", 1, 2, 4, more={"num_layers": 2}),
    "dense_8b": Step("dense_8b", 8, 4, 32),
    "Mixtral 8x7B, 16 layers": Step("published/mixtral_8x7b", 8, 1, 16, more={"num_layers": 16}),
    "Qwen3-30B-A3B, 24 layers": Step(QWEN, 8, 1, 16, more={"num_layers": 24}),
    "DeepSeek-V3, 6 layers of 64 experts": Step(
        "published/deepseek_v3", 8, 1, 16, experts=64, more={"num_layers": 6, "moe_layers": [*range(1, 6)]}
    ),
}


def main(*, json: str | None = None) -> int:
    """Print both tables."""
    rows = [*kernel_rows(), *step_rows()]
    print("\n".join([*kernel_table(rows), "", *step_table(rows)]))
    if json:
        write_json(json, verb="measured expected", rows=rows)
    return 0


def kernel_rows() -> list[dict[str, Any]]:
    found = []
    for name, shape in SHAPES[True].items():
        row, work = {kernel: expected(kernel, shape) for kernel in KERNELS.values()}, flops_of(shape)
        row["all"] = sum(work.values()) / sum(work[kernel] / rate for kernel, rate in row.items())
        found.append({"layer": name, "tf_per_s": row})
    return found


def step_rows() -> list[dict[str, Any]]:
    found = []
    for name, step in STEPS.items():
        cluster, run = load_cluster(f"h100-{step.gpus}"), check_run(_run(step), step.gpus)
        network, plan = network_of(run), plan_of(run)
        time, tokens = step_time(network, plan, cluster), run.train.global_batch * run.model.read_length
        tf_per_s = counted_training(run) * tokens / step.gpus / time.step / 1e12
        row = {"step": name, "gpus": step.gpus, "seconds": time.step, "tokens_per_s": tokens / time.step, "tf_per_s": tf_per_s}
        row |= {"mfu": tf_per_s / cluster.device.peak_tflops["bf16"], "gib": peak(network, plan, stack_on(cluster)).used / 2**30}
        found.append(row | {"parts": {part: s / time.step for part, s in time.parts.items() if s}})
    return found


def _run(step: Step) -> Run:
    """Return the recipe. Several GPUs share each layer's experts and, by FSDP, all other parameters."""
    sizes = MODELS[True].get(step.model)
    if sizes is None:
        run, _ = load(step.model)
        values = {part: getattr(run, part).model_dump(exclude_unset=True) for part in ("model", "experts", "router", "data")}
    else:
        values = {part: dict(sizes[part]) for part in ("model", "experts", "router") if part in sizes}
        values["model"] |= {"vocab_size": sizes["vocab_size"]}
    values["model"] |= step.more
    if step.experts is not None:
        values["experts"] |= {"num_experts": step.experts}
    ep = step.gpus if "moe_every" in values["model"] or "moe_layers" in values["model"] else 1
    values |= {"degrees": {"dp": step.gpus, "ep": ep}, "precision": {"compute": "bf16"}}
    values |= {"train": {"global_batch": step.gpus * step.sequences * step.microbatches}}
    return build_run(values | {"sharding": {"kind": "fsdp" if step.gpus > 1 else "ddp"}, "pipeline": {"microbatches": step.microbatches}})


def kernel_table(rows: list[dict[str, Any]]) -> list[str]:
    kernels = [row for row in rows if "layer" in row]
    heads = list(kernels[0]["tf_per_s"])
    lines = [f"| {row['layer']} | " + " | ".join(f"{row['tf_per_s'][kernel]:.0f}" for kernel in heads) + " |" for row in kernels]
    return ["| layer | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|", *lines]


def step_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| step | GPUs | s | TF/s | GiB | exchange of rows | AdamW |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        if "step" in row:
            shares = " | ".join(f"{row['parts'].get(part, 0.0):.0%}" for part in ("experts", "optimizer"))
            numbers = f"{row['seconds']:.2f} | {row['tf_per_s']:.0f} | {row['gib']:.0f}"
            lines.append(f"| {row['step']} | {row['gpus']} | {numbers} | {shares} |")
    return lines
