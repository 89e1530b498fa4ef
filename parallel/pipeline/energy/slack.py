"""Makespan and slack of a schedule for many choices of times in a row: the same times as `simulate`, but faster."""

from __future__ import annotations

from collections.abc import Mapping

from parallel.pipeline.check import linear
from parallel.pipeline.energy.clocks import Clock
from parallel.pipeline.schedule import Message, Node, Op, Schedule


class Graph:
    """A schedule as a graph of everything that takes time, in an order that respects `needs`; for makespan and slack under many times.

    Gives the same times as `simulate`. A message is a vertex after the one before it on its link. The sum of a stage's replicas is one
    vertex after all of them, in parallel with what their ranks do next.
    """

    def __init__(self, schedule: Schedule, transfer_time: float = 0) -> None:
        self._place: dict[Node, int] = {}
        self._before: list[list[int]] = []
        self._fixed: dict[int, float] = {}  # times of messages, by vertex
        self._waiting: dict[Node, set[int]] = {}  # S whose other replicas have not reached it yet -> the vertices before it
        last: dict[tuple[str, int, int], int] = {}  # the last vertex on a rank's compute, a rank's sums, or a link
        arrives: dict[Message, int] = {}
        for node in linear(schedule):
            action, here = schedule.action(node), ("rank", node.rank, 0)
            if action.op is Op.S:
                self._sum(schedule, node, last)
                continue
            needs = [need for need in schedule.needs(node) if need.rank == node.rank or action.op is Op.U]
            before = {*(self._place[need] for need in needs), *(arrives[message] for message in schedule.receives(node))}
            self._place[node] = last[here] = self._vertex(before | ({last[here]} if here in last else set()))
            for message in schedule.sends(node):
                link = ("link", message.source, message.target)
                last[link] = arrives[message] = self._vertex({self._place[node], *([last[link]] if link in last else [])})
                self._fixed[arrives[message]] = transfer_time
        self._after: list[list[int]] = [[] for _ in self._before]
        for i, before_i in enumerate(self._before):
            for j in before_i:
                self._after[j].append(i)

    def _sum(self, schedule: Schedule, node: Node, last: dict[tuple[str, int, int], int]) -> None:
        """Handle S: one vertex for all replicas, after everything that each did before it. The last replica to reach S makes it."""
        self._waiting[node] = {last[kind, node.rank, 0] for kind in ("rank", "sums") if (kind, node.rank, 0) in last}
        replicas = schedule.replicas(node)
        if all(replica in self._waiting for replica in replicas):
            place = self._vertex({i for replica in replicas for i in self._waiting[replica]})
            for replica in replicas:
                self._place[replica] = last["sums", replica.rank, 0] = place

    def _vertex(self, before: set[int]) -> int:
        self._before.append(sorted(before))
        return len(self._before) - 1

    def makespan(self, clocks: Mapping[Node, Clock]) -> float:
        return max(self._ends(self._times(clocks)))

    def slack(self, clocks: Mapping[Node, Clock]) -> dict[Node, float]:
        """How much longer each action alone could take without changing the makespan."""
        times = self._times(clocks)
        ends = self._ends(times)
        latest = [max(ends)] * len(ends)
        for i in reversed(range(len(ends))):
            for j in self._after[i]:
                latest[i] = min(latest[i], latest[j] - times[j])
        return {node: latest[i] - ends[i] for node, i in self._place.items()}

    def _times(self, clocks: Mapping[Node, Clock]) -> list[float]:
        times = [0.0] * len(self._before)
        for i, time in self._fixed.items():
            times[i] = time
        for node, i in self._place.items():
            times[i] = max(times[i], clocks[node].time)
        return times

    def _ends(self, times: list[float]) -> list[float]:
        ends: list[float] = []
        for before, time in zip(self._before, times, strict=True):
            ends.append(time + max((ends[j] for j in before), default=0.0))
        return ends
