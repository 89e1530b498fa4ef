"""Draws the gain from more experts at equal FLOPs per token, as in Switch's scaling figures (arXiv 2101.03961, figures 1 and 4)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moe.report.compare import Lines, evaluations

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from moe.report.history import Array


def scaling(runs: Mapping[int, Sequence[Lines]], out_png: Path) -> Path:
    """Draw two panels over the number of experts: the last validation loss (mean and range over seeds), and the speedup in steps,
    S / s. S: step of the last evaluation of the runs with the fewest experts. s: step at which the runs with another number of experts
    reach the loss of that evaluation. runs: number of experts -> the lines of metrics.jsonl of each seed. Return `out_png`."""
    from moe.report import style

    curves = {experts: evaluations(str(experts), seeds) for experts, seeds in sorted(runs.items())}
    out_png.parent.mkdir(parents=True, exist_ok=True)
    return style.save(lambda: _figure(curves), out_png)


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


def _figure(curves: Mapping[int, tuple[Array, Array]]) -> Figure:
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
