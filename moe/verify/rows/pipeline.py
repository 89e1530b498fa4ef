"""Lists the cases of `moe verify` (each a tiny model in one layout) that have pipeline stages."""

from __future__ import annotations

from dataclasses import replace

from moe.verify.cases import BATCH, Case
from parallel.mesh.mesh import divisors
from parallel.pipeline.schedules import SCHEDULES
from parallel.pipeline.schedules.kind import DEFAULT_CHUNKS, Size

LAYERS = {2: (3, 5), 4: (5, 9)}  # pp -> number of layers for (1, 2) stages on each rank; stages get unequal numbers of layers
THREE = ("dense", "gshard", "deepseek")


def pipeline_cases() -> list[Case]:
    """Return cases of every schedule in each precision (PipeDream and 2BW not in fp16), with recompute, and with engines that shard over
    replicas of the pipeline."""
    found = []
    for world, pp in ((2, 2), (4, 4), (4, 2)):
        for name, kind in SCHEDULES.items():
            for precision in ("fp32", "bf16") if kind.continuous else ("fp32", "bf16", "fp16"):
                shards = ["zero1"] if world > pp and not kind.continuous else []
                shards += ["fsdp"] if shards and name in ("1f1b", "chimera", "interleaved") and precision != "fp16" else []
                for model in THREE:
                    found += [staged(model, engine, world, pp, name, precision) for engine in ("ddp", *shards)]
                    found += [staged(model, "ddp", world, pp, name, precision, "full")] if model != "deepseek" else []
    for world, pp, microbatches in ((2, 2, 3), (4, 4, 6), (4, 2, 3)):  # pp does not divide the number of micro-batches
        found += [replace(staged(model, "ddp", world, pp, "interleaved", "fp32"), microbatches=microbatches) for model in THREE]
    for model in THREE:  # with optimizer states on the host
        found += [staged(model, "zero1+cpu", 2, 2, "1f1b", "fp32")]
        found += [staged(model, "zero1+cpu", 4, 2, schedule, "bf16") for schedule in ("1f1b", "zb_v", "chimera")]
        found += [staged(model, kind, 4, 2, schedule, "fp32") for kind, schedule in (("zero2+cpu", "zb_v"), ("zero3+cpu", "1f1b"))]
    # multi-token prediction, for which the last stage also has the embedding
    found += [staged("ahead", "ddp", 2, 2, schedule, "fp32") for schedule in ("1f1b", "interleaved", "zb_v", "chimera")]
    found += [staged("ahead", "zero1", 4, 2, "zb_h1", "fp32"), staged("ahead", "ddp", 4, 4, "1f1b", "bf16", "full")]
    found += [
        replace(staged(model, "ddp", 4, 2, schedule, "fp32"), packed=True) for model, schedule in (("gshard", "1f1b"), ("ahead", "zb_v"))
    ]
    options = (("mixer", "1f1b", "fp32"), ("mixer", "1f1b", "bf16"), ("gpt_oss", "zb_h1", "fp32"))
    found += [staged(model, "ddp", 2, 2, schedule, precision) for model, schedule, precision in options]
    adapted = (("ddp", "1f1b", "full"), ("ddp", "zb_v", "none"), ("fsdp", "zb_h1", "none"), ("ddp", "chimera", "none"))
    found += [staged("lora", engine, 2, 2, schedule, "fp32", again) for engine, schedule, again in adapted]
    found += [replace(staged("lora_t5", "ddp", 2, 2, "zb_h1", "fp32"), layers=4)]
    telling = (("coefficients", "zb_h1"), ("spectral", "1f1b"), ("absolute", "interleaved"))
    found += [staged(model, "ddp", 2, 2, schedule, "fp32") for model, schedule in telling]
    found += [staged("kfac", "ddp", 2, 2, schedule, "fp32") for schedule, kind in SCHEDULES.items() if not kind.continuous]
    found += [staged("kfac", "ddp", 4, 2, "chimera", "fp32"), replace(staged("kfac_t5", "ddp", 2, 2, "zb_h1", "fp32"), layers=4)]
    found += [staged("kfac_at_once", "ddp", 2, 2, "1f1b", "fp32", "full"), staged("kfac_at_once", "ddp", 2, 2, "zb_h1", "bf16")]
    found += [replace(staged("gshard", kind, world, 2, "zb_h1", "fp32"), overflow=True) for kind, world in (("ddp", 2), ("fsdp", 4))]
    own_balance = (("own_balance", "zb_h1"), ("own_balance_whole", "1f1b"))  # micro-batches of 4 sequences, two groups of own_balance
    found += [replace(staged(model, "ddp", 2, 2, schedule, "fp32"), microbatches=3) for model, schedule in own_balance]
    return found + _sharded_cases() + _empty_stage_cases() + _halves_cases()


