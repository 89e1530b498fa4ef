"""Chimera [2107.06925]: pipelines through the same ranks in opposite directions, each with its part of the micro-batches.

    rank 0   stage 0 of the pipeline down, stage p - 1 of the one up         (v: down, ^: up, p = m = 4)
    rank 0   vF . vF ^F ^B ^F ^B vB . vB
    rank 1   . vF ^F vF ^F ^B vB ^B vB ^B          ranks 2 and 3 are their mirror images

Each stage has two replicas, on ranks s and p - 1 - s, whose gradients are summed: S starts right after a stage's last backward pass
and runs in the bubbles that follow. Bubble (p - 2) / 2 m of ideal time if F = B; for m = p a step takes p F + (2 p - 2) B. With more
micro-batches and B = 2 F, blocks of p follow one another directly and bubbles open between them: 1/4 of ideal for p = 4, m = 8.
In flight: p / 2 + 1 on the outer ranks to p in the middle.

With n = 2 f pipelines (section 3.6; f divides p / 2), f go down and f go up, each starting p / f ranks after the one before it, with p / n
micro-batches of a block. Bubble (p - n) / n m if F = B, none for n = p. A rank holds n stages, with p - p / n + 1 to p in flight.
"""

from __future__ import annotations

from parallel.errors import BadInput
from parallel.pipeline.schedule import Action, Op, Schedule, flushed


def chimera(ranks: int, microbatches: int, *, pipelines: int = 2) -> Schedule:
    """Raises BadInput for an odd number of ranks, micro-batches that are not a multiple of it, and an impossible number of pipelines."""
    if ranks % 2:
        near = f"{ranks - 1} or {ranks + 1}" if ranks > 1 else "2"
        raise BadInput(
            "stages", got=ranks, needed="an even number for chimera, whose two directions meet in the middle", fix=f"set stages to {near}"
        )
    fit = [n for n in range(2, ranks + 1, 2) if ranks % n == 0]
    if pipelines not in fit:
        near = str(min(fit, key=lambda n: abs(n - pipelines)))
        needed = f"an even number that divides {ranks} stages: {', '.join(map(str, fit))}"
        raise BadInput("pipelines", got=pipelines, needed=needed, fix=f"set pipelines to {near}")
    if microbatches % ranks:
        near = " or ".join(str(n) for n in (microbatches // ranks * ranks, (microbatches // ranks + 1) * ranks) if n)
        raise BadInput(
            "microbatches",
            got=microbatches,
            needed=f"a multiple of {ranks} stages for chimera, half each way",
            fix=f"set microbatches to {near}",
        )
    homes = [sorted(_rank(stage, at, ranks, pipelines) for at in range(pipelines)) for stage in range(ranks)]
    orders = [_order(rank, ranks, microbatches, pipelines) for rank in range(ranks)]
    return flushed("chimera", homes, microbatches, orders)


def _rank(stage: int, pipeline: int, ranks: int, pipelines: int) -> int:
    """The rank of a pipeline's stage: the first half of the pipelines go down, each shifted by 2 p / n ranks; the others go back up."""
    way, shift = divmod(pipeline, pipelines // 2)
    return ((ranks - 1 - stage if way else stage) + shift * 2 * ranks // pipelines) % ranks


def _order(rank: int, ranks: int, microbatches: int, pipelines: int) -> list[Action]:
    """All pipelines in slots of equal length: 1F1B has F of micro-batch j at slot s + 2j and B at 2p - 1 - s + 2j.

    No slot is taken twice. The stages of a rank that go down have one parity and fill its slots one after the other; those that go up
    have the other parity; the backwards of one direction begin where the forwards of the other end. A block of p micro-batches takes 2p
    slots.
    """
    share = ranks // pipelines
    here = [(stage, at) for stage in range(ranks) for at in range(pipelines) if _rank(stage, at, ranks, pipelines) == rank]
    slots: dict[int, Action] = {}
    for block in range(microbatches // ranks):
        for stage, pipeline in here:
            for j in range(share):
                start, microbatch = 2 * ranks * block + 2 * j, ranks * block + pipeline * share + j
                slots[start + stage] = Action(Op.F, stage, microbatch)
                slots[start + 2 * ranks - 1 - stage] = Action(Op.B, stage, microbatch)
    order = [slots[slot] for slot in sorted(slots)]
    for stage, _ in here:
        last = max(at for at, action in enumerate(order) if action.op is Op.B and action.stage == stage)
        order.insert(last + 1, Action(Op.S, stage, version=1))
    return order
