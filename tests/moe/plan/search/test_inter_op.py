"""Alpa's dynamic program finds the best of all cuts of layers and devices into stages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import inf

import pytest

from moe.plan.search.alpa import inter_op
from parallel.errors import BadInput


def every(layers: int, devices: int, submeshes: tuple[int, ...]) -> Iterator[list[tuple[int, int]]]:
    """Yield all lists of stages (number of layers, number of devices) that use all layers and all devices."""
    if layers == devices == 0:
        yield []
    for count in range(1, layers + 1):
        for n in submeshes:
            if n <= devices:
                yield from ([(count, n), *rest] for rest in every(layers - count, devices - n, submeshes))


def by_brute_force(time, layers: int, devices: int, submeshes: tuple[int, ...], microbatches: int) -> float:  # type: ignore[no-untyped-def]
    best = inf
    for stages in every(layers, devices, submeshes):
        first, times = 0, []
        for i, (count, n) in enumerate(stages):
            times.append(time(first, first + count, n, len(stages) - 1 - i))
            first += count
        best = min(best, sum(times) + (microbatches - 1) * max(times))
    return best


SIZES = [(1, 1), (3, 2), (5, 4), (6, 6), (7, 8), (8, 5), (8, 8)]


@pytest.mark.parametrize(("layers", "devices"), SIZES)
@pytest.mark.parametrize("seed", range(6))
def test_equals_brute_force_on_random_costs(layers: int, devices: int, seed: int) -> None:
    """Stages have random work and random efficiency. For odd seeds, memory is limited, and a stage with more stages after it needs more."""
    draw = random.Random(1000 * layers + 10 * devices + seed)
    submeshes = (1, 2, 4, 8)[: 1 + seed % 4] if seed % 4 else (1, 2, 4, 8)
    work = [draw.uniform(1, 5) for _ in range(layers)]
    table: dict[tuple[int, int, int, int], float] = {}

    def time(first: int, end: int, n: int, later: int) -> float:
        key = (first, end, n, 0)
        table.setdefault(key, sum(work[first:end]) / n ** draw.uniform(0.5, 1.1))
        room = 4.0 * n if seed % 2 else inf
        return table[key] if (end - first) * (1 + 0.3 * later) <= room else inf

    microbatches = draw.choice([1, 2, 7, 64])
    expected = by_brute_force(time, layers, devices, submeshes, microbatches)
    run = dict(layers=layers, devices=devices, submeshes=submeshes, microbatches=microbatches)
    if expected == inf:
        with pytest.raises(BadInput, match="stages: got .* fix: give devices more memory"):
            inter_op(time, **run)  # type: ignore[arg-type]
        return
    found = inter_op(time, **run)  # type: ignore[arg-type]
    assert found.seconds == pytest.approx(expected, rel=1e-9)
    assert sum(stage.devices for stage in found.stages) == devices
    assert [stage.first for stage in found.stages] + [layers] == [0, *(stage.end for stage in found.stages)]


def test_equal_stages_take_m_plus_p_minus_1() -> None:
    """12 equal layers on 4 devices, m = 16 micro-batches: p = 4 stages, and m + p - 1 times the time of a stage."""
    found = inter_op(
        lambda first, end, n, later: float(end - first) if n == 1 else inf, layers=12, devices=4, submeshes=(1, 2), microbatches=16
    )
    assert [stage.end - stage.first for stage in found.stages] == [3, 3, 3, 3] and found.seconds == (16 + 4 - 1) * 3.0
