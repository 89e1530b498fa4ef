"""Messages between the ranks of a pipeline: one channel for each ordered pair of ranks, in which messages keep their order.

    rank 0  --F0 F1 F2-->  rank 1        one group carries messages to higher ranks, another those to lower ranks: two ranks that
    rank 0  <--B0 B1-----  rank 1        send to each other never wait for one another

The receiver knows the order (Schedule.messages), so only tensors travel: no shapes, no tags. It posts the next receive before it
needs the message, which then arrives while it computes; a message that comes before its turn is put aside.
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

Empty = Callable[[Message], Tensor]  # makes the tensor into which a message is received


@dataclass(frozen=True)
class Traffic:
    """A schedule's messages as one rank sees them.

    due: the messages to this rank, by source, in order of arrival. taken: the place in the receiver's order where it takes a message.
    left: the place in the sender's order where it sends it. channels: each ordered pair of ranks with its first message.
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
    """The channels of one rank. `up` and `down`: the axis of stages twice, with a process group each."""

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
        """Send one element through each new channel, pair after pair: NCCL connects two ranks once both are there, and blocks until so."""
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
        """Start to send. The tensor is kept until it is known to have arrived."""
        way = self._way(message)
        count(replace(way, label=str(message)), "send", tensor)
        self._announce(message)
        work = dist.isend(tensor, way.ranks[message.target], group=way.group)
        assert work is not None
        self.sent[message.target].append((self._traffic.taken[message], work, tensor))

    def _announce(self, message: Message) -> None:
        """For the watchdog: it compares what was sent through a channel with what is waited for."""
        ranks, record = self.up.ranks, self.up.communicator.record
        if record is not None:
            record.message(ranks[message.source], ranks[message.target], str(message))

    def _let_go(self, message: Message) -> None:
        """Release sent tensors: whatever this message's sender had taken before sending it has arrived, so waiting for these is free."""
        left, sent = self._traffic.left[message], self.sent[message.source]
        while sent and sent[0][0] <= left:
            sent.popleft()[1].wait()

    def end(self) -> None:
        """Wait until everything that was sent has arrived."""
        for sent in self.sent.values():
            while sent:
                sent.popleft()[1].wait()
