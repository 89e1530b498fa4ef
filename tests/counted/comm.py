"""Bytes that each rank sends for gradients and parameters in one step, counted and compared with closed forms.

    all-reduce (DDP)                             2 (N - 1)/N of the parameters' bytes
    reduce-scatter + all-gather (ZeRO-1, -2)     2 (N - 1)/N
    two all-gathers + reduce-scatter (ZeRO-3)    3 (N - 1)/N           N: dp for dense parameters, edp for experts

Collectives are counted in torch's dispatcher (tests/counted/sent.py), so engines of DeepSpeed and torch are counted in the same way. Rows
sent to experts, and numbers such as the norm, are counted separately. ZeRO-2, ZeRO-3 and FSDP reduce gradients in each micro-batch. ZeRO-3
is measured without prefetching, which would keep some weights gathered; only the row `ahead` is measured with it.
`python -m tests.counted comm --nproc 2 --json FILE`.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal
from unittest import mock

import torch

from moe.bench.training.sharded import PLAIN, ShardedKind, kinds_of, load_engines, start, tokens_of
from moe.calibrate.own_step import CPU, Training
from moe.launch import exit_codes
from moe.plan.job.states import Storage
from moe.records.results import write_json
from moe.train.loop.step import finish
from parallel.mesh.mesh import divisors
from parallel.numerics.precision import LossScale
from parallel.process.fork import run_on_ranks
from tests.counted.sent import NUMBERS, ROWS, STATES, Sent

LENGTH = 12
TOLERANCE = 0.005  # relative: padding to equal shards adds bytes, and small weights that are not sharded need fewer


def travels(kind: ShardedKind, precision: str) -> Storage:
    """Return the bytes per element with which parameters and gradients are sent. FSDP gathers parameters in the compute dtype."""
    storage = kind.storage(precision)
    if kind.sharding.get("kind") == "fsdp" and precision != "fp32":
        return Storage(2, storage.gradients, storage.optimizer)
    return storage


def without_look_ahead() -> AbstractContextManager[Any]:
    """Return a context in which DeepSpeed's stage 3 does not prefetch. With prefetching, it would gather a small model as a whole."""
    return mock.patch.dict("parallel.data.zero3._LIMITS", {"stage3_prefetch_bucket_size": 0})


def recipe(kind: ShardedKind, ranks: int, *, sparse: bool, microbatches: int, precision: str = "fp32") -> dict[str, Any]:
    """Return the recipe of a small model. The ratio of measured bytes to the closed form does not depend on the model's size."""
    model = {"num_layers": 4, "d_model": 512, "num_heads": 4, "d_ff": 2048, "max_length": LENGTH}
    values: dict[str, Any] = {"model": model, "sharding": kind.sharding, "degrees": {"dp": ranks, "ep": 2 if sparse else 1}}
    values |= {"pipeline": {"microbatches": microbatches}, "precision": {"compute": precision}}
    values |= {"train": {"global_batch": ranks * microbatches, "eval_sequences": ranks}}
    if sparse:
        model |= {"moe_every": 2}
        values |= {"experts": {"num_experts": 4}, "router": {"preset": "switch", "capacity_factor": None}}
    return values


def sent_bytes(
    *,
    parameters: float,
    gradients: float,
    stage: int,
    copies: int,
    microbatches: int = 1,
    reduces: Literal["step", "microbatch"] = "step",
    gathers: int = 2,
) -> float:
    """Bytes that each of `copies` ranks sends in one step by ring collectives. parameters, gradients: bytes of all of them.

    A reduce-scatter or an all-gather sends (N - 1)/N of the buffer, an all-reduce twice that. Stage 0: all-reduce of gradients. Stages 1
    and 2: reduce-scatter of gradients, all-gather of new parameters. Stage 3: reduce-scatter of gradients, `gathers` all-gathers of
    parameters in each micro-batch (2: forward and backward). reduces: when gradients are sent. Source: ZeRO section 7.
    """
    reduced = gradients * (microbatches if reduces == "microbatch" else 1)
    gathered = (0, 1, 1, gathers * microbatches)[stage] * parameters
    return (copies - 1) / copies * (reduced * (2 if stage == 0 else 1) + gathered)


def expected(kind: ShardedKind, started: Training) -> float:
    """Return the bytes that a rank sends in one step by the closed form: dense parameters over dp, experts over edp, and for FSDP
    `table_bytes`."""
    held, bytes_of = {"dp": 0, "edp": 0}, travels(kind, started.run.precision.compute)
    for layout in started.layouts.values():
        parts = torch.Size(layout.local_shape(started.mesh))
        held["edp" if "edp" in layout.copies() else "dp"] += parts.numel()
    beside = table_bytes(kind, started) if kind.name == "fsdp" else 0.0
    return beside + sum(
        sent_bytes(
            parameters=held[axis] * bytes_of.parameters,
            gradients=held[axis] * bytes_of.gradients,
            stage=kind.stage,
            copies=started.mesh.axis(axis).size,
            microbatches=started.run.pipeline.microbatches,
            reduces="microbatch" if kind.stage >= 2 else "step",
        )
        for axis in held
    )


