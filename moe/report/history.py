"""A run's lines of metrics.jsonl as arrays with an entry for each training step. The entry is NaN if the step's line lacks the number.

Suffixes of names are the axes of arrays: S training steps, E experts. If a step has two lines (in a file joined by hand), the last counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class History:
    """A run's lines of metrics.jsonl by kind: training and evaluation lines in order of steps, events in order of the file. weights: the
    weights of `balance_loss` and `z_loss` in the training loss; empty if unknown. The key own_balance is there if router.balance_loss is
    the user's."""

    train: tuple[Mapping[str, Any], ...]
    evals: tuple[Mapping[str, Any], ...]
    events: tuple[Mapping[str, Any], ...]
    weights: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(lines: Sequence[Mapping[str, Any]], weights: Mapping[str, float] | None = None) -> History:
        def by_step(kind: str) -> tuple[Mapping[str, Any], ...]:
            last = {line["step"]: line for line in lines if line.get("kind", "train") == kind}
            return tuple(last[step] for step in sorted(last))

        return History(by_step("train"), by_step("eval"), tuple(line for line in lines if line.get("kind") == "event"), weights or {})

    @property
    def steps_S(self) -> Array:
        return np.array([line["step"] for line in self.train], dtype=float)

    def series_S(self, key: str) -> Array:
        """Return the number under `key` in each training line, or NaN. A dot selects in a nested object: `grad_norm_parts.expert`."""
        outer, _, inner = key.partition(".")
        if not inner:
            return _numbers([line.get(outer) for line in self.train])
        return _numbers([(line.get(outer) or {}).get(inner) for line in self.train])

    def evaluations(self, key: str = "validation_loss") -> tuple[Array, Array]:
        """Return (steps, values under `key`) of the evaluations with a finite value."""
        steps, values = np.array([line["step"] for line in self.evals], dtype=float), _numbers([line.get(key) for line in self.evals])
        return steps[np.isfinite(values)], values[np.isfinite(values)]

    @property
    def in_nats(self) -> bool:
        """Whether losses are in nats per token. Values of a user's own train.loss are not; evaluations then lack bits per byte."""
        return all("bits_per_byte" in line for line in self.evals)

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the MoE layers; empty for a dense run."""
        return tuple(sorted({layer["layer"] for line in self.train for layer in line.get("moe") or ()}))

    @property
    def families(self) -> tuple[str, ...]:
        """Names of the families of parameters (dense, router, expert) whose gradient norm is recorded in any step."""
        return tuple(dict.fromkeys(name for line in self.train for name in line.get("grad_norm_parts") or {}))

    def load_SE(self, layer: int) -> Array:
        """Return each expert's load / mean load, before choices are dropped, at each training step; NaN for a step without this layer."""
        rows = [found.get("load") or [] for found in self._layer(layer)]
        experts = max((len(row) for row in rows), default=0)
        load_SE = np.array([_numbers(row) if len(row) == experts else np.full(experts, np.nan) for row in rows]).reshape(len(rows), experts)
        mean_S1 = load_SE.mean(axis=1, keepdims=True) if experts else np.ones((len(rows), 1))
        relative_SE: Array = np.where(np.isnan(load_SE), np.nan, 0.0)
        np.divide(load_SE, mean_S1, out=relative_SE, where=mean_S1 > 0)
        return relative_SE

    def dropped_S(self, layer: int) -> Array:
        """Return the share of (token, choice) pairs that the layer dropped, for each training step."""
        kept_S, dropped_S = (_numbers([found.get(key) for found in self._layer(layer)]) for key in ("kept", "dropped"))
        total_S = kept_S + dropped_S
        return np.divide(dropped_S, total_S, out=np.full_like(total_S, np.nan), where=total_S > 0)

    def bias_range_S(self, layer: int) -> Array:
        """Return the layer's largest minus its least selection bias, for each training step."""
        least_S, largest_S = (_numbers([found.get(key) for found in self._layer(layer)]) for key in ("bias_min", "bias_max"))
        return largest_S - least_S

    def _layer(self, layer: int) -> list[Mapping[str, Any]]:
        return [next((found for found in line.get("moe") or () if found["layer"] == layer), {}) for line in self.train]


def _numbers(values: Sequence[Any]) -> Array:
    return np.array([float(v) if isinstance(v, int | float) else np.nan for v in values], dtype=float)


def smoothed(values_S: Array) -> Array:
    """Return centered moving averages [S] that ignore NaN. The window is a thirtieth of the steps (3 to 501), shorter at both ends."""
    width = int(min(501, max(3, len(values_S) // 30))) | 1
    known = np.isfinite(values_S)
    kernel = np.ones(width)
    total = np.convolve(np.where(known, values_S, 0.0), kernel)[width // 2 :][: len(values_S)]
    count = np.convolve(known.astype(float), kernel)[width // 2 :][: len(values_S)]
    means_S: Array = np.full(len(values_S), np.nan)
    np.divide(total, count, out=means_S, where=count > 0.5)
    return means_S


def windows(values_SE: Array, steps_S: Array, most: int) -> tuple[Array, Array]:
    """Average `values_SE` over W <= `most` consecutive windows of equally many training steps (fewer in the last). NaN is ignored. Return
    (means [W, E], edges of the windows [W + 1], in steps). steps_S: number of each training step."""
    size = max(1, -(-len(steps_S) // most))
    starts = range(0, len(steps_S), size)
    parts = [values_SE[start : start + size] for start in starts]
    known = [np.isfinite(part) for part in parts]
    means = [
        np.divide(np.where(ok, part, 0).sum(0), ok.sum(0), out=np.full(part.shape[1], np.nan), where=ok.sum(0) > 0)
        for part, ok in zip(parts, known, strict=True)
    ]
    edges = [steps_S[start] - 0.5 for start in starts] + [steps_S[-1] + 0.5]
    return np.array(means), np.array(edges)
