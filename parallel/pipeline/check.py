"""Checks that a schedule is complete and free of deadlock. Needs no times and starts no processes.

Complete: every stage runs every micro-batch forward once and backward once (B, or I and W), on one rank, and every update happens.
Free of deadlock: each rank executes its actions in order, each as soon as the actions that it needs are done. If all ranks wait, it is
a deadlock: the error names each rank's next action and the actions that it waits for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import combinations

from parallel.errors import BadInput
from parallel.pipeline.schedule import COMPUTE, Action, Node, Op, Schedule
from parallel.pipeline.steps import steps


def check(schedule: Schedule) -> Schedule:
    """Return the schedule unchanged. Raises BadInput, one line, if it is incomplete or has a deadlock."""
    _check_whole(schedule)
    _check_updates(schedule)
    steps(schedule)
    return schedule


def linear(schedule: Schedule, *, sums_block: bool = False) -> list[Node]:
    """All actions in one order, each after the actions that it needs. Raises BadInput for a deadlock.

    sums_block: if True, a rank continues after S only when every replica has reached that S.
    """
    found = steps(schedule, sums_block=sums_block)
    return [Node(found.ranks[n], n - found.first[found.ranks[n]]) for n in found.order]


def _check_whole(schedule: Schedule) -> None:
    count: Counter[tuple[Op, int, int]] = Counter()
    for node, action in schedule.nodes():
        if not 0 <= action.stage < schedule.num_stages or node.rank not in schedule.homes[action.stage]:
            raise _wrong(
                schedule, f"{action} on rank {node.rank}", "stages only on the ranks that hold them", "move it to its stage's rank"
            )
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
        raise _wrong(
            schedule, " ".join(str(schedule.action(n)) for n in nodes.values()), "the backward on its forward's version", "give it that"
        )


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
        rank, op, stage, version = min((wanted - present) or (present - wanted))
        n = present[rank, op, stage, version]
        needed = (
            "this action once" if wanted[rank, op, stage, version] else f"versions 1 to {schedule.num_updates}, and S only for replicas"
        )
        raise _wrong(schedule, f"{n} times {Action(op, stage, version=version)} on rank {rank}", needed, "one U a stage, rank and batch")
    for stage, ranks in enumerate(schedule.homes):
        for pair in combinations(ranks, 2):
            shared = [set(homes) >= set(pair) for homes in schedule.homes]
            sums = [[a for a in schedule.orders[rank] if a.op is Op.S and shared[a.stage]] for rank in pair]
            if sums[0] != sums[1]:
                got = f"sums in different orders on ranks {pair[0]} and {pair[1]}"
                raise _wrong(schedule, got, "the same order on all ranks", f"reorder S of stage {stage}")


def _wrong(schedule: Schedule, got: str, needed: str, fix: str) -> BadInput:
    return BadInput(f"schedule {schedule.name}", got=got, needed=needed, fix=fix)
