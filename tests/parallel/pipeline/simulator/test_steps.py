"""The fast simulator equals a plain one (tests/support/plain_simulation.py): the same order, bit-equal times, the same deadlocks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from parallel.errors import BadInput
from parallel.pipeline.schedule import Action, Message, Schedule
from parallel.pipeline.schedules import SCHEDULES, make_schedule
from parallel.pipeline.schedules.chimera import chimera
from parallel.pipeline.simulator.simulate import drained_period, makespan, period, simulate
from tests.support.plain_simulation import ordered_nodes, plain_order, plain_simulate


def drawn(draw: random.Random) -> Schedule:
    """Return a random schedule of the catalog, with one or several batches."""
    name = draw.choice(sorted(SCHEDULES))
    p = 2 * draw.randint(1, 2)
    schedule = make_schedule(name, ranks=p, microbatches=draw.randint(2, 3) * p, batches=draw.choice([None, 1, 2, 3]))
    if name == "chimera" and p == 4 and draw.random() < 0.5:
        schedule = chimera(4, 8, pipelines=4)
    return schedule


def exchanged(schedule: Schedule, draw: random.Random, times: int) -> Schedule:
    """Return the schedule, without pairs, after exchanging two neighboring actions of a random rank `times` times."""
    orders = [list(order) for order in schedule.orders]
    for _ in range(times):
        order = draw.choice(orders)
        at = draw.randrange(len(order) - 1)
        order[at : at + 2] = order[at : at + 2][::-1]
    return replace(schedule, orders=tuple(map(tuple, orders)), pairs=frozenset())


@pytest.mark.parametrize("overlap", [True, False])
def test_simulate_equals_the_plain_simulator_bit_for_bit(overlap: bool) -> None:
    draw = random.Random(5)
    seen = set()
    for n in range(150):
        schedule = drawn(draw)
        if n % 2:
            schedule = exchanged(schedule, draw, 3)
        of: dict[tuple[int, Action], float] = {}
        ways: dict[Message, float] = {}

        def cost(rank: int, action: Action, of: dict[tuple[int, Action], float] = of) -> float:
            if action.op == "S":
                rank = -1  # the same time on all replicas
            return of.setdefault((rank, action), draw.choice([draw.randint(0, 5), draw.random()]))

        def took(message: Message, ways: dict[Message, float] = ways) -> float:
            return ways.setdefault(message, draw.choice([0, draw.random()]))

        order, waits = plain_order(schedule, all_reduce_blocks=not overlap)
        if any(waits):
            continue
        assert ordered_nodes(schedule, all_reduce_blocks=not overlap) == order
        for _ in range(2):  # the second time with the cached ActionGraph
            timeline = simulate(schedule, cost, transfer_time=took, overlap=overlap)
            assert (timeline.spans, timeline.transfers) == plain_simulate(schedule, cost, took, overlap)
        seen.add((schedule.name, bool(schedule.pairs)))
    assert len(seen) > len(SCHEDULES)


def test_deadlocks_are_those_of_the_plain_simulator() -> None:
    draw = random.Random(7)
    found = 0
    for _ in range(300):
        schedule = exchanged(drawn(draw), draw, draw.randint(1, 12))
        for block in (False, True):
            order, waits = plain_order(schedule, all_reduce_blocks=block)
            if not any(waits):
                assert ordered_nodes(schedule, all_reduce_blocks=block) == order
                continue
            found += 1
            with pytest.raises(BadInput) as bad:
                ordered_nodes(schedule, all_reduce_blocks=block)
            assert f"a deadlock after {len(order)} of {sum(map(len, schedule.orders))} actions" in str(bad.value)
            for rank, wait in enumerate(waits):
                said = str(bad.value).split(f"rank {rank} waits at ")
                assert (len(said) == 2) == bool(wait)
                if wait:
                    action, missing = said[1].split(";")[0].split(", needed")[0].split(" for ")
                    assert f"{action} for {sorted(m.replace('rank ', '') for m in missing.split(' and '))}" == wait
    assert found > 50


@pytest.mark.parametrize("name", [name for name, kind in SCHEDULES.items() if not kind.continuous])
@pytest.mark.parametrize("overlap", [True, False])
def test_drained_period_equals_the_period_of_a_repeated_schedule(name: str, overlap: bool) -> None:
    draw = random.Random(len(name))
    of: dict[tuple[int, str, int], float] = {}

    def cost(rank: int, action: Action) -> float:
        return of.setdefault((rank if action.op != "S" else 0, action.op, action.stage), draw.randint(1, 64) / 8)

    one = make_schedule(name, ranks=4, microbatches=8)
    expected = period(one.repeated, lambda s: makespan(s, cost, transfer_time=0.5, overlap=overlap), batches=3)
    assert drained_period(one, cost, transfer_time=0.5, overlap=overlap, batches=3) == expected


def test_drained_period_stops_early_in_the_steady_state() -> None:
    assert drained_period(make_schedule("1f1b", ranks=2, microbatches=5), batches=10**9) == (5 + 1) * 3
