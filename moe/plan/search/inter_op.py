"""Alpa's inter-operator search (arXiv 2201.12023, section 5): cuts layers into stages, and devices into submeshes, by dynamic programming.

    step time = sum_i t_i + (B - 1) max_i t_i              B micro-batches, each of which takes t_i seconds on stage i

For every possible time t_max of the slowest stage, in ascending order:

    F(s, l, d) = min over k > l and submeshes of n <= d devices:   F(s - 1, k, d - n) + t(l..k, n, s - 1)     for stages with t <= t_max

t(l..k, n, later) is the time of a stage with the layers l to k - 1 on n devices; inf if the stage does not fit into memory. `later` is the
number of later stages: for each of them, 1F1B keeps the activations of one more micro-batch. F(s, l, d) is the least sum of the times of s
stages with the layers from l to the last, on d devices. The result is the smallest F(s, 0, D) + (B - 1) t_max over all s and t_max, for D
devices. The search ends when B t_max exceeds the best result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from parallel.errors import BadInput, counted

Time = Callable[[int, int, int, int], float]  # (first layer, end layer, devices, number of later stages) -> seconds, or inf


@dataclass(frozen=True)
class Stage:
    """A stage: layers `first` to `end` - 1 on `devices` devices. seconds: time of one micro-batch, forward and backward."""

    first: int
    end: int
    devices: int
    seconds: float


@dataclass(frozen=True)
class Stages:
    """Stages of the whole model. seconds: time of a step."""

    stages: tuple[Stage, ...]
    seconds: float


def total(times: Sequence[float], microbatches: int) -> float:
    """Return the seconds of a step. times: seconds of one micro-batch on each stage."""
    return sum(times) + (microbatches - 1) * max(times)


def inter_op(time: Time, *, layers: int, devices: int, submeshes: Sequence[int], microbatches: int, gap: float = 1e-9) -> Stages:
    """Find the stages that use all devices and have the least step time. Raises BadInput if no stages fit into memory. time: (first, end,
    devices, number of later stages) -> seconds of one micro-batch on the stage, or inf. submeshes: numbers of devices that a stage may
    have. gap: if two values of t_max differ by less than this fraction, only the smaller is tried."""
    most = min(layers, devices)
    # t[later, submesh][first, end]: seconds of a stage that `later` stages follow; inf if the stage does not fit, or end <= first
    t = np.full((most, len(submeshes), layers + 1, layers + 1), inf)
    for later in range(most):
        for j, n in enumerate(submeshes):
            for first in range(layers):
                for end in range(first + 1, layers + 1):
                    t[later, j, first, end] = time(first, end, n, later)
    best, found = inf, None
    tried = -inf
    for t_max in np.unique(t[np.isfinite(t)]):
        if microbatches * t_max >= best:
            break
        if t_max <= tried * (1 + gap):
            continue
        tried = t_max
        sums, choice = _sums(np.where(t <= t_max * (1 + gap), t, inf), layers, devices, submeshes)
        values = sums[:, 0, devices] + (microbatches - 1) * t_max
        stages = int(values.argmin())
        if values[stages] < best:
            made = _walk(choice, t, stages, devices, submeshes)
            seconds = total([stage.seconds for stage in made], microbatches)  # less than values[stages] if all stages take less than t_max
            if seconds < best:
                best, found = seconds, Stages(made, seconds)
    if found is None:
        got = f"none that fit into memory, for {counted(layers, 'layer')} on {counted(devices, 'device')}"
        fix = "give devices more memory, or take more devices or smaller micro-batches"
        raise BadInput("stages", got=got, needed="stages that fit into memory", fix=fix)
    return found


def _sums(t: Any, layers: int, devices: int, submeshes: Sequence[int]) -> tuple[Any, Any]:
    """Return the arrays F[s, l, d] (top of this file) and choice[s, l, d, 2]: (index of the submesh, end layer) of the first stage. t:
    seconds, as in `inter_op`."""
    most = len(t)
    sums = np.full((most + 1, layers + 1, devices + 1), inf)
    choice = np.zeros((most + 1, layers + 1, devices + 1, 2), dtype=np.int32)
    sums[0, layers, 0] = 0.0
    for s in range(1, most + 1):
        for j, n in enumerate(submeshes):
            if n > devices or not np.isfinite(t[s - 1, j]).any():
                continue
            # both[l, k, rest]: seconds if the first of s stages has layers l to k - 1 on n devices, and the other stages have the layers
            # from k on `rest` devices; so d = n + rest
            both = t[s - 1, j][:layers, :, None] + sums[s - 1][None, :, : devices + 1 - n]
            end = both.argmin(axis=1)
            value = np.take_along_axis(both, end[:, None, :], axis=1)[:, 0]
            better = value < sums[s, :layers, n:]
            sums[s, :layers, n:] = np.where(better, value, sums[s, :layers, n:])
            choice[s, :layers, n:, 0] = np.where(better, j, choice[s, :layers, n:, 0])
            choice[s, :layers, n:, 1] = np.where(better, end, choice[s, :layers, n:, 1])
    return sums, choice


def _walk(choice: Any, t: Any, stages: int, devices: int, submeshes: Sequence[int]) -> tuple[Stage, ...]:
    """Return the `stages` stages that F[stages, 0, devices] stands for, in order. choice: from `_sums`. t: seconds, as in `inter_op`."""
    made, first = [], 0
    for s in range(stages, 0, -1):
        j, end = (int(x) for x in choice[s, first, devices])
        made.append(Stage(first, end, submeshes[j], float(t[s - 1, j, first, end])))
        first, devices = end, devices - submeshes[j]
    return tuple(made)
