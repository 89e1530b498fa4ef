"""A plain second implementation of the dependencies of actions and of the simulator. It runs action after action, with tables by node.
Also random schedules."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

from parallel.pipeline.check import action_graph
from parallel.pipeline.schedule import COMPUTE, Action, Message, Node, Op, Schedule, Span, flushed, stage_complete_at
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


def find(schedule: Schedule, op: Op, stage: int, microbatch: int, rank: int | None = None) -> Node | None:
    """Return the position of a micro-batch's F, B, I or W on a stage; None if no rank executes this action. For S and U of a batch,
    `microbatch` is the version, and `rank` the rank that executes it."""
    table = schedule.__dict__.setdefault("_plain", {})
    for node, a in () if table else schedule.nodes():
        table[(a.op, a.stage, a.microbatch, None) if a.op in COMPUTE else (a.op, a.stage, a.version, node.rank)] = node
    found: Node | None = table.get((op, stage, microbatch, rank))
    return found


def backward(schedule: Schedule, stage: int, microbatch: int) -> Node | None:
    """Return the position of the action that computes a stage's input gradient, which is its B or its I."""
    return find(schedule, Op.B, stage, microbatch) or find(schedule, Op.I, stage, microbatch)


def input_maker(schedule: Schedule, node: Node) -> Node | None:
    """Return the position of the action whose result this F, B or I reads: on the previous stage for F, on the next for B and I."""
    op, stage, microbatch, _ = schedule.action(node)
    if op is Op.F:
        return find(schedule, Op.F, stage - 1, microbatch)
    return backward(schedule, stage + 1, microbatch) if op in (Op.B, Op.I) else None


def replicas(schedule: Schedule, node: Node) -> tuple[Node, ...]:
    """Return the positions of S on all ranks that hold the stage of this S or U, for the same batch."""
    _, stage, _, version = schedule.action(node)
    found = (find(schedule, Op.S, stage, version, home) for home in schedule.homes[stage])
    return tuple(n for n in found if n is not None)


def sends(schedule: Schedule, node: Node) -> tuple[Message, ...]:
    """Return the messages that are sent when this action ends. In a pair, the first action sends nothing, and the second sends both."""
    if node in schedule.pairs:
        return ()
    block = (Node(node.rank, node.at - 1), node)
    return tuple(message for n in (block if block[0] in schedule.pairs else block[1:]) for message in _message(schedule, n))


def receives(schedule: Schedule, node: Node) -> tuple[Message, ...]:
    """Return the messages that must arrive before this action starts. The first action of a pair waits for the messages of both."""
    if Node(node.rank, node.at - 1) in schedule.pairs:
        return ()
    sources = (input_maker(schedule, n) for n in ((node, _after(node)) if node in schedule.pairs else (node,)))
    return tuple(m for source in sources if source is not None and source.rank != node.rank for m in _message(schedule, source))


def _message(schedule: Schedule, node: Node) -> tuple[Message, ...]:
    op, stage, microbatch, _ = schedule.action(node)
    if op is Op.F:
        reader = find(schedule, Op.F, stage + 1, microbatch)
    else:
        reader = backward(schedule, stage - 1, microbatch) if op in (Op.B, Op.I) else None
    return () if reader is None or reader.rank == node.rank else (Message(op, stage, microbatch, node.rank, reader.rank),)


def ordered_nodes(schedule: Schedule, *, all_reduce_blocks: bool = False) -> list[Node]:
    """Return the nodes in the order of the schedule's ActionGraph."""
    nodes = [node for node, _ in schedule.nodes()]
    return [nodes[n] for n in action_graph(schedule, all_reduce_blocks=all_reduce_blocks).order]


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
        made = (find(schedule, kind, stage, j) for j in batch for kind in (Op.B, Op.W))
        return tuple(sorted(n for n in made if n is not None and n.rank == node.rank))
    if op is Op.U:
        return replicas(schedule, node)
    found = [input_maker(schedule, node)]
    if op is Op.W:
        found.append(find(schedule, Op.I, stage, microbatch))
    elif op is not Op.F:
        found.append(find(schedule, Op.F, stage, microbatch))
    if version and op is not Op.W:
        found.append(find(schedule, Op.U, stage, version, node.rank))
    return tuple(n for n in found if n is not None)


def _after(node: Node) -> Node:
    return Node(node.rank, node.at + 1)


def plain_order(schedule: Schedule, *, all_reduce_blocks: bool) -> tuple[list[Node], list[str]]:
    """Return (all actions that can run, in a possible order; for each rank the action at which it is stuck, "" if all its actions ran)."""

    def needs(node: Node) -> tuple[Node, ...]:
        held = all_reduce_blocks and node.at and schedule.orders[node.rank][node.at - 1].op is Op.S
        return needs_of(schedule, node) + (replicas(schedule, Node(node.rank, node.at - 1)) if held else ())

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
        start = max([start, *(arrived[message] for message in receives(schedule, node))])
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
        for message in sends(schedule, node):
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
