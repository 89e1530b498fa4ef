"""Tests of `search`: results are within memory, never slower than the catalog's schedules, and on small sizes equal the optimum."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from parallel.errors import BadInput
from parallel.pipeline.check import check
from parallel.pipeline.order_file import read_order, write_order
from parallel.pipeline.schedule import Op, Schedule, flushed, one_stage_a_rank
from parallel.pipeline.schedules import SCHEDULES, make_schedule
from parallel.pipeline.schedules import search as search_file
from parallel.pipeline.schedules.alternating import Alternating
from parallel.pipeline.schedules.search import search
from parallel.pipeline.simulator.held import peak_held
from parallel.pipeline.simulator.simulate import costs, simulate
from tests.support.plain_simulation import plain_simulate

ON = {"line": ["1f1b", "gpipe", "naive", "zb_h1", "zb_h2"], "loop": ["interleaved", "looped_bfs"], "v": ["zb_v", "dualpipe_v"]}


def took(schedule: Schedule, F: Sequence[int], B: Sequence[int], share: float, transfer: float) -> float:
    """Return the makespan of a schedule by the plain simulator. F, B: times by stage. share: fraction of B that is W."""
    spans, _ = plain_simulate(schedule, costs(F, B, weight_share=share), lambda message: transfer, overlap=True)
    return max(span.end for row in spans for span in row)


def test_never_slower_than_the_catalog_at_equal_memory() -> None:
    """150 random problems with unequal stages. The memory limit is the peak memory of one of the catalog's schedules."""
    draw = random.Random(11)
    compared = faster = 0
    for _ in range(150):
        placement = draw.choice(("line", "loop", "v"))
        p, m = draw.randint(2, 3 if placement != "line" else 4), draw.randint(1, 5)
        rivals = []
        for name in ON[placement]:
            if not (name == "dualpipe_v" and m < 2 * p):
                rivals.append(make_schedule(name, ranks=p, microbatches=m))
        if not rivals:
            continue
        v = 1 if placement == "line" else 2
        F, B = ([draw.randint(1, 9) for _ in range(p * v)] for _ in range(2))
        share, transfer = draw.choice([0.25, 0.5, 0.75]), draw.choice([0, 0, 1, 2])
        memory = max(peak_held(draw.choice(rivals))) / v
        cost = costs(F, B, weight_share=share)
        found = search(placement, p, m, cost, chunks=v, transfer_time=transfer, memory=memory, rounds=10)
        assert max(peak_held(found)) <= memory * v and found.homes == rivals[0].homes
        time = took(found, F, B, share, transfer)
        for rival in rivals:
            if max(peak_held(rival)) <= memory * v:
                compared += 1
                other = took(rival, F, B, share, transfer)
                assert time <= other * (1 + 1e-12), (rival.name, p, m, F, B)
                faster += time < other
    assert compared > 200 and faster > 125


def optimum(p: int, m: int, F: Sequence[int], I: Sequence[int], W: Sequence[int], most: int, limit: float) -> float:  # noqa: E741
    """Return the smallest makespan of all orders with one stage a rank, or `limit` if it is not smaller: branch and bound, depth first.
    most: maximum number of micro-batches kept on a rank. Micro-batches keep their order, because all have the same times. Actions are
    appended by start time, so that each order is built once."""
    best = limit
    last = p - 1

    def go(free: list[float], counts: list[list[int]], ends: list[list[list[float]]], since: tuple[float, int]) -> None:
        nonlocal best
        f, i, w = counts
        left = [(m - f[r]) * F[r] + (m - i[r]) * I[r] + (m - w[r]) * W[r] for r in range(p)]
        if max(free[r] + left[r] for r in range(p)) >= best:
            return
        down = [m - i[r] and free[r] + (m - i[r]) * I[r] + sum(I[:r]) + W[0] for r in range(p)]
        if max(down) >= best:
            return
        if not any(left):
            best = max(free)
            return
        for r in range(p):
            ways = []
            if f[r] < m and f[r] - w[r] < most and (r == 0 or f[r - 1] > f[r]):
                ways.append((0, F[r], ends[0][r - 1][f[r]] if r else 0))
            if i[r] < f[r] and (r == last or i[r + 1] > i[r]):
                ways.append((1, I[r], ends[1][r + 1][i[r]] if r < last else 0))
            if w[r] < i[r]:
                ways.append((2, W[r], 0))
            for kind, length, arrival in ways:
                start = max(free[r], arrival)
                if (start, r) < since:
                    continue
                before = free[r]
                free[r] = start + length
                counts[kind][r] += 1
                ends[kind][r].append(free[r])
                go(free, counts, ends, (start, r))
                ends[kind][r].pop()
                counts[kind][r] -= 1
                free[r] = before

    go([0.0] * p, [[0] * p for _ in range(3)], [[[] for _ in range(p)] for _ in range(3)], (0.0, 0))
    return best


