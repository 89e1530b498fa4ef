"""The schedules by name. A new one is its file and a row here.

build("interleaved", ranks=4, microbatches=8, chunks=2)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parallel.errors import BadInput, did_you_mean
from parallel.pipeline.chimera import chimera
from parallel.pipeline.dualpipe_v import dualpipe_v
from parallel.pipeline.gpipe import gpipe
from parallel.pipeline.interleaved import interleaved
from parallel.pipeline.looped_bfs import looped_bfs
from parallel.pipeline.naive import naive
from parallel.pipeline.one_f_one_b import one_f_one_b
from parallel.pipeline.pipedream import pipedream
from parallel.pipeline.schedule import Schedule, at_least
from parallel.pipeline.two_bw import two_bw
from parallel.pipeline.zb_v import zb_v
from parallel.pipeline.zero_bubble import zb_h1, zb_h2


@dataclass(frozen=True)
class Kind:
    """`make(ranks, microbatches, chunks, batches)`; `chunks`: the only possible number a rank, or None where it is a choice.

    continuous: updates do not wait for the pipeline to drain (the weights that a gradient is of are older than those it changes).
    """

    make: Callable[[int, int, int, int], Schedule]
    about: str
    chunks: int | None = 1
    batches: int = 1
    continuous: bool = False


SCHEDULES: dict[str, Kind] = {
    "naive": Kind(lambda p, m, v, n: naive(p, m).repeated(n), "one rank works at a time"),
    "gpipe": Kind(lambda p, m, v, n: gpipe(p, m).repeated(n), "all forwards, then all backwards"),
    "pipedream": Kind(lambda p, m, v, n: pipedream(p, m, batches=n), "an update a micro-batch, stashed weights", continuous=True),
    "two_bw": Kind(lambda p, m, v, n: two_bw(p, m, batches=n), "two weight versions, updates one batch late", batches=2, continuous=True),
    "1f1b": Kind(lambda p, m, v, n: one_f_one_b(p, m).repeated(n), "PipeDream-Flush: forward and backward in turn"),
    "interleaved": Kind(lambda p, m, v, n: interleaved(p, m, v).repeated(n), "1F1B over several chunks a rank", chunks=None),
    "chimera": Kind(lambda p, m, v, n: chimera(p, m).repeated(n), "two directions, two replicas of each stage"),
    "zb_h1": Kind(lambda p, m, v, n: zb_h1(p, m).repeated(n), "weight gradients fill bubbles, memory as 1F1B"),
    "zb_h2": Kind(lambda p, m, v, n: zb_h2(p, m).repeated(n), "weight gradients fill bubbles, twice the memory"),
    "zb_v": Kind(lambda p, m, v, n: zb_v(p, m).repeated(n), "zero bubble on stages laid out as a V", chunks=2),
    "dualpipe_v": Kind(lambda p, m, v, n: dualpipe_v(p, m).repeated(n), "forward beside backward on a V", chunks=2),
    "looped_bfs": Kind(lambda p, m, v, n: looped_bfs(p, m, v).repeated(n), "all micro-batches through each chunk", chunks=None),
}
DEFAULT_CHUNKS = 2  # where they are a choice and nothing is said


def build(name: str, *, ranks: int, microbatches: int, chunks: int | None = None, batches: int | None = None) -> Schedule:
    """The schedule of this name on `ranks` pipeline ranks. Raises BadInput for what it cannot do, with the nearest that works.

    chunks: stages a rank, 2 by default where that is a choice. batches: of `microbatches` each, one after the other; 1 by default, for
    two_bw 2, because its first batch looks like 1F1B's.
    """
    if name not in SCHEDULES:
        near = did_you_mean(name, SCHEDULES)
        raise BadInput(
            "schedule",
            got=name,
            needed=f"one of {', '.join(SCHEDULES)}",
            fix=f"did you mean {near}?" if near else "choose one of them",
        )
    kind = SCHEDULES[name]
    at_least("stages", ranks, 1)
    at_least("microbatches", microbatches, 1)
    if chunks is not None:
        at_least("chunks", chunks, 1)
        if kind.chunks is not None and chunks != kind.chunks:
            several = ", ".join(n for n, k in SCHEDULES.items() if k.chunks is None)
            raise BadInput(
                "chunks",
                got=chunks,
                needed=f"{kind.chunks} for {name}",
                fix=f"set chunks to {kind.chunks}, or a schedule with a choice: {several}",
            )
    if batches is not None:
        at_least("batches", batches, 1)
    return kind.make(ranks, microbatches, kind.chunks or chunks or DEFAULT_CHUNKS, batches or kind.batches)
