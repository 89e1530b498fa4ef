"""Lists the cases of `moe verify` for sequence parallelism."""

from __future__ import annotations

from dataclasses import replace

from moe.verify.cases import BATCH, EXPERTS, LENGTH, MODELS, OPTIONS, PACKED, ROUTERS, SLICED, Case, attentions
from moe.verify.rows.pipeline import LAYERS
from moe.verify.telling import TELLING
from parallel.data.kinds import planned
from parallel.mesh.mesh import divisors
from parallel.pipeline.schedules import SCHEDULES
from parallel.sequence.kinds import SEQUENCES


def sequence_cases() -> list[Case]:
    """Return cases of every method of sequence parallelism with rotary and T5 positions, of every router, and of some methods with other
    kinds of parallelism."""
    found = []
    for sp in divisors(BATCH)[1:]:
        for attention, form in attentions().items():
            if (attention == "heads2" and sp % 2) or (SEQUENCES[form["kind"]].trades_heads and 4 % sp):
                continue
            found += [Case(model, "ddp", sp, 1, 3, "fp32", sp=sp, attention=attention) for model in ("dense", "gshard", "deepseek")]
            found += [Case("gshard", "ddp", sp, sp, 1, "fp32", "full", sp=sp, attention=attention)] if 4 % sp == 0 else []
            found += [Case("dense", "ddp", sp, 1, 1, "bf16", "selective", sp=sp, attention=attention)]
            found += [Case(model, "ddp", sp, 1, 1, "fp32", sp=sp, attention=attention) for model in PACKED]
            found += [Case("gshard", "ddp", sp, sp if 4 % sp == 0 else 1, 3, "fp32", sp=sp, attention=attention, packed=True)]
    for number, model in enumerate(model for model in MODELS | ROUTERS if model != "dense"):
        for sp, attention in ((2, "zigzag"), (4, "striped")):
            ep = sp if number % 2 else 1
            found += [Case(model, "ddp", sp, ep, 1 if number % 3 else 3, "fp32", sp=sp, attention=attention, experts=EXPERTS)]
    for world, sp, attention in ((2, 2, "zigzag"), (4, 2, "heads2"), (4, 2, "lightseq"), (4, 4, "zigzag")):
        for kind in planned():
            found += [Case("gshard", kind, world, 2, 1, "fp32", "full", sp=sp, attention=attention)]
            found += [Case("deepseek", kind, world, 1, 3, precision, sp=sp, attention=attention) for precision in ("fp32", "bf16", "fp16")]
        found += [Case("deepseek", "ddp", world, 2, 3, "fp32", sp=sp, attention=attention, padded=True)]
        found += [Case("dense", "zero1", world, 1, 1, "fp32", sp=sp, attention=attention, overflow=True)]
    # length 16: with 24, a token of gshard has two nearly equal expert scores in step 8, so rounding could change its expert
    for schedule in ("1f1b", "interleaved"):
        layers = LAYERS[2][int(SCHEDULES[schedule].chunks != 1)]
        for model, ep in (("dense", 1), ("gshard", 2), ("deepseek", 1)):
            found += [Case(model, "ddp", 4, ep, 4, "fp32", "full", pp=2, schedule=schedule, layers=layers, sp=2, length=16)]
    for attention, model in zip(("zigzag", "ulysses", "colossal", "lightseq"), OPTIONS, strict=True):
        found += [Case(model, "ddp", 2, 2, 1, "fp32", "full", sp=2, attention=attention)]
    # each method adds attention sinks in its own way. LightSeq: 6 tokens a rank, so that one pair of a rank is outside the window of 5
    for attention, length in (("ulysses", LENGTH), ("lightseq", 12), ("colossal", LENGTH)):
        found += [Case("gpt_oss", "ddp", 2, 1, 1, "fp32", sp=2, attention=attention, length=length)]
    for attention, kind in (("zigzag", "ddp"), ("striped", "fsdp"), ("ulysses", "zero3")):
        found += [
            Case("ahead", kind, 2, 2, 1, "fp32", sp=2, attention=attention, padded=attention == "striped", packed=attention == "ulysses")
        ]
    found += [Case("ahead_windows", "ddp", 2, 2, 1, "fp32", sp=2, attention="striped")]
    found += [Case("kfac", "ddp", 2, 2, 3, "fp32", sp=2, attention=attention) for attention in ("zigzag", "ulysses")]
    found += [Case("mixer", "ddp", 2, 1, 3, "fp32", sp=2, attention="ulysses"), Case("lora", "ddp", 2, 2, 1, "fp32", sp=2)]
    found += [Case(f"own_balance{whole}", "ddp", 2, 2, 3, "fp32", "full", sp=2, padded=True) for whole in ("", "_whole")]
    for attention, model in zip(("zigzag", "ulysses", "colossal", "lightseq", "contiguous"), TELLING, strict=True):
        found += [Case(model, "ddp", 2, 2, 1, "fp32", sp=2, attention=attention)]
    found += [Case("coefficients", "ddp", 2, 1, 3, "fp32", sp=2, attention="ulysses")]
    for attention, kind in (("zigzag", "ddp"), ("ulysses", "fsdp"), ("lightseq", "zero1")):
        for model, ep, m in (("dense", 1, 3), ("gshard", 4, 1), ("deepseek", 2, 1)):
            found += [Case(model, kind, 4, ep, m, "fp32", "full", tp=2, tensor="1d", sp=2, attention=attention)]
    return [replace(case, length=SLICED) if case.length == LENGTH else case for case in dict.fromkeys(found)] + _halves_cases()


def _halves_cases() -> list[Case]:
    """Cases of encoder-decoders with every method of sequence parallelism, which also splits the keys and values of cross attention."""
    found = [
        Case(model, kind, 2, ep, 1, "fp32", recompute, sp=2, attention=attention, length=12)
        for attention in attentions()
        for model, kind, ep, recompute in (("t5", "ddp", 2, "full"), ("t5_untied", "zero1", 1, "none"))
    ]
    found += [Case("t5", "fsdp", 4, 4, 1, "fp32", "selective", sp=4, attention=a, length=32) for a in ("contiguous", "heads2", "lightseq")]
    found += [Case("t5", "ddp", 4, 2, 1, "fp32", tp=2, tensor=tensor, sp=2, attention="zigzag", length=12) for tensor in ("1d", "sliced")]
    found += [Case("t5_packed", "ddp", 2, 2, 1, "fp32", "full", sp=2, attention=attention, length=32) for attention in attentions()]
    found += [Case("t5_packed", "fsdp", 4, 2, 3, "bf16", sp=2, attention="zigzag", length=32)]
    found += [Case("t5_packed", "ddp", 4, 2, 1, "fp32", tp=2, tensor=t, sp=2, attention="striped", length=32) for t in ("1d", "sliced")]
    return [*found, Case("t5_untied", "ddp", 2, 2, 3, "bf16", sp=2, attention="ulysses", length=12)]
