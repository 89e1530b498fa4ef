"""The end of a run's display: a table of its summary, the text it generates, and the folder with its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from moe.records.panel import LABEL, State, title
from moe.records.summary import LOSS, printable, size, summary_rows

FILES = {
    "recipe.yaml": "the whole recipe, each value with its origin",
    "metrics.jsonl": "every step's numbers, one JSON object a line",
    "summary.json": "the numbers above",
    "report.html": "curves, expert load over time, drops, memory: one page",
    "plots": "the same pictures as PNG",
    "checkpoints": "to go on from, or to generate with",
    "tensorboard": "tensorboard --logdir shows the curves",
    "data_files.txt": "files of the data that were skipped, or read as plain text, and why",
    "profile": "where the time of a step goes: tables, and traces for ui.perfetto.dev",
}


def ending(state: State, summary: Mapping[str, Any], out: Path | None) -> Group:
    """Return the summary's table, the generated text, and the list of the run's files."""
    table = Table(title=Text(title(state), style="bold"), title_justify="left", box=box.ROUNDED, show_header=False, border_style="cyan")
    table.add_column(style=LABEL, no_wrap=True)
    table.add_column(style="bold", overflow="fold")
    for label, value in summary_rows(summary):
        if label != LOSS:  # a sentence, printed on a line of its own
            table.add_row(label, Text(value))
    parts: list[RenderableType] = [table]
    if warning := summary.get("loss_warning"):
        parts.append(Text(str(warning), style="bold yellow"))
    if summary.get("sample"):
        parts.append(
            Panel(
                Text(printable(str(summary["sample"])).strip("\n")),
                title=Text("a sample of the text that it generates"),
                title_align="left",
                box=box.ROUNDED,
                border_style=LABEL,
            )
        )
    if out is not None:
        parts.append(_folder(out))
    return Group(*parts)


def _folder(out: Path) -> Group:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, justify="right", style=LABEL)
    grid.add_column(style=LABEL)
    for name, meaning in FILES.items():
        path = out / name
        if path.is_dir():
            inside = sorted(p.name for p in path.iterdir() if not p.name.startswith("."))
            grid.add_row(f"  {name}/", f"{len(inside)} item{'s' if len(inside) != 1 else ''}", meaning)
        elif path.exists():
            grid.add_row(f"  {name}", size(path.stat().st_size), meaning)
    return Group(Text.assemble("files in ", (f"{out}", "bold")), grid)
