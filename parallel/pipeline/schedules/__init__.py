"""The pipeline schedules, one file each, by name. Example: make_schedule("interleaved", ranks=4, microbatches=8, chunks=2)

Letters in this folder: p ranks, m micro-batches, v chunks (stages a rank), r a rank, s a stage, t a time. F, B, I and W are actions and
their times: forward pass, backward pass, and the two halves of a split backward pass, gradients of inputs and of weights. Bubble: idle time
divided by the time of a rank's actions. A micro-batch is in flight between its forward and backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

from parallel.errors import BadInput, did_you_mean, some
from parallel.fixes import Remove, Set, guess, written
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.schedules.chimera import chimera, chimera_refusal
from parallel.pipeline.schedules.dualpipe import dualpipe, dualpipe_refusal, dualpipe_v, dualpipe_v_refusal
from parallel.pipeline.schedules.gpipe import all_in_flight, gpipe, gpipe_seconds
from parallel.pipeline.schedules.interleaved import interleaved, interleaved_peaks, interleaved_seconds
from parallel.pipeline.schedules.kind import DEFAULT_CHUNKS, PassTimes, Placed, ScheduleKind, Size
from parallel.pipeline.schedules.looped_bfs import looped_bfs
from parallel.pipeline.schedules.naive import naive, naive_seconds
from parallel.pipeline.schedules.one_f_one_b import one_f_one_b, one_f_one_b_seconds
from parallel.pipeline.schedules.pipedream import pipedream, pipedream_age
from parallel.pipeline.schedules.two_bw import two_bw, two_bw_refusal
from parallel.pipeline.schedules.v_memory import v_half, v_min
from parallel.pipeline.schedules.zero_bubble import zb_h1, zb_h2, zb_v

ADVISED = "1f1b"  # proposed if a recipe cannot have its schedule, because 1f1b splits no backward pass and drains the pipeline each step
_OLDER = "gradients are computed with older weights, so losses differ from those of one process; better: zb_h1"


def _batches(build: Callable[[int, int], Schedule]) -> Callable[[Size], Schedule]:
    """Turn `build`, a function (ranks, micro-batches) -> schedule of one batch, into a function Size -> schedule of `size.batches`."""
    return lambda size: build(size.ranks, size.microbatches).repeated(size.batches)


SCHEDULES: dict[str, ScheduleKind] = {
    "naive": ScheduleKind(
        _batches(naive), "one rank works at a time", seconds=naive_seconds, rounds=1, advice="one rank works at a time; better: 1f1b"
    ),
    "gpipe": ScheduleKind(_batches(gpipe), "all forwards, then all backwards", seconds=gpipe_seconds, peaks=all_in_flight),
    "pipedream": ScheduleKind(
        lambda s: pipedream(s.ranks, s.microbatches, batches=s.batches, vertical_sync=s.vertical_sync),
        "an update after each micro-batch, stashed weights",
        option="vertical_sync",
        seconds=one_f_one_b_seconds,
        rounds=2,
        age=pipedream_age,
        advice=_OLDER,
    ),
    "two_bw": ScheduleKind(
        lambda s: two_bw(s.ranks, s.microbatches, batches=s.batches),
        "two weight versions, updates one batch late",
        batches=2,
        refusal=two_bw_refusal,
        seconds=one_f_one_b_seconds,
        rounds=2,
        age=lambda size, stage: 1,
        advice=_OLDER,
    ),
    "1f1b": ScheduleKind(_batches(one_f_one_b), "PipeDream-Flush: forward and backward in turn", seconds=one_f_one_b_seconds, rounds=1),
    "interleaved": ScheduleKind(
        lambda s: interleaved(s.ranks, s.microbatches, s.chunks).repeated(s.batches),
        "1F1B over several chunks a rank",
        chunks=None,
        seconds=interleaved_seconds,
        peaks=interleaved_peaks,
    ),
    "chimera": ScheduleKind(
        lambda s: chimera(s.ranks, s.microbatches, pipelines=s.pipelines).repeated(s.batches),
        "pipelines in two directions, replicas of each stage",
        option="pipelines",
        placed="both_ways",
        refusal=chimera_refusal,
    ),
    "zb_h1": ScheduleKind(_batches(zb_h1), "weight gradients fill bubbles, memory as 1F1B", rounds=2),
    "zb_h2": ScheduleKind(_batches(zb_h2), "weight gradients fill bubbles, twice the memory", rounds=2),
    "zb_v": ScheduleKind(_batches(zb_v), "zero bubble on stages laid out as a V", chunks=2, placed="v", rounds=3),
    "v_half": ScheduleKind(_batches(v_half), "half of 1F1B's memory, on a V", chunks=2, placed="v", steady=False),
    "v_min": ScheduleKind(_batches(v_min), "a third of 1F1B's memory, on a V", chunks=2, placed="v", rounds=2),
    "dualpipe_v": ScheduleKind(
        _batches(dualpipe_v), "a forward together with a backward pass, on a V", chunks=2, placed="v", refusal=dualpipe_v_refusal, rounds=3
    ),
    "dualpipe": ScheduleKind(
        _batches(dualpipe), "as dualpipe_v, but in two directions, replicas of each stage", placed="both_ways", refusal=dualpipe_refusal
    ),
    "looped_bfs": ScheduleKind(
        lambda s: looped_bfs(s.ranks, s.microbatches, s.chunks).repeated(s.batches),
        "all micro-batches through each chunk",
        chunks=None,
        peaks=all_in_flight,
    ),
}


def make_schedule(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    batches: int | None = None,
    vertical_sync: bool | None = None,
    pipelines: int | None = None,
) -> Schedule:
    """Make the schedule `name`. Raises BadInput for impossible sizes, with the nearest possible size as the fix.

    microbatches: number in one batch. chunks: stages a rank, 2 by default; only for schedules that allow several numbers.
    batches: 1 by default. For two_bw 2, because its first batch alone would be 1F1B.
    vertical_sync: only for pipedream, False by default. pipelines: only for chimera, 2 by default."""
    kind = kind_of(name)
    own = {"vertical_sync": vertical_sync, "pipelines": pipelines}
    for option, value in own.items():
        if value not in (None, False) and kind.option != option:
            owner = next(n for n, k in SCHEDULES.items() if k.option == option)
            needed = f"schedule {owner}, the only one with this option"
            raise BadInput(option, got=f"{written(value)} with schedule {name}", needed=needed, fix=Remove("it") | f"take schedule {owner}")
    for what, given in (("stages", ranks), ("microbatches", microbatches), ("chunks", chunks), ("batches", batches)):
        if given is not None and given < 1:
            raise BadInput(what, got=given, needed="at least 1", fix=Set("it", 1))
    if kind.chunks is not None and chunks not in (None, kind.chunks):
        several = ", ".join(n for n, k in SCHEDULES.items() if k.chunks is None)
        fix = Set("it", kind.chunks) | f"take a schedule whose number of chunks can be set: {several}"
        raise BadInput("chunks", got=chunks, needed=f"{kind.chunks} for {name}", fix=fix)
    options = {option: value for option, value in own.items() if value is not None}
    size = Size(ranks, microbatches, kind.chunks or chunks or DEFAULT_CHUNKS, batches or kind.batches, **options)  # type: ignore[arg-type]
    refused = kind.refusal(size)
    if refused is not None:
        raise refused
    return kind.make(size)


def placed(name: str) -> Placed:
    """Return the placement of a schedule's stages on ranks; `line` for a schedule that was read from a file."""
    kind = SCHEDULES.get(name)
    return "line" if kind is None else kind.placed


def closed_form(name: str) -> Callable[[PassTimes], float] | None:
    """Return the closed form of a schedule's time. None if the schedule must be simulated, for example because it was read from a file."""
    kind = SCHEDULES.get(name)
    return None if kind is None else kind.seconds


def fewer_ranks(name: str, most: int) -> int:
    """Return the largest number of ranks, up to `most`, with which the schedule is possible; 1 (no pipeline) if there is no such number."""
    kind = SCHEDULES.get(name)
    if kind is None:
        return max(1, most)
    refused = ((ranks, kind.refusal(Size(ranks, 1))) for ranks in range(most, 0, -1))
    return next((ranks for ranks, why in refused if why is None or why.what != "stages"), 1)


def kind_of(name: str) -> ScheduleKind:
    """Return the schedule's row in SCHEDULES. Raises BadInput for an unknown name."""
    if name not in SCHEDULES:
        near = did_you_mean(name, SCHEDULES)
        fix = guess(near) if near else "choose one of them"
        raise BadInput("schedule", got=name, needed=f"one of {some(SCHEDULES, rest='moe simulate')}", fix=fix)
    return SCHEDULES[name]
