"""Checks a schedule, and puts its actions in one order in which each comes after the actions that it needs. Starts no processes.

    number    0   1   2   3   4   5        rank after rank, each in its order
    action    0F0 0B0 0U  1F0 1B0 1U       source[3] = 0 and target[0] = 1: 1F0 waits for 0F0's message, which goes to rank 1
    order     0 3 4 5 1 2                  each rank in turn runs until it must wait, until all have ended

Complete: every stage runs every micro-batch forward once and backward once (B, or I and W), on one rank, and every update happens.
Free of deadlock: if each rank executes its actions in order, each as soon as the actions that it needs are done, all ranks reach their
end. A rank that must wait is set aside until the missing action is done, so the time is proportional to the number of actions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import accumulate, combinations

from parallel.errors import BadInput
from parallel.pipeline.schedule import COMPUTE, Action, Node, Op, Schedule

NONE = -1


def check(schedule: Schedule) -> Schedule:
    """Return the schedule unchanged. Raises BadInput, one line, if it is incomplete or has a deadlock."""
    _check_whole(schedule)
    _check_updates(schedule)
    action_graph(schedule)
    return schedule


def ordered_nodes(schedule: Schedule, *, sums_block: bool = False) -> list[Node]:
    """Return the schedule's nodes in one order, each after the nodes that it needs (arguments and errors: see `action_graph`)."""
    graph = action_graph(schedule, sums_block=sums_block)
    return [Node(graph.ranks[n], n - graph.first[graph.ranks[n]]) for n in graph.order]


def action_graph(schedule: Schedule, *, sums_block: bool = False) -> ActionGraph:
    """Return the schedule's ActionGraph, made once and stored with the schedule. Raises BadInput for a deadlock.

    sums_block: if True, a rank continues after S only when every replica has reached that S.
    """
    kept: dict[bool, ActionGraph] = schedule.__dict__.setdefault("_graphs", {})  # in the instance, as functools.cached_property does
    if sums_block not in kept:
        kept[sums_block] = ActionGraph(schedule, sums_block=sums_block)
    return kept[sums_block]


