"""Windows of a run's training steps: what the rules of the doctor (moe/records/rules.py) read.

    lines of metrics.jsonl  | 1 .. 15 | 16 .. 30 | ... |        a fortieth of the run each, at least MIN_STEPS steps
                                 \\ means over the window, for each MoE layer too

Means over many steps hide the chance of a single batch. A window keeps few numbers, so a running job can hold all of its windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# S steps of a window, E experts

Array = NDArray[np.float64]
MOST, MIN_STEPS = 40, 5  # number of windows in a run, and the smallest number of steps in one


@dataclass(frozen=True)
class Layer:
    """Means of one MoE layer over a window. load_E: load / fair share, for each expert. uneven: root mean square of (load / fair share - 1)
    over experts and single steps. echo: correlation of this deviation with the next step's, from -1 (each expert is in turn full and empty)
    to 1. dropped: share of choices. z_loss, entropy: as in metrics.jsonl."""

    layer: int
    load_E: Array
    uneven: float
    echo: float
    dropped: float
    z_loss: float
    entropy: float

    @staticmethod
    def of(layer: int, steps: Sequence[Mapping[str, Any]]) -> Layer:
        load_SE = np.array([step["load"] for step in steps], dtype=float)
        load_SE = load_SE * load_SE.shape[1] / np.maximum(load_SE.sum(1, keepdims=True), 1e-9)
        off_SE = load_SE - 1
        here, squares = (off_SE[:-1] * off_SE[1:]).sum(), (off_SE[:-1] ** 2).sum()
        kept, dropped = (sum(step.get(key) or 0 for step in steps) for key in ("kept", "dropped"))
        return Layer(
            layer,
            load_SE.mean(0),
            uneven=math.sqrt((off_SE**2).mean()),
            echo=float(here / squares) if squares else 0.0,
            dropped=dropped / max(1, kept + dropped),
            z_loss=_mean(step.get("z_loss") for step in steps),
            entropy=_mean(step.get("entropy") for step in steps),
        )


@dataclass(frozen=True)
class Window:
    """Some consecutive training steps. first, last: numbers of steps. losses, lrs: of each step with a finite loss, whose numbers are
    `steps`. router_share: the router's share of the squared gradient norm, NaN if unknown. layers: the MoE layers."""

    first: int
    last: int
    steps: Array
    losses: Array
    lrs: Array
    router_share: float
    layers: tuple[Layer, ...]

    @staticmethod
    def of(lines: Sequence[Mapping[str, Any]]) -> Window:
        known = [line for line in lines if _number(line.get("loss"))]
        columns = (np.array([line.get(key) or 0.0 for line in known], dtype=float) for key in ("step", "loss", "lr"))
        shares = [
            (parts["router"] / line["grad_norm"]) ** 2
            for line in lines
            if "router" in (parts := line.get("grad_norm_parts") or {}) and _number(parts["router"]) and line.get("grad_norm")
        ]
        return Window(lines[0]["step"], lines[-1]["step"], *columns, _mean(shares), tuple(_layers(lines)))


def _layers(lines: Sequence[Mapping[str, Any]]) -> Iterator[Layer]:
    found: dict[int, list[Mapping[str, Any]]] = {}
    for line in lines:
        for layer in line.get("moe") or ():
            if layer.get("load") and None not in layer["load"]:
                found.setdefault(layer["layer"], []).append(layer)
    for layer, steps in found.items():
        yield Layer.of(layer, [step for step in steps if len(step["load"]) == len(steps[-1]["load"])])


def window_length(steps: int) -> int:
    """Return the number of steps in a window of a run of `steps` steps."""
    return max(MIN_STEPS, -(-steps // MOST))


def windows_of(lines: Sequence[Mapping[str, Any]], steps: int) -> list[Window]:
    """Return the windows of a run's lines of metrics.jsonl. steps: number of steps of the whole run. Steps at the end that do not fill a
    window become one if they are at least half of it."""
    size, by_step = window_length(steps), {line["step"]: line for line in lines if line.get("kind", "train") == "train"}
    train = [by_step[step] for step in sorted(by_step)]
    return [Window.of(part) for at in range(0, len(train), size) if 2 * len(part := train[at : at + size]) >= size]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _mean(values: Any) -> float:
    found = [value for value in values if _number(value)]
    return sum(found) / len(found) if found else math.nan
