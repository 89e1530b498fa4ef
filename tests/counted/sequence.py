"""Counts the bytes that one layer of sequence-parallel attention sends, or saves for the backward pass, and compares them with the closed
forms of parallel/sequence/kinds.py, which must be exact: `python -m tests.counted sequence [--what kept]`.

Sent bytes are counted by the communicator; kept bytes are autograd's saved tensors. A second table has the closed forms for more ranks.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from moe.launch import exit_codes
from moe.records.results import write_json
from parallel.mesh.mesh import Axis, Degrees
from parallel.process import process
from parallel.process.fork import run_on_ranks
from parallel.process.process import World
from parallel.sequence.kinds import SEQUENCES, Attention, SequenceKind
from parallel.sequence.order import Order
from parallel.sequence.ulysses import Ulysses

LENGTH, HEADS, KV_HEADS, HEAD_SIZE, BATCH = 96, 12, 3, 16, 2
ON_PAPER = (4, 8, 16, 64)


def main(*, what: Literal["sent", "kept"] = "sent", nproc: int = 4, json: str | None = None) -> int:
    """Print the measured rows and the table of closed forms. Return 1 if a method's bytes differ from its closed form."""
    torch.set_num_threads(1)
    rows, table = measured(nproc, what), on_paper(what)
    if json:
        write_json(json, verb=f"counted sequence, {what}", rows=rows, on_paper=table)
    return exit_codes.of(all(row["passed"] for row in rows))


def measured(nproc: int, what: str) -> list[dict[str, Any]]:
    """Return and print a row for each method, 2 to nproc ranks, fp32 and bf16. what: "sent": bytes of all ranks together; "kept": of one
    rank."""
    rows = []
    for ranks in range(2, nproc + 1):
        for dtype in (torch.float32, torch.bfloat16) if LENGTH % (2 * ranks) == 0 and HEADS % ranks == 0 else ():
            found = run_on_ranks(_measure, ranks, ranks, dtype)
            of = Attention(BATCH, LENGTH, HEADS, KV_HEADS, HEAD_SIZE, itemsize=dtype.itemsize)
            for number, (kind, method) in enumerate(SEQUENCES.items()):
                theory = method.cost(ranks, of)
                expected = theory.forward + theory.backward if what == "sent" else theory.kept
                got = [one[number] for one in found]
                real = sum(one["sent"] for one in got) if what == "sent" else max(one["kept"] for one in got)
                row = {"kind": f"sequence {kind}", "ranks": ranks, "precision": str(dtype).removeprefix("torch."), "what": what}
                row |= {"calls": sum(one["calls"] for one in got), "measured_bytes": real, "expected_bytes": expected}
                rows.append(row | {"error": real / expected - 1, "passed": real == expected})
                print_row(rows[-1])
    return rows


def on_paper(what: str) -> list[dict[str, Any]]:
    """Return and print the bytes by formula that each method sends or keeps (`what`), on ON_PAPER ranks: 32 query heads, 8 key-value heads,
    32,768 tokens, bf16."""
    of, rows = Attention(1, 32768, 32, 8, 128, itemsize=2), []
    print(f"\n{'32,768 tokens, 32 heads, 8 of keys, bf16':<42}{'MiB a rank ' + what:>22} with 4, 8, 16, 64 ranks")
    for kind, method in SEQUENCES.items():
        costs = [method.cost(ranks, of) for ranks in ON_PAPER]
        each = [(c.forward + c.backward) / ranks if what == "sent" else c.kept for c, ranks in zip(costs, ON_PAPER, strict=True)]
        rows.append({"kind": f"sequence {kind}", "what": what} | {f"bytes_at_{ranks}": v for ranks, v in zip(ON_PAPER, each, strict=True)})
        print(f"{kind:<42}" + "".join(f"{value / 2**20:>11,.1f}" for value in each))
    return rows


def _measure(rank: int, ranks: int, dtype: torch.dtype) -> list[dict[str, int]]:
    axis = process.connect(Degrees(sp=ranks), World(rank, ranks)).axis("sp")
    return [_one(_method(kind, axis), axis, dtype) for kind in SEQUENCES.values()]


def _method(kind: SequenceKind, axis: Axis) -> Any:
    """Return the attention method on this axis, with the first of its possible orders of positions."""
    if kind.trades_heads:
        return Ulysses(axis, kind.make(Axis("alone"), Order(kind.orders[0], 1, LENGTH), None))
    return kind.make(axis, Order(kind.orders[0], axis.size, LENGTH), None)


def _one(method: Any, axis: Axis, dtype: torch.dtype) -> dict[str, int]:
    held = LENGTH // axis.size
    q, k, v = (torch.randn(BATCH, n, held, HEAD_SIZE).to(dtype).requires_grad_() for n in (HEADS, KV_HEADS, KV_HEADS))
    kept: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    axis.communicator.reset_counts()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        out = method(q, k, v)
    out.sum().backward()
    counts = axis.communicator.counts().values()
    return {"sent": sum(c.sent for c in counts), "calls": sum(c.calls for c in counts), "kept": sum(kept.values())}


def print_row(row: dict[str, Any]) -> None:
    failed = "" if row["passed"] else "  FAIL"
    print(
        f"{row['kind']:<24}{row['ranks']:>3} {row['precision']:<9}{row['what']:<5}{row['measured_bytes']:>12,}{row['expected_bytes']:>12,}"
        f"{row['error']:>8.1%}  {row['calls']} calls{failed}",
        flush=True,
    )
