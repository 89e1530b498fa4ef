"""The small costs that docs/inside/log.md quotes, measured again, in milliseconds: medians on one thread.

    python docs/benchmarks/measure.py [--json FILE]
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe.bench.timing import in_turn  # noqa: E402
from moe.model.transformer import Transformer  # noqa: E402
from moe.nn.linear import Norm  # noqa: E402
from moe.nn.rotary import rotate  # noqa: E402
from moe.nn.vocabulary import rows_of, summed_loss  # noqa: E402
from moe.recipe.sections import Experts, Model, Recompute, Router  # noqa: E402
from parallel.random import uniform  # noqa: E402

TINY = Model(d_model=128, num_heads=2, d_ff=512, ffn="relu", norm="layernorm", tied_embeddings=False, moe_every=2)


def median_ms(work: Callable[[], object], repeats: int = 9) -> float:
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def plain_rotate(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    angle = position.float().unsqueeze(1) * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def products() -> dict[str, float]:
    """One bf16 product of 300 to 800 rows: each shape for the first time, then again."""
    a, w = torch.randn(4096, 128).bfloat16(), torch.randn(128, 512).bfloat16()
    rows = random.Random(0).sample(range(300, 800), 500)
    found = {}
    for label in ("new shape", "known shape"):
        started = time.perf_counter()
        for m in rows:
            torch.mm(a[:m], w)
        found[f"bf16 product, {label}"] = (time.perf_counter() - started) / len(rows) * 1e3
    return found


def pieces() -> dict[str, float]:
    found = products()
    x = torch.randn(16, 256, 256).bfloat16().requires_grad_()
    for kind in ("rmsnorm", "layernorm"):
        norm = Norm(256, kind)
        norm.weight.data.fill_(1.0)
        found[f"{kind}, forward and backward"] = median_ms(lambda norm=norm: norm(x).sum().backward())
    q, position = torch.randn(16, 4, 256, 64).bfloat16().requires_grad_(), torch.arange(256)
    for label, turn in (("usual chain", plain_rotate), ("by hand", rotate)):
        found[f"rotary, {label}"] = median_ms(lambda turn=turn: turn(q, position).sum().backward())
    tokens = torch.arange(4096)
    found["a million numbers, hash"] = median_ms(lambda: uniform(1, tokens, 256))
    found["a million numbers, generator"] = median_ms(lambda: torch.rand(4096, 256))
    return found | steps() | chunks() | recompute()


def interleaved(work: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Medians of works that are compared with each other: in turn, round by round."""
    return {what: statistics.median(s) * 1e3 for what, s in in_turn(work, rounds=9, device=torch.device("cpu")).items()}


def chunks() -> dict[str, float]:
    """Cross-entropy of 2,048 tokens of width 256 and 32,000 words, forward and backward, in fp32."""
    draw = torch.Generator().manual_seed(0)
    x, targets = torch.randn(8, 256, 256, generator=draw).requires_grad_(), torch.randint(32_000, (8, 256), generator=draw)
    work: dict[str, Callable[[], object]] = {}
    for parts, tiles in ((1, 1), (4, 1), (16, 1), (1, 4), (16, 4)):
        matrix = rows_of(32_000, 256, tiles=tiles)
        for parameter in matrix.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        work[f"loss in {parts} chunks, head in {tiles} tiles"] = lambda parts=parts, matrix=matrix: summed_loss(
            x, targets, matrix, chunks=parts
        ).backward()
    return interleaved(work)


def recompute() -> dict[str, float]:
    """Forward and backward of 2,048 tokens of switch_tiny's sizes in fp32."""
    text = torch.randint(256, (8, 257), generator=torch.Generator().manual_seed(0))
    work: dict[str, Callable[[], object]] = {}
    for kind, every in (("none", 1), ("selective", 1), ("full", 2), ("full", 1)):
        model = Transformer(TINY, Experts(), Router(capacity_factor=2.0, jitter=0.01), recompute=Recompute(kind=kind, every=every))
        work[f"recompute {kind}, every {every}"] = lambda model=model: (
            model(text[:, :-1], targets_BL=text[:, 1:]).loss / text[:, 1:].numel()
        ).backward()
    return interleaved(work)


def steps() -> dict[str, float]:
    """Forward and backward of 2,048 tokens of the tiny sizes; set ONEDNN_MAX_CPU_ISA=AVX2 to see a processor without bf16."""
    found = {}
    text = torch.randint(256, (8, 257), generator=torch.Generator().manual_seed(0))
    for label, every in (("dense", 0), ("switch", 2)):
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            model = Transformer(
                TINY.model_copy(update={"moe_every": every}), Experts(), Router(capacity_factor=2.0, jitter=0.01), compute=dtype
            )

            def step(model: Transformer = model) -> None:
                F.cross_entropy(model(text[:, :-1]).logits_BLV.flatten(0, 1), text[:, 1:].flatten()).backward()

            found[f"{label}_tiny, {name}, 2,048 tokens"] = median_ms(step)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    measured = pieces()
    for what, ms in measured.items():
        print(f"{what:<36} {ms:9.3f} ms")
    if "--json" in sys.argv:
        Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(measured, indent=1) + "\n")
