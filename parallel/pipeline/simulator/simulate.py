"""Simulates a Schedule: computes a Timeline from the time of each action and the dependencies in its ActionGraph.

    simulate(schedule, costs(forward=1, backward=2)).makespan      # 33 units of time, for 1F1B with 4 ranks and 8 micro-batches

An action starts when its rank is free and its dependencies have ended. A message arrives one transfer time after it was sent. A link
carries one message at a time in each direction. S, the all-reduce of replicas' gradients, starts when all replicas have reached it. With
overlap, ranks compute during transfers and S; otherwise the sending rank, or the ranks of S, wait. All times have the same, arbitrary unit.
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

Cost = Callable[[int, Action], float]  # (rank, action) -> time of the action
OfMessage = Callable[[Message], float]  # message -> its transfer time, or its number of bytes


class Transfer(NamedTuple):
    """A message with the times at which the link starts to send it and at which it has arrived."""

    message: Message
    start: float
    end: float
    num_bytes: float


@dataclass(frozen=True)
class Timeline:
    """Simulated times. spans: for each rank its actions in order. overlap: True if transfers and all-reduces (S) ran while ranks
    computed."""

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
        """Return the time that a rank spends in forward passes, backward passes and updates. This is also called its ideal time."""
        return self._busy[rank]

    def idle(self, rank: int) -> float:
        return self.makespan - self.busy(rank)

    def bubbles(self) -> tuple[float, ...]:
        """Return for each rank its idle time divided by its ideal time."""
        return tuple(self.idle(rank) / self.busy(rank) if self.busy(rank) else 0.0 for rank in range(self.schedule.num_ranks))

    def bubble(self) -> float:
        """Return the idle time of all ranks together, divided by the ideal time of all ranks together."""
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
    """Return a Cost. forward, backward: times of a micro-batch's forward and backward pass, as one number or as a list with a time for each
    stage. Gradients of weights (W) take the fraction `weight_share` of `backward`, gradients of inputs (I) the rest. update: time of an
    update. summation: time of an all-reduce S."""

    def time_of(op: Op, stage: int) -> float:
        f, b = (times[stage] if isinstance(times, Sequence) else times for times in (forward, backward))
        return {Op.F: f, Op.B: b, Op.I: b * (1 - weight_share), Op.W: b * weight_share, Op.U: update, Op.S: summation}[op]

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
    cost: default: `costs()`. transfer_time, message_bytes: time and bytes of each message, as a number or a function of the message.
    overlap: True: ranks compute during transfers and S (all-reduces of replicas' gradients). False: the sending rank of a transfer, and the
    ranks of S, wait until it has ended."""
    run = _Run(schedule, transfer_time, overlap)
    run.all(cost or costs())
    return run.timeline(message_bytes)


def makespan(schedule: Schedule, cost: Cost | None = None, *, transfer_time: float | OfMessage = 0, overlap: bool = True) -> float:
    """Return `simulate(...).makespan` for the same arguments, but faster, because no Timeline is built."""
    run = _Run(schedule, transfer_time, overlap)
    end = run.all(cost or costs())
    return end - min(run.starts[n] for n in run.graph.first[:-1])


def period(build: Callable[[int], Schedule], time: Callable[[Schedule], float] = makespan, *, batches: int = 2) -> float:
    """Return the time that one more batch adds in a long run: the makespan of `batches` + 1 batches minus the makespan of `batches`.
    build: n -> the schedule of n batches. time: schedule -> its makespan. The result is smaller than one batch's makespan if a rank can
    start its next batch before the last rank has ended the current one."""
    return time(build(batches + 1)) - time(build(batches))


def drained_period(
    schedule: Schedule, cost: Cost | None = None, *, transfer_time: float | OfMessage = 0, overlap: bool = True, batches: int = 2
) -> float:
    """Return the time that one more batch adds in a long run, for a schedule of one batch that leaves the pipeline empty. The batch is
    simulated again and again until it delays all ranks and links by the same time (steady state), at most `batches` times. Costs must not
    depend on the micro-batch. cost, transfer_time, overlap: as in `simulate`."""
    run, cost = _Run(schedule, transfer_time, overlap), cost or costs()
    end, free = run.all(cost), run.free_times()
    for _ in range(batches):
        last, end, before, free = end, run.all(cost), free, run.free_times()
        delays = [now - then for then, now in zip(before, free, strict=True)]
        if max(delays) - min(delays) <= 1e-12 * end:
            return delays[0]
    return end - last