class ActionGraph:
    """A schedule's actions, numbered rank after rank, and the actions that each needs in addition to the previous action of its rank:

    F: F of the previous stage. B and I: F of the same stage, and the input gradient of the next stage. W: I of the same stage.
    S: all gradients of the batch for that stage on this rank. U: the same gradients, or S on all replicas if the stage has any.
    F, B and I that read a version above 0 also need the update that made it. Needs that no rank executes are left out; `check` refuses
    such a schedule.

    The lists have an entry for each action; NONE: there is no such action or rank.

    order: the numbers, sorted so that each action comes after the actions that it needs.
    first: number of each rank's first action; the last entry is the number of all actions.
    ranks: rank that executes the action.
    source: action that sends the message that the action receives.
    target: rank that receives the action's result.
    more: action -> further actions that it needs (U needs S on every replica; a pair needs the needs of both).
    pairs: first action of each pair, whose result is sent together with the second's.
    """

    def __init__(self, schedule: Schedule, *, sums_block: bool) -> None:
        self.schedule = schedule
        self.actions: list[Action] = [action for order in schedule.orders for action in order]
        self.first = [0, *accumulate(map(len, schedule.orders))]
        self.ranks = [rank for rank, order in enumerate(schedule.orders) for _ in order]
        self.source, self.target = [NONE] * len(self.actions), [NONE] * len(self.actions)
        self.more: dict[int, list[int]] = {}
        self.pairs = {self.first[node.rank] + node.at for node in schedule.pairs}
        self._connect(sums_block)
        self.order = self._in_order()

    def _connect(self, sums_block: bool) -> None:
        """Fill in source, target and more. Needs that come earlier in the same rank's order are left out: they are met anyway."""
        actions, ranks, homes, per_update = self.actions, self.ranks, self.schedule.homes, self.schedule.microbatches_per_update
        source, target, more = self.source, self.target, self.more
        width = 1 + max((action.microbatch for action in actions), default=0)
        by_op: dict[Op, dict[int, int]] = {op: {} for op in COMPUTE}  # keys: stage * width + micro-batch
        of_batch: dict[tuple[Op, int, int], list[int]] = defaultdict(list)  # S and U by stage and version
        gradients: dict[tuple[int, int, int], list[int]] = defaultdict(list)  # B and W by rank, stage and version of their update
        for n, (op, stage, microbatch, version) in enumerate(actions):
            if op is Op.S or op is Op.U:
                of_batch[op, stage, version].append(n)
                continue
            by_op[op][stage * width + microbatch] = n
            if op is Op.B or op is Op.W:
                gradients[ranks[n], stage, microbatch // per_update + 1].append(n)
        forward, inputs, backward = by_op[Op.F], by_op[Op.I], by_op[Op.I] | by_op[Op.B]
        needs: Iterable[int | None]
        for n, (op, stage, microbatch, version) in enumerate(actions):
            rank, key, maker, needs = ranks[n], stage * width + microbatch, None, ()
            if op is Op.F:
                maker = forward.get(key - width)
            elif op is Op.B or op is Op.I:
                maker, needs = backward.get(key + width), (forward.get(key),)
            elif op is Op.W:
                needs = (inputs.get(key),)
            elif op is Op.U and len(homes[stage]) > 1:
                more[n] = [*of_batch[Op.S, stage, version]]
            else:
                needs = gradients[rank, stage, version]
            if version and (op is Op.F or op is Op.B or op is Op.I):
                needs = (*needs, *(u for u in of_batch[Op.U, stage, version] if ranks[u] == rank))
            first = self.first[rank]
            if maker is not None and not first <= maker < n:
                source[n] = maker
                if ranks[maker] != rank:
                    target[maker] = rank
            for need in needs:
                if need is not None and not first <= need < n:
                    more.setdefault(n, []).append(need)
        for n in self.pairs:
            more[n] = [m for m in (*more.pop(n, ()), source[n + 1], *more.pop(n + 1, ())) if m not in (n, NONE)]
            source[n + 1] = NONE
        for (op, _, _), sums in of_batch.items() if sums_block else ():
            for n in sums if op is Op.S else ():
                if n + 1 < self.first[ranks[n] + 1]:
                    more.setdefault(n + 1, []).extend(sums)

    def _in_order(self) -> list[int]:
        num_ranks, source, more, pairs = len(self.first) - 1, self.source, self.more, self.pairs
        at, done = self.first[:-1], bytearray(len(self.actions))
        waiting: dict[int, list[int]] = {}
        turns = list(range(num_ranks))  # heap of ranks that can continue, each as round * num_ranks + rank
        order: list[int] = []
        while turns:
            turn = heappop(turns)
            rank = turn % num_ranks
            n, end = at[rank], self.first[rank + 1]
            while n < end:
                missing = source[n] if source[n] >= 0 and not done[source[n]] else NONE
                if n in more:
                    missing = next((m for m in more[n] if not done[m]), missing)
                if missing >= 0:
                    waiting.setdefault(missing, []).append(rank)
                    break
                order.append(n)
                for made in (n,) if not pairs else () if n in pairs else (n - 1, n) if n - 1 in pairs else (n,):
                    done[made] = 1
                    for other in waiting.pop(made, ()):
                        heappush(turns, turn - rank + other + (num_ranks if other <= rank else 0))
                n += 1
            at[rank] = n
        if len(order) < len(done):
            raise self._deadlock(at, done)
        return order

    def _deadlock(self, at: list[int], done: bytearray) -> BadInput:
        lines = []
        for rank, n in enumerate(at):
            if n == self.first[rank + 1]:
                lines.append(f"rank {rank} has ended")
                continue
            missing = [m for m in (self.source[n], *self.more.get(n, ())) if m >= 0 and not done[m]]
            texts = [f"{self.actions[m]} of rank {self.ranks[m]}" for m in dict.fromkeys(missing)]
            lines.append(f"rank {rank} waits at {self.actions[n]} for {' and '.join(texts)}")
        return _wrong(
            self.schedule,
            f"a deadlock after {sum(done)} of {len(done)} actions: {'; '.join(lines)}",
            "orders in which each action comes after the actions that it needs",
            "move what is waited for before the action that holds its rank up",
        )


def _check_whole(schedule: Schedule) -> None:
    count: Counter[tuple[Op, int, int]] = Counter()
    for node, action in schedule.nodes():
        if not 0 <= action.stage < schedule.num_stages or node.rank not in schedule.homes[action.stage]:
            got = f"{action} on rank {node.rank}"
            raise _wrong(schedule, got, "stages only on the ranks that hold them", "move it to its stage's rank")
        if action.op in COMPUTE:
            if not 0 <= action.microbatch < schedule.microbatches:
                raise _wrong(schedule, str(action), f"micro-batches 0 to {schedule.microbatches - 1}", "renumber it or remove it")
            if action.version > schedule.num_updates:
                raise _wrong(schedule, str(action), f"a version from 0 to {schedule.num_updates}", "correct it")
            count[action[:3]] += 1
    for named, n in count.items():
        if n > 1:
            raise _wrong(schedule, f"{Action(*named)} {n} times", "each action once", "remove the others")
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.microbatches):
            _check_one(schedule, stage, microbatch)


