"""Measures small costs that docs/inside/log.md quotes, on one thread: matrix products of new shapes, norms, noise, losses, recompute.

    products, pieces, steps, losses, recomputed   milliseconds: medians over rounds; the measurements of a set run in turn
    bytes of losses                               peak MiB of tensors that a loss allocates, including gradients
    idle groups                                   number of cores that eight waiting ranks keep busy, by their number of process groups

`python -m tests.measured small-costs [--only TEXT] --json FILE`. `ONEDNN_MAX_CPU_ISA=AVX2` simulates a processor without bf16 products.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from moe.bench.timing import in_turn
from moe.model.transformer import Transformer
from moe.nn.linear import Norm
from moe.nn.rotary import DEFAULT, turned, turns_of
from moe.nn.vocabulary import Rows, summed_loss
from moe.parallelize.build import save_memory
from moe.recipe.sections import Experts, Model, Recompute, Router
from moe.records.results import write_json
from parallel.numerics.random import uniform
from parallel.process.fork import run_on_ranks
from tests.counted.alive import Alive

TINY: dict[str, Any] = {"d_model": 128, "num_heads": 2, "d_ff": 512, "ffn": "relu", "norm": "layernorm", "tied_embeddings": False}
GROUPS, IDLE_RANKS, IDLE_S = (15, 30, 120), 8, 2.0
SHAPES = 500  # number of shapes of `products`; oneDNN keeps 1 MB of code for each
SEQUENCES, VOCABULARY = 8, 32_000  # number of sequences of 256 tokens; vocabulary of `losses`
Work = dict[str, Callable[[], object]]


def main(*, rounds: int = 9, only: str = "", json: str | None = None) -> int:
    """`python -m tests.measured small-costs`. only: text that the names of the measured sets must contain."""
    torch.set_num_threads(1)
    sets: dict[str, Callable[[], dict[str, float]]] = {
        "idle groups": idle_groups,  # first: ranks can only be forked before torch starts threads
        "products": products,
        "bytes of losses": bytes_of_losses,
        **{work.__name__: partial(_milliseconds, work, rounds) for work in (pieces, steps, losses, recomputed)},
    }
    rows: list[dict[str, Any]] = []
    for name, measure in sets.items():
        if only in name:
            unit = {"idle groups": "processors", "bytes of losses": "MiB"}.get(name, "milliseconds")
            for what, value in measure().items():
                rows.append({"set": name, "what": what, unit: value})
                print(f"{what:<44} {value:9.3f} {unit if unit != 'milliseconds' else 'ms'}", flush=True)
    if json:
        write_json(json, verb="bench small-costs", rows=rows, rounds=rounds)
    return 0


def _milliseconds(work: Callable[[], Work], rounds: int) -> dict[str, float]:
    seconds = in_turn(work(), rounds=rounds, device=torch.device("cpu"), warmups=1)
    return {what: statistics.median(times) * 1e3 for what, times in seconds.items()}


def products() -> dict[str, float]:
    """Milliseconds of a bf16 matrix product of 300 to 800 rows: of each shape the first time, and the second time."""
    a, w = torch.randn(4096, 128).bfloat16(), torch.randn(128, 512).bfloat16()
    rows = random.Random(0).sample(range(300, 800), SHAPES)
    found = {}
    for label in ("new shape", "known shape"):
        started = time.perf_counter()
        for m in rows:
            torch.mm(a[:m], w)
        found[f"bf16 product, {label}"] = (time.perf_counter() - started) / len(rows) * 1e3
    return found


def pieces() -> Work:
    """Functions to time: norms, rotary positions and random numbers for 4,096 tokens."""
    x = torch.randn(16, 256, 256).bfloat16().requires_grad_()
    q, places, tokens = torch.randn(16, 4, 256, 64).bfloat16().requires_grad_(), torch.arange(256), torch.arange(4096)

    def norm(kind: str) -> Callable[[], object]:
        made = Norm(256, kind)
        torch.nn.init.ones_(made.weight)
        return lambda: made(x).sum().backward()

    return {
        "rmsnorm, forward and backward": norm("rmsnorm"),
        "layernorm, forward and backward": norm("layernorm"),
        "rotary, usual chain": lambda: _plain_rotate(q, places).sum().backward(),
        "rotary, by hand": lambda: turned(q, turns_of(places, 64, DEFAULT, dtype=q.dtype)).sum().backward(),
        "a million numbers, hash": lambda: uniform(1, tokens, 256),
        "a million numbers, generator": lambda: torch.rand(4096, 256),
    }


def _plain_rotate(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    angle = places.float().unsqueeze(1) * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def steps() -> Work:
    """Functions to time: forward and backward of 2,048 tokens through a dense and a sparse model."""
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    return {
        f"{label}_tiny, {name}, 2,048 tokens": _step(every, dtype)
        for label, every in (("dense", 0), ("switch", 2))
        for name, dtype in dtypes.items()
    }


def recomputed() -> Work:
    """Functions to time: forward and backward of the sparse model in fp32 with each kind of recompute."""
    kinds = [Recompute(kind=kind, every=every) for kind, every in (("none", 1), ("selective", 1), ("full", 2), ("full", 1))]  # type: ignore[arg-type]
    return {f"recompute {r.kind}, every {r.every}": _step(2, torch.float32, recompute=r) for r in kinds}


def _step(moe_every: int, dtype: torch.dtype, *, recompute: Recompute | None = None) -> Callable[[], object]:
    router: dict[str, Any] = {"capacity_factor": 2.0, "jitter": 0.01}
    model = save_memory(Transformer(Model(**TINY, moe_every=moe_every), Experts(), Router(**router), compute=dtype), recompute=recompute)
    text = torch.randint(256, (SEQUENCES, 257), generator=torch.Generator().manual_seed(0))
    return lambda: F.cross_entropy(model(text[:, :-1]).logits_BLV.flatten(0, 1), text[:, 1:].flatten()).backward()


def losses() -> Work:
    """Functions to time: head and cross-entropy of 2,048 tokens of width 256, forward and backward in fp32, in tiles and chunks."""
    draw = torch.Generator().manual_seed(0)
    x, targets = (
        torch.randn(SEQUENCES, 256, 256, generator=draw).requires_grad_(),
        torch.randint(VOCABULARY, (SEQUENCES, 256), generator=draw),
    )

    def loss(chunks: int, tiles: int) -> Callable[[], object]:
        rows = Rows(slice(0, VOCABULARY), 256)
        torch.nn.init.normal_(rows.weight, std=0.02)
        matrix = rows if tiles == 1 else rows.in_tiles(tiles)
        return lambda: summed_loss(x, targets, matrix, chunks=chunks).backward()

    cuts = ((1, 1), (4, 1), (16, 1), (1, 4), (16, 4))
    return {f"loss in {chunks} chunks, head in {tiles} tiles": loss(chunks, tiles) for chunks, tiles in cuts}


def bytes_of_losses() -> dict[str, float]:
    """Return name in `losses` -> peak MiB of tensors during forward and backward. Gradients were allocated before."""
    found = {}
    for what, loss in losses().items():
        loss()
        with Alive() as alive:
            loss()
        found[what] = alive.most / 2**20
    return found


def idle_groups() -> dict[str, float]:
    """Return text with a number of process groups -> number of cores that IDLE_RANKS waiting ranks keep busy."""
    found = {}
    for count in GROUPS:
        busy = run_on_ranks(_idle, IDLE_RANKS, count)
        found[f"{IDLE_RANKS} ranks that wait, {count} groups each"] = sum(busy) / IDLE_S
    return found


def _idle(rank: int, count: int) -> float:
    """Return the CPU seconds of a rank that sleeps IDLE_S seconds with `count` process groups."""
    groups = [dist.new_group(list(range(IDLE_RANKS))) for _ in range(count)]
    dist.barrier(groups[-1])
    before = time.process_time()
    time.sleep(IDLE_S)
    busy = time.process_time() - before
    dist.barrier()
    return busy
