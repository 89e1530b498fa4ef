"""Faults in outside programs of plain torch, DeepSpeed and transformers, for `moe verify --compare`: is each found, and named?

A row for each fault of tests/peers/programs. A try is lost if the comparison finds nothing; `named` is true if the first deviation in
forward or backward order has the right module or parameter and the right cause. Rows "clean": runs without a fault, which must be equal.
With `full`, ten clean runs of each program in fp32 and in bf16; otherwise one.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from tests.campaigns.faults import Row
from tests.peers.programs.run import compared, opened, program, record_many, record_one

PROGRAMS = (
    "ddp",
    "fsdp_ep",
    "tensor",
    "megatron_tp",
    "megatron_cp",
    "deepspeed_moe",
    *(("transformers_ep",) if find_spec("transformers") else ()),
)


def rows(*, full: bool = False, rounds: int | None = None, only: str = "") -> Iterator[Row]:
    """Yield a row for each fault, and for clean runs of each program and dtype. rounds: number of clean runs."""
    with tempfile.TemporaryDirectory() as folder:
        for name in PROGRAMS:
            home = Path(folder) / name
            faults = [fault for fault in program(name).FAULTS if only in f"{name}: {fault}"]
            if faults:
                record_one(name, home / "one")
            for fault in faults:
                named: list[bool] = []
                row = Row.of(f"{name}: {fault}", 1, partial(_faulty, name, fault, home, named))
                row.more["named"] = all(named)
                yield row
            for dtype in (torch.float32, torch.bfloat16):
                title = f"{name}: clean in {str(dtype).removeprefix('torch.')}"
                if only in title:
                    yield Row.of(title, rounds or (10 if full else 1), partial(_clean, name, dtype, home))


def _faulty(name: str, fault: str, home: Path, named: list[bool], _: int) -> tuple[str, float]:
    began = time.perf_counter()
    code, first, said = compared(home / "one", record_many(name, home / "many", fault=fault))
    where, word, *_ = program(name).FAULTS[fault]
    named.append(any(row["name"].startswith(where) and word in row["cause"] for row in first))
    problem = "" if code else "not found"
    return problem, time.perf_counter() - began


def _clean(name: str, dtype: torch.dtype, home: Path, seed: int) -> tuple[str, float]:
    began = time.perf_counter()
    one = record_one(name, home / "clean", dtype=dtype, seed=seed)
    code, _, said = compared(one, record_many(name, home / "many", dtype=dtype, seed=seed))
    wrong = (
        " 0 differ" not in said if dtype == torch.bfloat16 else code or f" {opened(name)} not compared" not in said
    )  # bf16: a bound may be too loose
    return (said if wrong else ""), time.perf_counter() - began
