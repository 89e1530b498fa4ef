"""Zero bubble [2401.10241]: the backward pass is cut in two, because other ranks wait for only half of it.

    I (input gradient): the previous stage waits for it        W (weight gradient): only the update waits for it
    rank 2 | .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3     the last of three ranks in H1: W fills what would be bubbles

H1 (section 2): rank r starts p - r forward passes, as 1F1B, and delays W by r micro-batches, so each rank keeps p micro-batches until
their W. The bubble is (p - 1) (F + I - W) / (m (F + I + W)). H2: rank r starts 2 (p - r) - 1 forward passes and delays W by 2 r, and keeps
2 p - 1 micro-batches. The bubble is (p - 1) (F + I - 2 W) / (m (F + I + W)), zero if F = I = W. The formulas count a step from a rank's
first action to its last, because the ranks may start the next step in the same staggered way. In H2, a gradient norm over all ranks before
the update prevents that.

V (section 6) has the memory of 1F1B, by two chunks a rank placed as a V: rank 0 holds stages 0 and 2 p - 1, rank 1 stages 1 and 2 p - 2.
A micro-batch runs down the ranks and up again, so its loss is computed on the rank where it started, and all ranks free memory at the same
rate. Each has 2 p chunks in flight, as much as 1F1B's first rank. There is no bubble if F = I = W, and twice the messages of 1F1B.
"""

from __future__ import annotations

from collections import Counter, deque

from parallel.pipeline.schedule import Action, Op, Schedule, flushed, folded, one_stage_a_rank


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Build ZB-H1: on every rank the activations of 1F1B's first rank, and a third of its bubble if F = I = W."""
    orders = [_order(rank, microbatches, ahead=ranks - rank, delay=rank) for rank in range(ranks)]
    return flushed("zb_h1", one_stage_a_rank(ranks), microbatches, orders)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Build ZB-H2: almost twice the activations of 1F1B's first rank, and no bubble if F = I = W."""
    orders = [_order(rank, microbatches, ahead=2 * (ranks - rank) - 1, delay=2 * rank) for rank in range(ranks)]
    return flushed("zb_h2", one_stage_a_rank(ranks), microbatches, orders)


def _order(rank: int, microbatches: int, *, ahead: int, delay: int) -> list[Action]:
    """Return `ahead` forward passes, then I and the next F in turn. W of micro-batch j comes after I of micro-batch j + `delay`."""
    order = [Action(Op.F, rank, j) for j in range(min(ahead, microbatches))]
    for j in range(microbatches):
        order.append(Action(Op.I, rank, j))
        if j >= delay:
            order.append(Action(Op.W, rank, j - delay))
        if j + ahead < microbatches:
            order.append(Action(Op.F, rank, j + ahead))
    return order + [Action(Op.W, rank, j) for j in range(max(0, microbatches - delay), microbatches)]


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Build ZB-V. For fewer than 2 p - 1 micro-batches, take the order of 2 p - 1 and leave out the actions of the others."""
    orders = [[a for a in _v_order(rank, ranks, max(microbatches, 2 * ranks - 1)) if a.microbatch < microbatches] for rank in range(ranks)]
    return flushed("zb_v", folded(ranks), microbatches, orders)


def _v_order(rank: int, ranks: int, microbatches: int) -> list[Action]:
    down, up = rank, 2 * ranks - 1 - rank
    to = NumberedOrder()
    for _ in range(2 * (ranks - rank) - 1):
        to.forward(down)
    for _ in range(rank):
        to.forward(up)
        to.forward(down)
    for _ in range(ranks - rank):
        to.forward(up)
        to.input(up)
        to.weights(up)
    while to.counts[Op.F, up] < microbatches:
        if to.counts[Op.F, down] < microbatches:
            to.forward(down)
        to.input(down)
        to.weights(down)
        to.forward(up)
        to.input(up)
        to.weights(up)
    for _ in range(rank):
        to.input(down)
        to.input(up)
    for _ in range(ranks - rank):
        to.input(down)
        to.weights(down)
    for stage in (up, down):
        while to.weights(stage):
            pass
    return to.order


class NumberedOrder:
    """A rank's order, built by appending F, B, I and W of its stages. Each gets the number of the stage's next micro-batch.

    counts: (F, stage) and (B, stage) -> number of forward passes, and of B and I, so far.
    """

    def __init__(self) -> None:
        self.order: list[Action] = []
        self.counts: Counter[tuple[Op, int]] = Counter()
        self._pending: deque[Action] = deque()

    def forward(self, stage: int) -> None:
        self.order.append(Action(Op.F, stage, self._next(Op.F, stage)))

    def backward(self, stage: int) -> None:
        self.order.append(Action(Op.B, stage, self._next(Op.B, stage)))

    def input(self, stage: int) -> None:
        """Append I. Its W becomes pending."""
        microbatch = self._next(Op.B, stage)
        self.order.append(Action(Op.I, stage, microbatch))
        self._pending.append(Action(Op.W, stage, microbatch))

    def weights(self, stage: int | None = None) -> bool:
        """Append the oldest pending W, of any stage or of the given one. Returns False if there is none."""
        found = next((action for action in self._pending if stage in (None, action.stage)), None)
        if found is not None:
            self._pending.remove(found)
            self.order.append(found)
        return found is not None

    def _next(self, op: Op, stage: int) -> int:
        self.counts[op, stage] += 1
        return self.counts[op, stage] - 1
