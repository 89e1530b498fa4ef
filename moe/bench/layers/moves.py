"""Speed of moving rows, tokens to rows and back, compared with a copy of the same number of bytes on the same device.

    permute     tokens [T, D] -> rows [R, D], sorted by expert      reads and writes R D numbers          a copy of R D
    unpermute   rows [R, D] -> tokens [T, D], weighted by gates     reads R D and writes T D numbers      a copy of (R + T) D / 2

`share` is the copy's time divided by the move's: 1 is the full memory bandwidth. A part of `moe bench dispatch` (--only moves). Fused
kernels gather rows inside their products and do neither (docs/moe/kernels.md).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from moe.bench.layers.layers import LayerCase
from moe.bench.timing import in_turn, ratio
from moe.kernels import choose

# T tokens, D width, R rows, K choices

_BYTES = {"cpu": 2**25, "cuda": 2**33}  # bytes moved in one timing: many, so that launches and clock reads hardly count
_MOST = 64  # most repetitions of a move in one timing


def measure(cases: list[LayerCase], *, rounds: int) -> list[dict[str, Any]]:
    """Print and return a row for each case and direction."""
    print(f"\nrows moved\n  {'shape and dtype':<34} {'what':<10} {'MiB':>7} {'GB/s':>8} {'copy GB/s':>9} {'share':>6}")
    return [row for case in cases for row in _case(case, rounds=rounds)]


@torch.no_grad()
def _case(case: LayerCase, *, rounds: int) -> list[dict[str, Any]]:
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
        times = min(_MOST, max(1, _BYTES[case.device.type] // moved))
        repeated = {"ours": _repeated(move, times), "copy": _repeated(partial(copied.copy_, source), times)}
        seconds = in_turn(repeated, rounds=rounds, device=case.device)
        speed = {name: moved * times / statistics.median(values) / 1e9 for name, values in seconds.items()}
        share, dtype = ratio(seconds["copy"], seconds["ours"]), str(case.dtype).removeprefix("torch.")
        row = {"kind": "moves", "what": what, "shape": list(vars(s).values()), "dtype": dtype, "bytes": moved}
        row |= {"gb_per_s": speed["ours"], "copy_gb_per_s": speed["copy"], "share": share}
        cells = f"{moved / 2**20:>7.1f} {speed['ours']:>8.1f} {speed['copy']:>9.1f} {share:>6.2f}"
        print(f"  {f'{s} {dtype}':<34} {what:<10} {cells}", flush=True)
        found.append(row)
    return found


def _repeated(run: Callable[[], object], times: int) -> Callable[[], None]:
    def work() -> None:
        for _ in range(times):
            run()

    return work
