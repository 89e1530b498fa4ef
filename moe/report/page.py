"""The report: one self-contained HTML page about a run, with embedded pictures, no script, no external link, in light and dark mode.

    metrics.jsonl --> History --> PLOTS --> plots/*.png (light) --> report.html (both modes, base64)

summary.json and recipe.yaml are included if they exist. All text from files is escaped.
"""

from __future__ import annotations

import base64
import json as json_format
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe.recipe.load import load
from moe.records.metrics import METRICS, SUMMARY, read, read_summary
from moe.records.summary import MISSING, dropped_shares, duration, fixed, printable, summary_rows, why_skipped
from parallel.errors import BadInput, counted
from parallel.store.files import replace_file, write_text

if TYPE_CHECKING:
    from moe.report.plots import Plot

REPORT, PLOT_FOLDER = "report.html", "plots"
MOST_EVENTS = 200


@dataclass(frozen=True)
class Picture:
    """A drawn plot as two PNG files."""

    plot: Plot
    light: bytes
    dark: bytes


def main(run_dir: Path | str, json: Path | str | None = None) -> Path:
    """`moe report RUN`: write the report, and with `json` also the list of its files. Returns report.html's path."""
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
    """Draw plots/*.png and write report.html into a run's folder, finished or not. Returns the page's path. Raises BadInput for a folder
    without metrics.jsonl, or if files in it cannot be read."""
    folder = Path(run_dir)
    if not (folder / METRICS).is_file():
        near = Path("runs") / folder.name
        raise BadInput(
            f"run folder {folder}",
            got="no such folder" if not folder.is_dir() else f"no {METRICS} in it",
            needed=f"the folder of a run, with its {METRICS}",
            fix=f"did you mean {near}?" if (near / METRICS).is_file() else "name one, such as runs/switch_tiny",
        )
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
        )
        replace_file(folder / REPORT, text.encode())
    except OSError as error:
        raise BadInput(
            f"run folder {folder}", got=error.strerror or error, needed="a folder with room to write", fix="free space"
        ) from None
    return folder / REPORT


