"""Simulates a Schedule: computes a Timeline from the cost of each action and the needs of its ActionGraph.

    simulate(schedule, costs(forward=1, backward=2)).makespan      # 33 units of time, for 1F1B with 4 ranks and 8 micro-batches

An action starts when its rank is free and its needs are met. A message arrives one transfer time after the action that made it ended.
With overlap, a link works in parallel with the ranks, one message at a time in each direction; without, the sending rank waits.
The sum of replicas' gradients (S) starts when all replicas have reached it: with overlap in parallel with the next actions, without in
the ranks' own time. All times have the same, arbitrary unit. Integers stay integers, so that tests can compare with closed forms exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import NamedTuple

from parallel.errors import BadInput
from parallel.pipeline.check import action_graph
from parallel.pipeline.schedule import Action, Message, Op, Schedule, Span

Cost = Callable[[int, Action], float]  # (rank, action) -> time
OfMessage = Callable[[Message], float]


class Transfer(NamedTuple):
    message: Message
    start: float
    end: float
    num_bytes: float


@dataclass(frozen=True)
class Timeline:
    """Times of all actions and messages. spans: for each rank, in its order. overlap: True if S and messages ran while ranks computed."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    transfers: tuple[Transfer, ...]
    overlap: bool

    @cached_property
    def makespan(self) -> float:
        """Return the time from the first start to the last end."""
        return max(span.end for spans in self.spans for span in spans) - min(spans[0].start for spans in self.spans)

    @cached_property
    def _busy(self) -> tuple[float, ...]:
        return tuple(sum(end - start for action, start, end in spans if action.op is not Op.S) for spans in self.spans)

    def busy(self, rank: int) -> float:
        """Return the time that a rank spends in F, B, I, W and U (its ideal time)."""
        return self._busy[rank]

    def idle(self, rank: int) -> float:
        return self.makespan - self.busy(rank)

    def bubbles(self) -> tuple[float, ...]:
        """Return each rank's idle time, from the first start to the last end of all ranks, divided by its ideal time."""
        return tuple(self.idle(rank) / self.busy(rank) if self.busy(rank) else 0.0 for rank in range(self.schedule.num_ranks))

    def bubble(self) -> float:
        """Return the idle time of all ranks together, divided by their ideal time."""
        ideal = sum(self.busy(rank) for rank in range(self.schedule.num_ranks))
        return (self.schedule.num_ranks * self.makespan - ideal) / ideal if ideal else 0.0

    def sent_bytes(self) -> tuple[float, ...]:
        """Return the bytes that each rank sends to other ranks."""
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

    def time_of(op: Op, stage: int) -> float:
        of_stage = [times[stage] if isinstance(times, Sequence) else times for times in (forward, backward)]
        split = {Op.I: of_stage[1] * (1 - weight_share), Op.W: of_stage[1] * weight_share}
        return {Op.F: of_stage[0], Op.B: of_stage[1], **split, Op.U: update, Op.S: summation}[op]

    known = cache(time_of)  # cached, because the planner calls it millions of times
    return lambda rank, action: known(action.op, action.stage)


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
    run = _Run(schedule, transfer_time, overlap)
    run.all(cost or costs())
    return run.timeline(message_bytes)


def makespan(schedule: Schedule, cost: Cost | None = None, *, transfer_time: float | OfMessage = 0, overlap: bool = True) -> float:
    """Return the time from the first start to the last end: `simulate(...).makespan`, but faster, because no Timeline is built."""
    run = _Run(schedule, transfer_time, overlap)
    end = run.all(cost or costs())
    return end - min(run.starts[n] for n in run.graph.first[:-1])


def period(build: Callable[[int], Schedule], time: Callable[[Schedule], float] = makespan, *, batches: int = 2) -> float:
    """Return the period: the time that one more batch adds when the pipeline is full, in which a rank begins a batch after its own update.

    build: n -> the schedule of n batches. time: its makespan. batches: number of batches after which the pipeline is full. The period
    equals one batch's makespan if rank 0 waits until the last end. It is shorter for schedules that do not drain, and for those whose
    ranks end one after another as they began.
    """
    return time(build(batches + 1)) - time(build(batches))


