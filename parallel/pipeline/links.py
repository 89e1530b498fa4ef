"""Point-to-point messages between pipeline ranks: one channel for each ordered pair of ranks, in which messages keep their order.

    rank 0  --F0 F1 F2-->  rank 1        messages to higher ranks use one process group, messages to lower ranks another. So two
    rank 0  <--B0 B1-----  rank 1        ranks that send to each other never block one another

The receiver knows the order of messages from the schedule, so neither shapes nor tags are sent. It posts the next receive of a channel
early, so that the message arrives during computation.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor

from parallel.mesh.mesh import Axis
from parallel.mesh.regions import region
from parallel.numerics.supposed import labelled
from parallel.pipeline.check import action_graph
from parallel.pipeline.schedule import Message, Schedule

Empty = Callable[[Message], Tensor]  # allocates the tensor into which a message is received


@dataclass(frozen=True)
class Traffic:
    """Messages of a schedule, for the Links of one rank.

    expected: source rank -> the messages that it sends to this rank, in order of arrival.
    taken_at: message -> index of the action that receives it, in the receiver's order. sent_at: message -> index of the action that sends
    it, in the sender's order. Both contain all messages of the pipeline, not only this rank's.
    channels: ((source, target), first message) of every channel of the pipeline, sorted."""

    expected: dict[int, tuple[Message, ...]]
    taken_at: dict[Message, int]
    sent_at: dict[Message, int]
    channels: tuple[tuple[tuple[int, int], Message], ...]

    @staticmethod
    def of(schedule: Schedule, rank: int) -> Traffic:
        graph = action_graph(schedule)
        channels: dict[tuple[int, int], list[Message]] = defaultdict(list)
        taken_at, sent_at = dict[Message, int](), dict[Message, int]()
        for n, home in enumerate(graph.ranks):
            taken_at |= {graph.message(m): n - graph.first[home] for m in graph.received(n)}
            for message in map(graph.message, graph.sent(n)):
                sent_at[message] = n - graph.first[home]
                channels[home, message.target].append(message)
        expected = {source: tuple(messages) for (source, target), messages in channels.items() if target == rank}
        return Traffic(expected, taken_at, sent_at, tuple((pair, messages[0]) for pair, messages in sorted(channels.items())))


def _label(message: Message) -> str:
    return f"{message.op.value} of micro-batch {message.microbatch} in stage {message.stage}"


class Links:
    """Sends and receives of one rank. `up`, `down`: axes of the pipeline's ranks, each with its own process group, for messages to higher
    and to lower ranks."""

    def __init__(self, up: Axis, down: Axis) -> None:
        self.up, self.down = up, down
        self._connected: set[tuple[int, int]] = set()
        # target rank -> for each message with a kept tensor: (index of the target's action that receives it, the send, the tensor)
        self.sent: dict[int, deque[tuple[int, dist.Work, Tensor]]] = defaultdict(deque)

    def begin(self, traffic: Traffic, empty: Empty) -> None:
        """Start a run of a schedule: post a receive for the first message from each rank. empty: allocates a message's tensor."""
        self._connect(traffic, empty)
        self._empty, self._traffic = empty, traffic
        self._expected = {source: deque(messages) for source, messages in traffic.expected.items()}
        self._posted: dict[int, tuple[Message, Tensor, dist.Work]] = {}
        self._early: dict[Message, Tensor] = {}
        for source in self._expected:
            self._post(source)

    def _connect(self, traffic: Traffic, empty: Empty) -> None:
        """Send one element over each new channel, one channel at a time, because NCCL's first message of a channel blocks both ranks."""
        for pair, message in traffic.channels:
            if pair not in self._connected:
                self._connected.add(pair)
                axis, greeting = self._axis_of(message), empty(message).new_zeros(1)
                if axis.index == pair[0]:
                    dist.send(greeting, axis.ranks[pair[1]], group=axis.group)
                elif axis.index == pair[1]:
                    dist.recv(greeting, axis.ranks[pair[0]], group=axis.group)

    def _post(self, source: int) -> None:
        if self._expected[source]:
            message = self._expected[source].popleft()
            buffer = self._empty(message)
            work = dist.irecv(labelled(buffer, _label(message)), self.up.ranks[source], group=self._axis_of(message).group)
            assert work is not None
            self._posted[source] = message, buffer, work

    def _axis_of(self, message: Message) -> Axis:
        return self.up if message.source < message.target else self.down

    def take(self, message: Message) -> Tensor:
        """Return the tensor of a message to this rank, waiting until it has arrived."""
        while message not in self._early:
            arrived, buffer, work = self._posted.pop(message.source)
            self._announce(arrived)
            with region("wait for a message"):
                work.wait()
            self._early[arrived] = buffer
            self._post(message.source)
        self._release(message)
        return self._early.pop(message)

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start to send `tensor`, and keep a reference to it until it has arrived."""
        axis = self._axis_of(message)
        replace(axis, label=str(message)).count("send", tensor)
        self._announce(message)
        work = dist.isend(labelled(tensor, _label(message)), axis.ranks[message.target], group=axis.group)
        assert work is not None
        self.sent[message.target].append((self._traffic.taken_at[message], work, tensor))

    def _announce(self, message: Message) -> None:
        """Record that this rank sends the message or waits for it. The watchdog compares the records of sender and receiver."""
        ranks, record = self.up.ranks, self.up.communicator.record
        if record is not None:
            record.message(ranks[message.source], ranks[message.target], str(message))

    def _release(self, message: Message) -> None:
        """Free the tensors that this rank sent to the source of `message`, and that the source received before it sent `message`.
        Their transfers have ended, because `message` has arrived, so waiting for them takes little time."""
        sent_at, sent = self._traffic.sent_at[message], self.sent[message.source]
        while sent and sent[0][0] <= sent_at:
            sent.popleft()[1].wait()

    def end(self) -> None:
        """Wait until all messages that this rank sent have arrived."""
        for sent in self.sent.values():
            while sent:
                sent.popleft()[1].wait()
