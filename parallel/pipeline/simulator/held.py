"""Counts the activations and weight versions that each rank keeps. They depend only on the order of its actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import ge

from parallel.pipeline.schedule import Op, Schedule

_Size = Callable[[int], float]  # stage -> memory of one micro-batch of this stage, in any unit


@dataclass(frozen=True)
class RankPeaks:
    """Peak memory of one rank, in micro-batches.

    most: peaks, each as the number of kept micro-batches for each of `stages`. A peak that another one exceeds in all stages is left out.
    versions: number of weight versions, the newest included.
    """

    stages: tuple[int, ...]
    most: tuple[tuple[int, ...], ...]
    versions: int = 1


def held(schedule: Schedule) -> tuple[RankPeaks, ...]:
    """Return the peak memory of each rank, counted in its order of actions."""
    ranks = range(schedule.num_ranks)
    versions = weight_versions(schedule) if schedule.num_updates > 1 else [1] * len(ranks)
    return tuple(RankPeaks(schedule.stages_of(rank), _most(schedule, rank), versions[rank]) for rank in ranks)


def _most(schedule: Schedule, rank: int) -> tuple[tuple[int, ...], ...]:
    """Return `RankPeaks.most` of a rank. A micro-batch counts until its B or W: I frees about as much as the gradients kept for W need."""
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
    """Return the peaks without those that another one exceeds in all stages. `peaks`: as in `RankPeaks.most`, in descending order."""
    kept: list[tuple[int, ...]] = []
    for peak in peaks:
        if not any(all(map(ge, more, peak)) for more in kept):
            kept.append(peak)
    return tuple(kept)


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """Return the largest number of micro-batches in flight on each rank, from F to the end of B or I."""
    return peak_kept(schedule, lambda stage: 1, lambda stage: 0)


def peak_held(schedule: Schedule, size: _Size = lambda stage: 1) -> tuple[float, ...]:
    """Return the peak memory of each rank if W needs as much memory as I: of micro-batches from F to the end of B or W (default: their
    number)."""
    return peak_kept(schedule, size, size)


def peak_kept(schedule: Schedule, kept: _Size, pending: _Size) -> tuple[float, ...]:
    """Return the peak memory of each rank. kept: of a micro-batch in flight, until B or I. pending: of a micro-batch between I and W."""
    peaks = []
    for order in schedule.orders:
        held: float = 0
        peak = held
        for op, stage, _, _ in order:
            if op is Op.F:
                held += kept(stage)
                peak = max(peak, held)
            elif op is Op.B:
                held -= kept(stage)
            elif op is Op.I:
                held += pending(stage) - kept(stage)
                peak = max(peak, held)
            elif op is Op.W:
                held -= pending(stage)
        peaks.append(peak)
    return tuple(peaks)


def weight_versions(schedule: Schedule) -> tuple[int, ...]:
    """Return the most versions of a stage's weights that each rank keeps: the newest, and older ones that a later F, B or I reads."""
    return tuple(
        max((_versions(schedule, rank, stage) for stage in schedule.stages_of(rank)), default=0) for rank in range(schedule.num_ranks)
    )


def _versions(schedule: Schedule, rank: int, stage: int) -> int:
    mine = [action for action in schedule.orders[rank] if action.stage == stage]
    to_come = Counter(action.version for action in mine if action.op in (Op.F, Op.B, Op.I))  # version -> number of later readers
    newest, older, most = 0, 0, 1  # older: number of versions before the newest that a later action reads
    for op, _, _, version in mine:
        if op is Op.U:
            older += sum(to_come[v] > 0 for v in range(newest, version)) - sum(to_come[v] > 0 for v in range(version, newest))
            newest = version
        elif op in (Op.F, Op.B, Op.I):
            to_come[version] -= 1
            older -= version < newest and not to_come[version]
        most = max(most, 1 + older)
    return most
