"""Counts the bytes of one dense layer with tensor parallelism, and compares them with the closed forms of tensor_forms.py: weights,
bytes sent, and bytes kept for the backward pass. `python -m tests.counted tensor [--what kept]`

Sent bytes are counted by the communicator; kept bytes are autograd's saved tensors. A second table has the closed forms for more ranks.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from moe.checks.together import check_run
from moe.launch import exit_codes
from moe.nn.context import Context
from moe.parallelize.build import build
from moe.plan.time.layer_messages import DenseLayer
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.records.results import write_json
from parallel.mesh.grids import Grid, grid
from parallel.process import process
from parallel.process.fork import run_on_ranks
from parallel.process.process import World
from tests.counted.tensor_forms import Cost, cost

SOURCE = 32  # tokens that an encoder reads if its decoder reads LENGTH
SEQUENCES, LENGTH, WIDTH, HEADS, KV_HEADS, HEAD_SIZE, HIDDEN = 36, 8, 72, 24, 12, 4, 144
FORMS = (("1d", 2), ("1d", 4), ("sliced", 2), ("sliced", 4), ("2d", 4), ("2d", 9), ("2.5d", 8), ("3d", 8))
OVERLAPPED = (("1d", 2, 3), ("sliced", 2, 3))  # (form, ranks, tensor.overlap_chunks)
ON_PAPER = (4, 8, 16, 64)
PAPER = DenseLayer(tokens=4 * 2048, width=12288, heads=96, head_size=128, kv_heads=96, hidden=4 * 12288, gated=False, itemsize=2)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main(*, what: Literal["sent", "kept"] = "sent", nproc: int = 4, json: str | None = None) -> int:
    """Print the measured rows and the table of closed forms. Return 1 if sent bytes differ from the closed form, or others by over 5 %."""
    torch.set_num_threads(1)
    rows = []
    forms = [(*form, 1, source) for form in FORMS for source in (0, SOURCE)] + [(*form, 0) for form in OVERLAPPED]
    for kind, ranks, chunks, source in forms:
        for precision in DTYPES if ranks <= max(nproc, 4) or nproc >= 8 else ():
            found = measured(kind, ranks, precision, chunks=chunks, source=source)
            for row in (row for row in found if (row["what"] == "sent") == (what == "sent")):
                rows.append(row)
                print_row(row)
    table = on_paper()
    if json:
        write_json(json, verb=f"counted tensor, {what}", rows=rows, on_paper=table)
    return exit_codes.of(all(row["passed"] for row in rows))


def measured(kind: str, ranks: int, precision: str, *, chunks: int = 1, source: int = 0) -> list[dict[str, Any]]:
    """Return the rows "sent", "weights" and "kept" of one form of tensor parallelism. chunks: tensor.overlap_chunks. source: tokens of an
    encoder, SOURCE or 0.
    Sent bytes (mean over ranks) must equal the closed form; for 1D and sliced also the number of calls. Weights and kept bytes (maximum
    over ranks) must agree within 5 %."""
    of = DenseLayer(
        SEQUENCES * LENGTH, WIDTH, HEADS, HEAD_SIZE, KV_HEADS, HIDDEN, itemsize=DTYPES[precision].itemsize, source=SEQUENCES * source
    )
    form = grid(kind, ranks)
    assert form is not None
    theory = cost(form, of, chunks=chunks)
    found = run_on_ranks(_measure, ranks, kind, ranks, precision, chunks, source)
    name, calls = (
        f"tensor {kind}" + (f" in {chunks} chunks" if chunks > 1 else "") + (" with cross" if source else ""),
        max(one["calls"] for one in found),
    )
    rows = []
    for what, expected in {"sent": theory.forward + theory.backward, "weights": theory.weights, "kept": theory.kept}.items():
        got = sum(one["sent"] for one in found) / ranks if what == "sent" else max(one[what] for one in found)
        row = {"kind": name, "ranks": ranks, "precision": precision, "what": what, "calls": calls, "expected_calls": theory.calls}
        row |= {"measured_bytes": got, "expected_bytes": expected, "error": got / expected - 1}
        exact = got == expected and theory.calls in (None, calls)
        rows.append(row | {"passed": exact if what == "sent" else abs(got / expected - 1) <= 0.05})
    return rows


def print_row(row: dict[str, Any]) -> None:
    failed = "" if row["passed"] else "  FAIL"
    both = f"{row['measured_bytes']:>12,.0f}{row['expected_bytes']:>12,}{row['error']:>8.2%}{failed}"
    calls = f"  {row['calls']} calls" if row["what"] == "sent" else ""
    print(f"{row['kind']:<27}{row['ranks']:>3} {row['precision']:<6}{row['what']:<9}{both}{calls}", flush=True)


def run_of(kind: str, ranks: int, precision: str, *, chunks: int = 1, source: int = 0) -> Run:
    """Return the recipe of a model of one dense layer with this form of tensor parallelism, or with `source` of an encoder-decoder, in
    which layer 2 computes no position bias."""
    values: dict[str, dict[str, Any]] = {
        "model": {
            "num_layers": 1, "d_model": WIDTH, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "d_ff": HIDDEN,
            "ffn": "swiglu", "norm": "layernorm", "max_length": LENGTH, "moe_every": 0, "tied_embeddings": False,
        },
        "degrees": {"tp": ranks},
        "tensor": {"kind": "1d" if kind == "sliced" else kind, "sequence_parallel": kind == "sliced", "overlap_chunks": chunks},
        "precision": {"compute": precision},
        "train": {"global_batch": SEQUENCES, "eval_sequences": SEQUENCES},
    }  # fmt: skip
    if source:
        values["model"] |= {"kind": "encoder_decoder", "num_layers": 3, "encoder_layers": 1, "positions": "t5", "max_length": source}
        values["data"] = {"objective": "span_corruption"}
    return check_run(build_run(values), ranks)


def _measure(rank: int, kind: str, ranks: int, precision: str, chunks: int, source: int) -> dict[str, int]:
    run = run_of(kind, ranks, precision, chunks=chunks, source=source)
    mesh = process.connect(run.mesh_degrees(), World(rank, ranks))
    model, _ = build(run, mesh, device=torch.device("cpu"))
    layer = model.layers[-1]
    form = run.tp_grid()
    sequences, slices = SEQUENCES // form.sequences, ranks if kind == "sliced" else 1
    sizes = ((sequences, length // slices, WIDTH // form.columns) for length in (LENGTH, source))
    x, encoded = (torch.randn(size).to(DTYPES[precision]).requires_grad_() for size in sizes)
    context = Context.of(torch.zeros(sequences, LENGTH, dtype=torch.long))
    parameters = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept: dict[int, tuple[Tensor, int]] = {}  # address -> (tensor, bytes); holding the tensors prevents that an address is used again

    def note(saved: Tensor) -> Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved, saved.untyped_storage().nbytes()
        return saved

    mesh.communicator.reset_counts()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        out, _ = layer(x, context, None, encoded if source else None)
    # tensors of at most LENGTH * HEAD_SIZE elements are rotary angles, which do not count
    held = sum(size for at, (saved, size) in kept.items() if at not in parameters and saved.numel() > LENGTH * HEAD_SIZE)
    out.backward(torch.randn_like(out))
    counts = mesh.communicator.counts().values()
    weights = sum(p.numel() for name, p in layer.named_parameters() if "norm" not in name) * DTYPES[precision].itemsize
    return {"sent": sum(c.sent for c in counts), "calls": sum(c.calls for c in counts), "kept": held, "weights": weights}


def on_paper() -> list[dict[str, Any]]:
    """Return and print the closed forms for a layer of GPT-3's width in bf16 on ON_PAPER ranks, for each possible grid."""
    rows: list[dict[str, Any]] = []
    print(f"\n{'a layer of 12,288, 8,192 tokens, bf16':<38}{'ranks':>6}{'grid':>12}{'weights':>10}{'kept':>10}{'sent':>10}  MiB a rank")
    for ranks in ON_PAPER:
        for form in forms_of(ranks):
            found: Cost = cost(form, PAPER)
            kind, sides = form.kind, str(form)
            row = {"kind": f"tensor {kind}", "ranks": ranks, "grid": sides, "weights": found.weights, "kept": found.kept}
            rows.append(row | {"sent": found.forward + found.backward})
            print(
                f"tensor {kind:<31}{ranks:>6}{sides:>12}" + "".join(f"{rows[-1][n] / 2**20:>10,.1f}" for n in ("weights", "kept", "sent"))
            )
    return rows


def forms_of(ranks: int) -> list[Grid]:
    """Return every possible grid of this number of ranks, with every depth from 2 for 2.5D."""
    forms = [("1d", None), ("sliced", None), ("2d", None), *(("2.5d", depth) for depth in range(2, ranks)), ("3d", None)]
    return [made for kind, depth in forms if (made := grid(kind, ranks, depth))]
