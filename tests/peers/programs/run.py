"""Runs an outside program on one process or on ranks, and compares the recordings by the command `moe verify --compare`."""

from __future__ import annotations

import importlib
import io
import json
import os
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from moe.verify.yours.compare import main as compare

LIMIT_S = 100.0


def program(name: str) -> Any:
    return importlib.import_module(f"tests.peers.programs.{name}")


def _rank(rank: int, name: str, world: int, store: str, folder: str, given: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    program(name).main(folder, **given)
    dist.destroy_process_group()
    os._exit(0)  # skips the exit handlers of the parent, which this process was forked from


def record_many(name: str, folder: Path, *, world: int = 2, **given: Any) -> Path:
    """Run the program on forked ranks. Return the folder that it recorded."""
    with tempfile.TemporaryDirectory() as home:
        context = multiprocessing.start_processes(
            _rank, (name, world, f"{home}/store", str(folder), given), nprocs=world, join=False, start_method="fork"
        )
        while not context.join(LIMIT_S):
            pass
    return folder


def record_one(name: str, folder: Path, **given: Any) -> Path:
    """Run the program in this process. Return the folder that it recorded."""
    torch.set_num_threads(1)  # ranks are forked from here: no thread pool may exist
    program(name).main(str(folder), **given)
    return folder


def compared(one: Path, many: Path) -> tuple[int, list[dict[str, Any]], str]:
    """Return (exit code, first deviations in forward and in backward order, printed table)."""
    said = io.StringIO()
    file = many / "result.json"
    with redirect_stdout(said):
        code = compare(str(one), str(many), json=str(file), say=print)
    wrong = [row for row in json.loads(file.read_text())["rows"] if not row["passed"]]
    forward = [row for row in wrong if row["value"] in ("weight", "input", "output", "note")]
    return code, [*forward[:1], *[row for row in wrong if row not in forward][:1]], said.getvalue()
