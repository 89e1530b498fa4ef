"""Simulates a Schedule: computes a Timeline from the cost of each action and the rule `Schedule.needs`.

    simulate(schedule, costs(forward=1, backward=2)).makespan      # 33, for 1F1B with 4 ranks and 8 micro-batches

An action starts when its rank is free and its needs are met. A message arrives one transfer time after the action that made it ended.
With overlap, a link works in parallel with the ranks, one message at a time in each direction; without, the sending rank waits.
The sum of replicas' gradients (S) starts when all replicas have reached it: with overlap in parallel with the next actions, without in
the ranks' own time. All times have the same, arbitrary unit. Integers stay integers, so that tests can compare with closed forms exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from parallel.errors import BadInput
from parallel.pipeline.schedule import Action, Message, Op, Schedule
from parallel.pipeline.steps import Steps, steps

Cost = Callable[[int, Action], float]  # (rank, action) -> time
OfMessage = Callable[[Message], float]


class Span(NamedTuple):
    """An action with its start and end. For S with overlap, this is time on the network, not time of its rank."""

    action: Action
    start: float
    end: float


class Transfer(NamedTuple):
    message: Message
    start: float
    end: float
    num_bytes: float


@dataclass(frozen=True)
class Timeline:
    """Times of all actions. spans: for each rank, in its order. overlap: True if S and transfers ran in parallel with compute."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    transfers: tuple[Transfer, ...]
    overlap: bool

    @cached_property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return max(span.end for spans in self.spans for span in spans) - min(spans[0].start for spans in self.spans)

    @cached_property
    def _busy(self) -> tuple[float, ...]:
        return tuple(sum(end - start for action, start, end in spans if action.op is not Op.S) for spans in self.spans)

    def busy(self, rank: int) -> float:
        """Time that a rank spends in F, B, I, W and U (its ideal time)."""
        return self._busy[rank]

    def idle(self, rank: int) -> float:
        return self.makespan - self.busy(rank)

    def bubbles(self) -> tuple[float, ...]:
        """Idle time divided by ideal time, for each rank, from the first start to the last end of all ranks."""
        return tuple(self.idle(rank) / self.busy(rank) if self.busy(rank) else 0.0 for rank in range(self.schedule.num_ranks))

    def bubble(self) -> float:
        """Idle time divided by ideal time, of all ranks together."""
        ideal = sum(self.busy(rank) for rank in range(self.schedule.num_ranks))
        return (self.schedule.num_ranks * self.makespan - ideal) / ideal if ideal else 0.0

    def sent_bytes(self) -> tuple[float, ...]:
        """Bytes that each rank sends to other ranks between stages."""
        sent: list[float] = [0] * self.schedule.num_ranks
        for transfer in self.transfers:
            sent[transfer.message.source] += transfer.num_bytes
        return tuple(sent)


def costs(
    forward: float | Sequence[float] = 1,
    backward: float | Sequence[float] = 2,
    *,
    weight_share: float = 0.5,
    update: float = 0,
    summation: float = 0,
) -> Cost:
    """Make a cost function from the times of one micro-batch: a list with a time for each stage, or one number for all stages.

    B takes `backward`; W takes the fraction `weight_share` of that, and I the rest. update: time of U. summation: time of S.
    """

    def of(times: float | Sequence[float], stage: int) -> float:
        return times[stage] if isinstance(times, Sequence) else times

    def first(op: Op, stage: int) -> float:
        if op is Op.F:
            return of(forward, stage)
        if op is Op.U or op is Op.S:
            return update if op is Op.U else summation
        whole = of(backward, stage)
        return {Op.B: whole, Op.I: whole * (1 - weight_share), Op.W: whole * weight_share}[op]

    found: dict[tuple[Op, int], float] = {}  # cache: the planner calls this millions of times

    def cost(rank: int, action: Action) -> float:
        key = action[:2]
        if key not in found:
            found[key] = first(*key)
        return found[key]

    return cost


def simulate(
    schedule: Schedule,
    cost: Cost | None = None,
    *,
    transfer_time: float | OfMessage = 0,
    message_bytes: float | OfMessage = 0,
    overlap: bool = True,
) -> Timeline:
    """Compute the start and end of every action and message. Raises BadInput for a deadlock, and for negative times.

    cost: time of an action on a rank, default `costs()`. transfer_time, message_bytes: of a message, a number or a function of the message.
    overlap: messages and sums of replicas' gradients run while ranks compute; if False, ranks wait for them.
    """
    run = _Run(steps(schedule, sums_block=not overlap), transfer_time, overlap)
    run.all(cost or costs())
    return run.timeline(message_bytes)


def makespan(schedule: Schedule, cost: Cost | None = None, *, transfer_time: float | OfMessage = 0, overlap: bool = True) -> float:
    """Return the time from the first start to the last end: `simulate(...).makespan`, but faster, because no Timeline is built."""
    run = _Run(steps(schedule, sums_block=not overlap), transfer_time, overlap)
    end = run.all(cost or costs())
    return end - min(run.first_starts())


def period(build: Callable[[int], Schedule], time: Callable[[Schedule], float] = makespan, *, batches: int = 2) -> float:
    """Time of one more batch when the pipeline is full.

    build: n -> the schedule of n batches. batches: number of batches after which the pipeline is full. A rank begins its next batch right
    after its own update. If rank 0 waits until the last end, the period equals the makespan. It is shorter for schedules that do not
    drain, and if ranks end as staggered as they began.
    """
    return time(build(batches + 1)) - time(build(batches))