@pytest.mark.parametrize(("p", "m", "draws"), [(2, 1, 5), (2, 2, 15), (2, 3, 15), (3, 1, 5), (3, 2, 10), (3, 3, 4)])
def test_search_finds_the_optimum_of_small_problems(p: int, m: int, draws: int) -> None:
    """Random times of each stage, and a memory of 1 to m micro-batches."""
    draw = random.Random(10 * p + m)
    for _ in range(draws):
        F, I, W = ([draw.randint(1, 5) for _ in range(p)] for _ in range(3))  # noqa: E741
        most = draw.randint(1, m)
        times = {Op.F: F, Op.I: I, Op.W: W, Op.B: [a + b for a, b in zip(I, W, strict=True)]}
        found = search("line", p, m, lambda rank, a, times=times: times.get(a.op, [0] * p)[a.stage], memory=most)
        spans, _ = plain_simulate(found, lambda rank, a, times=times: times.get(a.op, [0] * p)[a.stage], lambda message: 0, overlap=True)
        time = max(span.end for row in spans for span in row)
        assert optimum(p, m, F, I, W, most, time + 1) == time, (F, I, W, most)


def test_a_searched_schedule_can_be_written_and_read_as_csv(tmp_path: object) -> None:
    found = search("v", 2, 3, costs(1, 2), memory=2)
    write_order(found, f"{tmp_path}/order.csv")
    assert read_order(f"{tmp_path}/order.csv").orders == found.orders
    assert search("v", 2, 3, costs(1, 2), memory=2) == found  # the search is deterministic


def test_fewer_changes_are_tried_for_long_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """`search` tries `rounds` changes, or fewer if the tried schedules would together have more than MAX_TRIED_ACTIONS actions."""
    moved, tried = search_file._moved, [0]

    def counted(schedule: Schedule, rng: random.Random) -> Schedule | None:
        tried.append(sum(map(len, schedule.orders)))
        return moved(schedule, rng)

    monkeypatch.setattr(search_file, "_moved", counted)
    for most, rounds in ((1000, 300), (30, 300), (1000, 7)):
        monkeypatch.setattr(search_file, "MAX_TRIED_ACTIONS", most)
        tried[:] = [0]
        search("line", 3, 5, costs([3, 1, 2], [5, 4, 7]), rounds=rounds)
        assert len(tried) - 1 == rounds if rounds == 7 else most - 48 < sum(tried) <= most  # a schedule has at most 48 actions


def test_search_refuses_a_memory_into_which_no_schedule_fits() -> None:
    with pytest.raises(BadInput, match="memory: got 0.5, needed at least 1"):
        search("line", 2, 2, costs(1, 2), memory=0.5)
    assert max(peak_held(search("v", 3, 4, costs(1, 2), memory=1))) == 2


@pytest.mark.parametrize(("name", "placement", "p", "m", "least"), [("zb_v", "v", 4, 4, 1.1), ("zb_h2", "line", 4, 4, 1.05)])
def test_search_beats_zb_v_and_zb_h2_with_few_micro_batches(name: str, placement: str, p: int, m: int, least: float) -> None:
    """The result is at least `least` times as fast at equal memory, because so few micro-batches do not fill these schedules' warm-up."""
    assert name in SCHEDULES
    rival = make_schedule(name, ranks=p, microbatches=m)
    v = rival.num_stages // p
    found = search(placement, p, m, costs(1, 2), memory=max(peak_held(rival)) / v)
    stages = [1] * (p * v)
    assert took(rival, stages, [2] * p * v, 0.5, 0) >= least * took(found, stages, [2] * p * v, 0.5, 0)


def test_alternating_gives_complete_orders_within_memory() -> None:
    """For random times and memory. With F = I = W and memory for 2 p - 1 micro-batches, the step is as short as H2's (2401.10241)."""
    draw = random.Random(3)
    for _ in range(40):
        p, m, sent, most = draw.randint(1, 5), draw.randint(1, 9), draw.choice([0, 1]), draw.randint(1, 9)
        times = [{op: draw.randint(1, 9) for op in (Op.F, Op.I, Op.W)} for _ in range(p)]
        late, skip, always = (draw.random() < 0.5 for _ in range(3))
        orders = Alternating(times, m, sent=sent, memory=most, late=late, skip=skip, always=always).orders()
        assert max(peak_held(check(flushed("rules", one_stage_a_rank(p), m, orders)))) <= most
    even = Alternating([dict.fromkeys((Op.F, Op.I, Op.W), 1)] * 4, 12, memory=7).orders()
    assert simulate(flushed("rules", one_stage_a_rank(4), 12, even), costs(1, 2)).makespan == 3 * 12 + 3
