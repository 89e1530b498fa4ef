"""Schedules are complete and free of deadlock, have the papers' weight versions, and equal torch.distributed.pipelining's orders."""

from __future__ import annotations

import random
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given
from hypothesis import strategies as st

from parallel.errors import BadInput
from parallel.pipeline.check import action_graph, check
from parallel.pipeline.links import Traffic
from parallel.pipeline.order_file import read_order, write_order
from parallel.pipeline.schedule import COMPUTE, Action, Node, Op, Schedule
from parallel.pipeline.schedules import SCHEDULES, make_schedule
from parallel.pipeline.schedules.one_f_one_b import one_f_one_b
from parallel.pipeline.schedules.pipedream import pipedream
from parallel.pipeline.simulator.held import peak_activations, weight_versions
from tests.support.plain_simulation import needs_of, ordered_nodes, own_needs, receives, sends

CHUNKS = {name: (1, 2, 4) if kind.chunks is None else (kind.chunks,) for name, kind in SCHEDULES.items()}
SIZES = [(name, p, factor * p, v) for name in SCHEDULES for p in (2, 3, 4, 8) for factor in (1, 2, 4) for v in CHUNKS[name]]


BOTH_WAYS = ("chimera", "dualpipe")  # schedules of p stages, each on two ranks


def fits(name: str, p: int, m: int) -> bool:
    return not (name in BOTH_WAYS and p % 2) and not (name.startswith("dualpipe") and m < 2 * p)


@pytest.mark.parametrize(("name", "p", "m", "v"), [s for s in SIZES if fits(*s[:3]) and (s[1] < 8 or s[2] < 32)])
def test_every_schedule_is_complete_and_free_of_deadlock(name: str, p: int, m: int, v: int) -> None:
    schedule = check(make_schedule(name, ranks=p, microbatches=m, chunks=v, batches=2))
    assert schedule.num_ranks == p and schedule.microbatches == 2 * m
    assert schedule.num_stages == p * (1 if name in BOTH_WAYS else v)
    assert len(ordered_nodes(schedule, all_reduce_blocks=True)) == sum(map(len, schedule.orders))


@given(name=st.sampled_from(sorted(SCHEDULES)), p=st.integers(1, 6), m=st.integers(1, 14), v=st.integers(1, 3))
def test_any_size_is_possible_or_refused_with_a_possible_size(name: str, p: int, m: int, v: int) -> None:
    chunks = v if SCHEDULES[name].chunks is None else None
    size = {"stages": p, "microbatches": m}
    for _ in range(3):  # at most two refusals: of the stages, then of the micro-batches
        try:
            check(make_schedule(name, ranks=size["stages"], microbatches=size["microbatches"], chunks=chunks))
            return
        except BadInput as bad:
            bad.fix.ways(bad.what)[0].apply(size)
    pytest.fail(f"{name} refuses what it told to do: {size}")