def drained_period(
    schedule: Schedule, cost: Cost | None = None, *, transfer_time: float | OfMessage = 0, overlap: bool = True, batches: int = 2
) -> float:
    """`period` of a schedule of one batch that drains, without building `schedule.repeated(n)`: each batch starts at the last one's clocks.

    Costs must not depend on the micro-batch. Once a batch has moved all clocks by the same time, every later batch does so too.
    """
    run, cost = _Run(steps(schedule, sums_block=not overlap), transfer_time, overlap), cost or costs()
    end, clocks = run.all(cost), run.clocks()
    for _ in range(batches):
        last, end, before, clocks = end, run.all(cost), clocks, run.clocks()
        moved = [now - then for then, now in zip(before, clocks, strict=True)]
        if max(moved) - min(moved) <= 1e-12 * end:
            return moved[0]
    return end - last


class _Run:
    """Clocks of a simulation: of ranks, of links in each direction, and of each rank's sums."""

    def __init__(self, steps: Steps, transfer_time: float | OfMessage, overlap: bool) -> None:
        self.steps, self.transfer_time, self.overlap = steps, transfer_time, overlap
        actions, ranks = len(steps.actions), steps.schedule.num_ranks
        self._starts: list[float] = [0] * actions
        self._ends: list[float] = [0] * actions
        self._ready: list[float] = [0] * actions  # time at which an action's message or sum has reached the ranks that need it
        self._free: list[float] = [0] * ranks
        self._summing: list[float] = [0] * ranks
        self._link: dict[tuple[int, int], float] = {}
        self._at_sum: dict[tuple[int, int], dict[int, float]] = {}

    def all(self, cost: Cost) -> float:
        """Compute all times of a batch, and return the last end. A second call computes the next batch."""
        self._sent: list[tuple[int, float]] = []
        s, starts, ends, ready, free = self.steps, self._starts, self._ends, self._ready, self._free
        actions, ranks, source, target, more, pairs = s.actions, s.ranks, s.source, s.target, s.more, s.pairs
        for n in s.order:
            rank, action = ranks[n], actions[n]
            start = free[rank]
            if source[n] >= 0 and ready[source[n]] > start:
                start = ready[source[n]]
            if n in more:
                start = max([start, *(ready[m] for m in more[n])])
            length = cost(rank, action)
            if length < 0:
                raise BadInput("cost", got=f"{length} for {action}", needed="a time of at least 0", fix="give times that are not negative")
            if action.op is Op.S:
                self._sum(n, start, length)
                continue
            starts[n], ends[n] = start, start + length
            free[rank] = ends[n]
            if pairs and n in pairs:
                continue
            if pairs and n - 1 in pairs and target[n - 1] >= 0:
                free[rank] = self._send(n - 1, ends[n])
            if target[n] >= 0:
                free[rank] = max(free[rank], self._send(n, ends[n]))
        return max(ends)

    def clocks(self) -> list[float]:
        """Times at which ranks, links and sums are free: the state with which the next batch starts."""
        return [*self._free, *self._link.values(), *filter(None, self._summing)]

    def first_starts(self) -> list[float]:
        """Start of each rank's first action."""
        return [self._starts[n] for n in self.steps.first[:-1]]

    def _send(self, maker: int, end: float) -> float:
        """Send an action's result at time `end`. Returns the time at which the sending rank is free."""
        took, link = self.transfer_time, (self.steps.ranks[maker], self.steps.target[maker])
        start = max(end, self._link.get(link, 0))
        arrival = start + (took(self._message(maker)) if callable(took) else took)
        self._link[link] = self._ready[maker] = arrival
        self._sent.append((maker, start))
        return end if self.overlap else arrival

    def _message(self, maker: int) -> Message:
        op, stage, microbatch, _ = self.steps.actions[maker]
        return Message(op, stage, microbatch, self.steps.ranks[maker], self.steps.target[maker])

    def _sum(self, n: int, ready: float, length: float) -> None:
        """Handle S: when the last replica reaches it, compute its time on all replicas."""
        _, stage, _, version = self.steps.actions[n]
        here = self._at_sum.setdefault((stage, version), {})
        here[n] = ready
        ranks = self.steps.schedule.homes[stage]
        if len(here) < len(ranks):
            return
        del self._at_sum[stage, version]
        start = max([*here.values(), *(self._summing[rank] for rank in ranks)])
        for m in here:
            rank = self.steps.ranks[m]
            self._starts[m], self._ends[m] = start, start + length
            self._summing[rank] = self._ready[m] = start + length
            if not self.overlap:
                self._free[rank] = start + length

    def timeline(self, message_bytes: float | OfMessage) -> Timeline:
        actions, first = self.steps.actions, self.steps.first
        spans = tuple(tuple(map(Span, actions[a:b], self._starts[a:b], self._ends[a:b])) for a, b in pairwise(first))
        sent = ((self._message(maker), start, self._ready[maker]) for maker, start in self._sent)
        transfers = tuple(Transfer(m, start, end, message_bytes(m) if callable(message_bytes) else message_bytes) for m, start, end in sent)
        return Timeline(self.steps.schedule, spans, transfers, self.overlap)
