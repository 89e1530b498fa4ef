"""Chimera [2107.06925]: pipelines run through the same ranks in opposite directions, each with an equal share of the micro-batches.

    rank 0 holds stage 0 of the pipeline down (v) and stage p - 1 of the pipeline up (^); here p = m = 4
    rank 0   vF . vF ^F ^B ^F ^B vB . vB
    rank 1   . vF ^F vF ^F ^B vB ^B vB ^B          ranks 2 and 3 are their mirror images

Each stage has two replicas, on ranks s and p - 1 - s. S sums their gradients: it starts right after a stage's last backward pass, and
runs in the bubbles that follow. A step takes m (F + B) + (p - 2) B if B is not shorter than F. For m = p, p / 2 + 1 micro-batches
are in flight on the outer ranks, and up to p on the middle ones.

More micro-batches form blocks of p. If B > F, blocks that follow one another directly leave bubbles between them. The paper closes these
by forward passes of two micro-batches or backward passes of half a micro-batch. Here a rank starts the next forward pass whenever it
can, with up to p micro-batches in flight. No bubble is left between blocks, and micro-batches keep their size.

With n = 2 f pipelines (section 3.6; f divides p / 2), f run down and f run up, each starting p / f ranks after the previous one, with
p / n micro-batches of a block. The bubble is (p - n) / n m if F = B, and zero for n = p. A rank holds n stages, with p - p / n + 1 to p
micro-batches in flight. Here blocks follow one another directly.
"""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heappop, heappush

from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.pipeline.schedule import Action, Op, Schedule, flushed, stage_complete_at
from parallel.pipeline.schedules.kind import Size


def chimera(ranks: int, microbatches: int, *, pipelines: int = 2) -> Schedule:
    """Build Chimera. `ranks` is even, and divides `microbatches`; `pipelines` is even, and divides `ranks`."""
    homes = [sorted(_rank(stage, at, ranks, pipelines) for at in range(pipelines)) for stage in range(ranks)]
    if pipelines == 2 and microbatches > ranks > 2:
        orders = _Filled(ranks, microbatches).orders()
    else:
        orders = [_order(rank, ranks, microbatches, pipelines) for rank in range(ranks)]
    orders = [_with_sums(order) for order in orders]
    return flushed("chimera", homes, microbatches, orders)


def chimera_refusal(size: Size) -> BadInput | None:
    """Refuse an odd number of ranks, an impossible number of pipelines, and micro-batches that are not a multiple of the ranks."""
    ranks, microbatches, pipelines = size.ranks, size.microbatches, size.pipelines
    if ranks % 2:
        needed = "an even number for chimera, because its two directions meet in the middle"
        return BadInput("stages", got=ranks, needed=needed, fix=Set("it", *sorted({max(2, ranks - 1), ranks + 1})))
    fit = [n for n in range(2, ranks + 1, 2) if ranks % n == 0]
    if pipelines not in fit:
        needed = f"an even number that divides {ranks} stages: {', '.join(map(str, fit))}"
        return BadInput("pipelines", got=pipelines, needed=needed, fix=Set("it", min(fit, key=lambda n: abs(n - pipelines))))
    if microbatches % ranks:
        rounds = microbatches // ranks
        needed = f"a multiple of {ranks}, the number of stages, for chimera"
        return BadInput("microbatches", got=microbatches, needed=needed, fix=Set("it", *[n * ranks for n in (rounds, rounds + 1) if n]))
    return None


def _rank(stage: int, pipeline: int, ranks: int, pipelines: int) -> int:
    """Return the rank of a pipeline's stage. The first half of the pipelines run down, each 2 p / n ranks further; the others run up."""
    way, shift = divmod(pipeline, pipelines // 2)
    return ((ranks - 1 - stage if way else stage) + shift * 2 * ranks // pipelines) % ranks


def _order(rank: int, ranks: int, microbatches: int, pipelines: int) -> list[Action]:
    """Return the order of one rank, by slots of equal length: F of a pipeline's micro-batch j is at slot s + 2j, B at 2p - 1 - s + 2j.

    A block of p micro-batches takes 2p slots. No slot is used twice: a rank's stages of the pipelines down have slots of one parity,
    its stages of the pipelines up the other, and the backward passes of one direction begin when the forward passes of the other end.
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
    """Return the order with S of each stage right after its last B."""
    complete = stage_complete_at(order)
    return [a for at, b in enumerate(order) for a in ((b, Action(Op.S, b.stage, version=1)) if at in complete else (b,))]


class _Filled:
    """Finds orders of two pipelines for m > p, with F = 1 and B = 2: each rank takes the action that can start first.

    If several can start at the same time, F goes before B, and earlier micro-batches go first. At most p micro-batches are in flight
    on a rank. Directions of the pipelines: 0 down, 1 up; each numbers its own micro-batches.
    """

    def __init__(self, ranks: int, microbatches: int) -> None:
        self.ranks, self.each = ranks, microbatches // 2
        self.free, self.flying = [0] * ranks, [0] * ranks
        self.next: Counter[tuple[Op, int, int]] = Counter()  # (operation, direction, stage) -> number of them so far
        self.arrived = {(Op.F, way, 0, n): 0 for way in (0, 1) for n in range(self.each)}
        self.done: list[list[Action]] = [[] for _ in range(ranks)]

    def orders(self) -> list[list[Action]]:
        chosen = [self._choice(rank) for rank in range(self.ranks)]
        heap = [choice for choice in chosen if choice is not None]
        heapify(heap)
        while heap:
            choice = heappop(heap)
            rank = choice[4]
            if choice != chosen[rank]:  # outdated: the rank has found a better choice since
                continue
            for changed in {rank, self._do(choice)}:
                new = chosen[changed] = self._choice(changed)
                if new is not None:
                    heappush(heap, new)
        return self.done

    def _choice(self, rank: int) -> tuple[int, int, int, int, int, int] | None:
        """Return a rank's next action as (start, 0 for F or 1 for B, micro-batch, -stage, rank, direction); None if the rank must wait."""
        found = []
        for way, stage in ((0, rank), (1, self.ranks - 1 - rank)):
            for turn, op in enumerate((Op.F, Op.B)):
                n = self.next[op, way, stage]
                since = self.arrived.get((op, way, stage, n))
                if since is not None and (op is Op.B or self.flying[rank] < self.ranks):
                    found.append((max(self.free[rank], since), turn, n, -stage, rank, way))
        return min(found, default=None)

    def _do(self, choice: tuple[int, int, int, int, int, int]) -> int:
        """Append the chosen action to its rank's order. Returns the rank that receives its result."""
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