def table_bytes(kind: ShardedKind, started: Training) -> float:
    """Return the additional bytes of FSDP for a tied embedding table: it is gathered for the embedding and for the head, in both passes,
    in fp32."""
    run, dp = started.run, started.mesh.axis("dp").size
    gathers = 4 * 4 - 2 * travels(kind, run.precision.compute).parameters
    return run.pipeline.microbatches * (dp - 1) / dp * gathers * run.vocab_size * run.model.d_model


def measure(
    rank: int, ranks: int, kind: ShardedKind, sparse: bool, microbatches: int, precision: str, ahead: bool = False
) -> dict[str, Any]:
    """Return this rank's row of the table for one case, measured in the third step, in which every engine is in its steady state."""
    values = recipe(kind, ranks, sparse=sparse, microbatches=microbatches, precision=precision)
    with nullcontext() if ahead or kind.sharding.get("kind") != "zero" else without_look_ahead():
        started = start(kind, values, rank, ranks)
    engine, mesh = started.engine, started.mesh

    def step(number: int) -> None:
        batch = tokens_of(rank, sequences=microbatches, length=LENGTH, step=number)
        numbers = started.accumulate(batch, microbatches=microbatches, step=number)
        finish(engine, numbers, world=mesh.axis("world"), scale=LossScale.of("none"), lr=1e-3, clip_norm=1.0, device=CPU)

    step(0)
    step(1)
    with Sent() as sent:
        step(2)
    measured, theory = sent.bytes[STATES], expected(kind, started)
    row: dict[str, Any] = {"kind": kind.name, "model": "sparse" if sparse else "dense", "ranks": ranks, "ep": mesh.axis("ep").size}
    row |= {"microbatches": microbatches, "precision": precision, "measured_bytes": measured, "expected_bytes": theory}
    row |= {"error": measured / theory - 1, "ahead": ahead}
    if not kind.is_peer:
        row["passed"] = (row["error"] if ahead else abs(row["error"])) <= TOLERANCE
    row |= {"rows_bytes": sent.bytes[ROWS], "numbers_bytes": sent.bytes[NUMBERS]}
    calls = [
        {"collective": did, "dtype": dtype, "ranks": size, "calls": sent.calls[did, dtype, size], "bytes": count}
        for (did, dtype, size), count in sent.bytes_of.items()
    ]
    return row | {"collectives": calls}


def cases(chosen: list[ShardedKind], nproc: int) -> list[tuple[ShardedKind, int, bool, int, str, bool]]:
    """Return the arguments of `measure` for each case, with the number of ranks as (kind, ranks, sparse, micro-batches, precision, ahead).
    Dense and sparse (ep 2) models, 1 and 3 micro-batches, each number of ranks that divides nproc. Other projects' engines: only dense, in
    bf16. bf16 and prefetching: only on two ranks, because the ratio does not depend on the number of ranks."""
    numbers = [ranks for ranks in divisors(nproc) if ranks > 1]
    found = []
    for kind in chosen:
        for ranks, sparse, microbatches in itertools.product(numbers, (False,) if kind.is_peer else (False, True), (1, 3)):
            found.append((kind, ranks, sparse, microbatches, "bf16" if kind.is_peer else "fp32", False))
            if ranks == 2 and not kind.is_peer:
                found.append((kind, ranks, sparse, microbatches, "bf16", False))
        if kind.name == "zero3":
            found.append((kind, 2, False, 1, "fp32", True))
    return found


def main(*, kinds: str | None = None, nproc: int = 2, only: str | None = None, json: str | None = None) -> int:
    """Print a row for each case. Return 1 if an engine sends a number of bytes that differs from the closed form."""
    chosen = kinds_of(kinds or ",".join((*PLAIN, "deepspeed1", "deepspeed2", "deepspeed3")))
    torch.set_num_threads(1)
    load_engines(chosen)
    print(f"{'kind':<12}{'model':<8}{'ranks':>6}{'batches':>8} {'in':<6}{'bytes sent':>12}{'theory':>12}{'error':>8}  sent as")
    rows: list[dict[str, Any]] = []
    for case in cases(chosen, nproc):
        kind, ranks, sparse, *_ = case
        if only is not None and only not in f"{kind.name} {'sparse' if sparse else 'dense'}":
            continue
        row: dict[str, Any] = run_on_ranks(measure, ranks, ranks, kind, *case[2:], timeout_s=120)[0]
        rows.append(row)
        print_row(row)
    if json:
        write_json(json, verb="counted comm", rows=rows, tolerance=TOLERANCE)
    return exit_codes.of(all(row.get("passed") is not False for row in rows))


def print_row(row: dict[str, Any]) -> None:
    said = ", ".join(f"{c['calls']} {c['collective']} of {c['dtype']} over {c['ranks']}" for c in row["collectives"])
    name, failed = row["kind"] + " ahead" * row["ahead"], "" if row.get("passed", True) else "  FAIL"
    print(
        f"{name:<12}{row['model']:<8}{row['ranks']:>6}{row['microbatches']:>8} {row['precision']:<6}{row['measured_bytes']:>12,}"
        f"{row['expected_bytes']:>12,.0f}{row['error']:>8.1%}  {said}{failed}",
        flush=True,
    )