def _of_this_run(summary: Mapping[str, Any] | None, lines: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the summary, or None if it is out of date: the run has been continued since, or another run was started in the folder."""
    last = max((line["step"] for line in lines if line.get("kind", "train") == "train"), default=None)
    stale = summary is not None and last is not None and summary.get("steps", last) != last
    return None if stale else summary


def _weights(recipe: Path) -> dict[str, float]:
    """Return {"balance_loss", "z_loss": weight in the training loss}; {} if the recipe cannot be read."""
    if not recipe.is_file():
        return {}
    try:
        spec = load(str(recipe))[0].router
    except BadInput:
        return {}
    return {"balance_loss": spec.balance_weight, "z_loss": spec.z_weight}


def draw(lines: Sequence[Mapping[str, Any]], folder: Path, *, weights: Mapping[str, float] | None = None) -> list[Picture]:
    """Draw every plot for which lines of metrics.jsonl have data, also into `folder`. PNGs there of other plots are removed."""
    from moe.report.history import History
    from moe.report.plots import PLOTS
    from moe.report.style import DARK, LIGHT, drawn_in, png

    folder.mkdir(parents=True, exist_ok=True)
    history, pictures = History.of(lines, weights), []
    for plot in PLOTS:
        images = []
        for theme in (LIGHT, DARK):
            with drawn_in(theme):
                if (fig := plot.draw(history, theme)) is not None:
                    images.append(png(fig))
        path = folder / f"{plot.name}.png"
        if images:
            path.write_bytes(images[0])
            pictures.append(Picture(plot, light=images[0], dark=images[1]))
        else:
            path.unlink(missing_ok=True)
    return pictures


def page_text(
    *, name: str, lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any] | None, recipe: str | None, pictures: Sequence[Picture]
) -> str:
    """Return the whole page as HTML. lines: of metrics.jsonl. recipe: text of recipe.yaml, or None."""
    evals = [
        (f"{line['step']:,}", fixed(line.get("validation_loss"), ".4f"), fixed(line.get("bits_per_byte"), ".4f"))
        for line in lines
        if line.get("kind") == "eval"
    ]
    events = _events(lines)
    sample = (summary or {}).get("sample")
    sections = [
        _cards(summary, lines),
        f'<div class="plots">{"".join(map(_figure, pictures))}</div>' if pictures else '<p class="note">No step has been recorded yet.</p>',
        _section("What it writes", f"<pre>{escape(printable(str(sample)))}</pre>") if sample else "",
        _section("Summary", _table(("", ""), summary_rows(summary))) if summary else "",
        _section("Evaluations", _table(("step", "validation loss", "bits per byte"), evals)) if evals else "",
        _section(f"Events ({len(events)})", _table(("step", "event", "details"), events[:MOST_EVENTS])) if events else "",
        _section("Recipe", f"<pre>{escape(recipe)}</pre>", is_open=False) if recipe else "",
    ]
    return _PAGE.format(title=escape(name), state=escape(_state(lines, summary)), style=_STYLE, body="\n".join(s for s in sections if s))


def _state(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any] | None) -> str:
    """Return the text under the title: the number of steps made, and the time of the last line."""
    train = [line for line in lines if line.get("kind", "train") == "train"]
    steps = counted(train[-1]["step"], "step") if train else "no step yet"
    times = [line["time"] for line in lines if isinstance(line.get("time"), int | float)]
    last = f", last line {datetime.fromtimestamp(max(times), UTC):%Y-%m-%d %H:%M} UTC" if times else ""
    return f"{steps}{last}" + ("" if summary else f"; no {SUMMARY} yet: the run continues, or was stopped")


def _cards(summary: Mapping[str, Any] | None, lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the most important numbers as HTML, from the summary, or without one from the latest lines."""
    rows = dict(summary_rows(summary or _latest(lines)))
    wanted = ("validation loss", "bits per byte", "tokens per second", "dropped tokens", "parameters", "training time")
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
    """Return (step, event, details) for each event line, skipped step, and step with a number that was not finite."""
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


def _figure(picture: Picture) -> str:
    light, dark = (f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in (picture.light, picture.dark))
    plot = picture.plot
    return (
        f'<figure{" class=wide" if plot.wide else ""}><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(plot.title)}: {escape(plot.caption)}"></picture>'
        f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
    )


def _section(title: str, inner: str, *, is_open: bool = True) -> str:
    return f"<details{' open' if is_open else ''}><summary><h2>{escape(title)}</h2></summary>{inner}</details>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = f"<thead><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr></thead>" if any(head) else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


_STYLE = """
:root { color-scheme: light dark; --page: #f6f8fa; --card: #ffffff; --text: #1f2328; --muted: #656d76; --line: #d8dee4; --accent: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0d1117; --card: #161b22; --text: #e6edf3; --muted: #9198a1; --line: #30363d; --accent: #58b4f0; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { margin: 0; font-size: 26px; } h2 { display: inline; font-size: 17px; margin: 0; }
.state, figcaption, .note, .cards span { color: var(--muted); }
.state { margin: 2px 0 20px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-bottom: 16px; }
.cards div, figure, details { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.cards div { padding: 12px 14px; } .cards span { font-size: 13px; }
.cards b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; }
.plots { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; margin-bottom: 14px; }
figure { margin: 0; padding: 10px 10px 8px; } figure.wide { grid-column: 1 / -1; }
img { width: 100%; height: auto; display: block; } figcaption { font-size: 13px; padding: 6px 6px 0; }
details { padding: 12px 16px; margin-bottom: 14px; } summary { cursor: pointer; } details > :last-child { margin-top: 10px; }
pre { background: var(--page); border-radius: 8px; padding: 12px; overflow-x: auto;
      font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; margin: 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: 4px 24px 4px 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--muted); font-weight: 600; }
footer { color: var(--muted); font-size: 13px; }
@media (max-width: 760px) {
  .plots { grid-template-columns: minmax(0, 1fr); }
  figure.wide picture { display: block; overflow-x: auto; } figure.wide img { min-width: 960px; }
}
@media print { body { background: none; } figure, details { break-inside: avoid; } }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · run report</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="state">{state}</p>
{body}
<footer>Made from metrics.jsonl alone; the same pictures are in plots/ as PNG.</footer>
</main>
</body>
</html>
"""
