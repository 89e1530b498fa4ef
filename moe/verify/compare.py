"""Deviations of a run from a reference: the numbers of a table row."""

from __future__ import annotations

import math

from torch import Tensor

from moe.verify.twin import Result

NUMBERS = ("loss", "gradient", "norm", "update", "ten_step")


def deviation(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference divided by b's largest value (at least `floor`); 0 for equal tensors, inf for other shapes or NaN."""
    if a.shape != b.shape or not bool(a.isfinite().all()):
        return float("inf")
    difference = (a.double() - b.double()).abs().max().item()
    return difference / max(b.abs().max().item(), floor) if difference else 0.0


def _relative(a: float, b: float) -> float:
    """The difference divided by b; inf if a is not finite, because max() would lose a NaN."""
    if not math.isfinite(a):
        return math.inf
    return abs(a - b) / abs(b) if a != b else 0.0


def gradient_deviations(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Return the deviation of each parameter's gradient, divided by its largest value, or a thousandth of all gradients' largest."""
    largest = max(g.abs().max().item() for g in want.values())
    return {name: deviation(got[name], gradient, 1e-3 * largest) for name, gradient in want.items()}


def compare(got: Result, want: Result) -> dict[str, float]:
    """Return the largest relative deviation of each of NUMBERS; `loss` includes the balance loss, `update` is of the weights."""
    if got.gradients.keys() != want.gradients.keys():
        return dict.fromkeys(NUMBERS, math.inf)
    return {
        "loss": max(_relative(got.losses[0], want.losses[0]), _relative(got.balance, want.balance)),
        "gradient": max(gradient_deviations(got.gradients, want.gradients).values()),
        "norm": _relative(got.norm, want.norm),
        "update": max(deviation(got.weights[n], w) for n, w in want.weights.items()),
        "ten_step": max(_relative(a, b) for a, b in zip(got.losses, want.losses, strict=True)),
    }
