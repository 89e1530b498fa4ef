"""Measures one MoE layer: each Triton kernel compared with the device's measured rates, and the whole layer compared with other packages.

The least time of a kernel, its bound, is the longer of two: its FLOPs / the rate of a large matrix product, and the bytes that it must
read and write / the rate of a copy. `share` is this bound / the measured time. T tokens, K choices, R = T K rows, D model, F hidden,
E experts, b bytes an element. With swiglu, H = X W1, G = X W3, A = silu(H) G. O is the layer's output, `gate` the router's weight of a row,
and d marks a gradient:

    kernel     computes                               FLOPs       bytes
    up         H, G, A from X[token]                  4 R D F     (T D + 2 E D F + 3 R F) b
    product    A W2; dH W1^T + dG W3^T                6 R D F     (3 R F + 3 E D F + 2 R D) b
    back       dH, dG, gate * A from dO[token] W2^T   2 R D F     (T D + E D F + 5 R F) b
    weights    dW1, dW2, dW3                          6 R D F     (2 T D + 3 R F + 3 E D F) b

`persistent product` is the kernel `product` as the recipe's setting `experts.kernels: triton_persistent` runs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from types import ModuleType
from typing import Any

import torch

from moe.bench.gpu.ceilings import ceiling
from moe.bench.gpu.part import Machine, Row, each, failures, table
from moe.bench.layers import dispatch, layers
from moe.bench.layers.layers import LayerCase, Shape
from moe.bench.timing import wait

SHAPES = {  # whether the device is a GPU -> name in the printed table -> sizes: tokens, width, hidden, experts, choices
    True: {
        "Mixtral 8x7B": Shape(8192, 4096, 14336, 8, 2),
        "Qwen3-30B-A3B": Shape(16384, 2048, 768, 128, 8),
        "DeepSeek-V3, a rank of 32": Shape(16384, 7168, 2048, 8, 2),
        "GLaM 64B/64E, a rank of 32": Shape(8192, 8192, 32768, 2, 1),
    },
    False: {"tiny": Shape(40, 16, 24, 4, 2)},
}
H100_TF_PER_S = 800.0  # assumed rate of a large bf16 product on an H100, in 10^12 FLOPs per second
FILL = 8  # assumed time for a tile's first loads and for storing its result, in steps of the inner loop
# function in moe/kernels/triton/network.py -> name in the printed table
KERNELS = {"up": "up", "product": "product", "back": "back", "weight_gradient": "weights"}
PERSISTENT = "persistent product"
TIMES = {True: 10, False: 1}  # whether the device is a GPU -> number of timed passes


def kernel_rows(machine: Machine, before: dict[str, list[Row]]) -> list[Row]:
    return each({name: partial(_kernels, machine, shape, before) for name, shape in SHAPES[machine.gpu].items()})


def _kernels(machine: Machine, shape: Shape, before: dict[str, list[Row]]) -> list[Row]:
    from moe.kernels.triton.device import has_tma

    seconds, flops, size = _seconds_of_kernels(machine, shape, "triton"), flops_of(shape), _bytes(shape, 2)
    peak, copy = ceiling(before, "bfloat16"), ceiling(before, "copy")

    def row(name: str, kernel: str, taken: float) -> Row:
        made: Row = {"kernel": name, "seconds": taken, "tf_per_s": flops[kernel] / taken / 1e12}
        made |= {"expected": expected(kernel, shape) if any(name in machine.name for name in ("H100", "H200")) else None}
        share = max(flops[kernel] / peak / 1e12, size[kernel] / copy / 1e9) / taken if peak and copy else None
        return made if share is None else made | {"share": share}

    found, total = [row(kernel, kernel, taken) for kernel, taken in seconds.items()], sum(seconds.values())
    found.append({"kernel": "all four", "seconds": total, "tf_per_s": sum(flops.values()) / total / 1e12})
    if has_tma(machine.device):
        found.append(row(PERSISTENT, "product", _seconds_of_kernels(machine, shape, "triton_persistent")["product"]))
    return found


def kernel_page(rows: Sequence[Row]) -> list[str]:
    cells = [(r["what"], r["kernel"], 1e3 * r["seconds"], r["tf_per_s"], r.get("expected"), r.get("share")) for r in rows if "kernel" in r]
    heads = ("layer, bf16, forward and backward", "kernel", "ms", "TF/s", "expected", "share of its bound")
    return [*table(cells, heads), *failures(rows)]


def race_rows(machine: Machine, before: dict[str, list[Row]]) -> list[Row]:
    """Compare our whole layer with the other implementations in `moe bench dispatch`. Without a GPU, compare it only with itself on other
    kernels, because importing another package takes seconds."""
    work = {}
    for name, shape in SHAPES[machine.gpu].items():
        for routing in ("balanced", "skewed") if machine.gpu else ("balanced",):
            case = LayerCase(shape, torch.bfloat16, routing, machine.device)
            peers = [peer for peer in dispatch.PEERS["swiglu"] if machine.gpu or peer == "ours-grouped_mm"]
            work[f"{name}, {routing}"] = partial(dispatch.measure, case, "swiglu", peers, rounds=5 if machine.gpu else 1)
    return each(work)


def race_page(rows: Sequence[Row]) -> list[str]:
    ours = [r for r in rows if r.get("kind") == "ours"]
    cells = [(r["what"], "batched products without routing", r["over_limit"]) for r in ours]
    cells += [(r["what"], peer, ratio) for r in ours for peer, ratio in r["over_peers"].items()]
    absent = sorted({f"{r['implementation']}: {r['not_run']}" for r in rows if "not_run" in r})
    differ = [r for r in rows if r.get("kind") == "peer" and not r.get("passed", True)]
    wrong = [f"RESULT DIFFERS FROM OURS: {r['implementation']} at {r['what']}" for r in differ]
    return [*table(cells, ("layer", "compared with", "our time / its time")), *absent, *wrong, *failures(rows)]


def expected(kernel: str, shape: Shape) -> float:
    """Return the expected TF/s of a kernel on an H100 or H200. The inner loop takes steps of 64 elements, assumed to run at 0.8 of the rate
    of a large product. Each tile also takes the time of FILL steps for its first loads and its result."""
    each = shape.rows / shape.experts
    steps = {"up": shape.width / 64, "product": 1.5 * shape.hidden / 64, "back": shape.width / 64, "weights": each / 64}[kernel]
    return H100_TF_PER_S * 0.8 * steps / (steps + FILL)


def flops_of(s: Shape) -> dict[str, float]:
    once = 2.0 * s.rows * s.width * s.hidden
    return {"up": 2 * once, "product": 3 * once, "back": once, "weights": 3 * once}


def _bytes(s: Shape, each: int) -> dict[str, float]:
    tokens, hidden, rows, matrix = s.tokens * s.width, s.rows * s.hidden, s.rows * s.width, s.experts * s.width * s.hidden
    numbers = {"up": tokens + 2 * matrix + 3 * hidden, "product": 3 * hidden + 3 * matrix + 2 * rows}
    numbers |= {"back": tokens + matrix + 5 * hidden, "weights": 2 * tokens + 3 * hidden + 3 * matrix}
    return {kernel: float(each * number) for kernel, number in numbers.items()}


def _seconds_of_kernels(machine: Machine, shape: Shape, kernels: str) -> dict[str, float]:
    """Return a dict: kernel -> its seconds in one pass of the layer, mean over TIMES passes. kernels: value of experts.kernels."""
    run = layers.ours(LayerCase(shape, torch.bfloat16, "balanced", machine.device), "swiglu", kernels=kernels)
    if machine.gpu:
        run()  # compiles
    from moe.kernels.triton import network

    seconds, times = dict.fromkeys(KERNELS.values(), 0.0), TIMES[machine.gpu]
    with _timed(machine, network, seconds):
        for _ in range(times):
            run()
    return {kernel: total / times for kernel, total in seconds.items()}


@contextmanager
def _timed(machine: Machine, module: ModuleType, seconds: dict[str, float]) -> Iterator[None]:
    """Within the context, time the functions of `module` that KERNELS names. Each call adds its time to `seconds` (name in the printed
    table -> seconds), and waits for the GPU before and after."""
    plain = {name: getattr(module, name) for name in KERNELS}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            wait(machine.device)
            started = time.perf_counter()
            result = function(*args, **named)
            wait(machine.device)
            seconds[KERNELS[name]] += time.perf_counter() - started
            return result

        return call

    try:
        for name, function in plain.items():
            setattr(module, name, timed(name, function))
        yield
    finally:
        for name, function in plain.items():
            setattr(module, name, function)
