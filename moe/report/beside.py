"""Compares two runs: differences of their recipes, their results, and a picture of both validation losses.

Recipes are compared as the runs had them (recipe.yaml), so an unfinished or stopped run can be compared too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe.recipe.changes import changes
from moe.recipe.load import load
from moe.records.metrics import read, read_summary
from moe.records.summary import summary_rows
from moe.report.compare import compare
from parallel.fixes import written

Row = tuple[str, str, str]  # label, value in the first run, value in the second


def beside(first: Path, second: Path) -> Path:
    """Print differences and results; draw both losses into the first run's folder. Returns the picture's path.

    Raises BadInput for a folder without a run, and for runs that evaluated at no step.
    """
    names = (first.name, second.name) if first.name != second.name else (str(first), str(second))
    differences, results = recipe_rows(first, second), result_rows(first, second)
    _print("recipe", names, differences or [("no difference", "", "")])
    _print("result", names, results)
    lines = {
        name: [[line for line in read(folder) if line.get("kind", "train") == "eval"]]
        for name, folder in zip(names, (first, second), strict=True)
    }
    return compare(lines, first / "plots" / f"beside-{second.name}.png", baseline=names[0], title="Validation loss of two runs")


def recipe_rows(first: Path, second: Path) -> list[Row]:
    """Return (key, value, value) for every key with different values."""
    before, after = (load(folder / "recipe.yaml")[0] for folder in (first, second))
    return [(change.key, written(change.before), written(change.after)) for change in changes(before, after)]


def result_rows(first: Path, second: Path) -> list[Row]:
    """Return the rows of both summaries. A run without a summary has its last evaluation."""
    a, b = (dict(summary_rows(read_summary(folder) or _so_far(folder))) for folder in (first, second))
    return [(label, a.get(label, "–"), b.get(label, "–")) for label in {**a, **b}]


def _so_far(folder: Path) -> dict[str, Any]:
    lines = read(folder)
    steps = [line["step"] for line in lines if line.get("kind", "train") == "train"]
    evaluated = [line for line in lines if line.get("kind", "train") == "eval"]
    return {"steps": max(steps, default=0)} | (evaluated[-1] if evaluated else {})


def _print(what: str, names: tuple[str, str], rows: list[Row]) -> None:
    table = [(what, *names), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(2)]
    for label, one, other in table:
        print(f"{label:<{widths[0]}}  {one:<{widths[1]}}  {other}".rstrip())
    print()
