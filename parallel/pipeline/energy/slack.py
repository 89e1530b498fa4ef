"""Makespan and slack of a schedule for many choices of clocks, one after another. Faster than `simulate`, with equal results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heappop, heappush

from parallel.pipeline.check import linear
from parallel.pipeline.energy.clocks import Clock
from parallel.pipeline.schedule import Message, Node, Op, Schedule


class Graph:
    """Graph of a schedule. Each action and each message is a vertex; vertices are numbered in an order that respects needs.

    A message comes after the previous message of its link. The sum of a stage's replicas is one vertex for all of them, in parallel with
    the next actions of their ranks.
    """

    def __init__(self, schedule: Schedule, transfer_time: float = 0) -> None:
        self.place: dict[Node, int] = {}
        self.before: list[list[int]] = []
        self._fixed: dict[int, float] = {}  # times of messages, by vertex
        self._waiting: dict[Node, set[int]] = {}  # S that some replicas have not reached yet -> vertices that come before it
        last: dict[tuple[str, int, int], int] = {}  # last vertex of a rank's compute, of a rank's sums, or of a link
        arrives: dict[Message, int] = {}
        for node in linear(schedule):
            action, here = schedule.action(node), ("rank", node.rank, 0)
            if action.op is Op.S:
                self._sum(schedule, node, last)
                continue
            needs = [need for need in schedule.needs(node) if need.rank == node.rank or action.op is Op.U]
            before = {*(self.place[need] for need in needs), *(arrives[message] for message in schedule.receives(node))}
            self.place[node] = last[here] = self._vertex(before | ({last[here]} if here in last else set()))
            for message in schedule.sends(node):
                link = ("link", message.source, message.target)
                last[link] = arrives[message] = self._vertex({self.place[node], *([last[link]] if link in last else [])})
                self._fixed[arrives[message]] = transfer_time
        self.after: list[list[int]] = [[] for _ in self.before]
        for i, before_i in enumerate(self.before):
            for j in before_i:
                self.after[j].append(i)

    def _sum(self, schedule: Schedule, node: Node, last: dict[tuple[str, int, int], int]) -> None:
        """Handle S: once the last replica reaches it, add one vertex for all, after each replica's previous actions and sums."""
        self._waiting[node] = {last[kind, node.rank, 0] for kind in ("rank", "sums") if (kind, node.rank, 0) in last}
        replicas = schedule.replicas(node)
        if all(replica in self._waiting for replica in replicas):
            place = self._vertex({i for replica in replicas for i in self._waiting[replica]})
            for replica in replicas:
                self.place[replica] = last["sums", replica.rank, 0] = place

    def _vertex(self, before: set[int]) -> int:
        self.before.append(sorted(before))
        return len(self.before) - 1

    def makespan(self, clocks: Mapping[Node, Clock]) -> float:
        return max(self.ends(self.times(clocks)))

    def slack(self, clocks: Mapping[Node, Clock]) -> dict[Node, float]:
        """Seconds by which each action alone could be longer without changing the makespan."""
        return ClockedGraph(self, clocks).slack()

    def times(self, clocks: Mapping[Node, Clock]) -> list[float]:
        times = [0.0] * len(self.before)
        for i, time in self._fixed.items():
            times[i] = time
        for node, i in self.place.items():
            times[i] = max(times[i], clocks[node].time)
        return times

    def ends(self, times: list[float]) -> list[float]:
        ends: list[float] = []
        for before, time in zip(self.before, times, strict=True):
            ends.append(time + max((ends[j] for j in before), default=0.0))
        return ends


class ClockedGraph:
    """Times of a graph's vertices at given clocks. After a change of one clock, only the times that depend on it are computed again.

    ends: end of each vertex. tails: longest time from the end of each vertex to the end of the step.
    """

    def __init__(self, graph: Graph, clocks: Mapping[Node, Clock]) -> None:
        self.graph, self.times = graph, graph.times(clocks)
        self.ends, self.tails = graph.ends(self.times), [0.0] * len(self.times)
        for i in reversed(range(len(self.times))):
            self.tails[i] = self._tail(i)

    @property
    def makespan(self) -> float:
        return max(self.ends)

    def slack(self) -> dict[Node, float]:
        most, ends, tails = self.makespan, self.ends, self.tails
        return {node: most - ends[i] - tails[i] for node, i in self.graph.place.items()}

    def critical(self, nodes: Iterable[Node], spare: float) -> list[Node]:
        """Nodes among `nodes` with a slack of at most `spare`."""
        longest, ends, tails, place = self.makespan - spare, self.ends, self.tails, self.graph.place
        return [node for node in nodes if ends[place[node]] + tails[place[node]] >= longest]

    def change(self, node: Node, clock: Clock) -> None:
        """Change the clock of one action, which must not be S."""
        changed = self.graph.place[node]
        was, self.times[changed] = self.times[changed], clock.time
        times, ends, tails, before, after = self.times, self.ends, self.tails, self.graph.before, self.graph.after
        later = [changed]
        while later:  # vertices are numbered in an order that respects needs
            i = heappop(later)
            then, now = ends[i], times[i] + max([ends[j] for j in before[i]], default=0.0)
            ends[i] = now
            if now != then:
                for j in after[i]:
                    if then + times[j] == ends[j] or now + times[j] > ends[j]:  # i decided when j starts, or decides it now
                        heappush(later, j)
        earlier: list[int] = []
        then, now = was + tails[changed], clock.time + tails[changed]
        while True:
            for j in before[changed] if now != then else ():
                if then == tails[j] or now > tails[j]:
                    heappush(earlier, -j)
            if not earlier:
                return
            changed = -heappop(earlier)
            then, tails[changed] = times[changed] + tails[changed], self._tail(changed)
            now = times[changed] + tails[changed]

    def _tail(self, i: int) -> float:
        return max([self.times[j] + self.tails[j] for j in self.graph.after[i]], default=0.0)
