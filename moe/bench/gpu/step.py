"""Measures whole training steps of two models, and compares the losses of a tiny model with those on the CPU.

A step is forward, backward, clipping and AdamW of `Transformer`, with fp32 weights and bf16 products; clipping and AdamW are torch's own
(fused). MFU is the model's FLOPs per second (FLOPs: moe/plan/job/flops.py), divided by the measured rate of a large bf16 product.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe.bench.gpu.ceilings import ceiling
from moe.bench.gpu.part import Machine, Row, each, failures, table
from moe.bench.timing import wait

if TYPE_CHECKING:  # these need pydantic, which a machine with a GPU may lack: __main__.py then leaves these parts out
    from moe.model.transformer import Transformer
    from moe.recipe import sections

# whether the device is a GPU -> name of a model -> sections of its recipe, vocab_size, and batch (sequences in a step)
MODELS: dict[bool, dict[str, dict[str, Any]]] = {
    True: {
        "dense 1.3B": {
            "model": dict(num_layers=24, d_model=2048, num_heads=16, d_ff=5632, ffn="swiglu", max_length=2048, tied_embeddings=False),
            "vocab_size": 32000, "batch": 8,
        },
        "Qwen3-30B-A3B, 4 layers": {
            "model": dict(
                num_layers=4, d_model=2048, num_heads=32, num_kv_heads=4, head_size=128, d_ff=6144, ffn="swiglu", qk_norm="heads",
                max_length=4096, moe_every=1, tied_embeddings=False,
            ),
            "experts": dict(num_experts=128, d_ff=768), "router": dict(preset="qwen3_moe"), "vocab_size": 32000, "batch": 4,
        },
    },
    False: {
        "sparse": {
            "model": dict(num_layers=2, d_model=32, num_heads=4, d_ff=48, ffn="swiglu", max_length=16, moe_every=2, tied_embeddings=False),
            "experts": dict(num_experts=4, d_ff=24), "router": dict(preset="mixtral"), "vocab_size": 64, "batch": 2,
        },
    },
}  # fmt: skip
STEPS = {True: 10, False: 2}  # whether the device is a GPU -> number of timed steps
TOP = 30  # largest number of GPU kernels that are listed
LOSSES = 10  # number of steps with compared losses


def step_rows(machine: Machine, before: dict[str, list[Row]]) -> list[Row]:
    peak = ceiling(before, "bfloat16")
    ways = {"": False, ", compiled": True} if machine.gpu else {"": False}
    models = MODELS[machine.gpu].items()
    return each({name + end: partial(_timed, machine, sizes, peak, compiled) for name, sizes in models for end, compiled in ways.items()})


def step_page(rows: Sequence[Row]) -> list[str]:
    heads = ("step", "s", "tokens/s", "TF/s", "MFU", "GiB", "waits for the GPU")
    keys = ("what", "seconds", "tokens_per_s", "tf_per_s", "mfu", "gib", "synchronizations")
    made = [row for row in rows if "failed" not in row]
    spent = [f"{row['what']}: {1e3 * s:.2f} ms a step in {name}" for row in made for name, s in row["kernels"][:5]]
    return [*table([[row[key] for key in keys] for row in made], heads), *spent, *failures(rows)]


def loss_rows(machine: Machine, before: dict[str, list[Row]]) -> list[Row]:
    """Return a row for each dtype: ten losses of the tiny model on the device. The row passes if a second run gives the same bits, and if
    the losses' relative difference from fp32 on the CPU is at most `limit`."""
    found = []
    sizes = MODELS[False]["sparse"]
    here = _losses(sizes, torch.device("cpu"), torch.float32)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2.0**-7)):
        there, again = (_losses(sizes, machine.device, dtype) for _ in range(2))
        apart = max(abs(a / b - 1) for a, b in zip(there, here, strict=True))
        row: Row = {"dtype": str(dtype).removeprefix("torch."), "losses": there, "apart": apart, "limit": limit}
        found.append(row | {"same_twice": there == again, "passed": apart <= limit and there == again})
    return found


