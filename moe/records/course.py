"""The course of a training loss: whether it fell as it should, for the rules of `moe doctor` (moe/records/rules.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moe.records.windows import Window

PARTS = 10  # mean losses of equal parts of the run are compared; a part has 1 / PARTS of the steps, rounded down
LEAST_STEPS = 20  # a run with fewer steps is not judged
LEAST_OF_PART = 8  # parts with fewer steps are not compared with each other: the noise of their means cannot be estimated
LONG = 0.05  # a fault, if at least this share of steps have a loss above the first one, and one of them is over 10 % above it
ERRORS = 4.0  # number of standard errors by which the loss must rise between two parts; it must also rise by 2 %
BEFORE = 20  # a step's loss is compared with the median loss of this number of previous steps
SPIKE, SPIKES = 8.0, 3  # a spike is this many standard deviations above the median of BEFORE previous steps; this many spikes are a fault


class Found(NamedTuple):
    """A fault that a rule found. since: the first step that shows it. value: the measured number, such as a loss. said: a sentence about
    the fault."""

    since: int
    value: float
    said: str


def course(windows: Sequence[Window]) -> Found | None:
    """Return the fault in the course of the loss: it ended above its first value, was above that value for long, or fell and then rose by
    more than noise explains. None: no fault. Steps without a finite loss are left out, because they are reported as skipped."""
    steps, losses = (np.concatenate([getattr(window, of) for window in windows] or [np.empty(0)]) for of in ("steps", "losses"))
    if len(losses) < LEAST_STEPS:
        return None
    first, size = float(losses[0]), len(losses) // PARTS
    begins = range(len(losses) % size, len(losses), size)
    parts = [losses[begin : begin + size] for begin in begins]
    means = [float(part.mean()) for part in parts]
    noise = float(parts[-1].std(ddof=1)) * math.sqrt(1 + 1 / size)  # standard deviation of (one step's loss - mean loss of `size` steps)
    if means[-1] - first > max(2 * noise, 0.02 * abs(first)):
        since = next(at for at in range(len(means) - 1, -1, -1) if at == 0 or means[at - 1] <= first)
        return Found(int(steps[begins[since]]), means[-1], f"the loss is at {means[-1]:.4g}, above the {first:.4g} that it began with")
    above = losses > first
    if above.sum() >= max(3, LONG * len(losses)) and losses.max() > 1.1 * first:
        top, where = int(losses.argmax()), f"in {above.sum()} of {len(losses)} steps"
        said = f"the loss was above its first value, {first:.4g}, {where}, up to {losses[top]:.4g} at step {int(steps[top])}"
        return Found(int(steps[(losses > 1.1 * first).argmax()]), float(losses[top]), said)
    if size < LEAST_OF_PART:
        return None
    best = min(range(len(means) - 1), key=means.__getitem__)
    noise = math.sqrt(sum(float(part.var(ddof=1)) / size for part in (parts[best], parts[-1])))
    if means[-1] - means[best] <= max(ERRORS * noise, 0.02 * abs(means[best])):
        return None
    said = f"the loss rose from {means[best]:.4g} to {means[-1]:.4g} in the last {size} steps"
    return Found(int(steps[begins[best] + size - 1]), means[-1], said)


def spikes(windows: Sequence[Window], *, after: int) -> Found | None:
    """Return the fault that the loss spikes at least SPIKES times after step `after`; None: no fault. In a spike, the loss is more than
    SPIKE standard deviations, and more than a tenth, above the median of the BEFORE previous steps; successive such steps are one spike.
    The standard deviation is estimated from the median absolute deviation of these previous steps, which spikes hardly change."""
    steps, losses = (np.concatenate([getattr(window, of) for window in windows] or [np.empty(0)]) for of in ("steps", "losses"))
    if len(losses) <= BEFORE:
        return None
    before = np.lib.stride_tricks.sliding_window_view(losses, BEFORE)[:-1]
    steps, losses, usual = steps[BEFORE:], losses[BEFORE:], np.median(before, axis=1)
    noise = 1.4826 * np.median(np.abs(before - usual[:, None]), axis=1)
    above = (losses - usual > np.maximum(SPIKE * noise, 0.1 * np.abs(usual))) & (steps > after)
    begins = np.flatnonzero(above & ~np.concatenate(([False], above[:-1])))
    if len(begins) < SPIKES:
        return None
    top = int(np.argmax(np.where(above, losses - usual, -np.inf)))
    said = f"the loss spiked {len(begins)} times, from {usual[top]:.4g} up to {losses[top]:.4g} at step {int(steps[top])}"
    return Found(int(steps[begins[0]]), float(losses[top]), said)
