"""Chimera [2107.06925]: pipelines through the same ranks in opposite directions, each with its part of the micro-batches.

    rank 0   stage 0 of the pipeline down, stage p - 1 of the one up         (v: down, ^: up, p = m = 4)
    rank 0   vF . vF ^F ^B ^F ^B vB . vB
    rank 1   . vF ^F vF ^F ^B vB ^B vB ^B          ranks 2 and 3 are their mirror images

Each stage has two replicas, on ranks s and p - 1 - s, whose gradients are summed: S starts right after a stage's last backward pass
and runs in the bubbles that follow. A step takes m (F + B) + (p - 2) B if B is not shorter than F. For m = p, p / 2 + 1 are in flight
on the outer ranks to p in the middle. With more micro-batches, blocks of p that follow one another directly would leave bubbles between
them where B > F; the paper closes these by forwards of two micro-batches or backwards of half a one. Here a rank goes on with the next
forward whenever it can, with up to p in flight on every rank: no bubble is left between blocks, and micro-batches stay as they are.

With n = 2 f pipelines (section 3.6; f divides p / 2), f go down and f go up, each starting p / f ranks after the one before it, with p / n
micro-batches of a block. Bubble (p - n) / n m if F = B, none for n = p. A rank holds n stages, with p - p / n + 1 to p in flight. Blocks
follow one another directly there.
"""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heappop, heappush

from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.pipeline.schedule import Action, Op, Schedule, flushed
from parallel.pipeline.schedules.kind import Size


def chimera(ranks: int, microbatches: int, *, pipelines: int = 2) -> Schedule:
    """An even number of ranks, micro-batches that are a multiple of it, and an even number of pipelines that divides it."""
    homes = [sorted(_rank(stage, at, ranks, pipelines) for at in range(pipelines)) for stage in range(ranks)]
    if pipelines == 2 and microbatches > ranks > 2:
        orders = _Filled(ranks, microbatches).orders()
    else:
        orders = [_order(rank, ranks, microbatches, pipelines) for rank in range(ranks)]
    orders = [_with_sums(order) for order in orders]
    return flushed("chimera", homes, microbatches, orders)


def chimera_refusal(size: Size) -> BadInput | None:
    """An odd number of ranks, an impossible number of pipelines, or micro-batches that are not a multiple of the ranks."""
    ranks, microbatches, pipelines = size.ranks, size.microbatches, size.pipelines
    if ranks % 2:
        needed = "an even number for chimera, whose two directions meet in the middle"
        return BadInput("stages", got=ranks, needed=needed, fix=Set("it", *sorted({max(2, ranks - 1), ranks + 1})))
    fit = [n for n in range(2, ranks + 1, 2) if ranks % n == 0]
    if pipelines not in fit:
        needed = f"an even number that divides {ranks} stages: {', '.join(map(str, fit))}"
        return BadInput("pipelines", got=pipelines, needed=needed, fix=Set("it", min(fit, key=lambda n: abs(n - pipelines))))
    if microbatches % ranks:
        rounds = microbatches // ranks
        needed = f"a multiple of {ranks} stages for chimera, half each way"
        return BadInput("microbatches", got=microbatches, needed=needed, fix=Set("it", *[n * ranks for n in (rounds, rounds + 1) if n]))
    return None


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
    return [slots[slot] for slot in sorted(slots)]


def _with_sums(order: list[Action]) -> list[Action]:
    """S of each stage right after its last B."""
    last = {action.stage: at for at, action in enumerate(order) if action.op is Op.B}
    return [a for at, b in enumerate(order) for a in ((b, Action(Op.S, b.stage, version=1)) if last[b.stage] == at else (b,))]


class _Filled:
    """Orders of two pipelines for m > p, found with F = 1 and B = 2: each rank takes the action that can start first.

    Among those that can start at once, F goes before B, earlier micro-batches first. At most p are in flight on a rank.
    """

    def __init__(self, ranks: int, microbatches: int) -> None:
        self.ranks, self.each = ranks, microbatches // 2
        self.free, self.flying = [0] * ranks, [0] * ranks
        self.next: Counter[tuple[Op, int, int]] = Counter()  # operation, direction, stage -> micro-batches of that direction
        self.arrived = {(Op.F, way, 0, n): 0 for way in (0, 1) for n in range(self.each)}
        self.done: list[list[Action]] = [[] for _ in range(ranks)]

    def orders(self) -> list[list[Action]]:
        chosen = [self._choice(rank) for rank in range(self.ranks)]
        heap = [choice for choice in chosen if choice is not None]
        heapify(heap)
        while heap:
            choice = heappop(heap)
            rank = choice[4]
            if choice != chosen[rank]:  # something better has arrived since
                continue
            for changed in {rank, self._do(choice)}:
                new = chosen[changed] = self._choice(changed)
                if new is not None:
                    heappush(heap, new)
        return self.done

    def _choice(self, rank: int) -> tuple[int, int, int, int, int, int] | None:
        """(start, 0 for F and 1 for B, number, -stage, rank, direction) of what a rank does next; None while it must wait."""
        found = []
        for way, stage in ((0, rank), (1, self.ranks - 1 - rank)):
            for turn, op in enumerate((Op.F, Op.B)):
                n = self.next[op, way, stage]
                since = self.arrived.get((op, way, stage, n))
                if since is not None and (op is Op.B or self.flying[rank] < self.ranks):
                    found.append((max(self.free[rank], since), turn, n, -stage, rank, way))
        return min(found, default=None)

    def _do(self, choice: tuple[int, int, int, int, int, int]) -> int:
        """Take the action. Returns the rank at which its result arrives."""
        start, turn, n, stage, rank, way = choice
        op, stage, last = (Op.F, Op.B)[turn], -stage, self.ranks - 1
        end = self.free[rank] = start + 1 + turn
        self.next[op, way, stage] += 1
        self.flying[rank] += 1 - 2 * turn
        block, j = divmod(n, self.ranks // 2)
        self.done[rank].append(Action(op, stage, self.ranks * block + way * self.ranks // 2 + j))
        to, at = (op, stage + 1 - 2 * turn) if op is Op.B or stage < last else (Op.B, last)
        if at < 0:
            return rank
        self.arrived[to, way, at, n] = end
        return last - at if way else at
