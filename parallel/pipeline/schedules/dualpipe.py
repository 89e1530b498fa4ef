"""DualPipe [2412.19437, section 3.2.1]: two pipelines in opposite directions, with forwards and backwards of the two in pairs.

    rank 0   stage 0 of the pipeline down, stage p - 1 of the one up       each with half of the micro-batches
    rank r   stages r and p - 1 - r, as rank p - 1 - r has them the other way round

A rank of the first half does with its two directions what a rank of DualPipe-V does with its two chunks, and the second half is its
mirror image. So each stage is held twice, as in Chimera, and its gradients are summed over both replicas (S). p + 1 micro-batches in
flight on every rank; idle time (p / 2 - 1) (F&B + B - 3 W), where F&B is the time of a pair, if F = I: that of DualPipe-V on half as
many ranks, each with twice the layers. With `paired=False`, results of a pair leave one by one, and it is (p / 2 - 1) (F + I - W).
"""

from __future__ import annotations

from dataclasses import replace

from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.pipeline.schedule import Action, Node, Op, Schedule, flushed
from parallel.pipeline.schedules.dualpipe_v import dualpipe_v
from parallel.pipeline.schedules.kind import Size


def dualpipe(ranks: int, microbatches: int, *, paired: bool = True) -> Schedule:
    """An even number of ranks, and an even number of micro-batches, at least two a rank."""
    half = dualpipe_v(ranks // 2, microbatches // 2, paired=paired)
    orders = [_order(half.orders[min(rank, ranks - 1 - rank)], rank, ranks, microbatches // 2) for rank in range(ranks)]
    homes = [sorted((stage, ranks - 1 - stage)) for stage in range(ranks)]
    pairs = frozenset(Node(rank, at) for of, at in half.pairs for rank in (of, ranks - 1 - of))
    return replace(flushed("dualpipe", homes, microbatches, orders), pairs=pairs)


def dualpipe_refusal(size: Size) -> BadInput | None:
    """An odd number of ranks or of micro-batches, or fewer than two micro-batches a rank."""
    ranks, microbatches = size.ranks, size.microbatches
    if ranks % 2:
        needed = "an even number for dualpipe, whose directions meet in the middle"
        return BadInput("stages", got=ranks, needed=needed, fix=Set("it", *sorted({max(2, ranks - 1), ranks + 1})))
    if microbatches % 2 or microbatches < 2 * ranks:
        near = max(2 * ranks, microbatches + microbatches % 2)
        needed = f"an even number of at least {2 * ranks}, two a rank, for dualpipe"
        return BadInput("microbatches", got=microbatches, needed=needed, fix=Set("it", near))
    return None


def _order(side: tuple[Action, ...], rank: int, ranks: int, each: int) -> list[Action]:
    """A rank's actions by those of DualPipe-V: the micro-batches of the pipeline up come after the `each` of the one down.

    S of each stage right after its last gradient, which comes after all pairs.
    """
    first_half, found = 2 * rank < ranks, []
    last = {action.stage: at for at, action in enumerate(side) if action.op in (Op.B, Op.W)}
    for at, (op, stage, microbatch, _) in enumerate(side):
        if op is Op.U:
            continue
        down = (2 * stage < ranks) == first_half
        found.append(Action(op, stage, microbatch if down else each + microbatch))
        found += [Action(Op.S, stage, version=1)] * (last[stage] == at)
    return found
