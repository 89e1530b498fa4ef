"""Predicted bytes (moe/plan/memory/memory.py) compared with tables of measured runs, of published formulas, and of runs that fitted or not.

    memory      a row's peak, of the kind that it states: allocated, reserved (with the allocator's factor), nvidia-smi (with the context)
    fits        predicted to fit: right if the run ran, wrong if it ran out of memory; only for a GPU of known size, a stated micro-batch
                and a stated recomputation
    formulas    the ZeRO paper's table, and Korthikanti's Figure 1: equal to the printed digits

Predicted and measured memory are compared only if a row states its micro-batch or its recomputation, because both decide its memory.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe.plan.job.states import MIXED, model_states
from moe.plan.memory.memory import Memory, memory, peak
from parallel.errors import BadInput
from tests.planner.read_tables import Row

# memory of the GPUs that are sold with one size only. An "80 GB" card has 80 GiB, of which 79.1 to 79.3 are usable.
CAPACITY_GB = {"h200": 141, "h800": 80, "b200": 180, "gb200": 185, "h100": 80, "b300": 270, "gb300": 275, "rtx3090": 24}
USABLE = 0.99
ZERO_COLUMNS = ("ddp_GB(16P)", "zero1_Pos_GB(4P+12P/N)", "zero2_Posg_GB(2P+14P/N)", "zero3_Posgp_GB(16P/N)")


@dataclass(frozen=True)
class Predicted:
    """A measured row and the predicted memory of the rank that needs the most."""

    row: Row
    needed: Memory

    @property
    def bytes(self) -> float:
        """Return the predicted bytes of the kind that the row measured: reserved by the allocator, used by nvidia-smi, or allocated."""
        return {"reserved": self.needed.reserved, "nvidia-smi": self.needed.used}.get(self.row.memory_kind, self.needed.allocated)

    @property
    def error(self) -> float | None:
        return self.bytes / self.row.memory - 1 if self.row.memory and comparable(self.row) else None

    @property
    def right(self) -> bool | None:
        """Return whether it was predicted correctly that the run fits or does not; None if the run failed otherwise, or too little is
        stated."""
        capacity = capacity_of(self.row.gpu)
        stated = "microbatch" not in self.row.inferred and self.row.cells["recompute"].strip()
        if capacity is None or self.row.status == "failed" or self.row.formula or not stated:
            return None
        return (self.needed.used <= capacity) == (self.row.status == "ok")


def comparable(row: Row) -> bool:
    """Return whether the row was measured and states its micro-batch or its recomputation."""
    return not row.formula and not ("microbatch" in row.inferred and not row.cells["recompute"].strip())


def capacity_of(gpu: str) -> float | None:
    """Return the usable bytes, 99 %, of the GPU that the text `gpu` describes: by its GB, or by a model that is sold with one size only.
    None if it has neither."""
    name = gpu.lower()
    stated = re.search(r"(\d+)\s*gb(?![/\w])", name)
    size = int(stated[1]) if stated else next((CAPACITY_GB[key] for key in sorted(CAPACITY_GB, key=len, reverse=True) if key in name), None)
    return None if size is None else USABLE * size * 2**30


def predictions(rows: Sequence[Row]) -> list[Predicted]:
    """Return predictions for measured rows, without rows whose sizes their schedule refuses."""
    made = []
    for row in rows:
        if row.formula:
            continue
        try:
            made.append(Predicted(row, peak(row.network, row.plan, row.stack)))
        except BadInput:
            continue
    return made


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the fields about memory in a table's row of the JSON: errors over rows that state their memory, and counts of right `fits`."""
    made = predictions(rows)
    errors = sorted(abs(p.error) for p in made if p.error is not None)
    right = [p.right for p in made if p.right is not None]
    lacking = [p.right for p in made if p.right is not None and p.row.status == "out of memory"]
    kinds = sorted({p.row.memory_kind for p in made if p.error is not None})
    return {
        "memory_rows": len(errors),
        "memory_kind": ", ".join(kinds) or None,
        "memory_error_median": _quantile(errors, 0.5),
        "memory_error_p90": _quantile(errors, 0.9),
        "fits_right": sum(right),
        "fits_total": len(right),
        "out_of_memory_right": sum(lacking),
        "out_of_memory_total": len(lacking),
    }


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the quantile at `share`, interpolated between two neighbors; None without numbers."""
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def formulas(rows: Sequence[Row]) -> dict[str, Any]:
    """Return how many rows of Korthikanti's Figure 1 (GiB of activations on the first stage) equal the prediction, and their number."""
    stated = [row for row in rows if row.formula and row.memory and "activations" in row.cells["memory_kind"]]
    right = [abs(memory(r.network, r.plan, r.stack)[0].parts["activations"] / (r.memory or 1.0) - 1) < 1e-9 for r in stated]
    return {"formula_right": sum(right), "formula_total": len(right)}


def zero_table(file: Path) -> dict[str, Any] | None:
    """Return how many lines of the ZeRO paper's table of model states equal the prediction to the last digit; None for another file."""
    with file.open(newline="") as opened:
        lines = list(csv.DictReader(opened))
    if not lines or any(name not in lines[0] for name in ("params_b", "dp", *ZERO_COLUMNS)):
        return None
    return {"formula_right": sum(map(_equal, lines)), "formula_total": len(lines)}


def _equal(line: dict[str, str]) -> bool:
    size, ranks = float(line["params_b"]), int(line["dp"])
    found = [model_states(size, stage=stage, copies=ranks, storage=MIXED).total for stage in range(4)]
    return all(abs(value - float(line[name])) < 0.00051 for value, name in zip(found, ZERO_COLUMNS, strict=True))
