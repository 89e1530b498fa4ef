"""Zero bubble [2401.10241]: the backward pass is split in two, because other ranks wait for only one half.

    F: forward pass     I (input gradient): the previous stage waits for it     W (weight gradient): only the update waits for it
    rank 2 | .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3     the last of three ranks in H1: W fills what would be bubbles

H1 (section 2), with p ranks, m micro-batches: rank r starts with p - r forward passes and delays W by r micro-batches, so each rank keeps p
micro-batches until their W. The bubble is (p - 1) (F + I - W) / (m (F + I + W)), where F, I and W are times, if neither F nor I is shorter
than W. H2: rank r starts with 2 (p - r) - 1 forward passes, delays W by 2 r, and keeps 2 p - 1 micro-batches. The bubble is
(p - 1) (F + I - 2 W) / (m (F + I + W)). Both formulas assume that a rank begins its next step right after its own last action. In H2, later
ranks begin and end a step later than rank 0. A gradient norm over all ranks makes every rank wait before its update, so H2's bubble grows.

V (section 6): two chunks (stages) a rank, placed as a V. Rank 0 holds stages 0 and 2 p - 1, rank 1 stages 1 and 2 p - 2. Every rank keeps
activations of up to 2 p (chunk, micro-batch) pairs, the memory of 1F1B's first rank. There is no bubble if F = I = W. V sends twice as many
messages as 1F1B.
"""

from __future__ import annotations

from collections import Counter, deque

from parallel.pipeline.schedule import Action, Op, Schedule, flushed, folded, one_stage_a_rank


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Build ZB-H1. Every rank keeps activations of up to `ranks` micro-batches, as 1F1B's first rank does. If forward passes, gradients of
    inputs and gradients of weights take equal times, the bubble is a third of 1F1B's."""
    orders = [_order(rank, microbatches, ahead=ranks - rank, delay=rank) for rank in range(ranks)]
    return flushed("zb_h1", one_stage_a_rank(ranks), microbatches, orders)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Build ZB-H2. Every rank keeps activations of up to 2 * ranks - 1 micro-batches; 1F1B's first rank keeps at most `ranks`. If
    forward passes, gradients of inputs and gradients of weights take equal times, there is no bubble."""
    orders = [_order(rank, microbatches, ahead=2 * (ranks - rank) - 1, delay=2 * rank) for rank in range(ranks)]
    return flushed("zb_h2", one_stage_a_rank(ranks), microbatches, orders)


def _order(rank: int, microbatches: int, *, ahead: int, delay: int) -> list[Action]:
    """Return a rank's order: `ahead` forward passes (F), then gradients of inputs (I) and F in turn. The gradients of weights (W) of
    micro-batch j follow I of micro-batch j + `delay`."""
    order = [Action(Op.F, rank, j) for j in range(min(ahead, microbatches))]
    for j in range(microbatches):
        order.append(Action(Op.I, rank, j))
        if j >= delay:
            order.append(Action(Op.W, rank, j - delay))
        if j + ahead < microbatches:
            order.append(Action(Op.F, rank, j + ahead))
    return order + [Action(Op.W, rank, j) for j in range(max(0, microbatches - delay), microbatches)]


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Build ZB-V. With fewer than n = 2 * ranks - 1 micro-batches, use the order for n micro-batches, without the actions of the
    micro-batches that do not exist."""
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
    """Builds a rank's order: each method appends an action, for the next micro-batch of the stage.
    counts: (F, stage) -> number of F so far; (B, stage) -> number of B and I together so far."""

    def __init__(self) -> None:
        self.order: list[Action] = []
        self.counts: Counter[tuple[Op, int]] = Counter()
        self._pending: deque[Action] = deque()

    def forward(self, stage: int) -> None:
        self.order.append(Action(Op.F, stage, self._next(Op.F, stage)))

    def backward(self, stage: int) -> None:
        self.order.append(Action(Op.B, stage, self._next(Op.B, stage)))

    def input(self, stage: int) -> None:
        """Append I (gradients of inputs), and put the W (gradients of weights) of its micro-batch into the queue of pending W."""
        microbatch = self._next(Op.B, stage)
        self.order.append(Action(Op.I, stage, microbatch))
        self._pending.append(Action(Op.W, stage, microbatch))

    def weights(self, stage: int | None = None) -> bool:
        """Append the oldest pending W of this stage (None: of any stage). Return False if no W is pending."""
        for at, action in enumerate(self._pending):
            if stage in (None, action.stage):
                del self._pending[at]
                self.order.append(action)
                return True
        return False

    def _next(self, op: Op, stage: int) -> int:
        self.counts[op, stage] += 1
        return self.counts[op, stage] - 1