# --- impossible sizes and invalid schedules are refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ({"name": "chimera", "ranks": 5}, "stages: got 5, needed an even number for chimera.*fix: set it to one of \\[4, 6\\]"),
        ({"name": "chimera", "microbatches": 6}, "microbatches: got 6, needed a multiple of 4.*fix: set it to one of \\[4, 8\\]"),
        ({"name": "two_bw", "microbatches": 3}, "microbatches: got 3, needed at least 4.*fix: set it to 4"),
        ({"name": "dualpipe_v", "microbatches": 7}, "microbatches: got 7, needed at least 8.*fix: set it to 8"),
        ({"name": "dualpipe", "ranks": 5}, "stages: got 5, needed an even number for dualpipe.*fix: set it to one of \\[4, 6\\]"),
        ({"name": "dualpipe", "microbatches": 9}, "microbatches: got 9, needed an even number of at least 8.*fix: set it to 10"),
        ({"name": "zb_v", "chunks": 3}, "chunks: got 3, needed 2 for zb_v; fix: set it to 2, or .*interleaved, looped_bfs"),
        ({"name": "1f1b", "chunks": 2}, "chunks: got 2, needed 1 for 1f1b; fix: set it to 1, or"),
        ({"name": "1f1b", "microbatches": 0}, "microbatches: got 0, needed at least 1; fix: set it to 1"),
        ({"name": "1f1b", "ranks": 0}, "stages: got 0, needed at least 1"),
        ({"name": "gpipe", "batches": 0}, "batches: got 0, needed at least 1"),
        ({"name": "chimaera"}, "schedule: got chimaera, needed one of naive, .*fix: did you mean chimera?"),
    ],
)
def test_an_impossible_size_is_refused_with_the_nearest_possible_size(size: dict[str, object], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        make_schedule(**({"ranks": 4, "microbatches": 8} | size))  # type: ignore[arg-type]


def swapped(schedule: Schedule, rank: int, a: int, b: int) -> Schedule:
    orders = [list(order) for order in schedule.orders]
    orders[rank][a], orders[rank][b] = orders[rank][b], orders[rank][a]
    return replace(schedule, orders=tuple(map(tuple, orders)))


def test_a_deadlock_is_reported_with_every_ranks_next_action() -> None:
    schedule = swapped(one_f_one_b(3, 2), 1, 0, 2)  # on rank 1, B0 now comes before F0
    with pytest.raises(BadInput) as bad:
        check(schedule)
    assert str(bad.value).startswith("schedule 1f1b: got a deadlock after 2 of 15 actions: rank 0 waits at 0B0 for 1B0 of rank 1; ")
    assert "rank 1 waits at 1B0 for 2B0 of rank 2 and 1F0 of rank 1; rank 2 waits at 2F0 for 1F0 of rank 1, needed" in str(bad.value)
    assert "\n" not in str(bad.value)


def without(schedule: Schedule, gone: Action) -> Schedule:
    return replace(schedule, orders=tuple(tuple(a for a in order if a != gone) for order in schedule.orders))


def test_check_refuses_missing_repeated_and_misplaced_actions() -> None:
    good = one_f_one_b(2, 3)
    with pytest.raises(BadInput, match="got 1F2 for stage 1 and micro-batch 2, needed 1F2 1B2, or I and W instead of B"):
        check(without(good, Action(Op.B, 1, 2)))
    with pytest.raises(BadInput, match="got 0 times 1U@1 on rank 1, needed this action once"):
        check(without(good, Action(Op.U, 1, version=1)))
    with pytest.raises(BadInput, match="got 0F1 2 times, needed each action once"):
        check(replace(good, orders=((*good.orders[0], Action(Op.F, 0, 1)), good.orders[1])))
    with pytest.raises(BadInput, match="got 1F0 on rank 0, needed stages only on the ranks that hold them"):
        check(replace(good, orders=((Action(Op.F, 1, 0), *good.orders[0]), good.orders[1])))
    with pytest.raises(BadInput, match="got 0F0 0B0@1, needed the backward pass on the weight version of its forward pass"):
        check(
            replace(good, orders=(tuple(a._replace(version=1) if a == Action(Op.B, 0, 0) else a for a in good.orders[0]), good.orders[1]))
        )


def test_check_refuses_all_reduces_in_different_orders() -> None:
    schedule = make_schedule("chimera", ranks=4, microbatches=4)
    places = [i for i, a in enumerate(schedule.orders[1]) if a.op is Op.S]
    with pytest.raises(BadInput, match="got all-reduces in different orders on ranks 1 and 2, needed the same order on all ranks"):
        check(swapped(schedule, 1, *places))


# --- weight versions of PipeDream and 2BW --------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_pipedream_reads_the_newest_weights_and_stashes_them(p: int) -> None:
    """Stage s of p (from 0) keeps p - s versions, and micro-batch b reads version max(0, b - (p - 1 - s)) (PipeDream, section 3.3)."""
    schedule = check(pipedream(p, 3 * p))
    for stage, order in enumerate(schedule.orders):
        newest = 0
        for action in order:
            if action.op is Op.F:
                assert action.version == newest == max(0, action.microbatch - (p - 1 - stage))
            newest = action.version if action.op is Op.U else newest
    assert weight_versions(schedule) == tuple(p - s for s in range(p))
    assert peak_activations(schedule) == tuple(p - s for s in range(p))


@pytest.mark.parametrize("p", [2, 3, 4])
def test_vertical_sync_reads_one_version_on_all_stages(p: int) -> None:
    schedule = check(pipedream(p, 3 * p, vertical_sync=True))
    assert {a.version - max(0, a.microbatch - (p - 1)) for _, a in schedule.nodes() if a.op in (Op.F, Op.B)} == {0}
    assert weight_versions(schedule) == (p,) * p


@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 5), (4, 4), (4, 8)])
def test_two_bw_is_one_update_late_with_two_versions(p: int, m: int) -> None:
    """All stages compute the gradients of update t + 1 with version t - 1 (PipeDream-2BW, section 3.1)."""
    schedule = check(make_schedule("two_bw", ranks=p, microbatches=m, batches=4))
    for _, action in schedule.nodes():
        if action.op in (Op.F, Op.B):
            assert action.version == max(0, action.microbatch // m - 1)
    assert weight_versions(schedule) == (2,) * p


def test_weight_versions_counts_the_newest_and_all_that_are_read_later() -> None:
    """For random orders of F, B and U. The time for 8,000 micro-batches shows that it is not quadratic."""
    draw = random.Random(5)
    for _ in range(200):
        m = draw.randint(1, 9)
        order = [Action(op, 0, j, draw.randint(0, m)) for j in range(m) for op in (Op.F, Op.B)]
        order += [Action(Op.U, 0, version=version) for version in range(1, m + 1)]
        draw.shuffle(order)
        most = newest = 0
        for at, action in enumerate(order):
            newest = action.version if action.op is Op.U else newest
            most = max(most, 1 + len({a.version for a in order[at + 1 :] if a.op is not Op.U and a.version < newest}))
        assert weight_versions(Schedule("drawn", ((0,),), m, 1, (tuple(order),))) == (most,)
    schedule, began = pipedream(1, 8000), time.process_time()
    assert weight_versions(schedule) == (1,) and time.process_time() - began < 2


def test_reading_a_version_before_its_update_is_a_deadlock() -> None:
    schedule = pipedream(2, 4)
    orders = tuple(tuple(a._replace(version=3) if a.op in (Op.F, Op.B) and a.microbatch == 2 else a for a in o) for o in schedule.orders)
    with pytest.raises(BadInput, match="rank 0 waits at 0F2@3 for 0U@3 of rank 0"):
        check(replace(schedule, orders=orders))


def test_schedules_that_drain_keep_one_weight_version() -> None:
    for name, kind in SCHEDULES.items():
        if not kind.continuous:
            assert weight_versions(make_schedule(name, ranks=4, microbatches=8, batches=2)) == (1,) * 4


# --- messages between ranks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_message_is_sent_once_and_received_once(name: str) -> None:
    """ActionGraph and Traffic have the plain implementation's messages: one forward and one backward for each micro-batch and rank
    boundary."""
    schedule = make_schedule(name, ranks=4, microbatches=8)
    graph = action_graph(schedule)
    sent = [message for node, _ in schedule.nodes() for message in sends(schedule, node)]
    received = [message for node, _ in schedule.nodes() for message in receives(schedule, node)]
    assert sorted(sent) == sorted(received) and len(set(sent)) == len(sent)
    for n, (node, _) in enumerate(schedule.nodes()):
        assert tuple(map(graph.message, graph.sent(n))) == sends(schedule, node)
        assert tuple(map(graph.message, graph.received(n))) == receives(schedule, node)
    traffic = [Traffic.of(schedule, rank) for rank in range(4)]
    assert sorted(message for one in traffic for messages in one.expected.values() for message in messages) == sorted(sent)
    assert all(message.target == rank for rank, one in enumerate(traffic) for of in one.expected.values() for message in of)
    crossings = sum(schedule.homes[s] != schedule.homes[s + 1] or len(schedule.homes[s]) > 1 for s in range(schedule.num_stages - 1))
    assert len(sent) == 2 * crossings * schedule.microbatches
    for node, _ in schedule.nodes():
        assert all(message.target == node.rank for message in receives(schedule, node))
        assert all(message.source == node.rank for message in sends(schedule, node))


# --- orders of torch.distributed.pipelining and of papers ---------------------------------------------------------------


def of_torch(kind: type, p: int, m: int, v: int) -> list[list[str]]:
    """Return for each rank the actions of torch's multi-stage schedule `kind`, without its waits; a pair's two actions are separate."""
    alone = SimpleNamespace(
        n_local_stages=v,
        pp_group_size=p,
        num_stages=p * v,
        _num_stages=p * v,
        _n_microbatches=m,
        microbatches_per_round=m // max(1, m // p),
        _stages=[None] * v,
    )
    orders = []
    for rank in range(p):
        actions = [a for a in kind._calculate_single_rank_operations(alone, rank) if a is not None]  # type: ignore[attr-defined]
        orders.append([str(part) for a in actions for part in (a.sub_actions or (a,))])
    return orders


def ours(schedule: Schedule) -> list[list[str]]:
    return [[str(a) for a in order if a.op in COMPUTE] for order in schedule.orders]


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("interleaved", "ScheduleInterleaved1F1B"),
        ("looped_bfs", "ScheduleLoopedBFS"),
        ("zb_v", "ScheduleZBVZeroBubble"),
        ("dualpipe_v", "ScheduleDualPipeV"),
    ],
)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 4), (4, 8), (8, 16), (8, 32)])
def test_orders_equal_torchs(name: str, theirs: str, p: int, m: int) -> None:
    for v in CHUNKS[name] if fits(name, p, m) else ():
        assert ours(make_schedule(name, ranks=p, microbatches=m, chunks=v)) == of_torch(getattr(torch_schedules, theirs), p, m, v)


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 2), (4, 6), (4, 10), (4, 15), (5, 13), (8, 18)])
def test_interleaved_equals_torchs_if_the_ranks_do_not_divide_the_micro_batches(p: int, m: int) -> None:
    """torch needs m divisible by its number of rounds m // p; other sizes are left out."""
    for v in (1, 2, 4) if m % max(1, m // p) == 0 else ():
        kind = torch_schedules.ScheduleInterleaved1F1B
        assert ours(make_schedule("interleaved", ranks=p, microbatches=m, chunks=v)) == of_torch(kind, p, m, v)


def printed_by_torch(kind: type, p: int, m: int) -> list[list[str]]:
    orders = kind._get_pipeline_order(SimpleNamespace(_num_stages=p, _n_microbatches=m))  # type: ignore[attr-defined]
    return [[str(a) for a in orders[rank] if a is not None and a.is_compute_op] for rank in range(p)]


def run_by_torch(kind: type, p: int, m: int) -> list[list[str]]:
    """Return for each rank the actions that torch's single-stage schedule `kind` runs, recorded by a mock of its stage."""
    orders = []
    for rank in range(p):
        calls: list[str] = []
        stage = MagicMock(stage_index=rank)
        for ops in (stage.get_fwd_recv_ops, stage.get_fwd_send_ops, stage.get_bwd_recv_ops, stage.get_bwd_send_ops):
            ops.return_value = []
        stage.forward_one_chunk.side_effect = lambda j, *_, calls=calls, rank=rank, **__: calls.append(f"{rank}F{j}")
        stage.backward_one_chunk.side_effect = lambda j, *_, calls=calls, rank=rank, **__: calls.append(f"{rank}B{j}")
        alone = MagicMock(_num_stages=p, _n_microbatches=m, _stage=stage, _has_backward=True)
        alone._check_inputs.return_value = ([()] * m, [{}] * m)
        kind._step_microbatches(alone)  # type: ignore[attr-defined]
        orders.append(calls)
    return orders


@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 6), (4, 4), (4, 8), (8, 16)])
def test_gpipe_and_1f1b_equal_torchs(p: int, m: int) -> None:
    assert run_by_torch(torch_schedules.ScheduleGPipe, p, m) == ours(make_schedule("gpipe", ranks=p, microbatches=m))
    assert printed_by_torch(torch_schedules.ScheduleGPipe, p, m) == ours(make_schedule("gpipe", ranks=p, microbatches=m))
    assert run_by_torch(torch_schedules.Schedule1F1B, p, m) == ours(make_schedule("1f1b", ranks=p, microbatches=m))


