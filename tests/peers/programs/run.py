"""Runs an outside program on one process or on ranks, and compares the recordings by the command `moe verify --compare`."""

from __future__ import annotations

import importlib
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from moe.verify.yours.compare import main as compare
from tests.support.ranks import run_on_ranks


def program(name: str) -> Any:
    return importlib.import_module(f"tests.peers.programs.{name}")


def record_many(name: str, folder: Path, *, world: int = 2, **given: Any) -> Path:
    """Run the program on forked gloo ranks. Return the folder that it recorded."""
    main = program(name).main
    run_on_ranks(lambda rank: main(str(folder), **given), world)
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