class _Run:
    """State of a simulation: start and end of each action, and the times at which ranks, links and all-reduces become free."""

    def __init__(self, schedule: Schedule, transfer_time: float | OfMessage, overlap: bool) -> None:
        self.graph = action_graph(schedule, all_reduce_blocks=not overlap)
        self.transfer_time, self.overlap = transfer_time, overlap
        actions, ranks = len(self.graph.actions), schedule.num_ranks
        self.starts: list[float] = [0] * actions
        self._ends: list[float] = [0] * actions
        self._ready: list[float] = [0] * actions  # for each action: time at which its result has arrived, or its all-reduce has ended
        self._free: list[float] = [0] * ranks  # for each rank: end of its last action
        self._reduced: list[float] = [0] * ranks  # for each rank: end of its last all-reduce
        self._link: dict[int, float] = {}  # source * ranks + target -> end of the last transfer
        # (stage, version) -> (number of the action S of a replica -> time at which its rank reached S)
        self._waiting: dict[tuple[int, int], dict[int, float]] = {}

    def all(self, cost: Cost) -> float:
        """Simulate one batch and return the end of its last action. Another call simulates a batch that follows directly."""
        self._sent: list[tuple[int, float]] = []
        graph, starts, ends, ready, free = self.graph, self.starts, self._ends, self._ready, self._free
        actions, ranks, source, target, more, pairs = graph.actions, graph.ranks, graph.source, graph.target, graph.more, graph.pairs
        for n in graph.order:
            rank, action = ranks[n], actions[n]
            start = free[rank]
            if source[n] >= 0 and ready[source[n]] > start:
                start = ready[source[n]]
            for m in more.get(n, ()):
                if ready[m] > start:
                    start = ready[m]
            length = cost(rank, action)
            if length < 0:
                raise BadInput("cost", got=f"{length} for {action}", needed="a time of at least 0", fix="give times that are not negative")
            if action.op is Op.S:
                self._all_reduce(n, start, length)
                continue
            starts[n], ends[n] = start, start + length
            free[rank] = ends[n]
            if pairs and n in pairs:  # an F that runs as one block with the next action, a B: its result is sent after the B
                continue
            if pairs and n - 1 in pairs and target[n - 1] >= 0:
                free[rank] = self._send(n - 1, ends[n])
            if target[n] >= 0 and (sent := self._send(n, ends[n])) > free[rank]:
                free[rank] = sent
        return max(ends)

    def free_times(self) -> list[float]:
        """Return the times at which each rank, link and all-reduce is free for the next batch."""
        return [*self._free, *self._link.values(), *filter(None, self._reduced)]

    def _send(self, maker: int, end: float) -> float:
        """Simulate sending the result of action `maker`, which ended at time `end`. Return the time at which the sending rank is free."""
        took, graph = self.transfer_time, self.graph
        link = graph.ranks[maker] * len(self._free) + graph.target[maker]
        before = self._link.get(link, 0)
        start = before if before > end else end
        arrival = start + (took(self.graph.message(maker)) if callable(took) else took)
        self._link[link] = self._ready[maker] = arrival
        self._sent.append((maker, start))
        return end if self.overlap else arrival

    def _all_reduce(self, n: int, ready: float, length: float) -> None:
        """Record that a rank reached action n, an all-reduce S of duration `length`, at time `ready`. When all replicas of the stage have
        reached S, compute the start and end of S on all of them."""
        _, stage, _, version = self.graph.actions[n]
        reached = self._waiting.setdefault((stage, version), {})
        reached[n] = ready
        ranks = self.graph.schedule.homes[stage]
        if len(reached) < len(ranks):
            return
        del self._waiting[stage, version]
        start = max([*reached.values(), *(self._reduced[rank] for rank in ranks)])
        for m in reached:
            rank = self.graph.ranks[m]
            self.starts[m], self._ends[m] = start, start + length
            self._reduced[rank] = self._ready[m] = start + length
            if not self.overlap:
                self._free[rank] = start + length

    def timeline(self, message_bytes: float | OfMessage) -> Timeline:
        actions, first = self.graph.actions, self.graph.first
        spans = tuple(tuple(map(Span, actions[a:b], self.starts[a:b], self._ends[a:b])) for a, b in pairwise(first))
        sent = ((self.graph.message(maker), start, self._ready[maker]) for maker, start in self._sent)
        transfers = tuple(Transfer(m, start, end, message_bytes(m) if callable(message_bytes) else message_bytes) for m, start, end in sent)
        return Timeline(self.graph.schedule, spans, transfers, self.overlap)
