"""Compiles the Triton kernels for a GPU that need not be present. Runs in its own process, because the test process interprets them.

    python -m tests.support.compiled 90 [CASE ...]        one line of JSON for each kernel: what ptxas says of it, its instructions

The interface runs forward and backward on tensors without values. Instead of launching a kernel, the kernel is compiled for these
arguments, down to machine code, as a launch would do. TRITON_CACHE_DIR must be empty, since ptxas says nothing of a kernel in the cache.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import moe.kernels.triton as kernels
from moe.kernels import triton_persistent
from moe.kernels.rows import Plan
from moe.kernels.triton import device, jitter, network, norm, router, routing, wide
from moe.kernels.triton.router import Given, Together
from moe.recipe.sections import Router, Swiglu
from parallel.numerics.weight_gradient import linear
from tests.support.networks import network_of

# limits for one program, from the table of compute capabilities in CUDA's programming guide
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}


@dataclass(frozen=True)
class Case:
    """A layer to compile. `routed`: the fused layer; otherwise its separate kernels, with dropout. `dtype`: of rows; `weights`: of the
    weights and their gradients."""

    tokens: int
    width: int
    hidden: int
    experts: int
    k: int
    ffn: str = "swiglu"
    routed: bool = True
    biases: bool = False
    dtype: torch.dtype = torch.bfloat16
    weights: torch.dtype = torch.float32


SMALL = {
    "tiles of 128 rows without a remainder": Case(1024, 256, 512, experts=4, k=3, weights=torch.bfloat16),
    "tiles of 64 rows with remainders, D and F no multiple of 16": Case(60, 72, 200, experts=6, k=2, routed=False),
    "fp32": Case(60, 80, 208, experts=6, k=2, ffn="gelu", routed=False, dtype=torch.float32),
}
PUBLISHED = {
    f"{name}, {'fp32' if dtype == torch.float32 else 'bf16'} weights": Case(*sizes, weights=dtype, **more)
    for dtype in (torch.float32, torch.bfloat16)
    for name, sizes, more in (
        ("mixtral", (8192, 4096, 14336, 8, 2), {}),
        ("glam", (32768, 8192, 32768, 64, 2, "geglu"), {}),
        ("qwen3-30b-a3b", (4096, 2048, 768, 128, 8), {}),
        ("deepseek-v3", (16384, 7168, 2048, 64, 8), {}),
        ("gpt-oss", (16384, 2880, 2880, 32, 4), {"biases": True}),
        ("no multiple of 16", (4000, 200, 328, 16, 2, "geglu"), {}),
    )
}


def compile_instead(kernel: Any, capability: int) -> Any:
    """Return a function that replaces a kernel's launch and only compiles. As in a launch, pointers count as aligned, integers divisible by
    16 are marked, and 1 and None are constants."""
    seen: set[str] = set()

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
        if (key := source.hash() + str(options)) in seen:
            return
        seen.add(key)
        with redirect_stdout(StringIO()) as said:
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        dtype = next(value.dtype for value in given.values() if isinstance(value, Tensor))
        tile = "x".join(str(given[f"BLOCK_{side}"]) for side in "MNK") if "BLOCK_M" in given else ""
        out = given["out"].dtype if kernel.__name__ == "weights" else dtype
        found = {"kernel": kernel.__name__, "dtype": str(dtype), "out": str(out), "tile": tile, "even": given.get("EVEN"), **options}
        print(json.dumps(found | report(compiled, said.getvalue())), flush=True)

    return launch


def report(compiled: Any, said: str) -> dict[str, Any]:
    """Return what ptxas said of a kernel, and facts read in its code. `buffers`: the fewest copies of a tile under way to shared memory."""
    ptx = compiled.asm["ptx"]
    buffers = re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x[a-z]", compiled.asm["ttgir"])
    return {
        "shared": compiled.metadata.shared,
        "registers": max(map(int, re.findall(r"Used (\d+) registers", said))),
        "spilled": max(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", said))),
        "warnings": sorted(set(re.findall(r"\bC7\d{3}\b", said))),
        "buffers": min(map(int, buffers), default=1),
        "asynchronous": bool(re.search(r"cp\.async|cp\.async\.bulk", ptx)),
        "narrow_loads": bool(re.search(r"ld\.global\S*\.b16", ptx)),
        "tensor_cores": bool(re.search(r"wgmma|mma\.sync|tcgen05\.mma", ptx)),
        "tf32": "tf32" in ptx,
    }


def route(preset: str, *, tokens: int, num_experts: int) -> None:
    """Run a router forward and backward."""
    spec, scores = Router(preset=preset, z_weight=0.1), torch.rand(tokens, num_experts, requires_grad=True)
    expert = scores.topk(spec.num_choices).indices
    bias, valid = (torch.rand(num_experts), torch.rand(tokens) > 0.5) if spec.bias_rate else (None, None)
    groups = (spec.top_groups, spec.expert_groups)
    for given in (None, expert)[: 2 if valid is not None else 1]:
        exchange = None if given is None else lambda chosen, _: Together(torch.ones(2, num_experts, dtype=torch.int32), chosen > 0)
        fused = kernels.route(scores, Given(2, 9, bias, valid, groups, given, given, exchange), spec)
        (fused.gate_TK.sum() + fused.loss).backward()


def sort(*, tokens: int, num_experts: int, k: int) -> None:
    """Run the kernels that choose experts and sort the choices."""
    scores = torch.rand(tokens, num_experts)
    kernels.top_k(scores, k)
    expert = scores.topk(k).indices
    kept = torch.ones_like(expert, dtype=torch.bool)
    kernels.kept(expert, kept, num_groups=2, num_experts=num_experts, slots_each=7)
    kernels.plan(expert, kept, num_experts=num_experts)
    kernels.queues(expert, torch.arange(tokens), mine=range(9), num_groups=2, num_experts=num_experts, slots_each=7, counted=k)
    kernels.by_bin(torch.ones(4, num_experts // 4, dtype=torch.int64), total=num_experts)


def compute(c: Case, *, capability: int) -> None:
    """Run forward and backward of the case's layer on tensors without values. `triton_persistent` needs capability 90."""
    whole = {"dtype": torch.int64, "device": "meta"}
    plan = Plan(torch.empty(c.tokens * c.k, **whole), torch.empty(c.tokens, c.k, **whole), torch.empty(c.experts, **whole))  # type: ignore[arg-type]
    x = torch.empty(c.tokens, c.width, dtype=c.dtype, device="meta", requires_grad=True)
    gate = torch.empty(c.tokens, c.k, device="meta", requires_grad=True)
    gated = "glu" in c.ffn

    def weight(*shape: int) -> Tensor:
        return torch.empty(c.experts, *shape, dtype=c.weights, device="meta", requires_grad=True)

    matrices = [weight(c.width, c.hidden), weight(c.hidden, c.width), weight(c.width, c.hidden)][: 3 if gated else 2]
    more = {"b1": weight(c.hidden), "b3": weight(c.hidden), "swiglu": Swiglu(alpha=1.702, limit=7.0, offset=1.0)} if c.biases else {}
    experts = network_of(c.ffn, *matrices, **more)
    if c.routed:
        for module in (kernels, triton_persistent)[: 2 if capability >= 90 else 1]:
            module.routed_ffn(x, gate, plan, experts).sum().backward()
        return
    dropped = torch.empty(c.tokens * c.k, c.hidden, dtype=c.dtype, device="meta")
    y = kernels.reorder(kernels.permute(x, plan), plan.choice_R)
    counts = [c.tokens * c.k // c.experts] * c.experts
    y = network.grouped_ffn(y, experts, counts=counts, dropped_RF=dropped)
    kernels.combine(y, gate, plan).sum().backward()


def main(capability: int, names: list[str]) -> None:
    """Compile these cases of PUBLISHED; without a name, the kernels of routing and the cases of SMALL."""
    triton.knobs.nvidia.dump_ptxas_log = True
    for module in (kernels.gemm, kernels.moves, norm, router, jitter, wide, triton_persistent):  # type: ignore[attr-defined]
        for kernel in vars(module).values():
            if isinstance(kernel, triton.JITFunction):
                kernel.run = compile_instead(kernel, capability)
    for module in (network, norm, routing, router, routing, jitter, wide, triton_persistent):
        module.on = lambda tensor: nullcontext()  # type: ignore[attr-defined]
    device._shared_bytes = lambda _: SHARED_BYTES[capability]  # type: ignore[assignment]
    triton_persistent.has_tma, triton_persistent.multiprocessors = lambda _: True, lambda _: 132  # type: ignore[assignment]
    device._l2_bytes = lambda _: 50 * 2**20  # type: ignore[assignment]
    if not names:
        route("glam", tokens=120, num_experts=60)
        route("deepseek_v3", tokens=2000, num_experts=256)
        sort(tokens=2000, num_experts=256, k=8)
        x, place = torch.empty(300, 7168, dtype=torch.bfloat16, device="meta", requires_grad=True), torch.arange(300, device="meta")
        kernels.jittered(x, place, key=1, size=0.01).sum().backward()
        weight = torch.empty(256, 7168, device="meta", requires_grad=True)
        linear(x, weight, dtype=torch.float32, kernels=wide).sum().backward()
        for width, centered in ((7168, False), (8192, True)):
            x, gain = torch.empty(300, width, dtype=torch.bfloat16, device="meta", requires_grad=True), torch.empty(width, device="meta")
            norm.norm(x, gain.requires_grad_(), centered=centered, eps=1e-6).sum().backward()
    for case in [PUBLISHED[name] for name in names] or SMALL.values():
        compute(case, capability=capability)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
