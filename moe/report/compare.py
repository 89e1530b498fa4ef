"""Compares runs: `compare` plots recipes that were trained with several seeds; `beside` compares two runs (`moe report RUN OTHER`).
`scaling` draws the gain from more experts at equal FLOPs per token, as in Switch's scaling figures (arXiv 2101.03961, figures 1 and 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe.recipe.changes import changes
from moe.recipe.load import load
from moe.records.metrics import read, read_summary
from moe.records.summary import MISSING, summary_rows
from parallel.errors import BadInput, counted
from parallel.fixes import written

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from moe.report.history import Array


import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from moe.report.history import Array


Lines = Sequence[Mapping[str, Any]]  # lines of a run's metrics.jsonl
Row = tuple[str, str, str]  # label, value in the first run, value in the second


def compare(runs: Mapping[str, Sequence[Lines]], out_png: str | Path, *, baseline: str | None = None, title: str | None = None) -> Path:
    """Draw validation loss over steps for several recipes, as the mean over seeds with a band from minimum to maximum. Return `out_png`.

    runs: label -> the lines of metrics.jsonl of each seed, with the seeds in the same order for every label. Only steps at which all seeds
    of a label were evaluated are drawn. baseline: a label; a second panel then shows the other labels' losses minus the losses of this
    label, seed by seed. Missing folders are made. Raises BadInput for an unknown baseline."""
    from moe.report import style
    from moe.report.history import History

    curves = {label: evaluations(label, seeds) for label, seeds in runs.items()}
    if not curves or (baseline is not None and baseline not in curves):
        needed = f"one of the runs: {', '.join(curves) or 'none were given'}"
        raise BadInput("baseline", got=baseline, needed=needed, fix="set baseline to one of these labels, or to None")
    out_png = Path(out_png)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    nats = all(History.of(lines).in_nats for seeds in runs.values() for lines in seeds)
    return style.save(lambda: _figure(curves, baseline, title, unit=" (nats per token)" if nats else ""), out_png)


def evaluations(label: str, seeds: Sequence[Lines]) -> tuple[Array, Array]:
    """Return (steps [S], validation losses [seeds, S]) for the S steps at which all seeds were evaluated. seeds: the lines of metrics.jsonl
    of each seed. Raises BadInput, which names the runs by `label`, if S is 0."""
    import numpy as np

    from moe.report.history import History

    found = [dict(zip(*(array.tolist() for array in History.of(lines).evaluations()), strict=True)) for lines in seeds]
    steps = sorted(set.intersection(*map(set, found))) if found else []
    if not steps:
        got, fix = (
            f"no step with validation_loss in each of {counted(len(seeds), 'seed')}",
            "give every seed the same train.steps and train.eval_every",
        )
        raise BadInput(f"runs of {label}", got=got, needed="at least one evaluation in common", fix=fix)
    return np.array(steps), np.array([[values[step] for step in steps] for values in found])


def _figure(curves: Mapping[str, tuple[Array, Array]], baseline: str | None, title: str | None, *, unit: str) -> Figure:
    import numpy as np

    from moe.report import style

    below = baseline is not None and len(curves) > 1
    fig = style.figure(width=8.0, height=6.4 if below else 4.2)
    axes = np.atleast_1d(fig.subplots(1 + below, sharex=True, height_ratios=(3, 2) if below else (1,)))
    marks = dict(zip(curves, "osD^vPX" * len(curves), strict=False))
    tones = dict(zip(curves, style.colors(len(curves)), strict=True))
    for label, (steps, values) in curves.items():
        seeds = counted(len(values), "seed")
        text = f"{label}: {values[:, -1].mean():.4f} at the end ({seeds})"
        _band(axes[0], steps, values, tone=tones[label], mark=marks[label], label=text)
    axes[0].set_title(title or "Validation loss, mean and range over seeds")
    axes[0].set_ylabel(f"validation loss{unit}")
    axes[0].set_ylim(*_range(list(curves.values())))
    axes[0].legend(loc="upper right")
    if below:
        base_steps, base = curves[baseline or ""]
        for label, (steps, values) in curves.items():
            common, here, there = np.intersect1d(steps, base_steps, return_indices=True)
            pairs = min(len(values), len(base))
            if label != baseline and len(common):
                _band(axes[1], common, values[:pairs, here] - base[:pairs, there], tone=tones[label], mark=marks[label], label=label)
        axes[1].axhline(0, color=tones[baseline or ""], linewidth=1.4)
        axes[1].set_ylabel(f"minus {baseline}\n(same seed)")
        axes[1].set_title("Below the line: better than the baseline", fontsize=10, fontweight="normal", color=style.MUTED)
    for ax in axes:
        style.step_axis(ax, np.concatenate([steps for steps, _ in curves.values()]), label=ax is axes[-1])
    return fig


def _band(ax: Any, steps: Array, values: Array, *, tone: Any, mark: str, label: str) -> None:
    ax.fill_between(steps, values.min(0), values.max(0), color=tone, alpha=0.2, linewidth=0)
    ax.plot(steps, values.mean(0), color=tone, marker=mark, markersize=4, label=label)


def _range(curves: Sequence[tuple[Array, Array]]) -> tuple[float, float]:
    """Return (bottom, top) of the y axis. The top ignores the first tenth of the steps, in which high losses would flatten all curves."""
    low = min(float(values.min()) for _, values in curves)
    last = max(float(steps[-1]) for steps, _ in curves)
    high = max(float(values[:, steps >= min(0.1 * last, steps[-1])].max()) for steps, values in curves)
    pad = 0.05 * (high - low) or 0.1
    return low - pad, high + pad


def beside(first: Path, second: Path) -> Path:
    """Print the differences of two runs' recipes, and both runs' results. Draw both validation losses, and return the path of the picture,
    in the first run's folder. Unfinished runs are compared too. Raises BadInput for a folder without a run, and for a run without an
    evaluation."""
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
    """Return a row for every key of the recipes (recipe.yaml) with different values."""
    before, after = (load(folder / "recipe.yaml")[0] for folder in (first, second))
    return [(change.key, written(change.before), written(change.after)) for change in changes(before, after)]


def result_rows(first: Path, second: Path) -> list[Row]:
    """Return a row for each entry of the two summaries. A run without a summary has its number of steps and its last evaluation instead."""
    a, b = (dict(summary_rows(read_summary(folder) or _so_far(folder))) for folder in (first, second))
    return [(label, a.get(label, MISSING), b.get(label, MISSING)) for label in {**a, **b}]


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


def scaling(runs: Mapping[int, Sequence[Lines]], out_png: Path) -> Path:
    """Draw two panels over the number of experts: the last validation loss (mean and range over seeds), and the speedup in steps,
    S / s. S: step of the last evaluation of the runs with the fewest experts. s: step at which the runs with another number of experts
    reach the loss of that evaluation. runs: number of experts -> the lines of metrics.jsonl of each seed. Return `out_png`."""
    from moe.report import style

    curves = {experts: evaluations(str(experts), seeds) for experts, seeds in sorted(runs.items())}
    out_png.parent.mkdir(parents=True, exist_ok=True)
    return style.save(lambda: _gain_figure(curves), out_png)


def step_of_loss(steps_S: Array, losses_S: Array, loss: float) -> float | None:
    """Return the first step at which a curve of losses is at most `loss`, by linear interpolation; None if it never is."""
    points = [(float(step), float(value)) for step, value in zip(steps_S, losses_S, strict=True)]
    if points[0][1] <= loss:
        return points[0][0]
    for (before, above), (step, below) in itertools.pairwise(points):
        if below <= loss:
            return before + (step - before) * (above - loss) / (above - below)
    return None


def reached(curves: Mapping[str, Sequence[Lines]], label: str, baseline: str) -> float | None:
    """Return the step at which the mean curve of `label` reaches the last mean loss of `baseline`; None if it never does.
    curves: label -> the lines of metrics.jsonl of each seed."""
    (steps, losses), (_, base) = (evaluations(name, curves[name]) for name in (label, baseline))
    return step_of_loss(steps, losses.mean(0), float(base[:, -1].mean()))


def _gain_figure(curves: Mapping[int, tuple[Array, Array]]) -> Figure:
    import numpy as np

    from moe.report import style

    counts = list(curves)
    last = [losses[:, -1] for _, losses in curves.values()]
    steps, fewest = curves[counts[0]]
    fig = style.figure(width=style.NARROW, height=5.6)
    above, below = fig.subplots(2, sharex=True)
    means = [float(losses.mean()) for losses in last]
    spread = np.array([[mean - losses.min(), losses.max() - mean] for mean, losses in zip(means, last, strict=True)]).T
    above.errorbar(counts, means, yerr=spread, color=style.LINES[0], marker="o", markersize=4, capsize=3)
    above.set_ylabel("last validation loss")
    above.set_title("Mean and range over seeds")
    speedups = [step_of_loss(at, losses.mean(0), float(fewest[:, -1].mean())) for at, losses in curves.values()]
    below.plot(counts, [float(steps[-1]) / step if step else np.nan for step in speedups], color=style.LINES[1], marker="s", markersize=4)
    below.axhline(1, color=style.MUTED, linewidth=1)
    below.set_ylabel("times fewer steps to the last\nloss with the fewest experts")
    below.set_xscale("log", base=2)
    below.set_xticks(counts, [str(count) for count in counts])
    below.set_xlabel("experts")
    return fig