def _check_one(schedule: Schedule, stage: int, microbatch: int) -> None:
    nodes = {op: node for op in COMPUTE if (node := schedule.find(op, stage, microbatch)) is not None}

    def named(ops: Iterable[Op]) -> str:
        return " ".join(str(Action(op, stage, microbatch)) for op in ops) or "nothing"

    if nodes.keys() not in ({Op.F, Op.B}, {Op.F, Op.I, Op.W}):
        got, needed = f"{named(nodes)} for stage {stage} and micro-batch {microbatch}", named((Op.F, Op.B))
        raise _wrong(schedule, got, f"{needed}, or I and W instead of B", "complete it")
    if len({node.rank for node in nodes.values()}) > 1:
        got, needed = f"{named(nodes)} on several ranks", "one rank for one micro-batch of a stage"
        raise _wrong(schedule, got, needed, "move the backward to its forward")
    if len({schedule.action(node).version for node in nodes.values()}) > 1:
        got = " ".join(str(schedule.action(n)) for n in nodes.values())
        raise _wrong(schedule, got, "the backward on its forward's version", "give it that")


def _check_updates(schedule: Schedule) -> None:
    """Check for one update per stage, rank and batch; for stages with replicas also one sum, in the same order on all of its ranks."""
    present = Counter((node.rank, a.op, a.stage, a.version) for node, a in schedule.nodes() if a.op not in COMPUTE)
    wanted = Counter(
        (rank, op, stage, version)
        for stage, ranks in enumerate(schedule.homes)
        for rank in ranks
        for version in range(1, schedule.num_updates + 1)
        for op in ((Op.S, Op.U) if len(ranks) > 1 else (Op.U,))
    )
    if present != wanted:
        key = rank, op, stage, version = min((wanted - present) or (present - wanted))
        needed = "this action once" if wanted[key] else f"versions 1 to {schedule.num_updates}, and S only for replicas"
        got = f"{present[key]} times {Action(op, stage, version=version)} on rank {rank}"
        raise _wrong(schedule, got, needed, "one U a stage, rank and batch")
    for stage, ranks in enumerate(schedule.homes):
        for pair in combinations(ranks, 2):
            shared = [set(homes) >= set(pair) for homes in schedule.homes]
            sums = [[a for a in schedule.orders[rank] if a.op is Op.S and shared[a.stage]] for rank in pair]
            if sums[0] != sums[1]:
                got = f"sums in different orders on ranks {pair[0]} and {pair[1]}"
                raise _wrong(schedule, got, "the same order on all ranks", f"reorder S of stage {stage}")


def _wrong(schedule: Schedule, got: str, needed: str, fix: str) -> BadInput:
    return BadInput(f"schedule {schedule.name}", got=got, needed=needed, fix=fix)
