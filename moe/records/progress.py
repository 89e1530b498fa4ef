"""The live display of a run: a rich panel on a terminal, plain lines in a log, a table at the end.

An error in the display never stops a training run (see `_guarded`). moe/records/panel.py draws the panel and the plain lines.
"""

from __future__ import annotations

import atexit
import io
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from moe.records.heat import ASCII
from moe.records.panel import LABEL, State, panel, plain_evaluation, plain_step, title, unicode_ramp
from moe.records.summary import printable, size, summary_rows

FAILURES = (Exception, SystemExit)  # rich raises SystemExit when the pipe is closed
PLAIN_EVERY_S = 5.0
PLAIN_EVERY_STEPS = 50
PLAINER = str.maketrans({"·": "-", "–": "-", "…": "..."})  # for consoles that can only print ASCII
Kind = Literal["auto", "live", "plain", "none"]
P = ParamSpec("P")
FILES = {
    "recipe.yaml": "the whole recipe, each value with its origin",
    "metrics.jsonl": "every step's numbers, one JSON object a line",
    "summary.json": "the numbers above",
    "report.html": "curves, expert load over time, drops, memory: one page",
    "plots": "the same pictures as PNG",
    "checkpoints": "to continue from, or to generate with",
    "tensorboard": "tensorboard --logdir shows the curves",
    "logs": "output of each process: rank-N.log",
    "data_files.txt": "files of the data that were skipped, or read as plain text, and why",
    "profile": "the time of each part of a step: tables, and traces for ui.perfetto.dev",
}


def _guarded(draw: Callable[Concatenate[Progress, P], None]) -> Callable[Concatenate[Progress, P], None]:
    """Wrap a method so that it never raises: if it fails, plain lines replace the live panel; if plain lines fail, nothing more is
    shown."""

    @wraps(draw)
    def guarded(self: Progress, /, *args: P.args, **named: P.kwargs) -> None:
        if self._kind == "none":
            return
        try:
            draw(self, *args, **named)
        except FAILURES as error:
            live, self._live = self._live, None
            failed, self._kind = self._kind, "none"
            with suppress(*FAILURES):
                print(f"the {failed} display stopped ({type(error).__name__}: {error}); training continues", file=sys.stderr)
                if live is not None:
                    live.stop()
                    self._kind = "plain"

    return guarded


class Progress:
    """Display of a run. It is given each new line of metrics.jsonl. No method raises. out: the run's folder; its files are listed at the
    end. kind: "live", "plain", "none", or "auto", which is live on a terminal and plain otherwise."""

    def __init__(self, state: State, *, out: Path | None = None, kind: Kind = "auto", console: Console | None = None) -> None:
        self._state, self._out, self._kind = state, out, kind
        self._live: Live | None = None
        self._printed_s = 0.0
        self._unprinted = False
        self._console = console or Console()
        self._open()

    @_guarded
    def _open(self) -> None:
        console = self._console
        self._state.ramp = unicode_ramp(console.encoding)
        if self._state.ramp == ASCII and isinstance(console.file, io.TextIOWrapper):
            console.file.reconfigure(errors="replace")  # an unprintable character in a name or a generated text must not end the display
        if self._kind == "auto":
            self._kind = "live" if console.is_terminal and not console.is_dumb_terminal else "plain"
        if self._kind == "live":
            # rich redraws in its own thread, twice a second, so training steps neither draw nor wait
            self._live = Live(console=console, get_renderable=self._panel, refresh_per_second=2, vertical_overflow="crop")
            atexit.register(self.close)  # so that the cursor is visible again after an uncaught exception
            self._live.start()
        else:
            for text in (title(self._state), *self._state.lines):
                self._print(text)

    def _panel(self) -> RenderableType:
        """Return the panel, or the error if drawing fails: rich calls this in its own thread, in which nothing else catches exceptions."""
        try:
            return panel(self._state, width=min(self._console.width, 110), height=self._console.height)
        except Exception as error:
            return Text(f"the display failed ({type(error).__name__}: {error}); training continues")

    @_guarded
    def step(self, line: Mapping[str, Any]) -> None:
        """Show a training step. line: the step's line of metrics.jsonl."""
        self._state.add(line)
        if self._kind != "plain":
            return
        now, step = line.get("time") or time.time(), line.get("step", 0)
        due = not self._printed_s or now - self._printed_s >= PLAIN_EVERY_S or step % PLAIN_EVERY_STEPS == 0 or step >= self._state.steps
        self._unprinted = not due
        if due:
            self._printed_s = now
            self._print(plain_step(self._state))

    @_guarded
    def evaluation(self, line: Mapping[str, Any]) -> None:
        """Show an evaluation. line: the evaluation's line of metrics.jsonl."""
        self._state.evaluation = line
        self._print(plain_evaluation(self._state))

    @_guarded
    def note(self, text: str) -> None:
        """Print a line that stays on the screen, such as a warning."""
        self._print(text)

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """End the display. With a summary (the fields of summary.json), print the last table, the generated sample and the files."""
        self._stop()
        if summary is not None:
            self._end(summary)

    @_guarded
    def _end(self, summary: Mapping[str, Any]) -> None:
        self._show(ending(self._state, summary, self._out))

    @_guarded
    def _stop(self) -> None:
        atexit.unregister(self.close)
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
            self._kind = "plain"
        elif self._unprinted:  # so that the last step is shown even if the run stops early
            self._unprinted = False
            self._print(plain_step(self._state))

    def _print(self, text: str) -> None:
        self._show(Text(text.translate(PLAINER) if self._state.ramp == ASCII else text), soft_wrap=True)

    def _show(self, what: RenderableType, *, soft_wrap: bool = False) -> None:
        self._console.print(what, soft_wrap=soft_wrap, highlight=False)
        self._console.file.flush()


def ending(state: State, summary: Mapping[str, Any], out: Path | None) -> Group:
    """Return the display for the end of a run: a table of its summary, the generated sample, and a list of the files in its folder."""
    table = Table(title=Text(title(state), style="bold"), title_justify="left", box=box.ROUNDED, show_header=False, border_style="cyan")
    table.add_column(style=LABEL, no_wrap=True)
    table.add_column(style="bold", overflow="fold")
    for label, value in summary_rows(summary):
        table.add_row(label, Text(value))
    parts: list[RenderableType] = [table]
    parts += [Text(str(alarm), style="bold yellow") for alarm in summary.get("alarms") or ()]
    if summary.get("sample"):
        shown, heading = Text(printable(str(summary["sample"])).strip("\n")), Text("a sample of the text that the model generates")
        parts.append(Panel(shown, title=heading, title_align="left", box=box.ROUNDED, border_style=LABEL))
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
