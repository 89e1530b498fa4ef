"""Deviations between two runs: the numbers of a table row."""

from __future__ import annotations

import math

from torch import Tensor

from moe.verify.twin import Result

NUMBERS = ("loss", "gradient", "norm", "update", "ten_step")


def deviation(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """Largest difference over the largest reference value (at least `floor`). 0 for equal tensors, inf for different shapes or NaN."""
    if a.shape != b.shape or not bool(a.isfinite().all()):
        return float("inf")
    difference = (a.double() - b.double()).abs().max().item()
    return difference / max(b.abs().max().item(), floor) if difference else 0.0


def relative(a: float, b: float) -> float:
    """Relative difference of two numbers, over `b`. inf if `a` is not finite, because max() would lose a NaN."""
    if not math.isfinite(a):
        return math.inf
    return abs(a - b) / abs(b) if a != b else 0.0


def gradient_deviations(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Deviation of each parameter's gradient, over its largest value or over a thousandth of the largest of all gradients if that is
    more.
    """
    largest = max(g.abs().max().item() for g in want.values())
    return {name: deviation(got[name], gradient, 1e-3 * largest) for name, gradient in want.items()}


def compare(got: Result, want: Result) -> dict[str, float]:
    """The largest relative deviation of each number of a row."""
    if got.gradients.keys() != want.gradients.keys():
        return dict.fromkeys(NUMBERS, math.inf)
    return {
        "loss": max(relative(got.losses[0], want.losses[0]), relative(got.balance, want.balance)),
        "gradient": max(gradient_deviations(got.gradients, want.gradients).values()),
        "norm": relative(got.norm, want.norm),
        "update": max(deviation(got.weights[n], w) for n, w in want.weights.items()),
        "ten_step": max(relative(a, b) for a, b in zip(got.losses, want.losses, strict=True)),
    }
