"""Chimera [2107.06925]: pipelines run through the same p ranks in opposite directions. Each gets an equal share of the m micro-batches.

    rank 0 holds stage 0 of the pipeline down (v) and stage p - 1 of the pipeline up (^); here p = m = 4, F: forward, B: backward pass
    rank 0   vF . vF ^F ^B ^F ^B vB . vB
    rank 1   . vF ^F vF ^F ^B vB ^B vB ^B          ranks 2 and 3 are their mirror images

Each stage s has two replicas, on ranks s and p - 1 - s. S, the all-reduce of their gradients, starts right after a stage's last B and runs
in the bubbles that follow. A step takes m (F + B) + (p - 2) B if B is not shorter than F. For m > p, the paper repeats blocks of p
micro-batches and changes micro-batch sizes to close the bubbles between blocks. Here a rank instead starts the next F whenever it can,
with up to p micro-batches in flight.

With n = 2 f pipelines (section 3.6), f run down and f run up, each starting p / f ranks after the previous one. Each rank holds n stages.
The bubble is (p - n) / (n m) of the compute time if F = B. Blocks of p micro-batches follow one another directly.
"""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heappop, heappush

from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.pipeline.schedule import Action, Op, Schedule, flushed, stage_complete_at
from parallel.pipeline.schedules.kind import Size


def chimera(ranks: int, microbatches: int, *, pipelines: int = 2) -> Schedule:
    """Build Chimera. `ranks` must be even and divide `microbatches`; `pipelines` must be even and divide `ranks`."""
    homes = [sorted(_rank(stage, at, ranks, pipelines) for at in range(pipelines)) for stage in range(ranks)]
    if pipelines == 2 and microbatches > ranks > 2:
        orders = _Greedy(ranks, microbatches).orders()
    else:
        orders = [_order(rank, ranks, microbatches, pipelines) for rank in range(ranks)]
    return flushed("chimera", homes, microbatches, [_with_all_reduces(order) for order in orders])


def chimera_refusal(size: Size) -> BadInput | None:
    """Return an error for an odd number of ranks, a wrong number of pipelines, or micro-batches that are not a multiple of the ranks."""
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
    """Return the rank that holds a stage of a pipeline. The first half of the pipelines run down, the others up. The pipelines of each half
    start 2 * ranks / pipelines ranks apart."""
    up, shift = divmod(pipeline, pipelines // 2)
    return ((ranks - 1 - stage if up else stage) + shift * 2 * ranks // pipelines) % ranks


def _order(rank: int, ranks: int, microbatches: int, pipelines: int) -> list[Action]:
    """Return the order of one rank's forward passes (F) and backward passes (B). It follows from time slots: for a pipeline's micro-batch j
    of a block, F of stage s has slot s + 2j, and B has slot 2p - 1 - s + 2j. A block of p micro-batches takes 2p slots. No two actions of a
    rank have the same slot."""
    each = ranks // pipelines  # micro-batches of one pipeline in a block
    here = [(stage, at) for stage in range(ranks) for at in range(pipelines) if _rank(stage, at, ranks, pipelines) == rank]
    slots: dict[int, Action] = {}
    for block in range(microbatches // ranks):
        for stage, pipeline in here:
            for j in range(each):
                start, microbatch = 2 * ranks * block + 2 * j, ranks * block + pipeline * each + j
                slots[start + stage] = Action(Op.F, stage, microbatch)
                slots[start + 2 * ranks - 1 - stage] = Action(Op.B, stage, microbatch)
    return [slots[slot] for slot in sorted(slots)]


def _with_all_reduces(order: list[Action]) -> list[Action]:
    """Return a rank's order with the all-reduce (S) of each stage inserted right after the stage's last backward pass (B)."""
    complete = stage_complete_at(order)
    return [a for at, b in enumerate(order) for a in ((b, Action(Op.S, b.stage, version=1)) if at in complete else (b,))]


class _Greedy:
    """Finds orders for two pipelines and more micro-batches than ranks, by a simulation in which a forward pass F takes 1 and a backward
    pass B takes 2: a free rank takes the action that can start first. If several can start at the same time, F goes before B, and lower
    micro-batches go first. At most `ranks` micro-batches are in flight on a rank. Directions are 0 (down) and 1 (up).
    Each direction numbers its own micro-batches from 0."""

    def __init__(self, ranks: int, microbatches: int) -> None:
        self.ranks, self.each = ranks, microbatches // 2
        self.free, self.in_flight = [0] * ranks, [0] * ranks  # for each rank: time at which it is free; micro-batches in flight
        self.next: Counter[tuple[Op, int, int]] = Counter()  # (op, direction, stage) -> next micro-batch
        self.done: list[list[Action]] = [[] for _ in range(ranks)]
        # (op, direction, stage, micro-batch) -> time at which the action's input has arrived
        self.arrived = {(Op.F, up, 0, n): 0 for up in (0, 1) for n in range(self.each)}

    def orders(self) -> list[list[Action]]:
        chosen = [self._choice(rank) for rank in range(self.ranks)]
        heap = [choice for choice in chosen if choice is not None]
        heapify(heap)
        while heap:
            choice = heappop(heap)
            rank = choice[4]
            if choice != chosen[rank]:  # outdated: the rank has another next action by now
                continue
            for changed in {rank, self._do(choice)}:
                new = chosen[changed] = self._choice(changed)
                if new is not None:
                    heappush(heap, new)
        return self.done

    def _choice(self, rank: int) -> tuple[int, int, int, int, int, int] | None:
        """Return a rank's next action as (start, 0 for F or 1 for B, micro-batch, -stage, rank, direction); None if the rank must wait."""
        found = []
        for up, stage in ((0, rank), (1, self.ranks - 1 - rank)):
            for back, op in enumerate((Op.F, Op.B)):
                n = self.next[op, up, stage]
                arrived = self.arrived.get((op, up, stage, n))
                if arrived is not None and (back or self.in_flight[rank] < self.ranks):
                    found.append((max(self.free[rank], arrived), back, n, -stage, rank, up))
        return min(found, default=None)

    def _do(self, choice: tuple[int, int, int, int, int, int]) -> int:
        """Append the chosen action to its rank's order. Return the rank that receives the result (for B of stage 0: the same rank)."""
        start, back, n, stage, rank, up = choice
        op, stage, last = (Op.F, Op.B)[back], -stage, self.ranks - 1
        end = self.free[rank] = start + 1 + back
        self.next[op, up, stage] += 1
        self.in_flight[rank] += 1 - 2 * back
        block, j = divmod(n, self.ranks // 2)
        self.done[rank].append(Action(op, stage, self.ranks * block + up * self.ranks // 2 + j))
        to, at = (op, stage + 1 - 2 * back) if back or stage < last else (Op.B, last)
        if at < 0:
            return rank
        self.arrived[to, up, at, n] = end
        return last - at if up else at
