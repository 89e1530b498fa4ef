"""An order found by search, for stages and links of unequal times and a limit of memory.

    start      the catalog's schedules on the same placement that fit; greedy orders: a rank does what can start first, and W fills
               waits, or makes room when memory is full; with a stage a rank, the zero-bubble paper's rules too (alternating.py)
    improve    move one action within its rank's order; keep what is not slower in the simulator and still fits

So the result is never slower than a schedule of the catalog that holds the same stages and fits. A placement says which stages a rank
holds: `line` one, `loop` r, p + r, ... (interleaved), `v` r and 2 p - 1 - r (zb_v). The search is the same each time it runs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import product
from typing import NamedTuple

from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.pipeline.check import check
from parallel.pipeline.schedule import COMPUTE, Action, Op, Schedule, flushed, folded, looped, one_stage_a_rank
from parallel.pipeline.schedules.alternating import Alternating
from parallel.pipeline.schedules.catalog import SCHEDULES, make_schedule
from parallel.pipeline.simulator.held import peak_held
from parallel.pipeline.simulator.simulate import Cost, OfMessage, makespan

PLACEMENTS = ("line", "loop", "v")
MOVED = 2**21  # actions in all the orders that moves make: half a minute at most


def homes_of(placement: str, ranks: int, chunks: int) -> Sequence[tuple[int]]:
    """The rank of each stage. chunks: stages a rank for `loop`."""
    return {"line": one_stage_a_rank(ranks), "loop": looped(ranks, chunks), "v": folded(ranks)}[placement]


class Given(NamedTuple):
    """What a search knows. memory: the most that a rank may keep until W, in micro-batches of all its layers; None: no limit."""

    placement: str
    ranks: int
    microbatches: int
    chunks: int
    cost: Cost
    transfer_time: float | OfMessage
    memory: float | None
    overlap: bool

    @property
    def homes(self) -> Sequence[tuple[int]]:
        return homes_of(self.placement, self.ranks, self.chunks)

    def fits(self, schedule: Schedule) -> bool:
        return self.memory is None or max(peak_held(schedule)) <= self.memory * self.chunks + 1e-9

    def time(self, schedule: Schedule) -> float:
        return makespan(schedule, self.cost, transfer_time=self.transfer_time, overlap=self.overlap)


def search(
    placement: str,
    ranks: int,
    microbatches: int,
    cost: Cost,
    *,
    chunks: int = 2,
    transfer_time: float | OfMessage = 0,
    memory: float | None = None,
    overlap: bool = True,
    rounds: int = 300,
) -> Schedule:
    """The fastest order found on a placement, from the first start to the last end.

    chunks: stages a rank for `loop`. rounds: moves tried after the start, fewer of a long order: no more than MOVED actions in all.
    cost: as for `simulate`; times do not depend on the micro-batch. Raises BadInput for a memory in which no order fits.
    """
    chunks = {"line": 1, "loop": chunks, "v": 2}[placement]
    given = Given(placement, ranks, microbatches, chunks, cost, transfer_time, memory, overlap)
    found = [schedule for schedule in (*_of_catalog(given), *_greedy_orders(given)) if given.fits(schedule)]
    if not found:
        raise BadInput("memory", got=memory, needed=f"at least 1, a micro-batch of a rank's layers, on {placement}", fix=Set("it", 1))
    best = min(found, key=given.time)
    return check(replace(_improved(best, given, rounds), name="search"))


def _of_catalog(given: Given) -> Iterator[Schedule]:
    """The catalog's schedules of one batch whose stages are placed in the same way."""
    for name, kind in SCHEDULES.items():
        if not kind.continuous and kind.chunks in (None, given.chunks):
            try:
                made = make_schedule(name, ranks=given.ranks, microbatches=given.microbatches, chunks=given.chunks)
            except BadInput:  # sizes that it cannot have
                continue
            if made.homes == tuple(given.homes):
                yield made


def _greedy_orders(given: Given) -> Iterator[Schedule]:
    seen: list[list[list[Action]]] = []
    for first, filled, ahead in product((Op.I, Op.F), (0.01, 0.5, 1.0), (1, 2, given.microbatches)):
        orders = _Greedy(given, first, filled, ahead).orders()
        if orders is not None and orders not in seen:
            seen.append(orders)
            yield flushed("search", given.homes, given.microbatches, orders)
    if given.placement == "line":
        times = [{op: given.cost(r, Action(op, r, 0)) for op in (Op.F, Op.I, Op.W)} for r in range(given.ranks)]
        sent = 0 if callable(given.transfer_time) else given.transfer_time
        for late, waiting, skip, always in product((False, True), repeat=4):
            how = {"late": late, "waiting": waiting, "skip": skip, "always": always}
            orders = Alternating(times, given.microbatches, sent=sent, memory=given.memory, **how).orders()
            if orders not in seen:
                seen.append(orders)
                yield flushed("search", given.homes, given.microbatches, orders)


