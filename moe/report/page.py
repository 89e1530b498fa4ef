"""The report: one self-contained HTML page about a run, with embedded pictures, no script, no external link.

    metrics.jsonl --> History --> PLOTS --> plots/*.png --> report.html (base64)

summary.json and recipe.yaml are included if they exist. All text from files is escaped.
"""

from __future__ import annotations

import base64
import errno
import json as json_format
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import starmap
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from moe.recipe.load import load
from moe.records.metrics import METRICS, SUMMARY, read, read_summary
from moe.records.summary import MISSING, dropped_shares, duration, fixed, printable, summary_rows, why_skipped
from parallel.errors import BadInput, counted
from parallel.store.files import replace_file, write_text

if TYPE_CHECKING:
    from moe.records.rules import Finding
    from moe.report.plots import Plot

REPORT, PLOT_FOLDER = "report.html", "plots"
MOST_EVENTS = 200  # largest number of events that the page lists


Pictures = dict["Plot", bytes]  # drawn plot -> its PNG file


def main(run_dir: Path | str, json: Path | str | None = None) -> Path:
    """`moe report RUN`: write the report and, if `json` is given, the list of its files to that path. Returns the path of report.html."""
    folder = Path(run_dir)
    page = write_report(folder)
    if json is not None:
        summary = read_summary(folder) or {}
        files = sorted((folder / PLOT_FOLDER).glob("*.png")) + [page]
        rows = [{"file": str(path.relative_to(folder)), "bytes": path.stat().st_size} for path in files]
        content = {"verb": "report", "commit": summary.get("commit"), "hardware": summary.get("hardware")}
        text = json_format.dumps({**content, "rows": rows, "passed": len(rows), "failed": 0}, indent=2)
        write_text(Path(json), text + "\n", what="--json")
    return page


def write_report(run_dir: Path | str) -> Path:
    """Draw plots/*.png and write report.html into the folder of a run, which may be unfinished. Returns the page's path. Raises BadInput
    for a folder without metrics.jsonl, or if its files cannot be read or written."""
    folder = Path(run_dir)
    if not (folder / METRICS).is_file():
        near = Path("runs") / folder.name
        got = "no such folder" if not folder.is_dir() else f"no {METRICS} in it"
        fix = f"did you mean {near}?" if (near / METRICS).is_file() else "name one, such as runs/switch_tiny"
        raise BadInput(f"run folder {folder}", got=got, needed=f"the folder of a run, with its {METRICS}", fix=fix)
    lines = read(folder)
    summary = _of_this_run(read_summary(folder), lines)
    recipe = folder / "recipe.yaml"
    try:
        text = page_text(
            name=str((summary or {}).get("recipe") or folder.resolve().name),
            lines=lines,
            summary=summary,
            recipe=recipe.read_text(encoding="utf-8", errors="replace") if recipe.is_file() else None,
            pictures=draw(lines, folder / PLOT_FOLDER, weights=_weights(recipe)),
            findings=_findings(lines, recipe),
        )
        replace_file(folder / REPORT, text.encode())
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        needed, fix = "a folder that can be written", f"cp -r {folder} COPY; moe report COPY"
        if full:
            needed, fix = "a folder with room to write", "free space"
        raise BadInput(f"run folder {folder}", got=error.strerror or error, needed=needed, fix=fix) from None
    return folder / REPORT


