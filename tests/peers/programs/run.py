"""Runs an outside program on one process or on ranks, and compares the recordings by the command `moe verify --compare`."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe.verify.yours.compare import main as compare
from tests.support.ranks import run_on_ranks


def program(name: str) -> Any:
    return importlib.import_module(f"tests.peers.programs.{name}")


def opened(name: str) -> int:
    """Return the number of values that the comparison of a clean run cannot compare."""
    return getattr(program(name), "OPEN", 0)


def record_many(name: str, folder: Path, *, world: int = 2, fault: str = "", **given: Any) -> Path:
    """Run the program on forked gloo ranks. Return the folder that it recorded."""
    torch.set_num_threads(1)  # ranks are forked from here: no thread pool may exist
    main = _with_fault(program(name), fault)
    run_on_ranks(lambda rank: main(str(folder), **given), world)
    return folder


def record_one(name: str, folder: Path, **given: Any) -> Path:
    """Run the program on one process. Return the folder that it recorded."""
    return record_many(name, folder, world=1, **given)


def _with_fault(module: Any, fault: str) -> Callable[..., None]:
    """Return the program's `main` with a fault: an argument of `main`, or an edit (old text, new text) of the program above its FAULTS."""
    where, word, *edit = module.FAULTS[fault] if fault else ("", "")
    if not edit:
        return partial(module.main, fault=fault) if fault else module.main
    names: dict[str, Any]
    text, names = Path(module.__file__).read_text().partition("\nFAULTS")[0], {"__name__": module.__name__}
    assert text.count(edit[0]) == 1, f"{fault}: the program has {text.count(edit[0])} times {edit[0]!r}"
    exec(compile(text.replace(*edit), module.__file__, "exec"), names)
    faulty: Callable[..., None] = names["main"]
    return faulty


def compared(one: Path, many: Path) -> tuple[int, list[dict[str, Any]], str]:
    """Return (exit code, first deviations in forward and in backward order, printed table)."""
    said = io.StringIO()
    file = many / "result.json"
    with redirect_stdout(said):
        code = compare(str(one), str(many), json=str(file), say=print)
    wrong = [row for row in json.loads(file.read_text())["rows"] if not row["passed"]]
    forward = [row for row in wrong if row["value"] in ("weight", "input", "output", "note")]
    return code, [*forward[:1], *[row for row in wrong if row not in forward][:1]], said.getvalue()
