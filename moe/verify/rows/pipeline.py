"""Layouts of pipelines."""

from __future__ import annotations

from dataclasses import replace

from moe.verify.cases import BATCH, Case
from parallel.mesh.mesh import divisors
from parallel.pipeline.schedules.catalog import SCHEDULES
from parallel.pipeline.schedules.kind import DEFAULT_CHUNKS, Size

LAYERS = {2: (3, 5), 4: (5, 9)}  # number of layers with one stage a rank and with two; stages are unequal


def pipeline_cases(nproc: int) -> list[Case]:
    """Every schedule: recompute with each precision for two models, and engines that shard over replicas of the pipeline in addition to
    DDP.

    Tied embeddings are on two stages, or twice on one rank. Some stages have layers with experts, others have none.
    """
    found = []
    for world, pp in ((2, 2), (4, 4), (4, 2)):
        for name, kind in SCHEDULES.items() if world <= nproc else ():
            for precision in ("fp32", "bf16") if kind.continuous else ("fp32", "bf16", "fp16"):
                shards = ["zero1"] if world > pp and not kind.continuous else []
                shards += ["fsdp"] if shards and name in ("1f1b", "chimera", "interleaved") and precision != "fp16" else []
                for model in ("dense", "gshard", "deepseek"):
                    found += [_staged(model, engine, world, pp, name, precision) for engine in ("ddp", *shards)]
                    found += [_staged(model, "ddp", world, pp, name, precision, "full")] if model != "deepseek" else []
    for world, pp, microbatches in ((2, 2, 3), (4, 4, 6), (4, 2, 3)):  # micro-batches that pp does not divide
        for model in ("dense", "gshard", "deepseek") if world <= nproc else ():
            found += [replace(_staged(model, "ddp", world, pp, "interleaved", "fp32"), microbatches=microbatches)]
    for model in ("dense", "gshard", "deepseek"):  # optimizers on the host
        found += [_staged(model, "zero1+cpu", 2, 2, "1f1b", "fp32")] if nproc >= 2 else []
        found += [_staged(model, "zero1+cpu", 4, 2, schedule, "bf16") for schedule in ("1f1b", "zb_v", "chimera")] if nproc >= 4 else []
    if nproc >= 2:  # with multi-token prediction, the last stage needs the embedding too
        found += [_staged("ahead", "ddp", 2, 2, schedule, "fp32") for schedule in ("1f1b", "interleaved", "zb_v", "chimera")]
    if nproc >= 4:
        found += [_staged("ahead", "zero1", 4, 2, "zb_h1", "fp32"), _staged("ahead", "ddp", 4, 4, "1f1b", "bf16", "full")]
    options = (("mixer", "1f1b", "fp32"), ("mixer", "1f1b", "bf16"), ("gpt_oss", "zb_h1", "fp32")) if nproc >= 2 else ()
    found += [_staged(model, "ddp", 2, 2, schedule, precision) for model, schedule, precision in options]
    return found + _empty_stage_cases(nproc)


def _empty_stage_cases(nproc: int) -> list[Case]:
    """Stages without layers: the head or the embedding alone in a stage, both alone, and a stage in the middle that only passes
    activations on.
    """

    def one(
        model: str, engine: str, world: int, schedule: str, stages: tuple[int, ...], precision: str = "fp32", recompute: str = "none"
    ) -> Case:
        pp = len(stages) // (SCHEDULES[schedule].chunks or DEFAULT_CHUNKS)
        return replace(_staged(model, engine, world, pp, schedule, precision, recompute), layers=sum(stages), stages=stages)

    found = (
        []
        if nproc < 2
        else [
            *(one(model, "ddp", 2, "1f1b", stages) for model in ("dense", "gshard", "deepseek") for stages in ((3, 0), (0, 3))),
            one("gshard", "ddp", 2, "zb_h1", (3, 0), "fp16"),
            one("dense", "ddp", 2, "two_bw", (0, 3)),
            one("gshard", "ddp", 2, "pipedream", (3, 0)),
            one("dense", "ddp", 2, "interleaved", (2, 0, 1, 0), "bf16", "full"),
            one("gshard", "ddp", 2, "zb_v", (0, 2, 1, 0), "bf16"),
        ]
    )
    if nproc >= 4:
        found += [
            one("gshard", "ddp", 4, "1f1b", (0, 2, 1, 0)),
            one("dense", "ddp", 4, "chimera", (1, 2, 1, 0)),
            one("gshard", "ddp", 4, "dualpipe", (0, 2, 1, 0), "bf16"),
            *(one("gshard", engine, 4, "1f1b", stages, "bf16") for engine in ("zero1", "fsdp") for stages in ((3, 0), (0, 3))),
            one("gshard", "zero1", 4, "zb_h1", (3, 0)),
        ]
    return found


def _staged(model: str, engine: str, world: int, pp: int, schedule: str, precision: str, recompute: str = "none") -> Case:
    dp = world // pp
    kind = SCHEDULES[schedule]
    layers = LAYERS[pp][int(kind.chunks != 1)]
    least = 2 * pp - 1 if schedule == "zb_h2" else 4  # with fewer micro-batches zb_h2 puts no weight gradient into a bubble
    fit = (m for m in divisors(BATCH // dp) if m >= least and m % pp == 0 and kind.refusal(Size(pp, m)) is None)
    microbatches = kind.update_every or next(fit)
    ep = dp if model != "dense" else 1
    return Case(model, engine, world, ep, microbatches, precision, recompute, pp=pp, schedule=schedule, layers=layers)
