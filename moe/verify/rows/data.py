"""Lists the cases of data parallelism with all engines (DDP, FSDP, ZeRO); also of tiling, uneven batches, encoder-decoders and model
options."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from moe.verify.cases import BATCH, HALVES, MODELS, Case
from moe.verify.rows.pipeline import LAYERS
from moe.verify.telling import TELLING
from parallel.data.kinds import ENGINES, PLAIN, planned
from parallel.mesh.mesh import divisors

WORLDS = divisors(BATCH)  # numbers of ranks that divide the batch
THREE = ("dense", "gshard", "deepseek")  # models of most cases
_BY_KFAC = ("kfac", "kfac_at_once", "kfac_t5")  # models that K-FAC updates


def data_cases() -> list[Case]:
    """Return all cases of `moe verify --kinds data`."""
    found = engine_cases() + _sharded_cases() + tiled_cases() + _replica_cases() + _batch_cases() + _casts_cases()
    return found + _copied_cases() + _halves_cases() + _options_cases() + _telling_cases()


def engine_cases() -> list[Case]:
    """Return cases of the engines that shard at most optimizer states (DDP, ZeRO stage 1). Recompute is combined only with DDP in fp32,
    because its code is the same for all engines and precisions."""
    return _with_engines([name for name in planned() if ENGINES[name].stage < 2], WORLDS, models=MODELS, recomputed=(PLAIN,))


def _sharded_cases() -> list[Case]:
    """Cases of engines that shard gradients or offload to the host, on at least two ranks. Engines that shard weights also have cases with
    recompute."""
    sharding = [name for name in planned() if ENGINES[name].stage >= 2]
    host = [name + ("+cpu-all" if ("parameters", "cpu") in kind.offloads else "+cpu") for name, kind in ENGINES.items() if kind.offloads]
    recomputed = [name for name in sharding if ENGINES[name].stage == 3]
    return _with_engines([*sharding, *host], WORLDS[1:], models=THREE, recomputed=recomputed)


def _with_engines(kinds: Iterable[str], worlds: Sequence[int], *, models: Iterable[str], recomputed: Collection[str]) -> list[Case]:
    """Return cases of the engines `kinds` in every precision, with and without ep. recomputed: engines that also get cases with
    recompute."""
    return [
        Case(model, kind, world, ep, microbatches, precision, recompute)
        for world in worlds
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


def tiled_cases() -> list[Case]:
    """Return cases in which feed-forward networks and the output head are computed in tiles and the loss in chunks, with ep and etp. In 16
    bits feed-forward networks are not tiled, because the measured tolerance does not include the rounding of their tiles. Tiles in 16 bits
    are tested in tests/parallel/data/test_tiling.py."""
    return [
        Case(model, kind, world, ep, m, precision, recompute, etp, tiles=5 if precision == "fp32" else 1, head_tiles=3, chunks=chunks)
        for world in WORLDS
        for kind, precision in (("ddp", "fp32"), ("ddp", "bf16"), ("fsdp", "fp32"), ("fsdp", "bf16"), ("zero1", "fp32"))
        for model in THREE
        for ep, etp in ((world, 1), (1, 2))
        if etp == 1 or (model != "dense" and world % 2 == 0 and (kind, precision) == ("ddp", "fp32"))
        for ep in [ep if model != "dense" else 1]
        if 4 % ep == 0
        for m, recompute, chunks in ((1, "none", 7), (3, "selective", 1))
        if BATCH % (world * m) == 0
        if recompute == "none" or (kind, precision) == ("ddp", "fp32")
    ]


def _replica_cases() -> list[Case]:
    """Cases of the engine dp: two replicas, each in a thread of one process; in one case they have unequal numbers of tokens."""
    return [Case("deepseek", "dp", 1, 1, 3, "fp32", padded=True)] + [
        Case(model, "dp", 1, 1, microbatches, precision, "full" if model == "deepseek" else "none", replicas=2)
        for model in THREE
        for microbatches in (1, 3)
        for precision in ("fp32", "bf16", "fp16")
    ]


def _casts_cases() -> list[Case]:
    """Cases of DDP in which weights are cast to 16 bits once a step, not at each use."""
    found = [Case("gshard", PLAIN, 2, ep, 3, "bf16", casts="step") for ep in (1, 2)]
    return [*found, Case("dense", PLAIN, 1, 1, 1, "fp16", casts="step")]


def _batch_cases() -> list[Case]:
    """Cases in fp32 in which ranks have unequal numbers of tokens, or a gradient overflows on one rank, so that a step is skipped."""
    found = [Case(model, kind, 2, ep, 3, "fp32", packed=True) for model, kind, ep in (("gshard", "ddp", 2), ("deepseek", "zero1", 1))]
    found += [Case("gpt_oss", "ddp", 1, 1, 1, "fp32", packed=True), Case("ahead", "fsdp", 2, 2, 1, "fp32", packed=True)]
    found += [Case("switch", "ddp", 2, 1, 3, "fp32", padded=True)]  # the model's z loss must not count padding
    found += [Case("packed", "ddp", 1, 1, 1, "fp32", packed=True)]  # documents begin at separators and at packed chats
    return found + [
        Case(model, kind, world, ep, microbatches, "fp32", padded=padded, overflow=not padded)
        for world in WORLDS
        for kind in ("ddp", "fsdp", "zero1")
        if world > 1 or kind == "ddp"
        for padded, microbatches in ((True, 3), (False, 1))
        if BATCH % (world * microbatches) == 0
        for model in THREE
        for ep in (dict.fromkeys((1, world)) if model != "dense" else [1])
        if 4 % ep == 0
    ]


def _copied_cases() -> list[Case]:
    """Cases in which tp ranks have copies of the weights (tensor.kind copied). Gradients of copies must not be counted more than once."""
    found = []
    for world, tp in ((2, 2), (4, 2), (4, 4)):
        for kind in planned():
            found += [Case("dense", kind, world, 1, 3, "fp32", tp=tp)] if tp == 2 else []
            found += [Case("gshard", kind, world, ep, 1, "fp32", tp=tp) for ep in divisors(world)[1:]]
            found += [Case("deepseek", kind, world, 1, 3 if tp == 2 else 1, "fp32", tp=tp)]
    found += [Case("gshard", kind, 2, 2, 1, "bf16", "selective", tp=2) for kind in ("ddp", "fsdp", "zero2", "zero3")]
    found += [Case("deepseek", kind, 2, 2, 1, "fp32", tp=2, padded=True) for kind in ("ddp", "fsdp", "zero1")]
    return found + [
        Case(model, kind, world, ep, 3, "fp32", pp=2, schedule="1f1b", layers=LAYERS[2][0], tp=2)
        for world, kind in ((4, "ddp"), (8, "ddp"), (8, "zero1"), (8, "fsdp"))
        for model, ep in (("dense", 1), ("gshard", 2))
    ]


def _halves_cases() -> list[Case]:
    """Cases of encoder-decoders: every engine, ep, micro-batches, recompute, and bf16."""
    found = [
        Case(model, kind, world, ep, microbatches, "fp32", recompute)
        for world in (1, 2, 4)
        for kind in (planned() if world > 1 else (PLAIN,))
        for model in HALVES
        for ep in divisors(world)
        for microbatches, recompute in ((1, "full"), (3, "selective" if model == "t5" else "none"))
        if (world < 4 or (kind, ep) in (("ddp", 2), ("fsdp", 4))) and (ep == world) == (microbatches == 1 or world == 1)
    ]
    found += [Case("t5", "dp", 1, 1, 1, "fp32"), Case("t5", "ddp", 1, 1, 1, "fp32", tiles=5, head_tiles=3, chunks=7)]
    found += [Case("t5_untied", "ddp", 2, 1, 1, "fp32", etp=2), Case("t5", "fsdp", 2, 2, 1, "fp32", tp=2)]
    return found + [Case("t5", kind, 2, 2, 1, "bf16", "full") for kind in ("ddp", "fsdp", "zero1", "zero3")]


def _options_cases() -> list[Case]:
    """Cases of models with options of published models, each with two engines. `mixer`, which draws experts at random, is also run in bf16.
    `ahead` (multi-token prediction) is also run in fp16, to test its second loss with a loss scale."""
    engines = {"gpt_oss": ("ddp", "zero3"), "latent": ("ddp", "fsdp"), "free": ("fsdp", "zero1"), "mixer": ("ddp", "fsdp")}
    engines["t5_packed"] = ("ddp", "zero3")
    found = [
        Case(model, kind, 2, 1 + number, 3 - 2 * number, "fp32", "full" if number else "none")
        for model, kinds in engines.items()
        for number, kind in enumerate(kinds)
    ]
    found += [Case("latent", "fsdp", 3, 1, 1, "fp32")]  # sizes of matrices are not divisible by 3
    found += [
        Case(model, "ddp", world, world, m, "fp32", again) for model in _BY_KFAC for world, m, again in ((1, 3, "none"), (2, 1, "full"))
    ]
    found += [Case("kfac", "ddp", 1, 1, 1, "fp32", overflow=True), Case("kfac", "ddp", 2, 2, 3, "fp32", padded=True)]
    found += [Case("kfac", "ddp", 2, 1, 1, "fp32")]  # each rank has copies of all experts
    found += [Case(model, "fsdp", 2, 2, 1, "fp32") for model in ("muon", "adafactor")]  # shards of matrices
    found += [Case("kfac_at_once", "ddp", world, world, m, "bf16", casts=casts) for world, m, casts in ((1, 3, "use"), (2, 1, "step"))]
    found += [Case("kfac_at_once", "ddp", 2, 2, 3, "fp16", overflow=True)]
    found += [Case("lora", "ddp", 2, 1, 1, "fp32", etp=2), Case("frozen", "ddp", 2, 2, 1, "fp32")]
    found += [Case("frozen_stage", kind, n, 1, 3, "fp32", pp=2, schedule="zb_h1") for kind, n in (("ddp", 2), ("fsdp", 4))]
    # a step that is clipped must leave nothing to the next one that is not
    clipped = (("ddp", 1), ("zero1", 2), ("zero3", 2))
    found += [Case("clipped", kind, world, 1, 1, "fp32", padded=True) for kind, world in clipped]
    found += [Case("gpt_oss", "ddp", 1, 1, 1, "fp32", tiles=5, head_tiles=3)]  # biases of experts in tiles
    found += [Case("ahead", "ddp", 2, 1, 1, "fp32", head_tiles=3, chunks=7)]  # capped logits, in tiles and chunks
    return [
        *found,
        Case("mixer", "ddp", 2, 2, 1, "bf16"),
        Case("ahead", "ddp", 1, 1, 1, "fp16"),
        Case("ahead_windows", "fsdp", 2, 2, 1, "fp32"),
    ]


def _telling_cases() -> list[Case]:
    """Cases of the models in TELLING. Experts move between ranks where ep is 2."""
    found = [Case(model, "ddp", 1, 1, 3, "fp32") for model in TELLING]
    found += [Case(model, "fsdp", 2, 2, 1, "fp32") for model in TELLING]
    found += [Case("coefficients", kind, 2, ep, 3, "fp32") for kind, ep in (("zero1", 2), ("zero2", 1), ("zero3", 2))]
    found += [Case("spectral", "fsdp", 4, 2, 1, "fp32")]  # FSDP divides each expert's states over two ranks
    found += [Case("spectral", "ddp", 2, 2, 3, "fp32"), Case("stretched", "zero1", 2, 2, 1, "fp32", padded=True)]
    return [*found, Case("coefficients", "ddp", 2, 2, 1, "fp32", overflow=True), Case("divided", "ddp", 2, 1, 3, "fp32", etp=2)]
