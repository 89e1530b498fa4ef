"""Compares the Triton kernels with the plain reference in fp32. Routing decisions must be equal; other results may differ by LIMITS."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe.bench.gpu.part import Machine, Row, table
from moe.kernels import choose, cpu, reference
from moe.kernels.activation import Activation
from moe.kernels.network import Network
from moe.kernels.rows import Plan
from moe.router.losses import balance_loss, z_loss

# T tokens, K choices, E experts, D model, F hidden

# dtype -> largest relative error in the 2-norm. fp32: sums are in another order. 16 bits: twice the unit roundoff of 2^-8 or 2^-11.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# whether the device is a GPU -> the sizes (T, E, D, F) that are compared
SIZES = {True: ((257, 5, 264, 328), (1024, 8, 512, 1024), (333, 16, 200, 136)), False: ((21, 3, 36, 28),)}
NETWORKS = ("relu", "gelu", "geglu", "swiglu")
LOADS = ("even", "drops", "one takes all", "empty experts")  # how choices are spread over experts; drops: some are dropped
# Each tensor gets memory of its own: in a block that torch caches for many, a read beyond one tensor would not be seen.
_SANITIZED = "import os; os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] = '1'; from moe.bench.gpu import right; right.once()"


def rows(machine: Machine, before: dict[str, list[Row]]) -> list[Row]:
    return [*_routing(machine), *_networks(machine), *_sanitizer(machine)]


def page(rows: Sequence[Row]) -> list[str]:
    wrong = [row for row in rows if row["passed"] is False]
    worst: dict[tuple[str, str], float] = {}
    for row in rows:
        if "error" in row:
            key = (row["network"], row["dtype"])
            worst[key] = max(worst.get(key, 0.0), row["error"] / row["limit"])
    lines = table([(network, dtype, share) for (network, dtype), share in worst.items()], ("network", "dtype", "error / limit"))
    notes = [row["note"] for row in rows if "note" in row]
    ran = [row for row in rows if row["passed"] is not None]
    return [f"{len(ran) - len(wrong)} of {len(ran)} comparisons passed", *lines, *notes, *(f"WRONG: {row}" for row in wrong)]


def once() -> None:
    """Run every kernel once, forward and backward. `_sanitizer` calls it under compute-sanitizer, which checks memory accesses."""
    machine = Machine(torch.device("cuda"))
    assert all(row["passed"] for row in _networks(machine, sizes=((37, 5, 36, 44),), networks=("swiglu",), loads=("drops",)))


def _routing(machine: Machine) -> list[Row]:
    found = []
    for number, (tokens, experts, k) in enumerate(((37, 5, 2), (300, 64, 8))[: 2 if machine.gpu else 1]):
        scores_TE = _random(machine, tokens, experts, seed=number)
        active_TK = _random(machine, tokens, k, seed=number + 10) > -0.5
        kernels: tuple[Any, ...] = (choose("triton"), reference)
        chosen = [m.top_k(scores_TE, k) for m in kernels]
        kept = [m.kept(chosen[1], active_TK, num_groups=1, num_experts=experts, slots_each=3) for m in kernels]
        plans = [m.plan(chosen[1], active_TK, num_experts=experts).cut(int(active_TK.sum())) for m in kernels]
        same = {"top_k": torch.equal(*chosen), "kept": torch.equal(*kept)}
        same["plan"] = all(torch.equal(getattr(plans[0], name), getattr(plans[1], name)) for name in ("choice_R", "row_TK", "counts_E"))
        same["route"] = _routes(scores_TE, chosen[1])
        found += [{"kernel": name, "experts": experts, "passed": passed} for name, passed in same.items()]
    return found


def _routes(logits_TE: Tensor, expert_TK: Tensor) -> bool:
    """Return whether the router's kernels give the results of torch operations: equal choices; gates, loss and gradient of the logits
    equal within 1e-5."""
    from moe.kernels.triton.router import Given

    k = expert_TK.shape[1]
    spec: Any = SimpleNamespace(num_choices=k, score="softmax", softmax_over="all", gates="before_drop", gate_scale=1.0, group_score="best")
    vars(spec).update(balance_counts="all", balance_weight=0.1, z_weight=0.1)
    logits_TE = logits_TE.requires_grad_()
    fused = choose("triton").route(logits_TE, Given(1, None, None, None), spec)
    loss = 0.1 * balance_loss(logits_TE.softmax(1), expert_TK) + 0.1 * z_loss(logits_TE)
    found = []
    for gate_TK, of_losses in ((fused.gate_TK, fused.loss), (logits_TE.gather(1, expert_TK).softmax(1), loss)):
        (grad_TE,) = torch.autograd.grad(gate_TK[:, 0].sum() + of_losses, logits_TE)
        found.append((gate_TK, of_losses, grad_TE))
    close = all(torch.allclose(a, b, rtol=LIMITS[torch.float32], atol=1e-7) for a, b in zip(*found, strict=True))
    return torch.equal(fused.expert_TK, expert_TK) and close


def _networks(
    machine: Machine,
    *,
    sizes: tuple[tuple[int, int, int, int], ...] | None = None,
    networks: Sequence[str] = NETWORKS,
    loads: Sequence[str] = LOADS,
) -> list[Row]:
    found = []
    sizes = SIZES[machine.gpu] if sizes is None else sizes
    cases = list(product(sizes, networks, loads)) if machine.gpu else list(zip(sizes * 4, networks, loads, strict=False))
    for number, ((tokens, experts, width, hidden), ffn, load) in enumerate(cases):
        plan = _plan(machine, load, tokens, experts, k=1 + number % 3)
        inputs = [_random(machine, tokens, width, seed=1), _random(machine, *plan.row_TK.shape, seed=2).sigmoid()]
        shapes = [(experts, width, hidden), (experts, hidden, width), (experts, width, hidden)][: 3 if "glu" in ffn else 2]
        inputs += [_random(machine, *shape, seed=3 + n) * shape[1] ** -0.5 for n, shape in enumerate(shapes)]
        dtypes = list(LIMITS) if machine.gpu else [list(LIMITS)[number % 3]]  # Triton's interpreter is slow
        for dtype in dtypes:
            rounded = [t.to(dtype) for t in inputs]
            want = _results(reference, [t.float() for t in rounded], ffn, plan)
            for name in _kernels(machine, dtype):
                got = _results(choose(name), rounded, ffn, plan)
                error = max(_error(a, b) for a, b in zip(got, want, strict=True))
                row: Row = {"kernels": name, "network": ffn, "load": load, "sizes": [tokens, experts, width, hidden]}
                row["dtype"] = str(dtype).removeprefix("torch.")
                found.append(row | {"error": error, "limit": LIMITS[dtype], "passed": error <= LIMITS[dtype]})
    return found


def _kernels(machine: Machine, dtype: torch.dtype) -> tuple[str, ...]:
    """Return the values of `experts.kernels` to check. In fp32, and without TMA, `triton_persistent` has no kernel of its own. Without a
    GPU, the slow interpreter checks `triton_persistent` only in bf16."""
    from moe.kernels.triton.device import has_tma

    twice = dtype in ((torch.bfloat16, torch.float16) if machine.gpu else (torch.bfloat16,))
    return ("triton", "triton_persistent") if twice and has_tma(machine.device) else ("triton",)


def _results(kernels: ModuleType, inputs: list[Tensor], ffn: str, plan: Plan) -> list[Tensor]:
    """Return the layer's output, then the gradient of each of `inputs`: x [T, D], gates [T, K], w1, w2 and, if gated, w3."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    x, gate, w1, w2, *w3 = leaves
    network = Network(w1, w2, w3[0] if w3 else None, None, None, Activation(ffn, None))
    out = kernels.routed_ffn(x, gate, plan, network)
    out.backward(torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm().clamp_min(1e-20))


def _plan(machine: Machine, load: str, tokens: int, experts: int, *, k: int) -> Plan:
    scores_TE = _random(machine, tokens, experts, seed=len(load))
    if load == "one takes all":
        scores_TE[:, experts - 1] += 100
    if load == "empty experts":
        scores_TE[:, [0, experts - 1]] -= 100
    kept_TK = _random(machine, tokens, k, seed=9) > (-0.3 if load == "drops" else -100)
    return cpu.plan(scores_TE.topk(k).indices, kept_TK, num_experts=experts)


def _random(machine: Machine, *shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(machine.device)


def _sanitizer(machine: Machine) -> list[Row]:
    """Check one small layer's memory accesses with NVIDIA's compute-sanitizer. Return one row; none on a CPU."""
    if not machine.gpu:
        return []
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return [{"kernel": "all", "passed": None, "note": "not run: compute-sanitizer is not installed"}]
    words = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", _SANITIZED]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        code = process.wait(150)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # kills the tool and the program that it started
        process.wait()
        return [{"kernel": "all", "passed": None, "note": "compute-sanitizer did not end within 150 s"}]
    return [{"kernel": "all", "passed": code == 0, "note": f"compute-sanitizer memcheck: exit code {code}"}]
