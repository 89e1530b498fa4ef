"""Warns about the course of a run's loss, in one line, from its records.

    ended above its first value | rose above it for long | fell, and rose again at the end        nothing of these: no line

Windows are tenths of the steps. If a loss falls as it should, no window is above an earlier one by more than noise explains.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe.records.summary import known

WINDOWS = 10
LEAST_STEPS = 20  # with fewer, two to a window, no verdict is possible
LONG = 0.05  # share of the steps: a warning if the loss was above its first value at least as often
ERRORS = 4.0  # standard errors of two windows' means
_FIX = "lower optimizer.lr, or lengthen optimizer.warmup_steps"


def loss_warning(lines: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the warning, or None for a loss that fell. Steps whose loss is not a finite number are left out: they are counted as
    skipped."""
    train = [line for line in lines if line.get("kind", "train") == "train" and known(line.get("loss"))]
    if len(train) < LEAST_STEPS:
        return None
    steps, losses = [int(line["step"]) for line in train], [float(line["loss"]) for line in train]
    first, size = losses[0], len(losses) // WINDOWS
    end = statistics.fmean(losses[-size:])
    highest = max(line["lr"] for line in train if known(line.get("lr"))) if any(known(line.get("lr")) for line in train) else None
    fix = f"{_FIX} (the highest rate was {highest:.3g})" if highest is not None else _FIX
    noise = statistics.stdev(losses[-size:]) * math.sqrt(1 + 1 / size)  # of one step, and of a mean of `size`
    if end - first > max(2 * noise, 0.02 * abs(first)):
        return f"the loss ended at {end:.4g}, above the {first:.4g} that it began with: {fix}"
    above = [step for step, loss in zip(steps, losses, strict=True) if loss > first]
    if len(above) >= max(3, LONG * len(losses)) and max(losses) > 1.1 * first:
        top = max(range(len(losses)), key=losses.__getitem__)
        return (
            f"the loss was above its first value, {first:.4g}, in {len(above)} of {len(losses)} steps, up to {losses[top]:.4g} at step "
            f"{steps[top]}: {fix}"
        )
    return _risen(steps, losses, size, fix)


def _risen(steps: Sequence[int], losses: Sequence[float], size: int, fix: str) -> str | None:
    """Return a warning if the last tenth of the loss is above its best one by more than the noise within both explains."""
    windows = [losses[at : at + size] for at in range(len(losses) % size, len(losses), size)]
    means = [statistics.fmean(window) for window in windows]
    best = min(range(len(means) - 1), key=means.__getitem__)
    noise = math.sqrt(sum(statistics.variance(window) / size for window in (windows[best], windows[-1])))
    if means[-1] - means[best] <= max(ERRORS * noise, 0.02 * abs(means[best])):
        return None
    begins = len(losses) % size + best * size
    where = f"steps {steps[begins]} to {steps[begins + size - 1]}"
    return f"the loss rose from {means[best]:.4g} in {where} to {means[-1]:.4g} in the last {size}: {fix}"
