"""Layouts of tensor parallelism: lines, grids, sequence parallelism between layers, overlap, DTensor."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from moe.verify.cases import PACKED, SLICED, Case
from moe.verify.rows.pipeline import _staged
from parallel.data.kinds.catalog import planned
from parallel.mesh.grids import SMALLEST


def tensor_cases(nproc: int) -> list[Case]:
    """Heads, hidden units and vocabulary split over tp. With tp 4, each of the two key-value heads is held by two ranks.

    gshard has T5's bias, tied embeddings, dropout and shared experts. ep folds over tp, and etp in one row of each world. The vocabulary's
    256 rows split evenly; tests/parallel/tensor/test_vocabulary.py splits 250 by 4.
    """
    found = []
    for world, tp in [(world, tp) for world, tp in ((2, 2), (4, 2), (4, 4)) if world <= nproc]:
        one = partial(Case, world=world, tp=tp, tensor="1d", microbatches=1)
        plain = partial(one, kind="ddp", precision="fp32")
        for kind in planned():
            found += [one("dense", kind, ep=1, microbatches=3 if world == 2 else 1, precision="fp32")]
            found += [one(model, kind, ep=ep, precision="fp32") for model, ep in (("gshard", world), ("deepseek", 2))]
        for model, ep in (("dense", 1), ("gshard", 2), ("deepseek", 2)):
            found += [one(model, "ddp", ep=ep, precision=precision) for precision in ("bf16", "fp16")]
            found += [plain(model, ep=ep, recompute=how) for how in ("full", "selective")]
            found += [one(model, kind, ep=ep, precision="fp32", tiles=5, head_tiles=3, chunks=7) for kind in ("ddp", "fsdp")]
        found += [plain("gshard", ep=1, etp=2), plain("deepseek", ep=2, padded=True)]
        found += [one("gshard", kind, ep=2, precision="bf16", recompute="selective") for kind in ("fsdp", "zero2", "zero3")]
    options = partial(Case, world=2, tp=2, ep=2, kind="ddp", microbatches=1)
    mixed = [options("mixer", tensor="sliced", precision=precision) for precision in ("fp32", "bf16")]
    found += [*mixed, options("gpt_oss", tensor="dtensor", precision="fp32")] if nproc >= 2 else []
    found += _halves_tensor_cases(nproc)
    return (
        found + _sliced_cases(nproc) + _overlapped_cases(nproc) + _dtensor_cases(nproc) + _staged_tensor_cases(nproc) + _grid_cases(nproc)
    )


def _halves_tensor_cases(nproc: int) -> list[Case]:
    """Encoder-decoders: cross attention and the bias shared by the layers of a half, split by heads. In bf16 also with FSDP, and in
    fp16.
    """
    one = partial(Case, kind="ddp", microbatches=1, precision="fp32", tensor="1d")
    two, four = partial(one, world=2, tp=2), partial(one, world=4, tp=2)
    found = [two("t5", ep=2), two("t5_untied", ep=1, recompute="full")]
    found += [two("t5", ep=2, precision="bf16"), two("t5_untied", ep=1, precision="fp16")]
    more = [four("t5", kind="fsdp", ep=2, recompute="selective"), four("t5_untied", kind="zero1", ep=2, etp=2)]
    more += [one("t5", world=4, tp=4, ep=2, tiles=5, head_tiles=3, chunks=7), four("t5", ep=4, tensor="overlapped")]
    more += [four("t5", kind="fsdp", ep=2, precision="bf16", recompute="selective")]
    return (found if nproc >= 2 else []) + (more if nproc >= 4 else [])


def _grid_cases(nproc: int) -> list[Case]:
    """Tensor parallelism in 2D, 2.5D and 3D: weights and activations in blocks. A batch of 24, so that eight ranks route equal shares.

    The vocabulary's 256 rows split evenly; tests/parallel/tensor/test_grids.py has 11. A single key-value head is copied along each line
    of a grid.
    """
    found = []
    for tensor, tp in SMALLEST.items():
        one = partial(Case, world=tp, tp=tp, tensor=tensor, microbatches=1, batch=24)
        plain = partial(one, kind="ddp", precision="fp32")
        for kind in planned() if tp <= nproc else ():
            found += [one(model, kind, ep=ep, precision="fp32") for model, ep in (("dense", 1), ("gshard", 4), ("deepseek", 2))]
        if tp <= nproc:
            found += [plain("dense", ep=1, microbatches=3), plain("gshard", ep=1, etp=2), plain("deepseek", ep=2, padded=True)]
            found += [plain("gshard", ep=2, recompute=how) for how in ("full", "selective")]
            found += [one("gshard", kind, ep=1, precision="fp32", tiles=5, head_tiles=3, chunks=7) for kind in ("ddp", "fsdp")]
            found += [plain(model, ep=1) for model in PACKED]
            found += [one("one_head", kind, ep=2, precision="fp32") for kind in planned()] + [plain("one_head", ep=4, recompute="full")]
            found += [one(model, "ddp", ep=ep, precision="bf16") for model, ep in (("dense", 1), ("deepseek", 2))]
            found += [one("dense", "zero2", ep=1, precision="fp16"), one("gshard", "fsdp", ep=2, precision="bf16", recompute="selective")]
    flat = partial(Case, world=8, tp=4, tensor="2d", precision="fp32", batch=24)
    both = [flat("gshard", "ddp", ep=4, microbatches=1), flat("dense", "zero1", ep=1, microbatches=1)]
    both += [flat("one_head", kind, ep=2, microbatches=1) for kind in ("fsdp", "zero2")]
    both += [
        flat(model, "ddp", ep=2, microbatches=1, recompute="full", sp=2, attention=attention, length=SLICED)
        for model, attention in (("gshard", "zigzag"), ("packed", "ulysses"))
    ]
    both += [
        replace(_staged(model, "ddp", 4, 2, schedule, "fp32"), world=8, microbatches=6, batch=24, ep=ep, tp=4, tensor="2d")
        for model, ep, schedule in (("dense", 1, "1f1b"), ("gshard", 2, "zb_h1"), ("gshard", 2, "chimera"))
    ]
    return found + (both if nproc >= 8 else [])


def _sliced_cases(nproc: int) -> list[Case]:
    """tensor.sequence_parallel: slices of the sequences between layers, whole sequences in MoE layers. tp 4 does not divide the 10 tokens
    of a sequence.
    """
    found = []
    for world in (world for world in (2, 4) if world <= nproc):
        one = partial(Case, world=world, tp=2, tensor="sliced", microbatches=1)
        plain = partial(one, kind="ddp", precision="fp32")
        found += [one("gshard", kind, ep=world, precision="fp32") for kind in planned()]
        found += [one(model, kind, ep=ep, precision="fp32") for model, ep in (("dense", 1), ("deepseek", 2)) for kind in ("ddp", "zero2")]
        if world == 2:
            found += [plain("gshard", ep=2, recompute=how) for how in ("full", "selective")]
            found += [plain("dense", ep=1, tiles=5, head_tiles=3, chunks=7), plain("deepseek", ep=2, padded=True)]
            found += [one(model, "ddp", ep=ep, precision="bf16") for model, ep in (("dense", 1), ("gshard", 2))]
    two = partial(Case, kind="ddp", world=2, microbatches=1, precision="fp32", tp=2)
    if nproc >= 2:  # latent attention exchanges latents; with slices, each rank computes those of its slice only
        found += [two("latent", ep=2, tensor="1d", recompute="full"), two("latent", ep=1, tensor="sliced", kind="zero3")]
        found += [two("latent", ep=2, tensor=tensor, precision="bf16") for tensor in ("1d", "sliced")]
        found += [two("ahead", ep=2, tensor="1d", kind="fsdp"), two("ahead", ep=1, tensor="sliced", recompute="selective", padded=True)]
    staged = [_staged(model, "ddp", 4, 2, "1f1b", "fp32") for model in ("dense", "gshard", "ahead")]
    staged = [replace(case, microbatches=6, ep=1 if case.model == "dense" else 2, tp=2, tensor="sliced") for case in staged]
    both = [  # slices over sp, and of these slices over tp
        Case(model, "ddp", 4, ep, 1, "fp32", tp=2, tensor=tensor, sp=2, length=24, attention="zigzag")
        for model, ep in (("dense", 1), ("gshard", 2), ("deepseek", 2), ("latent", 2), ("ahead", 2))
        for tensor in ("1d", "sliced")
    ]
    return found + (staged + both if nproc >= 4 else [])


def _overlapped_cases(nproc: int) -> list[Case]:
    """Tensor parallelism with overlapped chunks of different lengths, with and without slices: engines, recompute, 16 bits, delayed weight
    gradients. Also with tp 4, where two ranks share each key-value head, and with slices over sp.
    """
    if nproc < 2:
        return []
    one = partial(Case, world=2, tp=2, microbatches=1, precision="fp32")
    found = [one("gshard", "fsdp", ep=2, tensor="overlapped"), one("dense", "zero3", ep=1, tensor="overlapped", recompute="full")]
    found += [one("gshard", kind, ep=2, tensor="overlapped_sliced") for kind in ("ddp", "zero3")]
    found += [replace(one("dense", "ddp", ep=1, tensor=tensor), precision="bf16") for tensor in ("overlapped", "overlapped_sliced")]
    more = [replace(_staged("gshard", "ddp", 4, 2, "zb_h1", "fp32"), microbatches=6, ep=2, tp=2, tensor="overlapped_sliced")]
    more += [replace(one("dense", "fsdp", ep=1, tensor="overlapped"), world=4, tp=4)]
    more += [replace(one("gshard", "zero3", ep=4, tensor="overlapped_sliced"), world=4, tp=4, length=SLICED)]
    more += [replace(one("dense", "ddp", ep=1, tensor="overlapped_sliced"), world=4, sp=2, length=SLICED)]
    return found + (more if nproc >= 4 else [])


def _dtensor_cases(nproc: int) -> list[Case]:
    """tensor.kind dtensor, which shards as 1d does, so fewer rows. They test torch's own collectives within layers, with each engine,
    recompute, tiles, slices, sp, stages and bf16.
    """
    found = []
    for world in (world for world in (2, 4) if world <= nproc):
        one = partial(Case, world=world, tp=2, tensor="dtensor", microbatches=1)
        for kind in planned() if world == 2 else ("ddp", "fsdp", "zero3"):
            found += [one("gshard", kind, ep=world, precision="fp32")]
        if world == 2:
            found += [one("dense", kind, ep=1, precision="fp32", tiles=5, head_tiles=3, chunks=7) for kind in ("ddp", "fsdp")]
            found += [one("deepseek", "ddp", ep=2, precision="fp32", recompute=how) for how in ("full", "selective")]
            found += [one("dense", "ddp", ep=1, precision="bf16"), one("deepseek", "zero3", ep=1, precision="bf16", recompute="full")]
        sliced = replace(one("gshard", "ddp", ep=2, precision="fp32"), tensor="dtensor_sliced")
        found += [sliced, replace(sliced, model="dense", ep=1, kind="zero3"), replace(sliced, precision="bf16")]
    staged = replace(_staged("gshard", "ddp", 4, 2, "1f1b", "fp32"), microbatches=6, ep=2, tp=2, tensor="dtensor")
    both = Case("dense", "ddp", 4, 1, 1, "fp32", tp=2, tensor="dtensor", sp=2, length=SLICED, attention="zigzag")
    return found + ([staged, replace(staged, schedule="zb_h1"), both] if nproc >= 4 else [])


def _staged_tensor_cases(nproc: int) -> list[Case]:
    """Tensor parallelism in pipelines: stages send whole activations, backward passes are split, and a tied embedding is on two stages or
    twice on one rank.
    """
    schedules = {"ddp": ("1f1b", "interleaved", "zb_h1", "chimera"), "zero1": ("1f1b",), "fsdp": ("1f1b",)}
    return [
        replace(_staged(model, kind, 4, 2, schedule, "fp32"), world=world, microbatches=6 if world == 4 else 3, ep=ep, tp=2, tensor="1d")
        for world, kind in ((4, "ddp"), (8, "zero1"), (8, "fsdp"))
        if world <= nproc
        for schedule in schedules[kind]
        for model, ep in (("dense", 1), ("gshard", 2))
    ]
