"""Messages between the ranks of a pipeline: one channel for each ordered pair of ranks, in which messages keep their order.

    rank 0  --F0 F1 F2-->  rank 1        messages to higher ranks use one process group, messages to lower ranks another: two ranks
    rank 0  <--B0 B1-----  rank 1        that send to each other never block one another

The receiver knows the order (Schedule.messages), so only tensors travel: no shapes, no tags. It posts the next receive of a channel
early, so that the message arrives while it computes. A message that arrives before it is needed is stored.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor

from parallel.mesh.collectives import count
from parallel.mesh.mesh import Axis
from parallel.mesh.regions import region
from parallel.pipeline.schedule import Message, Schedule

Empty = Callable[[Message], Tensor]  # allocates the tensor into which a message is received


@dataclass(frozen=True)
class Traffic:
    """Messages of a schedule, arranged for one rank.

    due: messages to this rank by source rank, in order of arrival.
    taken: message -> index of the action, in the receiver's order, that uses it.
    left: message -> index of the action, in the sender's order, that sends it.
    channels: each ordered pair (source, target) of ranks with its first message.
    """

    due: dict[int, tuple[Message, ...]]
    taken: dict[Message, int]
    left: dict[Message, int]
    channels: tuple[tuple[tuple[int, int], Message], ...]

    @staticmethod
    def of(schedule: Schedule, rank: int) -> Traffic:
        messages = schedule.messages()
        return Traffic(
            {source: found for (source, target), found in messages.items() if target == rank},
            {m: node.at for node, _ in schedule.nodes() for m in schedule.receives(node)},
            {m: node.at for node, _ in schedule.nodes() for m in schedule.sends(node)},
            tuple((pair, found[0]) for pair, found in sorted(messages.items())),
        )


class Links:
    """Channels of one rank. `up` and `down`: the pipeline's axis twice, each with its own process group."""

    def __init__(self, up: Axis, down: Axis) -> None:
        self.up, self.down = up, down
        self._met: set[tuple[int, int]] = set()
        self.sent: dict[int, deque[tuple[int, dist.Work, Tensor]]] = defaultdict(deque)

    def begin(self, traffic: Traffic, empty: Empty) -> None:
        """Post the receive for the first message of every channel to this rank."""
        self._meet(traffic, empty)
        self._empty, self._traffic = empty, traffic
        self._due = {source: deque(messages) for source, messages in traffic.due.items()}
        self._asked: dict[int, tuple[Message, Tensor, dist.Work]] = {}
        self._early: dict[Message, Tensor] = {}
        for source in self._due:
            self._ask(source)

    def _meet(self, traffic: Traffic, empty: Empty) -> None:
        """Connect each new channel by a message of one element, pair after pair: NCCL's first message blocks until both ranks are there."""
        for pair, message in traffic.channels:
            if pair not in self._met:
                self._met.add(pair)
                way, hello = self._way(message), empty(message).new_zeros(1)
                if way.index == pair[0]:
                    dist.send(hello, way.ranks[pair[1]], group=way.group)
                elif way.index == pair[1]:
                    dist.recv(hello, way.ranks[pair[0]], group=way.group)

    def _ask(self, source: int) -> None:
        if self._due[source]:
            message = self._due[source].popleft()
            room = self._empty(message)
            work = dist.irecv(room, self.up.ranks[source], group=self._way(message).group)
            assert work is not None
            self._asked[source] = message, room, work

    def _way(self, message: Message) -> Axis:
        return self.up if message.source < message.target else self.down

    def take(self, message: Message) -> Tensor:
        """Wait for a message to this rank and return its tensor."""
        while message not in self._early:
            arriving, room, work = self._asked.pop(message.source)
            self._announce(arriving)
            with region("wait for a message"):
                work.wait()
            self._early[arriving] = room
            self._ask(message.source)
        self._let_go(message)
        return self._early.pop(message)

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start sending `tensor`. It is kept until it is known to have arrived."""
        way = self._way(message)
        count(replace(way, label=str(message)), "send", tensor)
        self._announce(message)
        work = dist.isend(tensor, way.ranks[message.target], group=way.group)
        assert work is not None
        self.sent[message.target].append((self._traffic.taken[message], work, tensor))

    def _announce(self, message: Message) -> None:
        """Record the message for the watchdog, which compares the messages sent and awaited on each channel."""
        ranks, record = self.up.ranks, self.up.communicator.record
        if record is not None:
            record.message(ranks[message.source], ranks[message.target], str(message))

    def _let_go(self, message: Message) -> None:
        """Release the tensors that the sender of `message` received before it sent it: waiting for those sends takes no time."""
        left, sent = self._traffic.left[message], self.sent[message.source]
        while sent and sent[0][0] <= left:
            sent.popleft()[1].wait()

    def end(self) -> None:
        """Wait until every sent message has arrived."""
        for sent in self.sent.values():
            while sent:
                sent.popleft()[1].wait()
