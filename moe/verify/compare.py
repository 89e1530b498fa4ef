"""Computes the five deviations in a table row of `moe verify`: how far a run's losses, gradients and weights are from a reference run's."""

from __future__ import annotations

import math

from torch import Tensor

from moe.verify.twin import Result

NUMBERS = ("loss", "gradient", "norm", "update", "ten_step")


def deviation(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """Return max |a - b| / max(max |b|, floor). It is 0 for equal tensors, and inf if shapes differ or a is not finite."""
    if a.shape != b.shape or not bool(a.isfinite().all()):
        return float("inf")
    difference, scale = (a.double() - b.double()).abs().max().item(), max(b.abs().max().item(), floor)
    return 0.0 if not difference else difference / scale if scale else math.inf


def _relative(a: float, b: float) -> float:
    if not math.isfinite(a):  # Python's max() would ignore a NaN
        return math.inf
    return 0.0 if a == b else abs(a - b) / abs(b) if b else math.inf


def gradient_deviations(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Return a dict: parameter -> deviation of its gradient. The divisor is the gradient's largest element, but at least 1/1000 of the
    largest element of all gradients. Otherwise rounding in a tiny gradient would be a large deviation. got, want: parameter -> gradient, of
    the tested run and of the reference."""
    largest = max(g.abs().max().item() for g in want.values())
    return {name: deviation(got[name], gradient, 1e-3 * largest) for name, gradient in want.items()}


def compare(got: Result, want: Result) -> dict[str, float]:
    """Return a dict: name in NUMBERS -> largest relative deviation. got, want: results of the tested run and of the reference. All
    deviations are inf if a gradient or a weight is missing.

    "loss", "gradient", "norm" and "update" are deviations in step 0: of the loss and the balance loss, of each parameter's gradient, of the
    gradient norm, and of each weight after the step. "ten_step" is the deviation of the losses of all steps.
    """
    if got.gradients.keys() != want.gradients.keys() or not want.weights.keys() <= got.weights.keys():
        return dict.fromkeys(NUMBERS, math.inf)
    return {
        "loss": max(_relative(got.losses[0], want.losses[0]), _relative(got.balance, want.balance)),
        "gradient": max(gradient_deviations(got.gradients, want.gradients).values()),
        "norm": _relative(got.norm, want.norm),
        "update": max(deviation(got.weights[n], w) for n, w in want.weights.items()),
        "ten_step": max(_relative(a, b) for a, b in zip(got.losses, want.losses, strict=True)),
    }
