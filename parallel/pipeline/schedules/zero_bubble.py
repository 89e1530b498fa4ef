"""Zero bubble, H1 and H2 [2401.10241, section 2]: the backward pass is cut in two, because other ranks wait for only half of it.

    I (input gradient): the previous stage waits for it        W (weight gradient): only the update waits for it
    rank 2 | .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3     the last of three ranks in H1: W fills what would be bubbles

H1: rank r starts p - r forward passes, as 1F1B, and delays W by r micro-batches, so each rank keeps p micro-batches until their W. The
bubble is (p - 1) (F + I - W) / (m (F + I + W)). H2: rank r starts 2 (p - r) - 1 forward passes and delays W by 2 r, and keeps 2 p - 1
micro-batches. The bubble is (p - 1) (F + I - 2 W) / (m (F + I + W)), zero if F = I = W. The formulas count a step from a rank's first
action to its last, because the ranks may start the next step in the same staggered way. In H2, a gradient norm over all ranks before the
update prevents that.
"""

from __future__ import annotations

from parallel.pipeline.schedule import Action, Op, Schedule, flushed, one_stage_a_rank


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Build ZB-H1: on every rank the activations of 1F1B's first rank, and a third of its bubble if F = I = W."""
    orders = [_order(rank, microbatches, ahead=ranks - rank, delay=rank) for rank in range(ranks)]
    return flushed("zb_h1", one_stage_a_rank(ranks), microbatches, orders)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Build ZB-H2: almost twice the activations of 1F1B's first rank, and no bubble if F = I = W."""
    orders = [_order(rank, microbatches, ahead=2 * (ranks - rank) - 1, delay=2 * rank) for rank in range(ranks)]
    return flushed("zb_h2", one_stage_a_rank(ranks), microbatches, orders)


def _order(rank: int, microbatches: int, *, ahead: int, delay: int) -> list[Action]:
    """Order of `ahead` forward passes, then I and the next F in turn. A micro-batch's W comes `delay` I after its own I."""
    order = [Action(Op.F, rank, j) for j in range(min(ahead, microbatches))]
    for j in range(microbatches):
        order.append(Action(Op.I, rank, j))
        if j >= delay:
            order.append(Action(Op.W, rank, j - delay))
        if j + ahead < microbatches:
            order.append(Action(Op.F, rank, j + ahead))
    return order + [Action(Op.W, rank, j) for j in range(max(0, microbatches - delay), microbatches)]
