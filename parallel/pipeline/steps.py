"""Puts all actions of a schedule in one order, each after the actions that it needs.

    number    0   1   2   3   4   5        rank after rank, each in its order
    action    0F0 0B0 0U  1F0 1B0 1U       source[3] = 0 and target[0] = 1: 1F0 waits for 0F0's message, which goes to rank 1
    order     0 3 4 5 1 2                  each rank in turn runs until it must wait, until all have ended

It computes for all actions at once the needs that `Schedule.needs`, `receives` and `sends` give for one. A rank that must wait is set
aside until the missing action is done, so the time is proportional to the number of actions. If all ranks wait, it is a deadlock, and the
error names every rank's next action with the actions that it waits for. The result is stored with the schedule, so that a second
simulation, with other times, does not repeat this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import accumulate

from parallel.errors import BadInput
from parallel.pipeline.schedule import COMPUTE, OF_A_BATCH, Action, Op, Schedule

NONE = -1


class Steps:
    """A schedule's actions, numbered rank after rank, and lists indexed by these numbers (NONE: there is none).

    order: the numbers, sorted so that each action comes after the actions that it needs.
    first: number of each rank's first action; the last entry is the number of all actions.
    ranks: rank that executes the action.
    source: action that sends the message for which it waits.
    target: rank to which its own message goes.
    more: further actions for which it waits (U for S on every replica; a pair for both of its messages).
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
        self._wire(sums_block)
        self.order = self._in_order()

    def _wire(self, sums_block: bool) -> None:
        """Fill in source, target and more. Needs that come earlier in the same rank's order are left out: they are met anyway."""
        self._index()
        width, forward, inputs, backward = self._width, self._by_op[Op.F], self._by_op[Op.I], self._by_op[Op.I] | self._by_op[Op.B]
        source, target, more, ranks = self.source, self.target, self.more, self.ranks
        needs: Iterable[int | None]
        for n, (op, stage, microbatch, version) in enumerate(self.actions):
            rank, key, maker, needs = ranks[n], stage * width + microbatch, None, ()
            if op is Op.F:
                maker = forward.get(key - width)
            elif op is Op.B or op is Op.I:
                maker, needs = backward.get(key + width), (forward.get(key),)
            elif op is Op.W:
                needs = (inputs.get(key),)
            elif op is Op.U and len(self.schedule.homes[stage]) > 1:
                more[n] = [*self._of_batch[Op.S, stage, version]]
            else:
                needs = self._gradients[rank, stage, version]
            if version and (op is Op.F or op is Op.B or op is Op.I):
                needs = (*needs, *(u for u in self._of_batch[Op.U, stage, version] if ranks[u] == rank))
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
        for (op, _, _), sums in self._of_batch.items() if sums_block else ():
            for n in sums if op is Op.S else ():
                if n + 1 < self.first[ranks[n] + 1]:
                    more.setdefault(n + 1, []).extend(sums)

    def _index(self) -> None:
        """Index F, B, I and W by stage * width + micro-batch, S and U by stage and version, and the gradients of each update by rank."""
        self._width = width = 1 + max((action.microbatch for action in self.actions), default=0)
        self._by_op: dict[Op, dict[int, int]] = {op: {} for op in COMPUTE}
        self._of_batch: dict[tuple[Op, int, int], list[int]] = defaultdict(list)
        self._gradients: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        by_op, gradients, ranks, per_update = self._by_op, self._gradients, self.ranks, self.schedule.microbatches_per_update
        for n, (op, stage, microbatch, version) in enumerate(self.actions):
            if microbatch == OF_A_BATCH:
                self._of_batch[op, stage, version].append(n)
                continue
            by_op[op][stage * width + microbatch] = n
            if op is Op.B or op is Op.W:
                gradients[ranks[n], stage, microbatch // per_update + 1].append(n)

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
        return BadInput(
            f"schedule {self.schedule.name}",
            got=f"a deadlock after {sum(done)} of {len(done)} actions: {'; '.join(lines)}",
            needed="orders in which each action comes after the actions that it needs",
            fix="move what is waited for before the action that holds its rank up",
        )


def steps(schedule: Schedule, *, sums_block: bool = False) -> Steps:
    """Steps of a schedule, computed once. Raises BadInput for a deadlock.

    sums_block: if True, a rank continues after S only when every replica has reached that S.
    """
    kept: dict[bool, Steps] = schedule.__dict__.setdefault("_steps", {})  # stored in the instance, as functools.cached_property does
    if sums_block not in kept:
        kept[sums_block] = Steps(schedule, sums_block=sums_block)
    return kept[sums_block]
