"""Collectives of data-parallel ranks that shard the weights of pipeline stages (FSDP), derived from a schedule: their order, a search for
deadlocks of all ranks together, and their time. Plain twin of parallel/data/stage_sums.py.

    once        gather 0 | 0F0 0F1 0I0 0W0 0I1 0W1 | scatter 0
    each pass   gather 0 | 0F0 0F1 0I0 0W0 | scatter 0, gather 0 | 0I1 0W1 | scatter 0
"""

from __future__ import annotations

from collections.abc import Sequence

from parallel.pipeline.schedule import Action, Node, Op, Schedule, stage_complete_at
from parallel.pipeline.simulator.simulate import Cost
from tests.support.plain_simulation import needs_of, plain_order

Call = tuple[str, int]  # ("act", index of the action), ("gather", stage) or ("scatter", stage)


def calls_of(order: Sequence[Action], *, once: bool) -> list[Call]:
    """Return a rank's calls. once: weights stay gathered, and gradients whole, until the last action of their stage; else B and I free
    weights, and each B and W scatters."""
    calls, whole, ends = list[Call](), set[int](), stage_complete_at(order)
    for at, (op, stage, *_) in enumerate(order):
        if op in (Op.F, Op.B, Op.I) and stage not in whole:
            calls.append(("gather", stage))
            whole.add(stage)
        calls.append(("act", at))
        if (at in ends) if once else op in (Op.B, Op.W):
            calls.append(("scatter", stage))
        if (at in ends) if once else op in (Op.B, Op.I):
            whole.discard(stage)
    return calls


def stuck(replicas: Sequence[Schedule], *, once: bool) -> list[str]:
    """Run a pipeline for each schedule. Rank r of all pipelines joins in each collective: it ends when all have called it, and a rank goes
    on when it has ended. An action waits for the actions that it needs in its pipeline. Return the calls that never end."""
    ranks, pipelines = range(replicas[0].num_ranks), range(len(replicas))
    calls = [[calls_of(order, once=once) for order in schedule.orders] for schedule in replicas]
    needs = [{node: needs_of(schedule, node) for node, _ in schedule.nodes()} for schedule in replicas]
    done, moved = [set[Node]() for _ in replicas], True
    while moved:
        moved = False
        for d in pipelines:
            for rank in ranks:
                while calls[d][rank] and calls[d][rank][0][0] == "act":
                    node = Node(rank, calls[d][rank][0][1])
                    if not done[d].issuperset(needs[d][node]):
                        break
                    done[d].add(node)
                    del calls[d][rank][0]
                    moved = True
        for rank in ranks:
            first = {calls[d][rank][0] if calls[d][rank] else ("act", 0) for d in pipelines}
            if len(first) == 1 and first.pop()[0] != "act":
                for d in pipelines:
                    del calls[d][rank][0]
                moved = True
    return [f"{calls[d][rank][0]} of rank {rank} of pipeline {d}" for d in pipelines for rank in ranks if calls[d][rank]]


def makespan(schedule: Schedule, cost: Cost, *, gather: float, scatter: float, once: bool) -> float:
    """Return the time of a batch. A rank's collectives run one after another, while it computes; a gather starts at most one action ahead
    of the action that waits for it. Messages take no time. gather, scatter: times of a stage's collectives."""
    calls = [calls_of(order, once=once) for order in schedule.orders]
    gathers = {(r, of[i + 1][1]) for r, of in enumerate(calls) for i, call in enumerate(of) if call[0] == "gather"}
    scatters = {(r, of[i - 1][1]) for r, of in enumerate(calls) for i, call in enumerate(of) if call[0] == "scatter"}
    begun, computing, link = ([0.0] * schedule.num_ranks for _ in range(3))
    ends = dict[Node, float]()
    for node in plain_order(schedule, all_reduce_blocks=False)[0]:
        rank = node.rank
        start = max([computing[rank], *(ends[need] for need in needs_of(schedule, node))])
        if node in gathers:
            link[rank] = max(link[rank], begun[rank]) + gather
            start = max(start, link[rank])
        begun[rank] = start
        computing[rank] = ends[node] = start + cost(rank, schedule.action(node))
        if node in scatters:
            link[rank] = max(link[rank], computing[rank]) + scatter
    return max(*computing, *link)
