"""Laws of tests/planner/orders.py: the rival has the paper's times, `clock` is right, no searched order of a sample is slower."""

from __future__ import annotations

import random

from parallel.pipeline.check import check
from parallel.pipeline.schedule import Action, Op, flushed, one_stage_a_rank
from parallel.pipeline.schedules import make_schedule
from tests.planner.orders import Case, clock, compared, drawn, most_kept, plain_orders
from tests.planner.zero_bubble_auto import auto
from tests.support.plain_simulation import plain_simulate


def test_the_rival_is_the_papers_zero_bubble_for_equal_times() -> None:
    """For F = B = W the rival is as fast as ZB-H2 with a memory of 2 p - 1 micro-batches, and no slower than ZB-H1 with a memory of p."""
    p, m = 4, 12
    even = [10] * p
    seconds, orders = auto(even, even, even, m, sent=0, memory=2 * p - 1)
    assert seconds == (3 * m + p - 1) * 10 and most_kept(orders) <= 2 * p - 1
    seconds, orders = auto(even, even, even, m, sent=0, memory=p)
    assert most_kept(orders) <= p and seconds <= (3 * m + 2 * (p - 1)) * 10


def test_every_rival_order_is_whole_and_within_memory() -> None:
    draw = random.Random(4)
    for _ in range(60):
        case = drawn(draw)
        seconds, orders = auto(*case[:4], sent=case.sent, memory=case.memory)
        assert most_kept(orders) <= case.memory and seconds == clock(orders, *case[:3], case.sent)
        names = {"F": Op.F, "B": Op.I, "W": Op.W}
        made = [[Action(names[kind], rank, j) for kind, j in order] for rank, order in enumerate(orders)]
        check(flushed("rival", one_stage_a_rank(len(made)), case.microbatches, made))


def test_the_clock_is_the_plain_simulators() -> None:
    draw = random.Random(6)
    for name in ("1f1b", "gpipe", "zb_h1", "zb_h2"):
        f, i, w = ([draw.randint(10, 90) for _ in range(3)] for _ in range(3))
        made = make_schedule(name, ranks=3, microbatches=5)
        length = {Op.F: f, Op.I: i, Op.W: w, Op.B: [a + b for a, b in zip(i, w, strict=True)], Op.U: [0] * 3}
        spans, _ = plain_simulate(made, lambda rank, a, length=length: length[a.op][a.stage], lambda message: 7, overlap=True)
        assert clock(plain_orders(made), f, i, w, 7) == max(span.end for row in spans for span in row)


def test_no_searched_order_is_slower_in_a_sample() -> None:
    """The sample: 40 random cases, and one in which an earlier version of the search was slower."""
    draw = random.Random(23)
    cases = [drawn(draw) for _ in range(40)]
    cases.append(Case((19, 62, 84, 41, 70, 45), (85, 47, 78, 32, 53, 67), (28, 51, 43, 45, 18, 70), 5, sent=9, memory=7))
    times = [compared(case) for case in cases]
    assert all(one.searched <= one.rival for one in times) and any(one.searched < one.rival for one in times)
