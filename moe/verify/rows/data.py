"""Layouts of data parallelism: engines, tiles, replicas, batches, and models whose parts only these layouts have."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from moe.verify.cases import BATCH, HALVES, MODELS, Case
from moe.verify.rows.pipeline import LAYERS
from parallel.data.kinds.catalog import ENGINES, PLAIN, planned
from parallel.mesh.mesh import divisors


def all_data_cases(nproc: int) -> list[Case]:
    """Return all cases of `moe verify --kinds data`. A case is one model on one layout of ranks."""
    found = data_cases(nproc) + sharded_cases(nproc) + tiled_cases(nproc)
    return found + replica_cases() + batch_cases(nproc) + copied_cases(nproc) + halves_cases(nproc) + options_cases(nproc)


def data_cases(nproc: int) -> list[Case]:
    """DDP and ZeRO stage 1. Recompute is tested only with DDP in fp32, because it does not depend on engine and precision."""
    return _with_engines(nproc, [name for name in planned() if ENGINES[name].stage < 2], least=1, models=MODELS, recomputed=(PLAIN,))


def sharded_cases(nproc: int) -> list[Case]:
    """Engines that shard gradients, and offload, on at least two ranks. Recompute is tested too, because its second forward pass gathers
    parameters again.
    """
    sharding = [name for name in planned() if ENGINES[name].stage >= 2]
    recomputed = [name for name in sharding if ENGINES[name].stage == 3]
    return _with_engines(nproc, [*sharding, *on_host()], least=2, models=("dense", "gshard", "deepseek"), recomputed=recomputed)


def on_host() -> list[str]:
    """Return engines with all states on the host that they can keep there, in the words of `sharding_of`."""
    return [f"{name}+cpu{'-all' if ('parameters', 'cpu') in kind.offloads else ''}" for name, kind in ENGINES.items() if kind.offloads]


def _with_engines(nproc: int, kinds: Iterable[str], *, least: int, models: Iterable[str], recomputed: Collection[str]) -> list[Case]:
    """Return a case for each model, engine, number of processes from `least` to `nproc`, precision, and split of experts and micro-batches
    that fits.

    kinds: the engines. recomputed: engines for which recomputed activations are also tested, in fp32.
    """
    return [
        Case(model, kind, world, ep, microbatches, precision, recompute)
        for world in range(least, nproc + 1)
        if BATCH % world == 0
        for kind in kinds
        for precision in ("fp32", "bf16", "fp16")
        for model in models
        for ep in (divisors(world) if model != "dense" else [1])
        if 4 % ep == 0
        for microbatches in (1, 3)
        if BATCH % (world * microbatches) == 0
        for recompute in ("none", "full" if microbatches == 1 else "selective")
        if recompute == "none" or (kind in recomputed and precision == "fp32")
    ]


def tiled_cases(nproc: int) -> list[Case]:
    """Tiles and chunks that divide nothing evenly, with each engine and with split experts.

    In 16 bits only the head and the loss are tiled. Tiles of a network round its partial results, and no reordering that `moe verify`
    measures does that (tests/parallel/data/test_tiling.py compares them with the exact result).
    """
    return [
        Case(
            model,
            kind,
            world,
            ep,
            microbatches,
            precision,
            recompute,
            etp,
            tiles=5 if precision == "fp32" else 1,
            head_tiles=3,
            chunks=chunks,
        )
        for world in range(1, nproc + 1)
        if BATCH % world == 0
        for kind, precision in (("ddp", "fp32"), ("ddp", "bf16"), ("fsdp", "fp32"), ("fsdp", "bf16"), ("zero1", "fp32"))
        for model in ("dense", "gshard", "deepseek")
        for ep, etp in [(world, 1), *([(1, 2)] if world % 2 == 0 and (kind, precision) == ("ddp", "fp32") else [])]
        if model != "dense" or (ep, etp) == (world, 1)
        for ep in [ep if model != "dense" else 1]
        if 4 % ep == 0
        for microbatches, recompute, chunks in ((1, "none", 7), (3, "selective", 1))
        if BATCH % (world * microbatches) == 0
        if recompute == "none" or (kind, precision) == ("ddp", "fp32")
    ]


def replica_cases() -> list[Case]:
    """Threaded data parallelism (kind dp), which is one process for every nproc."""
    return [
        Case(model, "dp", 1, 1, microbatches, precision, "full" if model == "deepseek" else "none", replicas=2)
        for model in ("dense", "gshard", "deepseek")
        for microbatches in (1, 3)
        for precision in ("fp32", "bf16", "fp16")
    ]


def batch_cases(nproc: int) -> list[Case]:
    """Batches in which ranks and micro-batches have different numbers of tokens, and a step that is skipped because one rank's gradient
    overflows. Only in fp32, because counting and skipping do not depend on the precision.
    """
    return [
        Case(model, kind, world, ep, microbatches, "fp32", padded=padded, overflow=not padded)
        for world in range(1, nproc + 1)
        if BATCH % world == 0
        for kind in ("ddp", "fsdp", "zero1")
        if world > 1 or kind == "ddp"
        for padded, microbatches in ((True, 3), (False, 1))
        if (padded or kind != "fsdp") and BATCH % (world * microbatches) == 0
        for model in ("dense", "gshard", "deepseek")
        for ep in (dict.fromkeys((1, world)) if model != "dense" else [1])
        if 4 % ep == 0
    ]


def copied_cases(nproc: int) -> list[Case]:
    """Weights that tp ranks hold as copies (tensor.kind copied). Sums, counts or shards over too many or too few ranks fail here.

    Pipelines are tested with DDP, and from 8 processes on also with engines that shard over replicas of stages.
    """
    found = []
    for world, tp in ((2, 2), (4, 2), (4, 4)):
        for kind in planned() if world <= nproc else ():
            found += [Case("dense", kind, world, 1, 3, "fp32", tp=tp)] if tp == 2 else []
            found += [Case("gshard", kind, world, ep, 1, "fp32", tp=tp) for ep in divisors(world)[1:]]
            found += [Case("deepseek", kind, world, 1, 3 if tp == 2 else 1, "fp32", tp=tp)]
    found += [Case("gshard", kind, 2, 2, 1, "bf16", "selective", tp=2) for kind in ("ddp", "fsdp", "zero2", "zero3") if nproc >= 2]
    found += [Case("deepseek", kind, 2, 2, 1, "fp32", tp=2, padded=True) for kind in ("ddp", "fsdp", "zero1") if nproc >= 2]
    staged = [(4, "ddp"), (8, "ddp"), (8, "zero1"), (8, "fsdp")]
    for world, kind in [(world, kind) for world, kind in staged if world <= nproc]:
        for model in ("dense", "gshard"):
            ep = 1 if model == "dense" else 2
            found += [Case(model, kind, world, ep, 3, "fp32", pp=2, schedule="1f1b", layers=LAYERS[2][0], tp=2)]
    return found


def halves_cases(nproc: int) -> list[Case]:
    """Encoder-decoders with every engine, split experts, micro-batches and recompute. bf16 tests the tensors between the two halves."""
    found = [
        Case(model, kind, world, ep, microbatches, "fp32", recompute)
        for world in (1, 2, 4)
        if world <= nproc
        for kind in (planned() if world > 1 else (PLAIN,))
        for model in HALVES
        for ep in divisors(world)
        for microbatches, recompute in ((1, "full"), (3, "selective" if model == "t5" else "none"))
        if (world < 4 or (kind, ep) in (("ddp", 2), ("fsdp", 4))) and (ep == world) == (microbatches == 1 or world == 1)
    ]
    found += [Case("t5", "dp", 1, 1, 1, "fp32"), Case("t5", "ddp", 1, 1, 1, "fp32", tiles=5, head_tiles=3, chunks=7)]
    found += [Case("t5_untied", "ddp", 2, 1, 1, "fp32", etp=2), Case("t5", "fsdp", 2, 2, 1, "fp32", tp=2)] if nproc >= 2 else []
    return found + [Case("t5", kind, 2, 2, 1, "bf16", "full") for kind in ("ddp", "fsdp", "zero1", "zero3") if nproc >= 2]


def options_cases(nproc: int) -> list[Case]:
    """Options of published models with two engines, micro-batches and recompute; experts drawn at random in bf16.

    all_expert_cases tests them with other dispatchers, sequence_cases with sequence parallelism, tensor_cases and pipeline_cases with tp,
    pp.
    """
    engines = {"gpt_oss": ("ddp", "zero3"), "latent": ("ddp", "fsdp"), "free": ("fsdp", "zero1"), "mixer": ("ddp", "fsdp")}
    found = [
        Case(model, kind, 2, 1 + number, 3 - 2 * number, "fp32", "full" if number else "none")
        for model, kinds in engines.items()
        for number, kind in enumerate(kinds)
    ]
    return [*found, Case("mixer", "ddp", 2, 2, 1, "bf16")] if nproc >= 2 else []
