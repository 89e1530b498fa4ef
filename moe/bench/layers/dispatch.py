"""Measures the time of one MoE layer, forward and backward in one process, and compares it with other systems and with a lower limit.

    limit   batched matrix products without routing, in which every expert has the same number of rows
    peers   installed packages: DeepSpeed MoE and AutoEP, transformers' Switch and Mixtral, torch grouped_mm, a dense network of equal
            FLOPs; on a GPU also ScatterMoE, SonicMoE and MegaBlocks. `ours-grouped_mm` is our layer with the kernels grouped_mm
    ours    the layer as in training, with router, balance loss and statistics

Each runs once in every round; ratios are medians over rounds. `over_limit` is a layer's time divided by the limit's time, `over_peers` our
time divided by the peer's (below 1: ours is faster). Peak memory counts all tensors that torch allocates during the pass, also gradients.
There are two more tables: the growth of time and memory with tokens and experts (`growth`), and the speed of permuting tokens to experts'
rows and back, compared with a plain copy (`moves`).
"""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from moe.bench.layers import gpu_layers, layers
from moe.bench.layers.layers import LayerCase, Pass, Shape
from moe.bench.timing import chosen_peers, conclude, in_turn, peak_bytes, ratio
from moe.kernels import choose
from parallel.errors import BadInput
from parallel.process.libc import keep_freed_memory
from parallel.process.process import World

SHAPES = {  # device -> Shape(tokens, model width, hidden units of an expert, experts, experts of each token)
    "cpu": (
        Shape(4096, 512, 2048, 8, 1),
        Shape(4096, 512, 2048, 8, 2),
        Shape(4096, 256, 512, 64, 2),
        Shape(4096, 256, 512, 128, 1),
        Shape(8192, 256, 256, 256, 8),
    ),
    "cuda": (
        Shape(8192, 4096, 14336, 8, 2),  # Mixtral 8x7B
        Shape(16384, 2048, 768, 128, 8),  # Qwen3-30B-A3B
        Shape(32768, 768, 3072, 128, 1),  # Switch-Base
    ),
}
GROWTH = {  # name of a row -> (small, large) shape
    "tokens x4": (Shape(4096, 256, 512, 64, 1), Shape(16384, 256, 512, 64, 1)),
    "experts 8 to 256": (Shape(8192, 256, 256, 8, 1), Shape(8192, 256, 256, 256, 1)),
}

Make = Callable[[LayerCase], Pass]
# in OURS and PEERS: activation -> implementation -> function that makes the pass to time
OURS: dict[str, dict[str, Make]] = {
    "relu": {"ours": partial(layers.ours, ffn="relu"), "ours, fp32 weights": partial(layers.ours, ffn="relu", master=torch.float32)},
    "swiglu": {"ours swiglu": partial(layers.ours, ffn="swiglu")},
}
PEERS: dict[str, dict[str, Make]] = {
    "relu": {
        "deepspeed": layers.deepspeed,
        "transformers-switch": layers.hf_switch,
        "grouped_mm": layers.grouped_mm,
        "dense": layers.dense,
        **{name: partial(make, ffn="relu") for name, make in gpu_layers.LAYERS.items()},
    },
    "swiglu": {
        "ours-grouped_mm": partial(layers.ours, ffn="swiglu", kernels="grouped_mm"),
        **{f"transformers-mixtral-{form}": partial(layers.hf_mixtral, form=form) for form in ("eager", "batched_mm", "grouped_mm")},
        "deepspeed-autoep": layers.deepspeed_autoep,
        **{name: partial(make, ffn="swiglu") for name, make in gpu_layers.LAYERS.items()},
    },
}
TABLES = ("growth", "moves")  # tables after the main one; --only NAME makes this one alone
MOVED_BYTES = {"cpu": 2**25, "cuda": 2**33}  # bytes moved in one timing: enough that launching kernels takes a negligible part of it
MOST_MOVES = 64  # largest number of times that one timing repeats the permutation of tokens


