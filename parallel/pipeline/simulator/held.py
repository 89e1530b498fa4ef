"""Counts the activations and weight versions that each rank keeps. They depend only on the order of its actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import ge

from parallel.pipeline.schedule import Op, Schedule


@dataclass(frozen=True)
class RankPeaks:
    """Peak memory of one rank, in micro-batches.

    most: peaks, each with the number of kept micro-batches for each of `stages`. Only peaks that no other peak exceeds in all stages.
    versions: number of weight versions, the newest included.
    """

    stages: tuple[int, ...]
    most: tuple[tuple[int, ...], ...]
    versions: int = 1


def held(schedule: Schedule) -> tuple[RankPeaks, ...]:
    """Peak memory of each rank, counted in its order of actions."""
    ranks = range(schedule.num_ranks)
    versions = weight_versions(schedule) if schedule.num_updates > 1 else [1] * len(ranks)
    return tuple(RankPeaks(schedule.stages_of(rank), _most(schedule, rank), versions[rank]) for rank in ranks)


def _most(schedule: Schedule, rank: int) -> tuple[tuple[int, ...], ...]:
    """Peaks of one rank. A micro-batch counts until its B or W: I frees about as much memory as the gradients kept for W need."""
    places = {stage: i for i, stage in enumerate(schedule.stages_of(rank))}
    now, peaks, rising = [0] * len(places), set(), False
    change = {Op.F: 1, Op.B: -1, Op.W: -1}
    for action in schedule.orders[rank]:
        step = change.get(action.op, 0)
        if step:
            if step < 0 and rising:
                peaks.add(tuple(now))
            rising = step > 0
            now[places[action.stage]] += step
    return undominated(sorted(peaks, reverse=True)) or ((0,) * len(now),)


def undominated(peaks: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Drop all peaks that another peak exceeds in all stages. `peaks` must be in descending order."""
    kept: list[tuple[int, ...]] = []
    for peak in peaks:
        if not any(all(map(ge, more, peak)) for more in kept):
            kept.append(peak)
    return tuple(kept)


def _one(stage: int) -> float:
    return 1


def peak_activations(schedule: Schedule, size: Callable[[int], float] = _one) -> tuple[float, ...]:
    """Most micro-batches in flight on each rank, from F to the end of B or I. size: weight of one micro-batch, by stage (default 1)."""
    return _peaks(schedule, {Op.F: 1, Op.B: -1, Op.I: -1}, size)


def peak_pending(schedule: Schedule, size: Callable[[int], float] = _one) -> tuple[float, ...]:
    """Most micro-batches between I and W on each rank. Their layers' inputs and output gradients are kept."""
    return _peaks(schedule, {Op.I: 1, Op.W: -1}, size)


def peak_held(schedule: Schedule, size: Callable[[int], float] = _one) -> tuple[float, ...]:
    """Most micro-batches in flight or between I and W on each rank: the memory peak if W needs as much memory as I."""
    return _peaks(schedule, {Op.F: 1, Op.B: -1, Op.W: -1}, size)


def peak_kept(schedule: Schedule, kept: Callable[[int], float], pending: Callable[[int], float]) -> tuple[float, ...]:
    """Peak memory of each rank, in the unit of `kept` and `pending`.

    kept: stage -> memory of a micro-batch in flight. pending: stage -> memory of a micro-batch between I and W.
    """
    peaks = []
    for order in schedule.orders:
        held = peak = 0.0
        for op, stage, _, _ in order:
            change = {Op.F: kept(stage), Op.B: -kept(stage), Op.I: pending(stage) - kept(stage), Op.W: -pending(stage)}
            held += change.get(op, 0)
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def _peaks(schedule: Schedule, change: dict[Op, int], size: Callable[[int], float]) -> tuple[float, ...]:
    peaks = []
    for order in schedule.orders:
        held = peak = 0.0
        for action in order:
            held += change.get(action.op, 0) * size(action.stage)
            peak = max(peak, held)
        peaks.append(int(peak) if size is _one else peak)
    return tuple(peaks)


def weight_versions(schedule: Schedule) -> tuple[int, ...]:
    """Most versions of a stage's weights that each rank keeps: the newest, and older ones that a later F, B or I reads."""
    return tuple(
        max((_versions(schedule, rank, stage) for stage in schedule.stages_of(rank)), default=0) for rank in range(schedule.num_ranks)
    )


def _versions(schedule: Schedule, rank: int, stage: int) -> int:
    mine = [action for action in schedule.orders[rank] if action.stage == stage]
    to_come = Counter(action.version for action in mine if action.op in (Op.F, Op.B, Op.I))
    newest, older, most = 0, 0, 1  # older: versions before the newest that a later action reads
    for op, _, _, version in mine:
        if op is Op.U:
            older += sum(to_come[v] > 0 for v in range(newest, version)) - sum(to_come[v] > 0 for v in range(version, newest))
            newest = version
        elif op in (Op.F, Op.B, Op.I):
            to_come[version] -= 1
            older -= version < newest and not to_come[version]
        most = max(most, 1 + older)
    return most
