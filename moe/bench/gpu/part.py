"""One part of the measurements of `python -m moe.bench.gpu`, and the machine that it measures.

A part returns rows, which are dicts for the JSON file, and formats them as lines of text. moe/bench/gpu/__main__.py lists the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe.records.results import hardware

Row = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """The device that is measured. On a CPU all sizes are tiny, so that every part can be tried without a GPU."""

    device: torch.device

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        return hardware(self.device)


@dataclass(frozen=True)
class Part:
    """One measurement. `rows(machine, before)` runs it; before: name of an earlier part -> its rows. page: formats rows as lines of text.
    minutes: longest expected time on an H100. packages: Python packages needed in addition to torch, triton, numpy and einops."""

    name: str
    minutes: float
    rows: Callable[[Machine, dict[str, list[Row]]], list[Row]]
    page: Callable[[Sequence[Row]], list[str]]
    packages: tuple[str, ...] = ()


class TooLong(BaseException):
    """Ends a part after its time limit. Not an Exception, after which a part continues. `each` keeps the rows so far."""


def each(work: Mapping[str, Callable[[], list[Row]]]) -> list[Row]:
    """Call each function in `work` (name -> function), and return the rows of all. Key "what" of a row has the function's name. A call that
    fails, for example if memory runs out, gives a row with the error."""
    found: list[Row] = []
    for name, one in work.items():
        try:
            found += [{"what": name} | row for row in one()]
        except (Exception, TooLong) as error:  # the others can still be measured
            found.append({"what": name, "failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", "passed": False})
            if isinstance(error, TooLong):
                break
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return found


def failures(rows: Sequence[Row]) -> list[str]:
    return [f"FAILED: {row['what']}: {row['failed']}" for row in rows if "failed" in row]


def table(rows: Sequence[Sequence[object]], heads: Sequence[str]) -> list[str]:
    """Return lines with aligned columns: text to the left, numbers to the right."""
    texts = [list(heads), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(heads))]
    numbers = [all(isinstance(row[column], int | float) or row[column] is None for row in rows) for column in range(len(heads))]
    aligned = [[c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numbers, strict=True)] for row in texts]
    return ["  ".join(row).rstrip() for row in aligned]


def _text(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 100 else f"{cell:.0f}"
    return "" if cell is None else str(cell)
