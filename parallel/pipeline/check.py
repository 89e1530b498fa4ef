"""Says what each action of a schedule waits for, receives and sends (ActionGraph), and sorts the actions topologically. Checks that a
schedule is complete and free of deadlock. Starts no processes.

number    0   1   2   3   4   5        index of an action; rank 0's actions first, then rank 1's
action    0F0 0B0 0U  1F0 1B0 1U       1F0: stage 1, operation F, micro-batch 0
source    -   4   -   0   -   -        number of the action whose result is received: action 3 (1F0) waits for action 0 (0F0)
target    1   -   -   -   0   -        rank to which the result is sent: 0F0 sends to rank 1
order     0 3 4 5 1 2                  topological order: each rank in turn runs until it must wait

Letters F, B, I, W, S and U are the operations of actions: see Op in schedule.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import accumulate, combinations

from parallel.errors import BadInput
from parallel.pipeline.schedule import COMPUTE, Action, Message, Op, Schedule

NONE = -1
WHOLE = ({Op.F, Op.B}, {Op.F, Op.I, Op.W})  # the sets of operations that are complete for one micro-batch on one stage


def check(schedule: Schedule) -> Schedule:
    """Return the schedule unchanged. Raises BadInput if it is incomplete or if its ranks would deadlock."""
    _check_whole(schedule)
    _check_updates(schedule)
    action_graph(schedule)
    return schedule


def action_graph(schedule: Schedule, *, all_reduce_blocks: bool = False) -> ActionGraph:
    """Return the schedule's ActionGraph, which is cached in the schedule. Raises BadInput for a deadlock. all_reduce_blocks: a rank
    continues after an all-reduce (S) only when all replicas of the stage have reached S."""
    cached: dict[bool, ActionGraph] = schedule.__dict__.setdefault("_graphs", {})
    if all_reduce_blocks not in cached:
        cached[all_reduce_blocks] = ActionGraph(schedule, all_reduce_blocks)
    return cached[all_reduce_blocks]


class ActionGraph:
    """Dependency graph of a schedule's actions, numbered from rank 0's first action to the last rank's last. Each action needs the previous
    action of its rank, and in addition (letters: see Op in schedule.py):

    F: F of the previous stage. B and I: F of the same stage, and the next stage's B or I. W: I of the same stage.
    S: each B or W that computes gradients of its stage on its rank. U: the same actions, or S on all replicas if the stage has replicas.
    F, B and I that read a weight version above 0: also the update on their rank that made this version.

    actions, ranks: each action, and the rank that executes it. order: the numbers in topological order.
    first: number of each rank's first action; one more entry: the number of all actions.
    source: for each action, the action whose result it receives; NONE: it receives nothing.
    target: for each action, the rank to which its result is sent; NONE: it sends nothing.
    more: action -> other actions that it needs. For example, an update U needs the all-reduce S on every replica of the stage.
    pairs: numbers of the F that run as one block with the next action, a B. The results of both are sent together."""

    def __init__(self, schedule: Schedule, all_reduce_blocks: bool) -> None:
        self.schedule = schedule
        self.actions: list[Action] = [action for order in schedule.orders for action in order]
        self.first = [0, *accumulate(map(len, schedule.orders))]
        self.ranks = [rank for rank, order in enumerate(schedule.orders) for _ in order]
        self.source, self.target = [NONE] * len(self.actions), [NONE] * len(self.actions)
        self.more: dict[int, list[int]] = {}
        self.pairs = {self.first[node.rank] + node.at for node in schedule.pairs}
        self._connect(all_reduce_blocks)
        self.order = self._in_order()

    def received(self, n: int) -> list[int]:
        """Return the actions of other ranks whose results must arrive before action n starts. If n is the first action of a pair (an F and
        a B that run as one block), this includes the results that the B needs."""
        return [m for m in (self.source[n], *self.more.get(n, ())) if m != NONE and self.target[m] == self.ranks[n]]

    def sent(self, n: int) -> list[int]:
        """Return the actions whose results are sent to other ranks when action n ends: n, if another rank needs its result. For an F of
        `pairs`, return nothing; for the B that follows it, those of the two that other ranks need."""
        ended = () if n in self.pairs else (n - 1, n) if n - 1 in self.pairs else (n,)
        return [m for m in ended if self.target[m] != NONE]

    def message(self, n: int) -> Message:
        """Return the message with the result of action n."""
        op, stage, microbatch, _ = self.actions[n]
        return Message(op, stage, microbatch, self.ranks[n], self.target[n])

    def _connect(self, all_reduce_blocks: bool) -> None:
        """Fill `source`, `target` and `more`. If an action needs another that comes earlier on its own rank, or that no rank runs, the
        other is left out."""
        actions, ranks, homes, per_update = self.actions, self.ranks, self.schedule.homes, self.schedule.microbatches_per_update
        source, target, more = self.source, self.target, self.more
        width = 1 + max((action.microbatch for action in actions), default=0)
        by_op: dict[Op, dict[int, int]] = {op: {} for op in COMPUTE}  # op -> (stage * width + micro-batch -> number of the action)
        of_batch: dict[tuple[Op, int, int], list[int]] = defaultdict(list)  # (S or U, stage, version) -> numbers of the actions
        gradients: dict[tuple[int, int, int], list[int]] = defaultdict(list)  # (rank, stage, version that an update makes) -> its B and W
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
        for (op, _, _), replicas in of_batch.items() if all_reduce_blocks else ():
            for n in replicas if op is Op.S else ():
                if n + 1 < self.first[ranks[n] + 1]:
                    more.setdefault(n + 1, []).extend(replicas)

    def _in_order(self) -> list[int]:
        num_ranks, source, more, pairs = len(self.first) - 1, self.source, self.more, self.pairs
        at, done = self.first[:-1], bytearray(len(self.actions))
        waiting: dict[int, list[int]] = {}
        turns = list(range(num_ranks))  # heap of ranks that can continue; an entry is round * num_ranks + rank, so ranks take turns
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
            "move each missing action to an earlier place in its rank's order",
        )


def _check_whole(schedule: Schedule) -> None:
    homes, microbatches = schedule.homes, schedule.microbatches
    found: dict[int, list[tuple[int, Action]]] = defaultdict(list)  # stage * micro-batches + micro-batch -> its pairs (rank, action)
    for rank, order in enumerate(schedule.orders):
        for action in order:
            op, stage, microbatch, version = action
            if not 0 <= stage < len(homes) or rank not in homes[stage]:
                got = f"{action} on rank {rank}"
                raise _wrong(schedule, got, "stages only on the ranks that hold them", "move the action to a rank that holds its stage")
            if op in COMPUTE:
                if not 0 <= microbatch < microbatches:
                    raise _wrong(schedule, str(action), f"micro-batches 0 to {microbatches - 1}", "renumber or remove the action")
                if version > schedule.num_updates:
                    raise _wrong(schedule, str(action), f"a version from 0 to {schedule.num_updates}", "correct the version after @")
                found[stage * microbatches + microbatch].append((rank, action))
    for actions in found.values():
        if len({action.op for _, action in actions}) < len(actions):
            named, n = Counter(action[:3] for _, action in actions).most_common(1)[0]
            raise _wrong(schedule, f"{Action(*named)} {n} times", "each action once", "remove the repetitions")
    for at in range(len(homes) * microbatches):
        _check_one(schedule, *divmod(at, microbatches), found[at])


def _check_one(schedule: Schedule, stage: int, microbatch: int, actions: list[tuple[int, Action]]) -> None:
    """Raise BadInput unless these (rank, action) of a stage's micro-batch are a forward pass F and a backward pass B, or F and both halves
    of the backward pass, I and W. All of them must be on one rank and read one weight version."""

    def named(ops: Iterable[Op]) -> str:
        return " ".join(str(Action(op, stage, microbatch)) for op in COMPUTE if op in ops) or "nothing"

    ops = {action.op for _, action in actions}
    if ops not in WHOLE:
        got, needed = f"{named(ops)} for stage {stage} and micro-batch {microbatch}", named((Op.F, Op.B))
        raise _wrong(schedule, got, f"{needed}, or I and W instead of B", "add or remove actions of this micro-batch")
    if len({rank for rank, _ in actions}) > 1:
        got, needed = f"{named(ops)} on several ranks", "one rank for one micro-batch of a stage"
        raise _wrong(schedule, got, needed, "move the backward passes to the rank of the forward pass")
    if len({action.version for _, action in actions}) > 1:
        got = " ".join(str(action) for _, action in actions)
        raise _wrong(schedule, got, "the backward pass on the weight version of its forward pass", "write the same version after @ in both")


def _check_updates(schedule: Schedule) -> None:
    """Raise BadInput unless each rank updates each of its stages once in a batch (U). A stage with replicas also needs one all-reduce (S)
    on each of its ranks in a batch. Two ranks must start the all-reduces that they share in the same order."""
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
        raise _wrong(schedule, got, needed, "write one U, and with replicas one S, for each stage, rank and batch")
    for stage, ranks in enumerate(schedule.homes):
        for pair in combinations(ranks, 2):
            shared = [set(homes) >= set(pair) for homes in schedule.homes]
            first, second = ([a for a in schedule.orders[rank] if a.op is Op.S and shared[a.stage]] for rank in pair)
            if first != second:
                got = f"all-reduces in different orders on ranks {pair[0]} and {pair[1]}"
                raise _wrong(schedule, got, "the same order on all ranks", f"reorder S of stage {stage}")


def _wrong(schedule: Schedule, got: str, needed: str, fix: str) -> BadInput:
    return BadInput(f"schedule {schedule.name}", got=got, needed=needed, fix=fix)
