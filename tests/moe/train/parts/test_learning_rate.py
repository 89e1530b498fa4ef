"""Learning-rate schedules: their first and last values, and their largest change between two updates."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.recipe.sections import Optimizer
from moe.train.parts.learning_rate import learning_rate

LR = 0.004


@st.composite
def runs(draw: st.DrawFn, schedule: str | None = None) -> tuple[Optimizer, int]:
    total = draw(st.integers(2, 3000))
    settings = Optimizer(
        lr=LR,
        warmup_steps=draw(st.integers(0, total - 1)),
        schedule=schedule or draw(st.sampled_from(["cosine", "wsd", "constant"])),
        decay_share=draw(st.floats(0.015625, 1.0, width=32)),
        min_lr_share=draw(st.floats(0.0, 1.0, width=32, allow_subnormal=False)),
    )
    return settings, total


def rates(settings: Optimizer, total: int) -> list[float]:
    return [learning_rate(update, settings, total=total) for update in range(total + 1)]


@given(runs())
def test_warm_up_is_linear_and_ends_at_the_full_rate(run: tuple[Optimizer, int]) -> None:
    settings, total = run
    warm = settings.warmup_steps
    assert rates(settings, total)[:warm] == pytest.approx([LR * (n + 1) / warm for n in range(warm)])
    assert learning_rate(warm, settings, total=total) == pytest.approx(LR, rel=1e-12)


@given(runs(), st.integers(0, 10_000))
def test_the_rate_is_never_negative_nor_above_the_full_one_even_after_the_end(run: tuple[Optimizer, int], update: int) -> None:
    settings, total = run
    assert 0 <= learning_rate(update, settings, total=total) <= LR * (1 + 1e-12)


@given(runs())
def test_the_rate_never_jumps(run: tuple[Optimizer, int]) -> None:
    """The rate changes between two updates by at most the steepest slope of warm-up and decay."""
    settings, total = run
    warm, drop = settings.warmup_steps, LR * (1 - settings.min_lr_share)
    decay = max(1.0, min(total - warm, total * settings.decay_share)) if settings.schedule == "wsd" else total - warm
    steepest = max(LR / warm if warm else 0.0, drop * (math.pi / 2 if settings.schedule == "cosine" else 1) / decay)
    found = rates(settings, total)
    assert max(abs(b - a) for a, b in zip(found, found[1:], strict=False)) <= steepest * (1 + 1e-9) + 1e-15


@given(runs("cosine"))
def test_cosine_falls_to_its_share_and_is_half_way_in_the_middle(run: tuple[Optimizer, int]) -> None:
    settings, total = run
    warm, low = settings.warmup_steps, LR * settings.min_lr_share
    after = rates(settings, total)[warm:]
    assert after[-1] == pytest.approx(low, abs=1e-15) and all(a >= b for a, b in zip(after, after[1:], strict=False))
    for n in range(len(after)):  # half a cosine is symmetric about its middle
        assert after[n] + after[-1 - n] == pytest.approx(LR + low)


@given(runs("wsd"))
def test_wsd_is_flat_and_then_a_straight_line_to_its_share(run: tuple[Optimizer, int]) -> None:
    settings, total = run
    start = max(settings.warmup_steps, total * (1 - settings.decay_share))
    found = rates(settings, total)
    assert all(found[n] == LR for n in range(settings.warmup_steps, math.floor(start) + 1))
    line = found[math.ceil(start) :]
    slopes = [b - a for a, b in zip(line, line[1:], strict=False)]
    assert slopes == pytest.approx([slopes[0]] * len(slopes), abs=1e-12) if slopes else True
    if total - start >= 1:
        assert found[-1] == pytest.approx(LR * settings.min_lr_share, abs=1e-12)


@given(runs("constant"))
def test_constant_stays(run: tuple[Optimizer, int]) -> None:
    settings, total = run
    assert set(rates(settings, total)[settings.warmup_steps :]) == {LR}


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_a_run_shorter_than_its_warm_up_only_warms_up(schedule: str) -> None:
    settings = Optimizer(lr=LR, warmup_steps=100, schedule=schedule)  # type: ignore[arg-type]
    assert [learning_rate(n, settings, total=10) for n in range(10)] == pytest.approx([LR * (n + 1) / 100 for n in range(10)])


def test_a_few_rates_by_hand() -> None:
    cosine = Optimizer(lr=1.0, warmup_steps=2, schedule="cosine", min_lr_share=0.0)
    assert [learning_rate(n, cosine, total=6) for n in (0, 1, 2, 4, 6)] == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])
    wsd = Optimizer(lr=1.0, warmup_steps=2, schedule="wsd", decay_share=0.4, min_lr_share=0.5)
    assert [learning_rate(n, wsd, total=10) for n in (1, 5, 6, 8, 10)] == pytest.approx([1.0, 1.0, 1.0, 0.75, 0.5])