class _Greedy:
    """One greedy order. first: what goes first of F and I that can start at once. filled: the share of W's time from which a wait is
    filled with it. ahead: at most so many times as many forwards in flight as 1F1B has there."""

    def __init__(self, given: Given, first: Op, filled: float, ahead: int) -> None:
        self.given, self.first, self.filled, self.ahead = given, first, filled, ahead
        self.rank = [home[0] for home in given.homes]
        stages = len(self.rank)
        self.held_by = [[s for s in range(stages) if self.rank[s] == r] for r in range(given.ranks)]
        self.free: list[float] = [0] * given.ranks
        self.kept = [0] * given.ranks
        self.next = {op: [0] * stages for op in (Op.F, Op.I)}
        self.owed: list[list[Action]] = [[] for _ in range(given.ranks)]
        self.arrived: dict[tuple[Op, int, int], float] = {(Op.F, 0, j): 0 for j in range(given.microbatches)}
        self.done: list[list[Action]] = [[] for _ in range(given.ranks)]

    def orders(self) -> list[list[Action]] | None:
        """Every rank's order; None if memory runs full with nothing left that frees it."""
        choices = {rank: self._choice(rank) for rank in range(self.given.ranks)}
        queue = [(choice, rank) for rank, choice in choices.items() if choice is not None]  # also choices that are no longer a rank's
        heapify(queue)
        for _ in range(3 * self.given.microbatches * len(self.rank)):
            while queue and choices[queue[0][1]] != queue[0][0]:
                heappop(queue)
            if not queue:
                return None
            (start, _, action), _ = heappop(queue)
            for rank in self._do(start, action):
                choices[rank] = choice = self._choice(rank)
                if choice is not None:
                    heappush(queue, (choice, rank))
        return self.done

    def _choice(self, rank: int) -> tuple[float, int, Action] | None:
        """The start, a number that says what goes first, and the action that a rank would do next."""
        free, found = self.free[rank], []
        for stage in self.held_by[rank]:
            for op in (Op.F, Op.I):
                action = Action(op, stage, self.next[op][stage])
                arrival = self.arrived.get(action[:3])
                if arrival is not None and (op is Op.I or self._room(rank, stage)):
                    found.append((max(free, arrival), 0 if op is self.first else 1, -stage, action))
        owed = self.owed[rank]
        if not found:
            return (free, 2, owed[0]) if owed else None
        start, order, _, action = min(found)
        if owed and start - free >= self.filled * self.given.cost(rank, owed[0]) and start > free:
            return (free, 2, owed[0])
        return start, order, action

    def _room(self, rank: int, stage: int) -> bool:
        limit, chunks = self.given.memory, self.given.chunks
        flying = self.next[Op.F][stage] - self.next[Op.I][stage]
        if flying >= self.ahead * (len(self.rank) - stage):
            return False
        later = sum(s > stage for s in self.held_by[rank])  # what this micro-batch will still need here
        return limit is None or self.kept[rank] + 1 + later <= limit * chunks

    def _do(self, start: float, action: Action) -> set[int]:
        """Do it; returns the ranks that can now do something else."""
        op, stage, microbatch, _ = action
        rank = self.rank[stage]
        end = self.free[rank] = start + self.given.cost(rank, action)
        self.done[rank].append(action)
        self.kept[rank] += {Op.F: 1, Op.I: 0, Op.W: -1}[op]
        if op is Op.W:
            self.owed[rank].remove(action)
            return {rank}
        self.next[op][stage] += 1
        last = len(self.rank) - 1
        if op is Op.F:
            to = (Op.I, stage, microbatch) if stage == last else (Op.F, stage + 1, microbatch)
        else:
            self.owed[rank].append(action._replace(op=Op.W))
            to = (Op.I, stage - 1, microbatch)
        if to[1] < 0:
            return {rank}
        took = 0 if callable(self.given.transfer_time) or self.rank[to[1]] == rank else self.given.transfer_time
        self.arrived[to] = end + took
        return {rank, self.rank[to[1]]}


def _improved(schedule: Schedule, given: Given, rounds: int) -> Schedule:
    """Try moves of one action by a few places, and keep each after which the schedule fits and is not slower."""
    if schedule.pairs:
        return schedule
    draw, best, time = random.Random(0), schedule, given.time(schedule)
    least = max(sum(given.cost(r, a) for a in order) for r, order in enumerate(schedule.orders))
    for _ in range(min(rounds, MOVED // sum(map(len, best.orders)))):
        if time <= least:
            break
        tried = _moved(best, draw)
        if tried is None or not given.fits(tried):
            continue
        try:
            took = given.time(tried)
        except BadInput:  # a deadlock
            continue
        if took <= time:
            best, time = tried, took
    return best


def _moved(schedule: Schedule, draw: random.Random) -> Schedule | None:
    """One action, not U, some places earlier or later in its rank's order; None if it would then come before what it needs there."""
    rank = draw.randrange(schedule.num_ranks)
    order = [a for a in schedule.orders[rank] if a.op in COMPUTE]
    at = draw.randrange(len(order))
    to = at + draw.choice((-4, -3, -2, -1, 1, 2, 3, 4))
    if not 0 <= to < len(order):
        return None
    action = order.pop(at)
    order.insert(to, action)
    turn = {Op.F: 0, Op.B: 1, Op.I: 1, Op.W: 2}
    mine = [turn[a.op] for a in order if a.stage == action.stage and a.microbatch == action.microbatch]
    if mine != sorted(mine):
        return None
    orders = [[a for a in o if a.op in COMPUTE] for o in schedule.orders]
    orders[rank] = order
    return flushed(schedule.name, schedule.homes, schedule.microbatches, orders)
