"""Local search for a fast schedule, for stages and links of unequal times and limited memory. Deterministic (fixed seed).

    start      the fastest of: the catalog's schedules with the same placement; greedy schedules; with one stage a rank, also the
               schedules of alternating.py. Only schedules that fit into memory are taken
    improve    move one action to another place in its rank's order; keep the change if it fits and is not slower in the simulator

Placements on p ranks: `line` (one stage a rank), `loop` (rank r holds stages r, p + r, ..., as in interleaved), `v` (stages r and
2 p - 1 - r, as in zb_v). F: forward pass; B: backward pass, or its halves I (gradients of inputs) and W (of weights).
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
from parallel.pipeline.schedules import SCHEDULES, make_schedule
from parallel.pipeline.schedules.alternating import Alternating
from parallel.pipeline.simulator.held import peak_held
from parallel.pipeline.simulator.simulate import Cost, OfMessage, makespan

MAX_TRIED_ACTIONS = 2**21  # limit of (schedules tried) * (actions of a schedule), so that a search takes at most half a minute


def homes_of(placement: str, ranks: int, chunks: int) -> Sequence[tuple[int]]:
    """Return for each stage a tuple with its one rank. placement: line, loop or v. chunks: stages a rank, used only for `loop`."""
    return {"line": one_stage_a_rank(ranks), "loop": looped(ranks, chunks), "v": folded(ranks)}[placement]


class Problem(NamedTuple):
    """Arguments of `search`, and `homes`: for each stage a tuple with its rank."""

    placement: str
    ranks: int
    microbatches: int
    chunks: int
    cost: Cost
    transfer_time: float | OfMessage
    memory: float | None
    overlap: bool
    homes: Sequence[tuple[int]]

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
    """Return the fastest schedule that is found for a placement. Raises BadInput if none fits into `memory`.

    cost: (rank, action) -> time, which must not depend on the micro-batch. transfer_time: of one message, as a number or a function of the
    message. overlap: ranks compute during transfers and all-reduces. chunks: stages a rank, for `loop`.
    memory: limit of the activations that a rank keeps until their weight gradients (W); None: no limit. Unit: one micro-batch's activations
    in all stages of the rank, so those in one of its stages count 1 / chunks.
    rounds: number of changes that are tried; fewer for long schedules (MAX_TRIED_ACTIONS)."""
    chunks = {"line": 1, "loop": chunks, "v": 2}[placement]
    homes = homes_of(placement, ranks, chunks)
    problem = Problem(placement, ranks, microbatches, chunks, cost, transfer_time, memory, overlap, homes)
    found = [schedule for schedule in (*_of_catalog(problem), *_heuristic(problem)) if problem.fits(schedule)]
    if not found:
        raise BadInput("memory", got=memory, needed="at least 1 (unit: one micro-batch's activations on one rank)", fix=Set("it", 1))
    best = min(found, key=problem.time)
    return check(replace(_improved(best, problem, rounds), name="search"))


def _of_catalog(problem: Problem) -> Iterator[Schedule]:
    """Yield the catalog's schedules of one batch that have the problem's placement."""
    for name, kind in SCHEDULES.items():
        if not kind.continuous and kind.chunks in (None, problem.chunks):
            try:
                made = make_schedule(name, ranks=problem.ranks, microbatches=problem.microbatches, chunks=problem.chunks)
            except BadInput:  # the schedule does not exist for these numbers of ranks and micro-batches
                continue
            if made.homes == tuple(problem.homes):
                yield made


def _heuristic(problem: Problem) -> Iterator[Schedule]:
    """Yield the distinct schedules of the greedy heuristic and, with one stage a rank, of alternating.py."""
    seen: list[list[list[Action]]] = []
    for orders in _orders(problem):
        if orders is not None and orders not in seen:
            seen.append(orders)
            yield flushed("search", problem.homes, problem.microbatches, orders)


def _orders(problem: Problem) -> Iterator[list[list[Action]] | None]:
    for first, filled, ahead in product((Op.I, Op.F), (0.01, 0.5, 1.0), (1, 2, problem.microbatches)):
        yield _Greedy(problem, first, filled, ahead).orders()
    if problem.placement == "line":
        times = [{op: problem.cost(r, Action(op, r, 0)) for op in (Op.F, Op.I, Op.W)} for r in range(problem.ranks)]
        sent = 0 if callable(problem.transfer_time) else problem.transfer_time
        for late, waiting, skip, always in product((False, True), repeat=4):
            how = {"late": late, "waiting": waiting, "skip": skip, "always": always}
            yield Alternating(times, problem.microbatches, sent=sent, memory=problem.memory, **how).orders()


class _Greedy:
    """Builds the orders of all ranks by a simulation: a free rank takes the forward pass F or the gradients of inputs I that can start
    first; gradients of weights W fill waits, or release memory that F needs. first: the op (F or I) that goes first if both can start at
    the same time. filled: a wait is filled with W if the wait is at least this fraction of W's time. ahead: a stage has at most `ahead`
    times as many micro-batches in flight as in 1F1B."""

    def __init__(self, problem: Problem, first: Op, filled: float, ahead: int) -> None:
        self.problem, self.first, self.filled, self.ahead = problem, first, filled, ahead
        self.rank = [home[0] for home in problem.homes]  # stage -> its rank
        stages = len(self.rank)
        self.held_by = [[s for s in range(stages) if self.rank[s] == r] for r in range(problem.ranks)]  # rank -> its stages
        self.free: list[float] = [0] * problem.ranks  # for each rank: time at which it is free
        self.kept = [0] * problem.ranks  # for each rank: micro-batches between F and W, summed over its stages
        self.next = {op: [0] * stages for op in (Op.F, Op.I)}  # op -> for each stage: its next micro-batch
        self.pending: list[list[Action]] = [[] for _ in range(problem.ranks)]  # for each rank: W that may run
        # (op, stage, micro-batch) -> time at which the action's input has arrived
        self.arrived: dict[tuple[Op, int, int], float] = {(Op.F, 0, j): 0 for j in range(problem.microbatches)}
        self.done: list[list[Action]] = [[] for _ in range(problem.ranks)]

    def orders(self) -> list[list[Action]] | None:
        """Return the order of each rank, without updates (U); None if memory is full and no action that frees memory is ready."""
        choices = {rank: self._choice(rank) for rank in range(self.problem.ranks)}
        queue = [(choice, rank) for rank, choice in choices.items() if choice is not None]  # outdated entries stay until they are popped
        heapify(queue)
        for _ in range(3 * self.problem.microbatches * len(self.rank)):
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
        """Return a rank's next action as (start, priority, action), where a lower priority goes first; None if the rank must wait."""
        free, found = self.free[rank], []
        for stage in self.held_by[rank]:
            for op in (Op.F, Op.I):
                action = Action(op, stage, self.next[op][stage])
                arrival = self.arrived.get(action[:3])
                if arrival is not None and (op is Op.I or self._room(rank, stage)):
                    found.append((max(free, arrival), 0 if op is self.first else 1, -stage, action))
        pending = self.pending[rank]
        if not found:
            return (free, 2, pending[0]) if pending else None
        start, order, _, action = min(found)
        if pending and start - free >= self.filled * self.problem.cost(rank, pending[0]) and start > free:
            return (free, 2, pending[0])
        return start, order, action

    def _room(self, rank: int, stage: int) -> bool:
        limit, chunks = self.problem.memory, self.problem.chunks
        in_flight = self.next[Op.F][stage] - self.next[Op.I][stage]
        if in_flight >= self.ahead * (len(self.rank) - stage):
            return False
        later = sum(s > stage for s in self.held_by[rank])  # later stages on this rank, which will also need memory for the micro-batch
        return limit is None or self.kept[rank] + 1 + later <= limit * chunks

    def _do(self, start: float, action: Action) -> set[int]:
        """Append the action to its rank's order. Return the ranks whose next action may have changed."""
        op, stage, microbatch, _ = action
        rank = self.rank[stage]
        end = self.free[rank] = start + self.problem.cost(rank, action)
        self.done[rank].append(action)
        self.kept[rank] += {Op.F: 1, Op.I: 0, Op.W: -1}[op]
        if op is Op.W:
            self.pending[rank].remove(action)
            return {rank}
        self.next[op][stage] += 1
        last = len(self.rank) - 1
        if op is Op.F:
            to = (Op.I, stage, microbatch) if stage == last else (Op.F, stage + 1, microbatch)
        else:
            self.pending[rank].append(action._replace(op=Op.W))
            to = (Op.I, stage - 1, microbatch)
        if to[1] < 0:
            return {rank}
        took = 0 if callable(self.problem.transfer_time) or self.rank[to[1]] == rank else self.problem.transfer_time
        self.arrived[to] = end + took
        return {rank, self.rank[to[1]]}


def _improved(schedule: Schedule, problem: Problem, rounds: int) -> Schedule:
    """Return the schedule after up to `rounds` random changes (`_moved`). A change that does not fit or makes the step slower is undone."""
    if schedule.pairs:
        return schedule
    draw, best, time = random.Random(0), schedule, problem.time(schedule)
    least = max(sum(problem.cost(r, a) for a in order) for r, order in enumerate(schedule.orders))
    for _ in range(min(rounds, MAX_TRIED_ACTIONS // sum(map(len, best.orders)))):
        if time <= least:
            break
        tried = _moved(best, draw)
        if tried is None or not problem.fits(tried):
            continue
        try:
            took = problem.time(tried)
        except BadInput:  # the changed order has a deadlock
            continue
        if took <= time:
            best, time = tried, took
    return best


def _moved(schedule: Schedule, draw: random.Random) -> Schedule | None:
    """Return the schedule with a random forward or backward action moved by up to four places in its rank's order. None if the new place
    does not exist, or if the actions of one micro-batch and stage would be in a wrong order, such as B before F."""
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