def loss_page(rows: Sequence[Row]) -> list[str]:
    cells = [(r["dtype"], r["apart"], r["limit"], "yes" if r["same_twice"] else "NO", "yes" if r["passed"] else "NO") for r in rows]
    return table(cells, ("losses of ten steps", "largest relative difference from the CPU in fp32", "limit", "same bits twice", "passed"))


def _run(sizes: dict[str, Any]) -> sections.Run:
    from moe.recipe import sections

    model = sections.Model(vocab_size=sizes["vocab_size"], **sizes["model"])
    return sections.Run(
        model=model, experts=sections.Experts(**sizes.get("experts", {})), router=sections.Router(**sizes.get("router", {}))
    )


def _model(run: sections.Run, device: torch.device, compute: torch.dtype) -> Transformer:
    from moe.model.transformer import Transformer

    model = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size, compute=compute)
    return model.to(device).train()


def _step(model: Transformer, tokens_BL: Tensor) -> Callable[[], Tensor]:
    """Return a function that takes one training step on these tokens and returns the loss. It does not wait for the GPU."""
    from moe.nn.context import Context

    read_BL, next_BL = tokens_BL[:, :-1].contiguous(), tokens_BL[:, 1:].contiguous()
    context = Context.of(read_BL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=tokens_BL.is_cuda)

    def step() -> Tensor:
        loss: Tensor = model(read_BL, context, next_BL).loss / next_BL.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _tokens(run: sections.Run, batch: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(run.vocab_size, (batch, run.model.max_length + 1), generator=generator).to(device)


def _timed(machine: Machine, sizes: dict[str, Any], peak: float | None, compiled: bool) -> list[Row]:
    from moe.parallelize.compiled import compile_between_products
    from moe.plan.job.flops import size

    run, steps = _run(sizes), STEPS[machine.gpu]
    if machine.gpu:
        torch.cuda.reset_peak_memory_stats(machine.device)
    model = _model(run, machine.device, torch.bfloat16)
    if compiled:
        compile_between_products(model)
    step = _step(model, _tokens(run, sizes["batch"], machine.device))
    step(), step()  # two warm-up steps: they compile kernels and allocate the optimizer's states
    wait(machine.device)
    started = time.perf_counter()
    for _ in range(steps):
        step()
    wait(machine.device)
    seconds = (time.perf_counter() - started) / steps
    tokens = sizes["batch"] * run.model.max_length
    rate = size(run).training * tokens / seconds / 1e12
    row: Row = {"seconds": seconds, "tokens_per_s": tokens / seconds, "tf_per_s": rate, "mfu": peak and rate / peak}
    row["gib"] = torch.cuda.max_memory_allocated(machine.device) / 2**30 if machine.gpu else None
    return [row | {"synchronizations": _synchronizations(machine, step), "kernels": _kernels(machine, step)}]


def _synchronizations(machine: Machine, step: Callable[[], Tensor]) -> int | None:
    """Return the number of times that one step waits for the GPU, counted by CUDA; None on a CPU."""
    if not machine.gpu:
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in seen)


def _kernels(machine: Machine, step: Callable[[], Tensor]) -> list[tuple[str, float]]:
    """Return (name, seconds) of the GPU kernels that take the most time in a step; on a CPU, of torch's operations."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if machine.gpu else [])]) as found:
        step()
        wait(machine.device)
    spent = [(e.key[:80], (e.self_device_time_total if machine.gpu else e.self_cpu_time_total) / 1e6) for e in found.key_averages()]
    return sorted(((name, seconds) for name, seconds in spent if seconds > 0), key=lambda one: -one[1])[:TOP]


def _losses(sizes: dict[str, Any], device: torch.device, dtype: torch.dtype) -> list[float]:
    run = _run(sizes)
    step = _step(_model(run, device, dtype), _tokens(run, sizes["batch"], device))
    return [float(step()) for _ in range(LOSSES)]
