"""The small costs that docs/log.md quotes, measured again: python docs/measure.py [--json FILE]. One thread, medians, milliseconds."""

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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from moe.config import Experts, Model, Router  # noqa: E402
from moe.model.attention import rotate  # noqa: E402
from moe.model.linear import Norm  # noqa: E402
from moe.model.transformer import Transformer  # noqa: E402
from parallel.random import uniform  # noqa: E402


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
    return found | steps()


def steps() -> dict[str, float]:
    """Forward and backward of 2,048 tokens of the tiny sizes; set ONEDNN_MAX_CPU_ISA=AVX2 to see a processor without bf16."""
    found = {}
    text = torch.randint(256, (8, 257), generator=torch.Generator().manual_seed(0))
    for label, every in (("dense", 0), ("switch", 2)):
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            sizes = Model(d_model=128, num_heads=2, d_ff=512, ffn="relu", norm="layernorm", tied_embeddings=False, moe_every=every)
            model = Transformer(sizes, Experts(), Router(capacity_factor=2.0, jitter=0.01), compute=dtype)

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