def main(*, peers: str = "all", only: str | None = None, rounds: int = 7, json: str | None = None) -> int:
    """`moe bench dispatch`. Returns 1 if the cosine similarity of a peer's outputs and ours is too small (`_same`). Speed is only reported.
    peers: all, none, or comma-separated names. only: text that a row must contain, or a name in TABLES."""
    chosen = chosen_peers(peers, list(dict.fromkeys(name for family in PEERS.values() for name in family)))
    keep_freed_memory()
    device = World().device
    dtypes = (torch.bfloat16,) if device.type == "cuda" else (torch.float32, torch.bfloat16)
    balanced = [LayerCase(shape, dtype, "balanced", device) for shape in SHAPES[device.type] for dtype in dtypes]
    cases = [case for one in balanced for case in (one, replace(one, routing="skewed")) if only is None or only in _label(case)]
    if not cases and only not in TABLES:
        needed = f"part of a row's text, such as E64, bf16 or skewed; or {' or '.join(TABLES)}"
        raise BadInput("--only", got=only, needed=needed, fix="leave it out")
    rows: list[dict[str, Any]] = []
    for case in cases:
        for ffn in ("relu", "swiglu"):
            rows += measure(case, ffn, [name for name in PEERS[ffn] if name in chosen], rounds=rounds)
            gc.collect()
            gc.freeze()  # later garbage collections skip the objects of loaded libraries, which saves 0.3 s each
    if only in (None, "growth"):
        rows += _growth(device, rounds=rounds)
    if only in (None, "moves"):
        rows += measure_moves(balanced, rounds=rounds)
    return conclude(json, "dispatch", rows, rounds=rounds, threads=torch.get_num_threads())


def _label(case: LayerCase) -> str:
    return f"{case.shape} {'fp32' if case.dtype == torch.float32 else 'bf16'} {case.routing}"


def measure(case: LayerCase, ffn: str, peers: list[str], *, rounds: int) -> list[dict[str, Any]]:
    """Time the limit (only the products that every implementation needs), this project's layers, and the layers of other projects whose
    names are in `peers`. ffn: relu or swiglu. Print and return a table row for each."""
    if ffn == "swiglu" and not peers:
        return []
    mine = {name: make for name, make in OURS[ffn].items() if case.dtype != torch.float32 or "fp32 weights" not in name}
    limit, first = f"limit {ffn}", next(iter(mine))
    makes: dict[str, Make] = {limit: partial(layers.limit, ffn=ffn), **mine, **{p: PEERS[ffn][p] for p in peers}}
    made = {name: _made(case, name, make) for name, make in makes.items()}
    passes = {name: one for name, one in made.items() if isinstance(one, Pass)}
    seconds = in_turn(passes, rounds=rounds, device=case.device)
    peaks = {name: _peak(run, case.device) for name, run in passes.items()}
    print(f"\n{_label(case)}\n  {'implementation':<32} {'ms':>8} {'over limit':>10} {'ours over it':>12} {'peak MiB':>9}")
    about = {"shape": list(vars(case.shape).values()), "dtype": str(case.dtype).removeprefix("torch."), "routing": case.routing}
    rows: list[dict[str, Any]] = []
    for name in passes:
        kind = "limit" if name == limit else "ours" if name in mine else "peer"
        row: dict[str, Any] = {**about, "implementation": name, "kind": kind, "seconds": statistics.median(seconds[name])}
        row |= {"over_limit": ratio(seconds[name], seconds[limit]), "peak_bytes": peaks[name]}
        if kind == "ours":
            row["over_peers"] = {p: ratio(seconds[name], seconds[p]) for p in peers if p in passes}
            row["over_peers_bytes"] = {p: peaks[name] / peaks[p] for p in peers if p in passes}
        if name in peers and name != "dense":
            row["passed"] = _same(passes[first], passes[name])
        rows.append(row)
        over = f"{ratio(seconds[first], seconds[name]):.2f}" if kind == "peer" else ""
        cells = f"{row['seconds'] * 1e3:>8.1f} {row['over_limit']:>10.2f} {over:>12} {peaks[name] / 2**20:>9.1f}"
        print(f"  {name:<32} {cells}{'' if row.get('passed', True) else '  RESULT DIFFERS FROM OURS'}", flush=True)
    for name, reason in ((name, one) for name, one in made.items() if isinstance(one, str)):
        print(f"  {name:<32} {reason}")
        rows.append({**about, "implementation": name, "kind": "peer", "not_run": reason})
    return rows


def _made(case: LayerCase, name: str, make: Make) -> Pass | str:
    """Make the layer `name` and return its Pass. If it cannot run, return the reason as text."""
    if reason := gpu_layers.why_not(name, case.device):
        return reason
    if name == "transformers-switch" and case.shape.k > 1:
        return "top-1 only"
    if name.endswith("batched_mm"):
        # batched_mm makes a copy of an expert's three matrices for each of the expert's rows, and gradients of all these copies
        needed = 2 * case.shape.rows * 3 * case.shape.width * case.shape.hidden * case.dtype.itemsize
        half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        free = torch.cuda.mem_get_info(case.device)[0] if case.device.type == "cuda" else half
        if needed > free:
            return f"not run: needs {needed / 2**30:.0f} GiB, {free / 2**30:.0f} may be used"
    try:
        made = make(case)
        if name in gpu_layers.LAYERS:
            made()  # the first pass compiles its kernels, and fails if they do not support this GPU or these sizes
        return made
    except ImportError as error:
        return f"not installed: {error.name}"
    except Exception as error:
        if name not in gpu_layers.LAYERS:
            raise
        return f"not run: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _peak(run: Pass, device: torch.device) -> int:
    gc.collect()
    run.clear()
    return peak_bytes(run, device)


