"""A picture that compares recipes over several seeds each: validation loss over steps, as the mean over seeds with a band from minimum
to maximum. A second panel shows the difference to a baseline, seed by seed, where a few hundredths of a nat are visible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from moe.report.history import Array
    from moe.report.style import Theme

Lines = Sequence[Mapping[str, Any]]


def compare(
    runs: Mapping[str, Sequence[Lines]],
    out_png: Path,
    *,
    baseline: str | None = None,
    key: str = "validation_loss",
    title: str | None = None,
) -> Path:
    """Draw `runs` to `out_png`: label -> one list of metrics.jsonl lines per seed, with seeds in the same order for every label.

    Only steps that all seeds of a label evaluated are drawn. With `baseline` (one of the labels), a second panel shows every other label
    minus the baseline at the same seed. Creates folders; returns the path. Raises BadInput if a label's seeds share no evaluation.
    """
    from moe.report import style

    curves = {label: evaluations(label, seeds, key=key) for label, seeds in runs.items()}
    if not curves or (baseline is not None and baseline not in curves):
        raise BadInput(
            "baseline", got=baseline, needed=f"one of the runs: {', '.join(curves) or 'none were given'}", fix="name one of them, or None"
        )
    out_png = Path(out_png)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    return style.save(lambda theme: _figure(curves, theme, baseline, key, title), out_png)


def evaluations(label: str, seeds: Sequence[Lines], *, key: str = "validation_loss") -> tuple[Array, Array]:
    """Return (steps, values [seeds, steps]) at the steps that every seed evaluated. Raises BadInput if there are none."""
    import numpy as np

    from moe.report.history import History

    found = [dict(zip(*(array.tolist() for array in History.of(lines).evaluations(key)), strict=True)) for lines in seeds]
    steps = sorted(set.intersection(*map(set, found))) if found else []
    if not steps:
        raise BadInput(
            f"runs of {label}",
            got=f"no step at which all {len(seeds)} seeds have {key}",
            needed="at least one evaluation in common",
            fix="give every seed the same train.steps and train.eval_every",
        )
    return np.array(steps), np.array([[values[step] for step in steps] for values in found])


def _figure(curves: Mapping[str, tuple[Array, Array]], theme: Theme, baseline: str | None, key: str, title: str | None) -> Figure:
    import numpy as np

    from moe.report import style

    below = baseline is not None and len(curves) > 1
    fig = style.figure(width=8.0, height=6.4 if below else 4.2)
    axes = np.atleast_1d(fig.subplots(1 + below, sharex=True, height_ratios=(3, 2) if below else (1,)))
    marks = dict(zip(curves, "osD^vPX" * len(curves), strict=False))
    tones = dict(zip(curves, style.colours(theme, len(curves)), strict=True))
    for label, (steps, values) in curves.items():
        seeds = f"{len(values)} seed{'s' if len(values) > 1 else ''}"
        _band(
            axes[0], steps, values, tone=tones[label], mark=marks[label], label=f"{label}: {values[:, -1].mean():.4f} at the end ({seeds})"
        )
    axes[0].set_title(title or f"{_words(key).capitalize()}, mean and range over seeds")
    axes[0].set_ylabel(f"{_words(key)} (nats per token)" if key.endswith("loss") else _words(key))
    axes[0].set_ylim(*_range(curves.values()))
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
        axes[1].set_title("Below the line: better than the baseline", fontsize=10, fontweight="normal", color=theme.muted)
    for ax in axes:
        style.step_axis(ax, np.concatenate([steps for steps, _ in curves.values()]), label=ax is axes[-1])
    return fig


def _band(ax: Any, steps: Array, values: Array, *, tone: Any, mark: str, label: str) -> None:
    ax.fill_between(steps, values.min(0), values.max(0), color=tone, alpha=0.2, linewidth=0)
    ax.plot(steps, values.mean(0), color=tone, marker=mark, markersize=4, label=label)


def _range(curves: Any) -> tuple[float, float]:
    """Return the y-range: from the lowest value to the values after a tenth of the steps. Including the start would flatten the end."""
    import numpy as np

    everything = [(steps, values) for steps, values in curves]
    low = min(float(values.min()) for _, values in everything)
    last = max(float(steps[-1]) for steps, _ in everything)
    late = [values[:, steps >= min(0.1 * last, steps[-1])] for steps, values in everything]
    high = max(float(np.max(values)) for values in late)
    pad = 0.05 * (high - low) or 0.1
    return low - pad, high + pad


def _words(key: str) -> str:
    return key.replace("_", " ")
