"""`loss_warning` returns one line about a training loss that rose, and None for a loss that fell and for a short run."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from moe.records.summary import LEAST_STEPS, LOSS, loss_warning, summary_rows


def lines(curve: Callable[[int], float], steps: int = 200, *, noise: float = 0.1) -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [{"kind": "train", "step": n, "lr": 0.5, "loss": curve(n) + draw.gauss(0, noise)} for n in range(1, steps + 1)]


def falls(step: int) -> float:
    return 1.5 + 4 * math.exp(-step / 30)


RISES = {
    "ended above": (lambda n: falls(1) + n / 100, "the loss ended at 7"),
    "above for long": (lambda n: falls(n) + (6 if 10 < n < 40 else 0), "the loss was above its first value, 5"),
    "diverged and settled higher": (lambda n: falls(n) + (0.5 if n > 150 else 0), "the loss rose from 1.5"),
}


@pytest.mark.parametrize("name", RISES)
def test_a_loss_that_rises_is_one_line_with_a_fix(name: str) -> None:
    curve, said = RISES[name]
    warning = loss_warning(lines(curve))
    assert warning is not None and warning.startswith(said) and "\n" not in warning
    assert "lower optimizer.lr" in warning and "0.5" in warning
    assert dict(summary_rows({"loss_warning": warning}))[LOSS] == warning


@pytest.mark.parametrize("steps", [LEAST_STEPS, 57, 200, 2000])
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.4])
def test_a_loss_that_falls_or_stays_where_it_is_is_not_mentioned(steps: int, noise: float) -> None:
    assert loss_warning(lines(lambda n: falls(n * 200 // steps), steps, noise=noise)) is None
    assert (
        loss_warning(lines(lambda n: 5.5, steps, noise=noise / 10)) is None
    )  # constant but for noise, as with a learning rate of nearly 0


def test_a_run_too_short_to_say_anything_and_losses_that_are_no_numbers() -> None:
    assert loss_warning(lines(lambda n: float(n), LEAST_STEPS - 1)) is None
    lost = [line | {"loss": None} for line in lines(falls)]
    assert loss_warning(lost) is None and loss_warning([]) is None
