"""Windows of a run's training steps: means over a few consecutive steps, which the rules of `moe doctor` read (moe/records/rules.py).

    lines of metrics.jsonl  | 1 .. 15 | 16 .. 30 | ... |        a fortieth of the run each, at least MIN_STEPS steps
                                 \\ means over the window, for each MoE layer too

A mean over many steps averages out the noise of single batches. A window keeps few numbers, so a running job can hold all of its windows in
memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