def test_torch_prints_1f1b_wrongly_on_the_last_rank() -> None:
    """torch prints F1 ... Fm for the last rank but runs F0 ... F(m - 1). Delete this test when torch corrects `_get_pipeline_order`."""
    p, m = 4, 8
    printed, right = printed_by_torch(torch_schedules.Schedule1F1B, p, m), ours(make_schedule("1f1b", ranks=p, microbatches=m))
    assert printed[:-1] == right[:-1]
    assert printed[-1] == [re.sub(r"F(\d+)", lambda found: f"F{int(found[1]) + 1}", action) for action in right[-1]]


@pytest.mark.parametrize(
    ("p", "m", "rank", "slots"),
    [
        (4, 4, 0, "0F0 0F1 3F2 3B2 3F3 3B3 0B0 0B1"),
        (4, 4, 1, "1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1"),
        (2, 4, 0, "0F0 1F1 1B1 0B0 0F2 1F3 1B3 0B2"),
    ],
)
def test_chimeras_order_equals_the_papers_figure(p: int, m: int, rank: int, slots: str) -> None:
    """Chimera, figure 3 for p = 4 and m = 4. For p = 2, blocks of p micro-batches follow one another directly (section 3.3)."""
    assert ours(make_schedule("chimera", ranks=p, microbatches=m))[rank] == slots.split()