def drained_period(
    schedule: Schedule, cost: Cost | None = None, *, transfer_time: float | OfMessage = 0, overlap: bool = True, batches: int = 2
) -> float:
    """Return the `period` of a schedule of one batch that drains: simulates this batch again and again, without a longer schedule.

    Costs must not depend on the micro-batch. Each batch starts when the last one's ranks, links and sums are free. Once a batch has moved
    all of these times equally, every later batch does so too.
    """
    run, cost = _Run(schedule, transfer_time, overlap), cost or costs()
    end, free = run.all(cost), run.free_times()
    for _ in range(batches):
        last, end, before, free = end, run.all(cost), free, run.free_times()
        moved = [now - then for then, now in zip(before, free, strict=True)]
        if max(moved) - min(moved) <= 1e-12 * end:
            return moved[0]
    return end - last


class _Run:
    """A simulation: start and end of each action, and the times at which ranks, links (one for each direction) and sums are free."""

    def __init__(self, schedule: Schedule, transfer_time: float | OfMessage, overlap: bool) -> None:
        self.graph = action_graph(schedule, sums_block=not overlap)
        self.transfer_time, self.overlap = transfer_time, overlap
        actions, ranks = len(self.graph.actions), schedule.num_ranks
        self.starts: list[float] = [0] * actions
        self._ends: list[float] = [0] * actions
        self._ready: list[float] = [0] * actions  # time at which an action's message or sum has reached the ranks that need it
        self._free: list[float] = [0] * ranks
        self._summing: list[float] = [0] * ranks
        self._link: dict[tuple[int, int], float] = {}
        self._at_sum: dict[tuple[int, int], dict[int, float]] = {}

    def all(self, cost: Cost) -> float:
        """Compute all times of a batch, and return the last end. A second call computes the next batch, which follows directly."""
        self._sent: list[tuple[int, float]] = []
        graph, starts, ends, ready, free = self.graph, self.starts, self._ends, self._ready, self._free
        actions, ranks, source, target, more, pairs = graph.actions, graph.ranks, graph.source, graph.target, graph.more, graph.pairs
        for n in graph.order:
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

    def free_times(self) -> list[float]:
        """Return the times at which each rank, link and sum is free for the next batch."""
        return [*self._free, *self._link.values(), *filter(None, self._summing)]

    def _send(self, maker: int, end: float) -> float:
        """Send the result of action `maker` at time `end`. Returns the time at which the sending rank is free."""
        took, link = self.transfer_time, (self.graph.ranks[maker], self.graph.target[maker])
        start = max(end, self._link.get(link, 0))
        arrival = start + (took(self._message(maker)) if callable(took) else took)
        self._link[link] = self._ready[maker] = arrival
        self._sent.append((maker, start))
        return end if self.overlap else arrival

    def _message(self, maker: int) -> Message:
        op, stage, microbatch, _ = self.graph.actions[maker]
        return Message(op, stage, microbatch, self.graph.ranks[maker], self.graph.target[maker])

    def _sum(self, n: int, ready: float, length: float) -> None:
        """Record that a replica reached its S, action n, at time `ready`. If it is the last one, compute the times of S on all replicas."""
        _, stage, _, version = self.graph.actions[n]
        here = self._at_sum.setdefault((stage, version), {})
        here[n] = ready
        ranks = self.graph.schedule.homes[stage]
        if len(here) < len(ranks):
            return
        del self._at_sum[stage, version]
        start = max([*here.values(), *(self._summing[rank] for rank in ranks)])
        for m in here:
            rank = self.graph.ranks[m]
            self.starts[m], self._ends[m] = start, start + length
            self._summing[rank] = self._ready[m] = start + length
            if not self.overlap:
                self._free[rank] = start + length

    def timeline(self, message_bytes: float | OfMessage) -> Timeline:
        actions, first = self.graph.actions, self.graph.first
        spans = tuple(tuple(map(Span, actions[a:b], self.starts[a:b], self._ends[a:b])) for a, b in pairwise(first))
        sent = ((self._message(maker), start, self._ready[maker]) for maker, start in self._sent)
        transfers = tuple(Transfer(m, start, end, message_bytes(m) if callable(message_bytes) else message_bytes) for m, start, end in sent)
        return Timeline(self.graph.schedule, spans, transfers, self.overlap)
