"""Lists the cases of tensor parallelism that `moe verify` trains: 1D, 2D, 2.5D, 3D and DTensor, also with sequence parallelism between
layers or with collectives that overlap with products."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from moe.router.methods import METHODS
from moe.verify.cases import EXPERTS, PACKED, ROUTERS, SLICED, Case
from moe.verify.rows.pipeline import staged
from parallel.data.kinds import planned
from parallel.mesh.grids import SMALLEST

SOURCE = 31  # encoder tokens in cases on grids: span corruption then gives the decoder 8 tokens, one for each rank of the largest grid
TILED: dict[str, Any] = {"tiles": 5, "head_tiles": 3, "chunks": 7}


def tensor_cases() -> list[Case]:
    """Return all cases of `moe verify --kinds tensor`."""
    found = _line_cases() + _halves_cases() + _sliced_cases() + _overlapped_cases() + _dtensor_cases()
    return found + _staged_cases() + _grid_cases() + _few_sequences_cases() + _adapted_cases() + _telling_cases()


def _line_cases() -> list[Case]:
    """Cases of tensor.kind 1d, which splits heads, hidden units and vocabulary over tp. MoE layers use the same ranks for ep, in some cases
    for etp."""
    found = []
    for world, tp in ((2, 2), (4, 2), (4, 4)):
        one = partial(Case, world=world, tp=tp, tensor="1d", microbatches=1)
        plain = partial(one, kind="ddp", precision="fp32")
        for kind in planned():
            found += [one("dense", kind, ep=1, microbatches=3 if world == 2 else 1, precision="fp32")]
            found += [one(model, kind, ep=ep, precision="fp32") for model, ep in (("gshard", world), ("deepseek", 2))]
        for model, ep in (("dense", 1), ("gshard", 2), ("deepseek", 2)):
            found += [one(model, "ddp", ep=ep, precision=precision) for precision in ("bf16", "fp16")]
            found += [plain(model, ep=ep, recompute=how) for how in ("full", "selective")]
            found += [one(model, kind, ep=ep, precision="fp32", **TILED) for kind in ("ddp", "fsdp")]
        found += [plain("gshard", ep=1, etp=2), plain("deepseek", ep=2, padded=True)]
        found += [one("gshard", kind, ep=2, precision="bf16", recompute="selective") for kind in ("fsdp", "zero2", "zero3")]
    options = partial(Case, world=2, tp=2, ep=2, kind="ddp", microbatches=1)
    found += [options("mixer", tensor="sliced", precision=precision) for precision in ("fp32", "bf16")]
    found += [options("gpt_oss", tensor=tensor, precision="fp32") for tensor in ("dtensor", "sliced")]
    found += [
        options("free", tensor="1d", precision="fp32"),
        *(options("olmoe", tensor=kind, precision="fp32") for kind in ("sliced", "dtensor")),
        options("qwen3_moe", tensor="1d", precision="fp32"),  # its shared expert has a gate
        options("mixtral", tensor="sliced", precision="fp32"),  # experts.residual adds a dense network to each MoE layer
        *(options(model, tensor="1d", precision="fp32") for model in ("muon", "adafactor")),  # updates need whole matrices, sharded here
    ]
    # models with fewer key heads than tp ranks: both have biases of q, k and v, olmoe also norms over all heads
    found += [
        Case(f"own_balance{whole}", kind, 2, 2, m, "fp32", tp=2, tensor=tensor, padded=True)
        for whole, kind, tensor, m in (("", "zero1", "1d", 3), ("", "ddp", "sliced", 1), ("_whole", "fsdp", "1d", 1))
    ]
    return found + [options(model, world=4, tp=4, tensor="1d", precision="fp32") for model in ("gpt_oss", "olmoe")]


def _halves_cases() -> list[Case]:
    """Cases of encoder-decoders in all kinds of tensor parallelism. They test cross attention, whose keys come from the encoder. They also
    test the position bias, which is split by heads and shared by all layers of the encoder (or of the decoder)."""
    one = partial(Case, kind="ddp", microbatches=1, precision="fp32", tensor="1d")
    two, four = partial(one, world=2, tp=2), partial(one, world=4, tp=2)
    found = [two("t5", ep=2), two("t5_untied", ep=1, recompute="full")]
    found += [two("t5", ep=2, precision="bf16"), two("t5_untied", ep=1, precision="fp16")]
    found += [four("t5", kind="fsdp", ep=2, recompute="selective"), four("t5_untied", kind="zero1", ep=2, etp=2)]
    found += [one("t5", world=4, tp=4, ep=2, **TILED), four("t5", ep=4, tensor="overlapped")]
    found += [two("t5", ep=2, tensor="sliced"), two("t5_untied", ep=1, tensor="sliced", kind="zero3", recompute="full")]
    found += [four("t5", kind="fsdp", ep=4, tensor="overlapped_sliced"), two("t5", ep=2, tensor="sliced", precision="bf16")]
    found += [four("t5", kind="fsdp", ep=2, precision="bf16", recompute="selective")]
    found += [two("t5", ep=2, tensor="dtensor"), two("t5", ep=1, tensor="dtensor", kind="fsdp", precision="bf16")]
    found += [two("t5_untied", ep=2, tensor="dtensor_sliced", kind="zero3", recompute="full")]
    grids = {tensor: partial(one, world=tp, tp=tp, tensor=tensor, batch=24, length=SOURCE) for tensor, tp in SMALLEST.items()}
    for grid in grids.values():
        found += [grid("t5", ep=2), grid("t5_untied", ep=4, kind="fsdp", recompute="full"), grid("t5", ep=1, precision="bf16")]
    found += [grids["2d"]("t5", kind="zero3", ep=2, recompute="selective"), grids["2.5d"]("t5_untied", kind="zero1", ep=1, **TILED)]
    found += [
        grids["3d"]("t5_untied", ep=1, etp=2, microbatches=3),
        grids["3d"]("t5_packed", ep=2),
        two("t5_packed", ep=2, tensor="sliced"),
    ]
    flat = partial(one, "t5", world=8, tp=4, tensor="2d", batch=24, ep=2)
    found += [flat(sp=2, attention=attention, length=32) for attention in ("zigzag", "ulysses")] + [flat(kind="zero2", length=SOURCE)]
    return found + [
        replace(staged("t5", "ddp", 4, 2, schedule, "fp32"), world=8, microbatches=6, batch=24, ep=2, tp=4, tensor="2d", length=SOURCE)
        for schedule in ("1f1b", "zb_h1", "chimera")
    ]


def _grid_cases() -> list[Case]:
    """Cases of 2D, 2.5D and 3D tensor parallelism, which split weights and activations into blocks."""
    found = []
    for tensor, tp in SMALLEST.items():
        one = partial(Case, world=tp, tp=tp, tensor=tensor, microbatches=1, batch=24)
        plain = partial(one, kind="ddp", precision="fp32")
        for kind in planned():
            found += [one(model, kind, ep=ep, precision="fp32") for model, ep in (("dense", 1), ("gshard", 4), ("deepseek", 2))]
        found += [plain("dense", ep=1, microbatches=3), plain("gshard", ep=1, etp=2), plain("deepseek", ep=2, padded=True)]
        found += [plain("gshard", ep=2, recompute=how) for how in ("full", "selective")]
        found += [one("gshard", kind, ep=1, precision="fp32", **TILED) for kind in ("ddp", "fsdp")]
        found += [*(plain(model, ep=1) for model in PACKED), plain("dense", ep=1, packed=True)]
        found += [one("one_head", kind, ep=2, precision="fp32") for kind in planned()] + [plain("one_head", ep=4, recompute="full")]
        found += [one(model, "ddp", ep=ep, precision="bf16") for model, ep in (("dense", 1), ("deepseek", 2))]
        found += [one("dense", "zero2", ep=1, precision="fp16"), one("gshard", "fsdp", ep=2, precision="bf16", recompute="selective")]
        found += [plain("olmoe", ep=2)]
    flat = partial(Case, world=8, tp=4, tensor="2d", precision="fp32", batch=24, microbatches=1)
    found += [flat("gshard", "ddp", ep=4), flat("dense", "zero1", ep=1), *(flat("one_head", kind, ep=2) for kind in ("fsdp", "zero2"))]
    sliced = partial(flat, kind="ddp", ep=2, recompute="full", sp=2, length=SLICED)
    found += [sliced(model, attention=attention) for model, attention in (("gshard", "zigzag"), ("packed", "ulysses"))]
    return found + [
        replace(staged(model, "ddp", 4, 2, schedule, "fp32"), world=8, microbatches=6, batch=24, ep=ep, tp=4, tensor="2d")
        for model, ep, schedule in (("dense", 1, "1f1b"), ("gshard", 2, "zb_h1"), ("gshard", 2, "chimera"))
    ]


def _sliced_cases() -> list[Case]:
    """Cases of tensor.sequence_parallel: between layers, each tp rank has a slice of every sequence. MoE layers route these slices as they
    are."""
    found = []
    for world in (2, 4):
        one = partial(Case, world=world, tp=2, tensor="sliced", microbatches=1)
        found += [one("gshard", kind, ep=world, precision="fp32") for kind in planned()]
        found += [one(model, kind, ep=ep, precision="fp32") for model, ep in (("dense", 1), ("deepseek", 2)) for kind in ("ddp", "zero2")]
        if world == 2:
            plain = partial(one, kind="ddp", precision="fp32")
            found += [plain("gshard", ep=2, recompute=how) for how in ("full", "selective")]
            found += [plain("dense", ep=1, **TILED), plain("deepseek", ep=2, padded=True)]
            found += [one(model, "ddp", ep=ep, precision="bf16") for model, ep in (("dense", 1), ("gshard", 2))]
    # latent attention with sequence_parallel: each rank computes only the latents of its slice, and ranks exchange them
    two = partial(Case, kind="ddp", world=2, microbatches=1, precision="fp32", tp=2)
    found += [two("latent", ep=2, tensor="1d", recompute="full"), two("latent", ep=1, tensor="sliced", kind="zero3")]
    found += [two("latent", ep=2, tensor=tensor, precision="bf16") for tensor in ("1d", "sliced")]
    found += [two("ahead", ep=2, tensor="1d", kind="fsdp"), two("ahead", ep=1, tensor="sliced", recompute="selective", packed=True)]
    for model, ep in (("dense", 1), ("gshard", 2), ("ahead", 2)):
        found += [replace(staged(model, "ddp", 4, 2, "1f1b", "fp32"), microbatches=6, ep=ep, tp=2, tensor="sliced")]
    return found + [  # sequences are split over sp; with "sliced", each part is split again over tp
        Case(model, "ddp", 4, ep, 1, "fp32", tp=2, tensor=tensor, sp=2, length=24, attention="zigzag")
        for model, ep in (("dense", 1), ("gshard", 2), ("deepseek", 2), ("latent", 2), ("ahead", 2))
        for tensor in ("1d", "sliced")
    ]


def _few_sequences_cases() -> list[Case]:
    """Cases of micro-batches of 1 or 3 sequences, a number that tp does not divide. Each tp rank then routes a chunk of the micro-batch's
    tokens (chunks differ in length) or, with sequence parallelism between layers, a slice of each sequence."""
    one = partial(Case, kind="ddp", microbatches=3, precision="fp32", batch=3)
    found = []
    together = [name for name in ROUTERS if name in METHODS and METHODS[name].needs_whole_groups]
    for tp, ep, model in ((2, 2, "gshard"), (2, 1, "deepseek"), (4, 4, "megatron")):
        line = partial(one, model, world=tp, tp=tp, ep=ep)
        found += [line(tensor="1d", length=11), line(tensor="1d", length=11, microbatches=1, padded=True)]
        found += [line(tensor="sliced", length=12, microbatches=m) for m in (1, 3)]
    found += [one(name, world=4, tp=4, ep=2, tensor="1d", length=11) for name in together]
    eight = partial(one, "eight_heads", world=8, tp=8, ep=8, experts=EXPERTS)
    found += [eight(tensor="1d", length=11), eight(tensor="sliced", length=16), eight(tensor="1d", length=9, microbatches=1, padded=True)]
    found += [replace(eight(tensor="copied", length=13), model="deepseek", ep=4)]
    two = partial(one, world=4, tp=2, ep=4, sp=2, attention="zigzag", length=12)
    found += [
        two("gshard", tensor="1d", batch=9),
        two("glam", tensor="sliced"),
        *(two(name, tensor="1d", recompute="full") for name in together),
    ]
    found += [one("t5", world=2, tp=2, ep=2, tensor="1d"), one("mixer", world=2, tp=2, ep=2, tensor="dtensor", microbatches=1)]
    found += [
        one("gshard", world=4, tp=4, ep=2, tensor="2d", length=11, batch=6),
        one("deepseek", world=8, tp=8, ep=4, tensor="3d", batch=12),
    ]
    for engine, world, sp, tensor in (("ddp", 4, 1, "1d"), ("zero1", 4, 1, "sliced"), ("ddp", 8, 2, "1d")):
        pipeline = staged("gshard", engine, world, 2, "1f1b", "fp32")
        found += [replace(pipeline, microbatches=4, batch=4, ep=2, tp=2, tensor=tensor, sp=sp, length=SLICED)]
    return found


def _adapted_cases() -> list[Case]:
    """Cases of LoRA adapters in all kinds of tensor parallelism. One of an adapter's two matrices is sharded along the same dim as its
    weight."""
    two = partial(Case, "lora", kind="ddp", world=2, ep=2, microbatches=1, precision="fp32", tp=2)
    found = [two(tensor=tensor) for tensor in ("sliced", "overlapped", "dtensor", "dtensor_sliced")]
    found += [two(tensor="1d", ep=1, microbatches=3, recompute="full"), two(kind="fsdp", tensor="overlapped_sliced", ep=1)]
    found += [replace(two(tensor=tensor), model="lora_t5") for tensor in ("1d", "sliced")]
    found += [two(world=tp, tp=tp, tensor=tensor, batch=24) for tensor, tp in SMALLEST.items()]
    staged_too = replace(staged("lora", "ddp", 4, 2, "zb_h1", "fp32"), microbatches=6, ep=2, tp=2, tensor="sliced")
    return [*found, two(world=4, tp=4, tensor="1d"), staged_too]


def _telling_cases() -> list[Case]:
    """Cases of the models in TELLING, whose coefficients are large, each in another kind of tensor parallelism."""
    two = partial(Case, kind="ddp", world=2, ep=2, microbatches=1, precision="fp32", tp=2)
    kinds = (("coefficients", "1d"), ("spectral", "sliced"), ("absolute", "1d"), ("stretched", "dtensor"), ("divided", "sliced"))
    return [two(model, tensor=tensor) for model, tensor in kinds]


def _overlapped_cases() -> list[Case]:
    """Cases of tensor.overlap_chunks with chunks of unequal size, combined with each of these: sequence_parallel, the engines ddp,
    fsdp and zero3, recompute, bf16, a pipeline, and sp."""
    one = partial(Case, world=2, tp=2, microbatches=1, precision="fp32")
    found = [one("gshard", "fsdp", ep=2, tensor="overlapped"), one("dense", "zero3", ep=1, tensor="overlapped", recompute="full")]
    found += [one("gshard", kind, ep=2, tensor="overlapped_sliced") for kind in ("ddp", "zero3")]
    found += [one("dense", "ddp", ep=1, tensor=tensor, precision="bf16") for tensor in ("overlapped", "overlapped_sliced")]
    found += [replace(staged("gshard", "ddp", 4, 2, "zb_h1", "fp32"), microbatches=6, ep=2, tp=2, tensor="overlapped_sliced")]
    found += [one("dense", "fsdp", ep=1, tensor="overlapped", world=4, tp=4)]
    found += [one("gshard", "zero3", ep=4, tensor="overlapped_sliced", world=4, tp=4, length=SLICED)]
    return [*found, one("dense", "ddp", ep=1, tensor="overlapped_sliced", world=4, sp=2, length=SLICED)]


def _dtensor_cases() -> list[Case]:
    """Cases of tensor.kind dtensor in layers of every kind. Few are needed, because DTensor shards weights as 1d does."""
    found = []
    for world in (2, 4):
        one = partial(Case, world=world, tp=2, tensor="dtensor", microbatches=1)
        found += [one("gshard", kind, ep=world, precision="fp32") for kind in (planned() if world == 2 else ("ddp", "fsdp", "zero3"))]
        if world == 2:
            found += [one("dense", kind, ep=1, precision="fp32", **TILED) for kind in ("ddp", "fsdp")]
            found += [one("deepseek", "ddp", ep=2, precision="fp32", recompute=how) for how in ("full", "selective")]
            found += [one("dense", "ddp", ep=1, precision="bf16"), one("deepseek", "zero3", ep=1, precision="bf16", recompute="full")]
        sliced = one("gshard", "ddp", ep=2, precision="fp32", tensor="dtensor_sliced")
        found += [sliced, replace(sliced, model="dense", ep=1, kind="zero3"), replace(sliced, precision="bf16")]
    pipeline = replace(staged("gshard", "ddp", 4, 2, "1f1b", "fp32"), microbatches=6, ep=2, tp=2, tensor="dtensor")
    both = Case("dense", "ddp", 4, 1, 1, "fp32", tp=2, tensor="dtensor", sp=2, length=SLICED, attention="zigzag")
    latent = Case("latent", "ddp", 2, 2, 1, "fp32", "full", tp=2, tensor="dtensor")
    found += [latent, replace(latent, kind="zero3", ep=1, tensor="dtensor_sliced"), replace(latent, model="ahead", tensor="dtensor_sliced")]
    found += [replace(latent, precision="bf16"), replace(latent, precision="bf16", tensor="dtensor_sliced")]
    return [*found, pipeline, replace(pipeline, schedule="zb_h1"), both]


def _staged_cases() -> list[Case]:
    """Cases of tensor parallelism in pipelines, in which stages send unsharded activations. A tied embedding is on two pipeline ranks or,
    in some schedules, on one."""
    schedules = {"ddp": ("1f1b", "interleaved", "zb_h1", "chimera"), "zero1": ("1f1b",), "fsdp": ("1f1b",)}
    return [
        replace(staged(model, kind, 4, 2, schedule, "fp32"), world=world, microbatches=6 if world == 4 else 3, ep=ep, tp=2, tensor="1d")
        for world, kind in ((4, "ddp"), (8, "zero1"), (8, "fsdp"))
        for schedule in schedules[kind]
        for model, ep in (("dense", 1), ("gshard", 2))
    ]
