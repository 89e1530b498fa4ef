"""Zero bubble, H1 and H2 [2401.10241, section 2]: backward cut in two, because only half of it is waited for.

    I (input gradient): the stage before waits for it          W (weight gradient): only the update waits for it
    rank 2 | .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3     the last of three ranks in H1: W fills what would be bubbles

H1: forwards in flight as in 1F1B, rank r delays W by r, so each rank keeps p micro-batches until their W; bubble
(p - 1) (F + I - W) / (m (F + I + W)). H2: 2 (p - r) - 1 forwards ahead, W delayed by 2 r, 2 p - 1 kept; bubble
(p - 1) (F + I - 2 W) / (m (F + I + W)): none where F = I = W. The formulas count a step from a rank's first action to its last, as
the next step may follow at the same stagger; a norm over all ranks before the update breaks that for H2.
"""

from __future__ import annotations

from parallel.pipeline.schedule import Action, Op, Schedule, flushed, one_stage_a_rank


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """The activations of 1F1B's first rank, on every rank; a third of its bubble where F = I = W."""
    orders = [_order(rank, microbatches, ahead=ranks - rank, delay=rank) for rank in range(ranks)]
    return flushed("zb_h1", one_stage_a_rank(ranks), microbatches, orders)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Almost twice the activations; no bubble where F = I = W."""
    orders = [_order(rank, microbatches, ahead=2 * (ranks - rank) - 1, delay=2 * rank) for rank in range(ranks)]
    return flushed("zb_h2", one_stage_a_rank(ranks), microbatches, orders)


def _order(rank: int, microbatches: int, *, ahead: int, delay: int) -> list[Action]:
    """`ahead` forwards, then I and the next F in turn; the W of a micro-batch comes `delay` I later than its own."""
    order = [Action(Op.F, rank, j) for j in range(min(ahead, microbatches))]
    for j in range(microbatches):
        order.append(Action(Op.I, rank, j))
        if j >= delay:
            order.append(Action(Op.W, rank, j - delay))
        if j + ahead < microbatches:
            order.append(Action(Op.F, rank, j + ahead))
    return order + [Action(Op.W, rank, j) for j in range(max(0, microbatches - delay), microbatches)]