def _of_this_run(summary: Mapping[str, Any] | None, lines: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the summary, or None if it is out of date: the run has been continued since, or another run was started in the folder."""
    last = max((line["step"] for line in lines if line.get("kind", "train") == "train"), default=None)
    stale = summary is not None and last is not None and summary.get("steps", last) != last
    return None if stale else summary


def _findings(lines: Sequence[Mapping[str, Any]], recipe: Path) -> list[Finding]:
    """Return what the rules of `moe doctor` find; [] if the recipe cannot be read."""
    from moe.records.rules import diagnose

    try:
        return diagnose(lines, load(str(recipe))[0]) if recipe.is_file() else []
    except BadInput:
        return []


def _weights(recipe: Path) -> dict[str, float]:
    """Return the weights of balance_loss and z_loss in the training loss; {} if the recipe cannot be read. With a user's balance loss,
    own_balance is a further key."""
    if not recipe.is_file():
        return {}
    try:
        spec = load(str(recipe))[0].router
    except BadInput:
        return {}
    found = {"balance_loss": spec.balance_weight, "z_loss": spec.z_weight}
    return found | ({"own_balance": spec.balance_weight} if spec.own_balance else {})


def draw(lines: Sequence[Mapping[str, Any]], folder: Path, *, weights: Mapping[str, float] | None = None) -> Pictures:
    """Draw every plot for which the lines of metrics.jsonl have data, and write it into `folder`. PNGs of plots without data are removed.
    weights: name of an auxiliary loss -> its weight in the training loss; None: unknown."""
    from moe.report.history import History
    from moe.report.plots import PLOTS
    from moe.report.style import png, styled

    folder.mkdir(parents=True, exist_ok=True)
    history, pictures = History.of(lines, weights), Pictures()
    for plot in PLOTS:
        path = folder / f"{plot.name}.png"
        with styled():
            if (fig := plot.draw(history)) is not None:
                pictures[plot] = png(fig)
        if plot in pictures:
            path.write_bytes(pictures[plot])
        else:
            path.unlink(missing_ok=True)
    return pictures


def page_text(
    *,
    name: str,
    lines: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any] | None,
    recipe: str | None,
    pictures: Pictures,
    findings: Sequence[Finding] = (),
) -> str:
    """Return the whole page as HTML. name: its title. lines: of metrics.jsonl. summary: the fields of summary.json, or None. recipe: text
    of recipe.yaml, or None. pictures: the drawn plots. findings: of `moe doctor`."""
    found = [line for line in lines if line.get("kind") == "eval"]
    evals = [(f"{one['step']:,}", *(fixed(one.get(key), ".4f") for key in ("validation_loss", "bits_per_byte"))) for one in found]
    events = _events(lines)
    sample = (summary or {}).get("sample")
    figures = "".join(starmap(_figure, pictures.items()))
    sections = [
        _cards(summary, lines),
        _section("What is wrong", "".join(f"<p>{escape(found.line)}</p>" for found in findings)) if findings else "",
        f'<div class="plots">{figures}</div>' if figures else '<p class="note">No step has been recorded yet.</p>',
        _section("What it writes", f"<pre>{escape(printable(str(sample)))}</pre>") if sample else "",
        _section("Summary", _table(("", ""), summary_rows(summary))) if summary else "",
        _section("Evaluations", _table(("step", "validation loss", "bits per byte"), evals)) if evals else "",
        _section(f"Events ({len(events)})", _table(("step", "event", "details"), events[:MOST_EVENTS])) if events else "",
        _section("Recipe", f"<pre>{escape(recipe)}</pre>", is_open=False) if recipe else "",
    ]
    page = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return page.substitute(title=escape(name), state=escape(_state(lines, summary)), body="\n".join(filter(None, sections)))


def _state(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any] | None) -> str:
    """Return the text under the title: the number of steps made, and the time of the last line."""
    train = [line for line in lines if line.get("kind", "train") == "train"]
    steps = counted(train[-1]["step"], "step") if train else "no step yet"
    times = [line["time"] for line in lines if isinstance(line.get("time"), int | float)]
    last = f", last line {datetime.fromtimestamp(max(times), UTC):%Y-%m-%d %H:%M} UTC" if times else ""
    return f"{steps}{last}" + ("" if summary else f"; no {SUMMARY} yet: the run continues, or was stopped")


def _cards(summary: Mapping[str, Any] | None, lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the most important numbers as HTML, from the summary, or if there is none from the latest lines."""
    rows = dict(summary_rows(summary or _latest(lines)))
    wanted = ("validation loss", "bits per byte", "tokens per second", "dropped choices", "parameters", "training time")
    cards = [(label, rows[label].partition(" nats")[0].partition(", ")[0]) for label in wanted if label in rows]
    inner = "".join(f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>" for label, value in cards)
    return f'<div class="cards">{inner}</div>'


def _latest(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in lines:
        for key in ("validation_loss", "bits_per_byte", "tokens_per_second"):
            if line.get(key) is not None:
                found[key] = line[key]
    seconds = [line.get("step_seconds") or 0.0 for line in lines if line.get("kind", "train") == "train"]
    return {**found, **dropped_shares(lines), "train_seconds": sum(seconds)} if seconds else found


def _events(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows (step, event, details) of the report's table: events, skipped steps, and steps with numbers that are not finite."""
    found: list[tuple[str, ...]] = []
    explained = {line["step"] for line in lines if line.get("event") == "skipped"}
    for line in lines:
        step = f"{line['step']:,}"
        if line.get("kind") == "event":
            rest = [(key, value) for key, value in line.items() if key not in ("step", "kind", "event", "time")]
            details = ", ".join(f"{key} {duration(value) if key.endswith('seconds') else value}" for key, value in rest)
            found.append((step, str(line.get("event", MISSING)), details))
        elif line.get("skipped") and line["step"] not in explained:
            found.append((step, "skipped", why_skipped(line.get("loss_scale"))))
        if line.get("nonfinite"):
            found.append((step, "not finite", ", ".join(map(str, line["nonfinite"]))))
    return found


def _figure(plot: Plot, image: bytes) -> str:
    source = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    return (
        f'<figure{" class=wide" if plot.wide else ""}><div><img src="{source}" alt="{escape(plot.title)}: {escape(plot.caption)}"></div>'
        f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
    )


def _section(title: str, inner: str, *, is_open: bool = True) -> str:
    return f"<details{' open' if is_open else ''}><summary><h2>{escape(title)}</h2></summary>{inner}</details>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = f"<thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead>" if any(head) else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'
