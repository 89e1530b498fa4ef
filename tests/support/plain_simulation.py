"""A plain second implementation of the dependencies of actions and of the simulator. It runs action after action, with tables by node.
Also random schedules."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

from parallel.pipeline.schedule import Action, Message, Node, Op, Schedule, Span, flushed, stage_complete_at
from parallel.pipeline.simulator.simulate import Cost, OfMessage, Timeline, Transfer


def any_order(ranks: int, microbatches: int, seed: int) -> Schedule:
    """Return a random valid schedule: actions are drawn among those that can run next; stages are on random ranks, with B or I and W."""
    draw = random.Random(seed)
    num_stages = ranks + draw.randint(0, ranks)
    homes = [(draw.randrange(ranks),) for _ in range(num_stages)]
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[tuple[Op, int, int]] = set()
    left = {(s, j): [Op.F] + draw.choice([[Op.B], [Op.I, Op.W]]) for s in range(num_stages) for j in range(microbatches)}
    while any(left.values()):
        s, j = draw.choice([at for at, ops in left.items() if ops])
        op = left[s, j][0]
        before = s == 0 or (Op.F, s - 1, j) in done
        after = s == num_stages - 1 or {(Op.B, s + 1, j), (Op.I, s + 1, j)} & done
        if op is Op.W or (before if op is Op.F else after):
            left[s, j].pop(0)
            done.add((op, s, j))
            orders[homes[s][0]].append(Action(op, s, j))
    return flushed(f"chance {seed}", homes, microbatches, orders)


def needs_of(schedule: Schedule, node: Node) -> tuple[Node, ...]:
    """Return the nodes that must end before this one starts, in addition to the previous action of its rank (ActionGraph's rule)."""
    needs = own_needs(schedule, node)
    if node in schedule.pairs:
        needs += tuple(need for need in own_needs(schedule, _after(node)) if need != node)
    return tuple(_after(need) if need in schedule.pairs and need.rank != node.rank else need for need in needs)


def own_needs(schedule: Schedule, node: Node) -> tuple[Node, ...]:
    """Return the same for one action of a pair (forward and backward at the same time), without what the other action needs."""
    op, stage, microbatch, version = schedule.action(node)
    each = schedule.microbatches_per_update
    if op is Op.S or (op is Op.U and len(schedule.homes[stage]) == 1):
        batch = range((version - 1) * each, version * each)
        made = (schedule.find(kind, stage, j) for j in batch for kind in (Op.B, Op.W))
        return tuple(sorted(n for n in made if n is not None and n.rank == node.rank))
    if op is Op.U:
        return schedule.replicas(node)
    found = [schedule.input_maker(node)]
    if op is Op.W:
        found.append(schedule.find(Op.I, stage, microbatch))
    elif op is not Op.F:
        found.append(schedule.find(Op.F, stage, microbatch))
    if version and op is not Op.W:
        found.append(schedule._of_batch.get((Op.U, stage, version, node.rank)))
    return tuple(n for n in found if n is not None)


def _after(node: Node) -> Node:
    return Node(node.rank, node.at + 1)


def plain_order(schedule: Schedule, *, all_reduce_blocks: bool) -> tuple[list[Node], list[str]]:
    """Return (all actions that can run, in a possible order; for each rank the action at which it is stuck, "" if all its actions ran)."""

    def needs(node: Node) -> tuple[Node, ...]:
        held = all_reduce_blocks and node.at and schedule.orders[node.rank][node.at - 1].op is Op.S
        return needs_of(schedule, node) + (schedule.replicas(Node(node.rank, node.at - 1)) if held else ())

    done: set[Node] = set()
    order: list[Node] = []
    at, moved = [0] * schedule.num_ranks, True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.orders):
            while at[rank] < len(actions) and done.issuperset(needs(Node(rank, at[rank]))):
                order.append(Node(rank, at[rank]))
                done.add(order[-1])
                at[rank] += 1
                moved = True
    waits = []
    for rank, actions in enumerate(schedule.orders):
        node = Node(rank, at[rank])
        missing = [n for n in needs(node) if n not in done] if at[rank] < len(actions) else []
        waits.append(f"{schedule.action(node)} for {sorted({f'{schedule.action(n)} of {n.rank}' for n in missing})}" if missing else "")
    return order, waits


def plain_simulate(
    schedule: Schedule, cost: Cost, transfer_time: OfMessage, overlap: bool
) -> tuple[tuple[tuple[Span, ...], ...], tuple[Transfer, ...]]:
    """Simulate a schedule. Return (spans of each rank's actions, transfers), as `simulate` does."""
    spans: dict[Node, Span] = {}
    transfers: list[Transfer] = []
    free: list[float] = [0] * schedule.num_ranks
    summing: list[float] = [0] * schedule.num_ranks
    link: dict[tuple[int, int], float] = {}
    arrived: dict[Message, float] = {}
    at_sum: dict[tuple[int, int], dict[int, tuple[Node, float]]] = {}
    for node in plain_order(schedule, all_reduce_blocks=not overlap)[0]:
        action = schedule.action(node)
        start = free[node.rank]
        for need in needs_of(schedule, node):
            if need.rank == node.rank or action.op is Op.U:
                start = max(start, spans[need].end)
        start = max([start, *(arrived[message] for message in schedule.receives(node))])
        if action.op is Op.S:
            here = at_sum.setdefault((action.stage, action.version), {})
            here[node.rank] = (node, start)
            ranks = schedule.homes[action.stage]
            if len(here) == len(ranks):
                begin = max([since for _, since in here.values()] + [summing[rank] for rank in ranks])
                end = begin + cost(node.rank, action)
                for rank, (place, _) in here.items():
                    spans[place] = Span(action, begin, end)
                    summing[rank] = end
                    free[rank] = free[rank] if overlap else end
            continue
        end = start + cost(node.rank, action)
        spans[node] = Span(action, start, end)
        free[node.rank] = end
        for message in schedule.sends(node):
            way = (message.source, message.target)
            begin = max(end, link.get(way, 0))
            link[way] = arrived[message] = begin + transfer_time(message)
            transfers.append(Transfer(message, begin, link[way], 0))
            free[node.rank] = free[node.rank] if overlap else max(free[node.rank], link[way])
    return tuple(tuple(spans[Node(rank, i)] for i in range(len(order))) for rank, order in enumerate(schedule.orders)), tuple(transfers)


def exposed(timeline: Timeline, seconds: Callable[[int, int], float], *, begin: Literal["stage", "rank"] = "stage") -> float:
    """Return the time from the end of a timeline's last action to the end of the last gradient all-reduce. All-reduces of a rank run one
    after another, and do not slow actions down.

    seconds: (rank, stage) -> duration of the stage's all-reduce. begin: it starts as soon as its stage's gradients are complete ("stage"),
    or after all of the rank's actions ("rank").
    """
    end = last = max(span.end for spans in timeline.spans for span in spans)
    for rank, spans in enumerate(timeline.spans):
        free = max((span.end for span in spans), default=0.0) if begin == "rank" else 0.0
        for at, stage in sorted(stage_complete_at(timeline.schedule.orders[rank]).items()):
            free = max(free, spans[at].end) + seconds(rank, stage)
        last = max(last, free)
    return last - end
