"""Windows of a run's training steps, which are means over a few consecutive steps, and the course of the training loss: whether it fell as
it should. The rules of `moe doctor` read both (moe/records/rules.py).

    lines of metrics.jsonl  | 1 .. 15 | 16 .. 30 | ... |        a fortieth of the run each, at least MIN_STEPS steps
                                 \\ means over the window, for each MoE layer too

A mean over many steps averages out the noise of single batches. A window keeps few numbers, so a running job can hold all of its windows in
memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# S steps of a window, E experts

Array = NDArray[np.float64]
MOST, MIN_STEPS = 40, 5  # largest number of windows in a run, and smallest number of steps in a window


@dataclass(frozen=True)
class Layer:
    """Means of one MoE layer over a window. load_E: load / fair share, for each expert. uneven: root mean square of (load / fair share - 1)
    over experts and single steps. echo: correlation of this deviation with the next step's, from -1 (loads alternate between high and low)
    to 1. dropped: dropped choices / all choices of experts. z_loss: mean squared log-sum-exp of the router's logits. entropy: of the
    softmax of these logits. bias_range: largest minus least selection bias, NaN if unknown."""

    layer: int
    load_E: Array
    uneven: float
    echo: float
    dropped: float
    z_loss: float
    entropy: float
    bias_range: float


@dataclass(frozen=True)
class Window:
    """Some consecutive training steps. first, last: numbers of steps. steps: numbers of the steps with a finite loss. losses, lrs: loss and
    learning rate of each of `steps`. router_share: the router's share of the squared gradient norm, NaN if unknown. layers: the MoE
    layers."""

    first: int
    last: int
    steps: Array
    losses: Array
    lrs: Array
    router_share: float
    layers: tuple[Layer, ...]


class Filling:
    """A window that is being filled, step by step. Of experts' loads it keeps the sums over steps, and the last step's loads."""

    def __init__(self) -> None:
        self.count, self._first, self._last = 0, 0, 0
        self._rows: list[tuple[float, float, float]] = []  # step, loss, learning rate
        self._shares: list[float] = []
        self._layers: dict[int, _Sums] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a step's line of metrics.jsonl."""
        self._first, self._last, self.count = self._first if self.count else line["step"], line["step"], self.count + 1
        if _number(line.get("loss")):
            self._rows.append((line["step"], line["loss"], line["lr"] if _number(line.get("lr")) else math.nan))
        router, norm = (line.get("grad_norm_parts") or {}).get("router"), line.get("grad_norm")
        if _number(router) and _number(norm) and norm:
            self._shares.append((router / norm) ** 2)
        for layer in line.get("moe") or ():
            load = layer.get("load")
            if load and None not in load:
                self._layers.setdefault(layer["layer"], _Sums(len(load))).add(layer)

    def window(self) -> Window:
        """Return the Window of the steps added so far. At least one step must have been added."""
        steps, losses, lrs = np.array(self._rows, dtype=float).reshape(-1, 3).T
        layers = tuple(sums.layer(number) for number, sums in self._layers.items())
        return Window(self._first, self._last, steps, losses, lrs, _mean(self._shares), layers)


class _Sums:
    """Sums over steps of one layer's numbers. _squares: sum of all experts' squared deviations (load / fair share - 1). _last: what the
    last step added to `_squares`. _echoes: sum of the products of an expert's deviations in consecutive steps."""

    def __init__(self, experts: int) -> None:
        self._load_E, self._before_E, self._steps = np.zeros(experts), np.zeros(experts), 0
        self._squares = self._echoes = self._last = self._kept = self._dropped = 0.0
        self._z: list[float] = []
        self._entropy: list[float] = []
        self._bias_range: list[float] = []

    def add(self, layer: Mapping[str, Any]) -> None:
        load_E = np.array(layer["load"], dtype=float)
        if load_E.shape != self._load_E.shape:
            return
        load_E *= len(load_E) / max(load_E.sum(), 1e-9)
        off_E = load_E - 1
        self._load_E, self._steps = self._load_E + load_E, self._steps + 1
        self._echoes += float(off_E @ self._before_E)
        self._last, self._before_E = float(off_E @ off_E), off_E
        self._squares += self._last
        if _number(layer.get("kept")) and _number(layer.get("dropped")):
            self._kept, self._dropped = self._kept + layer["kept"], self._dropped + layer["dropped"]
        self._z += [layer["z_loss"]] if _number(layer.get("z_loss")) else []
        self._entropy += [layer["entropy"]] if _number(layer.get("entropy")) else []
        if _number(layer.get("bias_min")) and _number(layer.get("bias_max")):
            self._bias_range.append(layer["bias_max"] - layer["bias_min"])

    def layer(self, number: int) -> Layer:
        echoed = self._squares - self._last  # without the last step, which has no next step to compare with
        return Layer(
            number,
            self._load_E / max(1, self._steps),
            uneven=math.sqrt(self._squares / max(1, self._steps * len(self._load_E))),
            echo=self._echoes / echoed if echoed else 0.0,
            dropped=self._dropped / max(1, self._kept + self._dropped),
            z_loss=_mean(self._z),
            entropy=_mean(self._entropy),
            bias_range=_mean(self._bias_range),
        )


def window_length(steps: int) -> int:
    """Return the number of steps in each window of a run: a fortieth (1 / MOST) of its `steps`, but at least MIN_STEPS."""
    return max(MIN_STEPS, -(-steps // MOST))


def windows_of(lines: Sequence[Mapping[str, Any]], steps: int) -> list[Window]:
    """Return the windows of a run's lines of metrics.jsonl. steps: number of steps of the whole run. Lines that remain at the end form a
    shorter window if they fill at least half of one; otherwise they are left out."""
    size, by_step = window_length(steps), {line["step"]: line for line in lines if line.get("kind", "train") == "train"}
    found, filling = list[Window](), Filling()
    for number, step in enumerate(sorted(by_step), start=1):
        filling.add(by_step[step])
        if filling.count == size or (number == len(by_step) and 2 * filling.count >= size):
            found.append(filling.window())
            filling = Filling()
    return found


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


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
