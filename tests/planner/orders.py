"""Searched orders of actions compared with the zero-bubble paper's automatic orders at equal memory: 1,000 cases of unequal costs.

`python -m tests.planner orders --json FILE`. A case is p ranks with one stage each, m micro-batches, a time of F, I and W for each rank, a
time of messages, and a limit of micro-batches that a rank keeps until W, all at random. The rival is the shortest of eight orders by the
paper's rules (zero_bubble_auto.py). `clock` times both orders; it shares nothing with the search and its simulator. The search takes the
best of many orders and then improves it by moving actions, which takes most of its time. Here it moves none. A row passes if no searched
order is slower than its rival.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from parallel.pipeline.schedule import COMPUTE, Action, Op, Schedule
from parallel.pipeline.schedules.search import search
from tests.planner.zero_bubble_auto import Order, auto

CASES, ROUNDS, SEED = 1_000, 0, 17  # ROUNDS of moved actions: none
STAGES = (2, 3, 4, 5, 6, 8)
HEAD = f"{'stages':>6}{'cases':>7}{'slower':>8}{'equal':>7}{'faster':>8}{'mean gain':>11}{'largest':>9}"


class Case(NamedTuple):
    """One random pipeline to order. forward, inputs, weights: integer times of the actions F, I and W on each rank. sent: time of a
    message. memory: number of micro-batches that a rank may keep from F to W."""

    forward: tuple[int, ...]
    inputs: tuple[int, ...]
    weights: tuple[int, ...]
    microbatches: int
    sent: int
    memory: int


class Times(NamedTuple):
    """Seconds from the first start to the last end, of the searched order and of the rival."""

    searched: float
    rival: float

    @property
    def gain(self) -> float:
        return self.rival / self.searched - 1


def drawn(draw: random.Random) -> Case:
    """Return a random case. Messages are shorter than any action, so that no message waits for the one before it."""
    p = draw.choice(STAGES)
    forward, inputs, weights = (tuple(draw.randint(10, 90) for _ in range(p)) for _ in range(3))
    return Case(forward, inputs, weights, draw.randint(1, 12), sent=draw.choice((0, 2, 5, 9)), memory=draw.randint(1, 2 * p))


def compared(case: Case, *, rounds: int = ROUNDS) -> Times:
    """Return the times of a case in both orders by `clock`. Raises AssertionError for an order that exceeds the case's memory."""
    f, i, w, m, sent, memory = case
    length = {Op.F: f, Op.I: i, Op.W: w, Op.B: tuple(a + b for a, b in zip(i, w, strict=True))}

    def cost(rank: int, action: Action) -> float:
        return length[action.op][rank] if action.op in length else 0

    found = search("line", len(f), m, cost, transfer_time=sent, memory=memory, rounds=rounds)
    _, rival = auto(f, i, w, m, sent=sent, memory=memory)
    assert most_kept(rival) <= memory and most_kept(plain_orders(found)) <= memory, case
    return Times(clock(plain_orders(found), f, i, w, sent), clock(rival, f, i, w, sent))


def plain_orders(schedule: Schedule) -> list[Order]:
    """Return the orders with the paper's names F, B and W. A backward pass that is not split has the name `both`."""
    names = {Op.F: ("F",), Op.I: ("B",), Op.W: ("W",), Op.B: ("both",)}
    return [[(name, a.microbatch) for a in order if a.op in COMPUTE for name in names[a.op]] for order in schedule.orders]


def clock(orders: Sequence[Order], forward: Sequence[int], inputs: Sequence[int], weights: Sequence[int], sent: int) -> float:
    """Return the end of the last action if every rank runs its actions in order, each as soon as its input has arrived."""
    p, at, now = len(orders), [0] * len(orders), [0] * len(orders)
    down: dict[tuple[int, int], int] = {}  # (rank, micro-batch) -> end of the forward pass; `up`: of the backward pass
    up: dict[tuple[int, int], int] = {}
    while any(at[rank] < len(orders[rank]) for rank in range(p)):
        before = list(at)
        for rank in range(p):
            while at[rank] < len(orders[rank]):
                kind, j = orders[rank][at[rank]]
                needs = down.get((rank - 1, j)) if kind == "F" else up.get((rank + 1, j))
                alone = kind == "W" or rank == (0 if kind == "F" else p - 1)
                if not alone and needs is None:
                    break
                start = now[rank] if alone or needs is None else max(now[rank], needs + sent)
                took = {"F": forward, "B": inputs, "W": weights}.get(kind)
                now[rank] = start + (took[rank] if took else inputs[rank] + weights[rank])
                (down if kind == "F" else {} if kind == "W" else up)[rank, j] = now[rank]
                at[rank] += 1
        assert at != before, "deadlock"
    return max(now)


def most_kept(orders: Sequence[Order]) -> int:
    """Return the largest number of micro-batches that any rank keeps at a time, from F to W."""
    most = 0
    for order in orders:
        kept = 0
        for kind, _ in order:
            kept += {"F": 1, "B": 0}.get(kind, -1)
            most = max(most, kept)
    return most


def rows(cases: int = CASES) -> list[dict[str, Any]]:
    """Compare both orders on `cases` random cases. Print and return a row (see `row_of`) for each number of stages, then one for all."""
    print(HEAD)
    draw, found = random.Random(SEED), []
    for _ in range(cases):
        case = drawn(draw)
        found.append((len(case.forward), compared(case)))
    made = [row_of(p, [times for stages, times in found if stages == p]) for p in STAGES]
    return [*(row for row in made if row), row_of(None, [times for _, times in found])]


def row_of(stages: int | None, times: Sequence[Times]) -> dict[str, Any]:
    """Print and return one row: how often the searched order was slower, equal or faster than the rival, and its mean and largest gain.
    stages: number of stages of these cases; None for all cases. times: the two times of each case. Returns {} without cases."""
    if not times:
        return {}
    slower = sum(one.searched > one.rival for one in times)
    equal = sum(one.searched == one.rival for one in times)
    gains = [one.gain for one in times]
    faster = len(times) - slower - equal
    row: dict[str, Any] = {"stages": stages or "all", "cases": len(times), "slower": slower, "equal": equal, "faster": faster}
    row |= {"gain_mean": statistics.mean(gains), "gain_largest": max(gains), "rounds": ROUNDS, "passed": slower == 0}
    counts = f"{row['stages']:>6}{row['cases']:>7}{slower:>8}{equal:>7}{row['faster']:>8}"
    print(f"{counts}{row['gain_mean']:>11.1%}{row['gain_largest']:>9.1%}", flush=True)
    return row
