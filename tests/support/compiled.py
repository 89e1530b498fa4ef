"""Compiles the Triton kernels for a GPU that need not be present. Runs in its own process, because the test process interprets them.

    python -m tests.support.compiled 90        one line of JSON for each kernel: its resources of a multiprocessor, its instructions

The interface runs forward and backward on CPU tensors. Instead of launching a kernel, the kernel is compiled for these arguments, down to
machine code, as a launch would do. Nothing is computed, so results are undefined.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import moe.kernels.triton as kernels
from moe.kernels import cpu
from moe.kernels.triton import device, network, routing, rows
from tests.support.networks import network_of

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # limit for one program, from the table of compute capabilities in CUDA's programming guide
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}


def compile_instead(kernel: Any, capability: int) -> Any:
    """Return a function that replaces a kernel's launch and only compiles. As in a launch, pointers count as aligned, integers divisible by
    16 are marked, and 1 and None are constants."""

    def launch(*args: Any, grid: Any, warmup: bool, num_warps: int = 4, num_stages: int = 3, **named: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | named
        assert all(type(n) is int and n < 2**31 for n in grid)
        constants = {p.name for p in kernel.params if p.is_constexpr}
        plain = {p.name for p in kernel.params if p.do_not_specialize}
        signature, constant, attributes = {}, {}, {}
        for place, name in enumerate(kernel.arg_names):
            value = given[name]
            if isinstance(value, Tensor):
                signature[name] = TYPES[value.dtype]
            elif name in constants or value is None or (value == 1 and name not in plain):
                signature[name], constant[(place,)] = "constexpr", value
            else:
                signature[name] = "i32"
            if signature[name] != "constexpr" and name not in plain and (isinstance(value, Tensor) or value % 16 == 0):
                attributes[(place,)] = [["tt.divisibility", 16]]
        options = {"num_warps": num_warps, "num_stages": num_stages}
        source = ASTSource(kernel, signature, constant, attributes)
        dtype = next(value.dtype for value in given.values() if isinstance(value, Tensor))
        report(f"{kernel.__name__} {dtype}", triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options), num_warps)

    return launch


def report(name: str, compiled: Any, num_warps: int) -> None:
    ptx, target = compiled.asm["ptx"], compiled.metadata.target.arch
    said = assembled(ptx, target)
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", said)]
    found: dict[str, Any] = {"kernel": name, "warps": num_warps, "stages": compiled.metadata.num_stages}
    found |= {
        "shared": compiled.metadata.shared,
        "registers": max(map(int, re.findall(r"Used (\d+) registers", said))),
        "spilled": sum(spills),
    }
    found["warnings"] = sorted(set(re.findall(r"\bC7\d{3}\b", said)))
    found |= {"tensor_cores": bool(re.search(r"wgmma|mma\.sync|tcgen05\.mma", ptx)), "tf32": "tf32" in ptx}
    print(json.dumps(found), flush=True)


def assembled(ptx: str, capability: int) -> str:
    """Return what ptxas says of a kernel: registers, bytes spilled, and warnings such as C7510 for serialised tensor core products."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        name = re.search(r"^\.target (\w+)", ptx, flags=re.M)
        assert name is not None
        command = [tool, "-v", f"--gpu-name={name[1]}", file, "-o", os.devnull]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def route(*, tokens: int, num_experts: int, k: int) -> None:
    scores = torch.rand(tokens, num_experts)
    kernels.top_k(scores, k)
    expert = scores.topk(k).indices
    kept = torch.ones_like(expert, dtype=torch.bool)
    kernels.slots(expert, kept, num_groups=2, num_experts=num_experts)
    kernels.plan(expert, kept, num_experts=num_experts)


def compute(dtype: torch.dtype, *, fused: bool, tokens: int, num_experts: int, k: int, width: int, hidden: int, ffn: str) -> None:
    """Run forward and backward of the fused MoE layer, or of its separate kernels (with dropout)."""
    expert = torch.rand(tokens, num_experts).topk(k).indices
    plan = cpu.plan(expert, torch.ones_like(expert, dtype=torch.bool), num_experts=num_experts)
    x = torch.rand(tokens, width).to(dtype).requires_grad_()
    gate = torch.rand(tokens, k, requires_grad=True)
    shapes = [(num_experts, width, hidden), (num_experts, hidden, width), (num_experts, width, hidden)]
    weights = [torch.rand(shape, requires_grad=True) for shape in shapes[: 3 if "glu" in ffn else 2]]
    experts = network_of(ffn, *weights)
    if fused:
        kernels.routed_ffn(x, gate, plan, experts).sum().backward()
        return
    dropped = torch.ones(len(plan.choice_R), hidden, dtype=dtype)
    y = kernels.reorder(kernels.permute(x, plan), torch.arange(len(plan.choice_R)))
    y = kernels.grouped_ffn(y, experts, counts=plan.counts_E.tolist(), dropped_RF=dropped)
    kernels.combine(y, gate, plan).sum().backward()


def main(capability: int) -> None:
    for module in (kernels.gemm, kernels.moves):  # type: ignore[attr-defined]
        for kernel in vars(module).values():
            if isinstance(kernel, triton.JITFunction):
                kernel.run = compile_instead(kernel, capability)
    for module in (network, rows, routing):
        module.on = lambda tensor: nullcontext()  # type: ignore[attr-defined]
    device._shared_bytes = lambda _: SHARED_BYTES[capability]  # type: ignore[assignment]
    device._l2_bytes = lambda _: 50 * 2**20  # type: ignore[assignment]
    route(tokens=120, num_experts=60, k=3)
    compute(
        torch.bfloat16, fused=True, tokens=1024, num_experts=4, k=3, width=256, hidden=512, ffn="swiglu"
    )  # tiles of 128 rows without a remainder
    compute(
        torch.bfloat16, fused=False, tokens=60, num_experts=6, k=2, width=80, hidden=208, ffn="swiglu"
    )  # tiles of 64 rows with remainders
    compute(torch.float32, fused=True, tokens=60, num_experts=6, k=2, width=80, hidden=208, ffn="gelu")


if __name__ == "__main__":
    main(int(sys.argv[1]))