def _sharded_cases() -> list[Case]:
    """Cases with sharded weights: of all schedules that split the backward pass, and of some others. Gradients are summed after each
    backward pass or, with `fsdp+kept`, once a step."""
    split = [name for name, kind in SCHEDULES.items() if kind.splits_backward]
    kinds = ("fsdp", "fsdp+kept", "zero2", "zero3")
    found = [
        staged(THREE[(at + turn) % 3], kind, 4, 2, name, precision)
        for at, name in enumerate(split)
        for turn, kind in enumerate(kinds[:2])
        for precision in ("fp32", "bf16")
    ]
    found += [staged(THREE[at % 3], kinds[at % 2 + 2], 4, 2, name, ("bf16", "fp32")[at % 2]) for at, name in enumerate(split)]
    found += [staged(model, "fsdp+kept", 4, 2, name, "fp32") for model, name in zip(THREE, ("1f1b", "chimera", "interleaved"), strict=True)]
    return [*found, staged("gshard", "fsdp+kept", 4, 2, "zb_h1", "fp16"), staged("ahead", "fsdp", 4, 2, "zb_v", "fp32", "full")]


def _halves_cases() -> list[Case]:
    """Cases of encoder-decoders. Some stages have layers of only the encoder or only the decoder, others of both."""
    of_four = [name for name, kind in SCHEDULES.items() if not kind.continuous]
    found = [replace(staged("t5", "ddp", 2, 2, schedule, "fp32"), layers=4) for schedule in of_four]
    found += [replace(staged("t5_untied", "ddp", 2, 2, schedule, "fp32"), layers=3) for schedule in ("1f1b", "zb_h1")]
    options = (("zero1", "1f1b", "full"), ("fsdp", "1f1b", "full"), ("fsdp+kept", "zb_v", "none"))
    found += [replace(staged("t5", engine, 4, 2, name, "fp32", again), layers=4) for engine, name, again in options]
    found += [replace(staged("t5", "ddp", 4, 4, "1f1b", "fp32"), layers=4, stages=stages) for stages in ((1, 1, 1, 1), (0, 3, 1, 0))]
    narrow = (("1f1b", "bf16"), ("zb_h1", "bf16"), ("1f1b", "fp16"), ("zb_v", "fp16"))
    found += [replace(staged("t5", "ddp", 2, 2, schedule, precision), layers=4) for schedule, precision in narrow]
    both = replace(staged("t5", "ddp", 4, 2, "1f1b", "fp32"), layers=4, microbatches=3)
    found += [replace(staged("t5_packed", "ddp", 2, 2, "zb_h1", "fp32", "full"), layers=4)]
    sharded = replace(both, sp=2, length=12, attention="zigzag", ep=2)
    found += [sharded, replace(sharded, model="t5_packed", length=32)]
    return [*found, replace(both, tp=2, tensor="sliced", ep=2)]


def _empty_stage_cases() -> list[Case]:
    """Cases of stages without layers: the first with only the embedding, the last with only the head, or one between them."""
    ends = ((3, 0), (0, 3))
    # (model, engine, world, schedule, number of layers of each stage, precision, recompute)
    rows: list[tuple[str, str, int, str, tuple[int, ...], str, str]] = [
        *((model, "ddp", 2, "1f1b", stages, "fp32", "none") for model in THREE for stages in ends),
        ("gshard", "ddp", 2, "zb_h1", (3, 0), "fp16", "none"),
        ("dense", "ddp", 2, "two_bw", (0, 3), "fp32", "none"),
        ("gshard", "ddp", 2, "pipedream", (3, 0), "fp32", "none"),
        ("dense", "ddp", 2, "interleaved", (2, 0, 1, 0), "bf16", "full"),
        ("gshard", "ddp", 2, "zb_v", (0, 2, 1, 0), "bf16", "none"),
        ("gshard", "ddp", 4, "1f1b", (0, 2, 1, 0), "fp32", "none"),
        ("dense", "ddp", 4, "chimera", (1, 2, 1, 0), "fp32", "none"),
        ("gshard", "ddp", 4, "dualpipe", (0, 2, 1, 0), "bf16", "none"),
        *(("gshard", engine, 4, "1f1b", stages, "bf16", "none") for engine in ("zero1", "fsdp") for stages in ends),
        ("gshard", "zero1", 4, "zb_h1", (3, 0), "fp32", "none"),
        ("lora", "ddp", 2, "zb_v", (0, 2, 0, 1), "fp32", "none"),
    ]
    found = []
    for model, engine, world, schedule, stages, precision, recompute in rows:
        pp = len(stages) // (SCHEDULES[schedule].chunks or DEFAULT_CHUNKS)
        found.append(replace(staged(model, engine, world, pp, schedule, precision, recompute), layers=sum(stages), stages=stages))
    return found


def staged(model: str, engine: str, world: int, pp: int, schedule: str, precision: str, recompute: str = "none") -> Case:
    """Return a case of a pipeline, with ep = dp if the model has experts. Number of micro-batches: 1 with PipeDream; else the smallest
    divisor of a replica's batch that is a multiple of pp, at least 4 (zb_h2: 2 pp - 1), and allowed by the schedule."""
    dp, kind = world // pp, SCHEDULES[schedule]
    least = 2 * pp - 1 if schedule == "zb_h2" else 4  # with fewer, zb_h2 computes no weight gradient in a bubble
    fit = (m for m in divisors(BATCH // dp) if m >= least and m % pp == 0 and kind.refusal(Size(pp, m)) is None)
    ep, microbatches = dp if model != "dense" else 1, kind.update_every or next(fit, least)
    layers = LAYERS[pp][int(kind.chunks != 1)]
    return Case(model, engine, world, ep, microbatches, precision, recompute, pp=pp, schedule=schedule, layers=layers)