# --- CSV files of schedules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_survives_a_csv_file(name: str, tmp_path: Path) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=8, batches=2)
    write_order(schedule, tmp_path / f"{name}.csv")
    assert read_order(tmp_path / f"{name}.csv") == schedule
    (tmp_path / f"{name}.csv").write_text(
        (tmp_path / f"{name}.csv").read_text(), encoding="utf-8-sig"
    )  # with a byte order mark, as spreadsheets save it
    assert read_order(tmp_path / f"{name}.csv") == schedule


def test_torchs_compute_only_csv_is_read(tmp_path: Path) -> None:
    """Empty cells (waits) are ignored, and updates are appended to each rank's order."""
    (tmp_path / "order.csv").write_text("0F0,0F1,,,0B0,,0B1\n,1F0,1B0,1F1,1B1,,\n")
    schedule = read_order(tmp_path / "order.csv")
    assert ours(schedule) == ours(make_schedule("1f1b", ranks=2, microbatches=2)) and schedule.orders[1][-1] == Action(Op.U, 1, version=1)


def test_a_pair_receives_before_and_sends_after_both_actions(tmp_path: Path) -> None:
    schedule = make_schedule("dualpipe_v", ranks=2, microbatches=6)
    write_order(schedule, tmp_path / "order.csv")
    assert ")OVERLAP_F_B" in (tmp_path / "order.csv").read_text()
    graph = action_graph(schedule)
    for first in schedule.pairs:
        second = Node(first.rank, first.at + 1)
        assert schedule.action(first).op is Op.F and schedule.action(second).op is Op.B
        at = [node for node, _ in schedule.nodes()].index(first)
        assert not graph.sent(at) and not graph.received(at + 1)
        assert set(own_needs(schedule, second)) - {first} <= {*needs_of(schedule, first), *needs_of(schedule, second)}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("0F0,0X0\n", "line 1 cell 2: got '0X0', needed stage, then F"),
        ("\n0F0,0B0\n\n1F0,1X0\n", "line 4 cell 2: got '1X0'"),
        ("0F0,0B\n", "line 1 cell 2: got '0B', needed"),
        ("0F0,0U3\n", "line 1 cell 2: got '0U3', needed"),
        ("", "without a forward"),
        ("0U@1\n", "without a forward"),
        ("0F0,0B0\n2F0,2B0\n", "got stages up to 2 without stage 1, needed all stages from 0; fix: add stage 1"),
        ("0F0,0B0,0F2,0B2\n", "got nothing for stage 0 and micro-batch 1"),
        ("0F0,0B0,0F1,0B1,0F2,0B2,0U@1,0U@2\n", "got 3 micro-batches and 2 updates"),
        ("0F0,0B0,0U@0\n", "line 1 cell 3: got '0U@0', needed .* version from 1"),
        ("0F0@5,0B0@5,0U@1\n", "got 0F0@5, needed a version from 0 to 1"),
        ("0F0,0B0\n,,\n", "line 2: got no action, needed a stage on every rank"),
        ("0F0,0B0\n1B0,1F0\n", "got a deadlock after 1 of 6 actions"),
        ("0F0,1F0\n1B0,0B0\n", "got no .*|got 1F0 1B0 on several ranks|got 0F0 0B0 on several ranks"),
    ],
)
def test_an_invalid_csv_is_refused_in_one_line(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "order.csv").write_text(content)
    with pytest.raises(BadInput, match=said) as bad:
        read_order(tmp_path / "order.csv")
    assert "\n" not in str(bad.value)


def test_a_missing_or_binary_csv_is_refused(tmp_path: Path) -> None:
    (tmp_path / "order.csv").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "order.csv", tmp_path / "none.csv", tmp_path):
        with pytest.raises(BadInput, match="needed a CSV file of actions"):
            read_order(path)