def _same(ours: Pass, peer: Pass) -> bool:
    """Return whether the two output vectors of every token have a cosine similarity above 0.99. Their norms may differ, because some layers
    use other gates."""
    a_TD, b_TD = (run().detach().float().reshape(-1, run.x.shape[-1]) for run in (ours, peer))
    return bool(torch.nn.functional.cosine_similarity(a_TD, b_TD).min() > 0.99)


def _growth(device: torch.device, *, rounds: int) -> list[dict[str, Any]]:
    """Print and return a table row for each entry of GROWTH: time and memory of the large shape, divided by the small one's."""
    rows = []
    print(f"\ngrowth, fp32 balanced\n  {'what':<20} {'time':>6} {'memory':>7}")
    for what, shapes in GROWTH.items():
        small, large = (layers.ours(LayerCase(shape, torch.float32, "balanced", device), "relu") for shape in shapes)
        seconds = in_turn({"small": small, "large": large}, rounds=rounds, device=device)
        time, memory = ratio(seconds["large"], seconds["small"]), _peak(large, device) / _peak(small, device)
        rows.append({"kind": "growth", "what": what, "shapes": [str(s) for s in shapes], "time": time, "memory": memory})
        print(f"  {what:<20} {time:>6.2f} {memory:>7.2f}")
    return rows


def measure_moves(cases: list[LayerCase], *, rounds: int) -> list[dict[str, Any]]:
    """Print and return two table rows for each case: permute (tokens [T, D] to rows [R, D], sorted by expert) and unpermute (each
    token's weighted sum of its rows). `share`: time of a plain copy of equal bytes / time of the permutation. With share 1, the
    permutation has full memory bandwidth.
    """
    print(f"\nrows moved\n  {'shape and dtype':<34} {'what':<10} {'MiB':>7} {'GB/s':>8} {'copy GB/s':>9} {'share':>6}")
    return [row for case in cases for row in _moves(case, rounds=rounds)]


@torch.no_grad()
def _moves(case: LayerCase, *, rounds: int) -> list[dict[str, Any]]:
    s, kernels = case.shape, choose()
    expert_TK = case.experts_of_tokens()
    plan = kernels.plan(expert_TK, torch.ones_like(expert_TK, dtype=torch.bool), num_experts=s.experts)
    x_TD, gate_TK = case.inputs(), torch.full(expert_TK.shape, 1 / s.k, device=case.device)
    rows_RD = kernels.permute(x_TD, plan)
    work: dict[str, tuple[int, Callable[[], object]]] = {
        "permute": (2 * s.rows * s.width, lambda: kernels.permute(x_TD, plan)),
        "unpermute": ((s.rows + s.tokens) * s.width, lambda: kernels.combine(rows_RD, gate_TK, plan)),
    }
    found = []
    for what, (numbers, move) in work.items():
        moved = numbers * case.dtype.itemsize
        source = torch.ones(numbers // 2, dtype=case.dtype, device=case.device)
        copied = torch.empty_like(source)
        times = min(MOST_MOVES, max(1, MOVED_BYTES[case.device.type] // moved))
        repeated = {"ours": partial(_repeat, move, times), "copy": partial(_repeat, partial(copied.copy_, source), times)}
        seconds = in_turn(repeated, rounds=rounds, device=case.device)
        speed = {name: moved * times / statistics.median(values) / 1e9 for name, values in seconds.items()}
        share, dtype = ratio(seconds["copy"], seconds["ours"]), str(case.dtype).removeprefix("torch.")
        row = {"kind": "moves", "what": what, "shape": list(vars(s).values()), "dtype": dtype, "bytes": moved}
        row |= {"gb_per_s": speed["ours"], "copy_gb_per_s": speed["copy"], "share": share}
        cells = f"{moved / 2**20:>7.1f} {speed['ours']:>8.1f} {speed['copy']:>9.1f} {share:>6.2f}"
        print(f"  {f'{s} {dtype}':<34} {what:<10} {cells}", flush=True)
        found.append(row)
    return found


def _repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()
