"""Counts the activations and weight versions that each rank keeps, from the order of its actions alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import ge
from typing import NamedTuple

from parallel.pipeline.schedule import Op, Schedule

_Size = Callable[[int], float]  # stage -> memory of one micro-batch's activations in this stage, in any unit
_GRADIENTS = {Op.I: 1, Op.B: 2, Op.W: 2}  # backward action -> least value of its stage's InFlight.gradients afterwards


class InFlight(NamedTuple):
    """Numbers of micro-batches, for each stage of a rank, at the moment at which a backward action begins. kept: micro-batches between
    forward pass F and backward pass B or I (gradients of inputs only), with all activations. pending: micro-batches between I and W
    (gradients of weights). at_i: the action is I. freed: whether FSDP has freed the stage's weights: from a B or I to the
    next F; (): False for all stages. gradients: which gradients of the stage's parameters exist. 0: none. 1: an I has ended, so those of
    the embedding and of LoRA adapters exist. 2: a B or W has ended, so all exist. (): not known."""

    kept: tuple[int, ...]
    pending: tuple[int, ...]
    at_i: bool
    freed: tuple[bool, ...] = ()
    gradients: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankPeaks:
    """Moments of a step at which the memory of a rank's activations may have its peak.

    stages: the rank's stages. most: for each such moment, the number of each stage's micro-batches after their forward pass and before the
    end of their backward pass (B or W); a moment is left out if another moment has at least as many in every stage. versions: number of
    weight versions that the rank keeps, the newest included. with_i: if the rank splits backward passes into I and W, or has several
    stages, such moments with more detail (InFlight); else ().
    """

    stages: tuple[int, ...]
    most: tuple[tuple[int, ...], ...]
    versions: int = 1
    with_i: tuple[InFlight, ...] = ()

    @cached_property
    def moments(self) -> tuple[InFlight, ...]:
        """Return each moment of a possible peak as an InFlight: `with_i`, or, if it is empty, the entries of `most` converted."""
        return self.with_i or tuple(InFlight(count, (0,) * len(count), False) for count in self.most)


def rank_peaks(schedule: Schedule) -> tuple[RankPeaks, ...]:
    """Return the RankPeaks of each rank, counted in its order of actions."""
    ranks = range(schedule.num_ranks)
    versions = weight_versions(schedule) if schedule.num_updates > 1 else [1] * len(ranks)
    return tuple(RankPeaks(schedule.stages_of(r), _most(schedule, r), versions[r], _with_i(schedule, r)) for r in ranks)


def _most(schedule: Schedule, rank: int) -> tuple[tuple[int, ...], ...]:
    """Return a rank's possible peaks, each as the number of micro-batches in flight for each of its stages (`RankPeaks.most`). A
    micro-batch counts from F until B or W: I frees about as much memory as it allocates for W."""
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


def _with_i(schedule: Schedule, rank: int) -> tuple[InFlight, ...]:
    """Return a rank's `RankPeaks.with_i`: its possible peaks as InFlight; () if it has one stage and does not split backward passes."""
    stages, before, (kept, pending, whole, gradients) = schedule.stages_of(rank), Op.U, (Counter[int]() for _ in range(4))
    seen: set[tuple[int, ...]] = set()  # `kept`, `pending`, `whole` and `gradients` of each stage, then whether the action is I
    for op, stage, *_ in schedule.orders[rank]:
        if op in (Op.B, Op.I) or (before, op) == (Op.F, Op.W):  # may be a peak; before W only if F has just raised the numbers
            seen.add((*(count[s] for count in (kept, pending, whole, gradients) for s in stages), op is Op.I))
        before = op
        kept[stage] += (op is Op.F) - (op in (Op.B, Op.I))
        if op in (Op.F, Op.B, Op.I):
            whole[stage] = op is Op.F
        pending[stage] += (op is Op.I) - (op is Op.W)
        gradients[stage] = max(gradients[stage], _GRADIENTS.get(op, 0))
    n = len(stages)
    if n == 1 and not any(at_i for *_, at_i in seen):
        return ()

    def moment(of: tuple[int, ...]) -> InFlight:
        return InFlight(of[:n], of[n : 2 * n], bool(of[-1]), tuple([not one for one in of[2 * n : 3 * n]]), of[3 * n : -1])

    return tuple(map(moment, undominated(sorted(seen, reverse=True))))


def undominated(peaks: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the Pareto-maximal peaks, each once: no other peak is at least as large in every number. peaks: in descending order."""
    kept: list[tuple[int, ...]] = []
    for peak in peaks:
        if not any(all(map(ge, more, peak)) for more in kept):
            kept.append(peak)
    return tuple(kept)


def peak_activations(schedule: Schedule) -> tuple[float, ...]:
    """Return for each rank the largest number of micro-batches in flight: from the forward pass F to the end of the backward pass B, or of
    I (gradients of inputs only) if the backward pass is split into I and W."""
    return peak_kept(schedule, lambda stage: 1, lambda stage: 0)


def peak_held(schedule: Schedule, size: _Size = lambda stage: 1) -> tuple[float, ...]:
    """Return each rank's peak memory of activations, if each micro-batch keeps its activations from the forward pass until all of its
    gradients are computed (end of B or W). size: memory of a micro-batch; by default 1, so that micro-batches are counted."""
    return peak_kept(schedule, size, size)


def peak_kept(schedule: Schedule, kept: _Size, pending: _Size) -> tuple[float, ...]:
    """Return each rank's peak memory of activations. kept: memory of a micro-batch from its forward pass F to its backward pass B, or I
    (gradients of inputs only). pending: its memory from I to W (gradients of weights)."""
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
    """Return for each rank the largest number of weight versions of a stage that it keeps at once: the newest, and older ones that a later
    action reads."""
    return tuple(
        max((_versions(schedule, rank, stage) for stage in schedule.stages_of(rank)), default=0) for rank in range(schedule.num_ranks)
    )


def _versions(schedule: Schedule, rank: int, stage: int) -> int:
    mine = [action for action in schedule.orders[rank] if action.stage == stage]
    # version -> number of later actions that read it
    readers = Counter(action.version for action in mine if action.op in (Op.F, Op.B, Op.I))
    newest, older, most = 0, 0, 1  # older: number of versions before the newest that a later action reads
    for op, _, _, version in mine:
        if op is Op.U:
            older += sum(readers[v] > 0 for v in range(newest, version)) - sum(readers[v] > 0 for v in range(version, newest))
            newest = version
        elif op in (Op.F, Op.B, Op.I):
            readers[version] -= 1
            older -= version < newest and not readers[version]
        most = max(most, 1 + older)
    return most
