"""Simulates a Schedule: from the cost of each action to a Timeline, by the schedule's dependency rule and nothing else.

An action starts when its rank is free and its needs are met; what another rank made arrives one transfer time after it ended.
With overlap, a link works in parallel with the ranks, one message at a time in each direction; without, the sending rank waits meanwhile.
The sum of replicas' gradients (S) starts when all of them have reached it: with overlap in parallel with what follows, else in the
ranks' time. Times have any unit. Integers stay integers, so that closed forms can be met exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parallel.errors import BadInput
from parallel.pipeline.check import linear
from parallel.pipeline.schedule import Action, Message, Node, Op, Schedule

Cost = Callable[[int, Action], float]  # time of an action on a rank
OfMessage = Callable[[Message], float]


@dataclass(frozen=True)
class Span:
    """An action with its start and end. For S with overlap this is the time on the network, not its rank's."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Transfer:
    message: Message
    start: float
    end: float
    num_bytes: float


@dataclass(frozen=True)
class Timeline:
    """The times of all actions. `spans` are in each rank's order; `overlap`: whether S and transfers ran in parallel with compute."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    transfers: tuple[Transfer, ...]
    overlap: bool

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return max(span.end for spans in self.spans for span in spans) - min(spans[0].start for spans in self.spans)

    def busy(self, rank: int) -> float:
        """Time in F, B, I, W and U: the rank's ideal time."""
        return sum(span.end - span.start for span in self.spans[rank] if span.action.op is not Op.S)

    def idle(self, rank: int) -> float:
        return self.makespan - self.busy(rank)

    def bubbles(self) -> tuple[float, ...]:
        """Idle time over ideal time of each rank, from the first start to the last end of all ranks."""
        return tuple(self.idle(rank) / self.busy(rank) if self.busy(rank) else 0.0 for rank in range(self.schedule.num_ranks))

    def bubble(self) -> float:
        """Idle time over ideal time, all ranks together."""
        ideal = sum(self.busy(rank) for rank in range(self.schedule.num_ranks))
        return (self.schedule.num_ranks * self.makespan - ideal) / ideal if ideal else 0.0

    def sent_bytes(self) -> tuple[float, ...]:
        """Bytes that each rank sends to other ranks between stages."""
        return tuple(sum(t.num_bytes for t in self.transfers if t.message.source == rank) for rank in range(self.schedule.num_ranks))


def costs(
    forward: float | Sequence[float] = 1,
    backward: float | Sequence[float] = 2,
    *,
    weight_share: float = 0.5,
    update: float = 0,
    summation: float = 0,
) -> Cost:
    """Times of one micro-batch, by stage or one number for all. B takes `backward`; W takes `weight_share` of that, and I the rest."""

    def of(times: float | Sequence[float], stage: int) -> float:
        return times[stage] if isinstance(times, Sequence) else times

    def cost(rank: int, action: Action) -> float:
        if action.op is Op.F:
            return of(forward, action.stage)
        if action.op in (Op.U, Op.S):
            return update if action.op is Op.U else summation
        whole = of(backward, action.stage)
        return {Op.B: whole, Op.I: whole * (1 - weight_share), Op.W: whole * weight_share}[action.op]

    return cost


def simulate(
    schedule: Schedule,
    cost: Cost | None = None,
    *,
    transfer_time: float | OfMessage = 0,
    message_bytes: float | OfMessage = 0,
    overlap: bool = True,
) -> Timeline:
    """Give every action its time. Raises BadInput for a deadlock, and for negative times."""
    run = _Run(schedule, cost or costs(), _by_message(transfer_time), _by_message(message_bytes), overlap)
    for node in linear(schedule, sums_block=not overlap):
        run.step(node)
    spans = tuple(tuple(run.spans[Node(rank, i)] for i in range(len(order))) for rank, order in enumerate(schedule.orders))
    return Timeline(schedule, spans, tuple(run.transfers), overlap)


def period(build: Callable[[int], Schedule], run: Callable[[Schedule], Timeline] = simulate, *, batches: int = 2) -> float:
    """Time of one more batch once the pipeline is full. `build(n)` is the schedule of n batches; `batches` of them fill it.

    A rank begins its next batch right after its own update. If a flush leaves rank 0 waiting until the end, this is the makespan. It is
    less for schedules without a flush, and for those whose ranks end with the stagger with which they began.
    """
    return run(build(batches + 1)).makespan - run(build(batches)).makespan


def _by_message(value: float | OfMessage) -> OfMessage:
    return value if callable(value) else lambda message: value


class _Run:
    """The clocks during a simulation: of ranks, of links in each direction, and of each rank's sums."""

    def __init__(self, schedule: Schedule, cost: Cost, transfer_time: OfMessage, message_bytes: OfMessage, overlap: bool) -> None:
        self.schedule, self.cost, self.transfer_time, self.message_bytes, self.overlap = (
            schedule,
            cost,
            transfer_time,
            message_bytes,
            overlap,
        )
        self.spans: dict[Node, Span] = {}
        self.transfers: list[Transfer] = []
        self._free: list[float] = [0] * schedule.num_ranks
        self._link: dict[tuple[int, int], float] = {}
        self._summing: list[float] = [0] * schedule.num_ranks
        self._arrived: dict[Message, float] = {}
        self._at_sum: dict[tuple[int, int], dict[int, tuple[Node, float]]] = {}

    def step(self, node: Node) -> None:
        """Give one action its time, after all of its needs have theirs."""
        action = self.schedule.action(node)
        start = self._free[node.rank]
        for need in self.schedule.needs(node):
            if need.rank == node.rank or action.op is Op.U:
                start = max(start, self.spans[need].end)
        for message in self.schedule.receives(node):
            start = max(start, self._arrived[message])
        if action.op is Op.S:
            self._sum(node, action, start)
            return
        length = self.cost(node.rank, action)
        if length < 0:
            raise BadInput("cost", got=f"{length} for {action}", needed="a time of at least 0", fix="give times that are not negative")
        end = start + length
        self.spans[node] = Span(action, start, end)
        self._free[node.rank] = self._send(node, end)

    def _send(self, node: Node, end: float) -> float:
        """The time at which the rank is free after an action that ended at `end`."""
        free = end
        for message in self.schedule.sends(node):
            link = (message.source, message.target)
            start = max(end, self._link.get(link, 0))
            arrival = start + self.transfer_time(message)
            self._link[link] = arrival
            self._arrived[message] = arrival
            self.transfers.append(Transfer(message, start, arrival, self.message_bytes(message)))
            free = free if self.overlap else arrival
        return free

    def _sum(self, node: Node, action: Action, ready: float) -> None:
        """Handle S: the last replica to reach it starts it on all."""
        here = self._at_sum.setdefault((action.stage, action.version), {})
        here[node.rank] = (node, ready)
        ranks = self.schedule.homes[action.stage]
        if len(here) < len(ranks):
            return
        start = max([at for _, at in here.values()] + [self._summing[rank] for rank in ranks])
        end = start + self.cost(node.rank, action)
        for rank, (place, _) in here.items():
            self.spans[place] = Span(action, start, end)
            self._summing[rank] = end
            if not self.overlap:
                self._free[rank] = end
