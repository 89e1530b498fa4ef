"""Diagnoses from ranks' answers written by hand, and the sum of tokens that shows whether two ranks ran different collectives.

Only this file would notice a diagnosis that names a wrong rank.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch

from parallel.mesh.record import Record, balanced
from parallel.watch.diagnosis import ABORTED, diagnose
from parallel.watch.watchdog import is_echo

Made = list[tuple[Any, ...]]  # (axis, ranks, name, label, shape, send, receive) of each collective of a rank


def record_of(rank: int, made: Made, dtype: torch.dtype = torch.float32) -> Record:
    record = Record(rank)
    for axis, ranks, name, label, shape, send, receive in made:
        tensor = torch.empty(shape, dtype=dtype)
        record.announce(axis, ranks, ranks.index(rank), name=name, label=label, tensor=tensor, send=send, receive=receive)
    return record


def summed(axis: str, ranks: tuple[int, ...], label: str = "", shape: tuple[int, ...] = (3,)) -> tuple[Any, ...]:
    return axis, ranks, "all_reduce", label, shape, None, None


def answers(records: list[Record], **said: dict[int, Any]) -> dict[int, dict[str, Any]]:
    """Return rank -> answer, by default of a rank that has waited 9 s in a collective. said: field -> rank -> other value."""
    found = {record.rank: record.answer() | {"idle": 9.0, "waits": "yes", "place": "x.py:1 f"} for record in records}
    for field, values in said.items():
        for rank, value in values.items():
            found[rank][field] = value
    return found


WORLD = (0, 1, 2, 3)
PAIRS = ((0, 1), (2, 3))


def step(rank: int, **other: Any) -> Made:
    """Return a rank's collectives of a step: two sums over pairs, an all_to_all over all ranks, a sum over all ranks."""
    pair = PAIRS[rank // 2]
    send = other.get("send", [rank + j for j in range(4)])
    receive = [j + rank for j in range(4)]
    exchange = ("ep", WORLD, "all_to_all", "layers.1", (sum(send), 5), send, receive)
    return [summed("tp", pair, "layers.0", (3, 2)), summed("tp", pair, "layers.1"), exchange, summed("dp", WORLD, "norm")]


def total(steps: dict[int, Made]) -> float:
    return sum(record_of(rank, made).token() for rank, made in steps.items())


def test_tokens_of_ranks_that_agree_sum_to_zero_and_of_others_never() -> None:
    whole = {rank: step(rank) * 2 for rank in WORLD}
    assert balanced(total(whole)) and not balanced(record_of(1, whole[1]).token())
    for rank, at in itertools.product(WORLD, range(8)):
        made = whole[rank]
        axis, ranks, name, label, shape, send, receive = made[at]
        changes: list[Made] = [
            made[:at] + made[at + 1 :],
            made[:at] + [made[at], made[at]] + made[at + 1 :],
            made[:at] + [(axis, ranks, "counts", label, shape, send, receive)] + made[at + 1 :],
            made[:at] + [(axis, ranks, name, "layers.7", shape, send, receive)] + made[at + 1 :],
            made[:at] + [(axis, ranks, name, label, (*shape[:-1], shape[-1] + 1), send, receive)] + made[at + 1 :],
        ]
        if send is not None:
            other = [send[0] + 1, send[1] - 1, *send[2:]]
            changes.append(made[:at] + [(axis, ranks, name, label, shape, other, receive)] + made[at + 1 :])
        for change in changes:
            assert not balanced(total(whole | {rank: change})), (rank, at, change)


def test_the_number_of_rows_may_differ_and_their_width_may_not() -> None:
    made = {rank: [("ep", (0, 1), "all_to_all", "", (4 + rank, 5), [2, 2], [2, 2])] for rank in (0, 1)}
    assert balanced(total(made))
    made[1] = [("ep", (0, 1), "all_to_all", "", (5, 6), [2, 2], [2, 2])]
    assert not balanced(total(made))


def test_an_announcement_costs_microseconds() -> None:
    record, tensor = Record(0), torch.ones(4)
    began = time.process_time()
    for _ in range(2000):
        record.announce("dp", WORLD, 0, name="all_reduce", label="layers.1", tensor=tensor, send=None, receive=None)
    assert (time.process_time() - began) / 2000 < 50e-6  # measured: 6 to 14 microseconds on a busy machine


def finding(found: dict[int, dict[str, Any]], silent: dict[int, str] | None = None, **how: Any) -> tuple[str, tuple[int, ...], str]:
    result = diagnose(found, silent or {}, limit_s=5.0, **how)
    assert result is not None and "\n" not in result.line
    return result.kind, result.ranks, result.line


def test_a_rank_that_does_not_answer_is_missing() -> None:
    kind, ranks, line = finding(answers([record_of(r, step(r)) for r in (0, 1, 3)]), {2: "last seen 4 s ago in step 7"})
    assert (kind, ranks) == ("silent", (2,)) and line.startswith("rank 2 is missing (no answer; rank 2: last seen 4 s ago in step 7)")
    assert "ranks 0 1 3 wait" in line and "all_reduce 1 over dp in norm" in line


def test_a_rank_that_failed_is_named_with_its_error() -> None:
    found = answers([record_of(r, step(r)) for r in WORLD], failed={3: "ValueError: boom"}, phase={3: "the backward pass"}, step={3: 12})
    assert finding(found)[1:] == ((3,), "rank 3 failed in the backward pass of step 12: ValueError: boom")


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_rank_that_waits_itself_is_not_missing(cut: int) -> None:
    """Rank 2 waits for rank 3, which computes, and ranks 0 and 1 wait for both: only rank 3 is missing."""
    done = {0: 3, 1: 3, 2: cut + 1 if cut < 2 else 3, 3: cut}
    found = answers([record_of(r, step(r)[: done[r]]) for r in WORLD], waits={3: "no"})
    kind, ranks, line = finding(found)
    assert (kind, ranks) == ("behind", (3,)) and line.startswith("rank 3 is missing (rank 3 has been at ") and " for 9 s (" in line


def test_ranks_that_compute_longer_than_the_limit_are_no_hang() -> None:
    found = answers([record_of(r, step(r)) for r in WORLD], waits=dict.fromkeys(WORLD, "no"))
    assert diagnose(found, {}, limit_s=5.0) is None
    waiting = answers([record_of(r, step(r)[: 4 - (r == 1)]) for r in WORLD], idle=dict.fromkeys(WORLD, 4.9), waits={1: "no"})
    assert diagnose(waiting, {}, limit_s=5.0) is None
    assert finding(waiting, share=0.5)[1] == (1,)


def test_the_first_collective_that_differs_is_named_with_the_smaller_part() -> None:
    made = {rank: step(rank) for rank in WORLD}
    made[2] = [*made[2][:3], summed("dp", WORLD, "norm", (4,)), *made[2][:2]]
    kind, ranks, line = finding(answers([record_of(r, m) for r, m in made.items()]))
    assert (kind, ranks) == ("differ", (2,)) and "rank 2 made another collective 1 over dp" in line and "[4]" in line and "[3]" in line


def test_of_two_ranks_both_are_named_and_splits_by_the_rank_in_every_pair() -> None:
    two = [record_of(0, [summed("dp", (0, 1), "a")]), record_of(1, [summed("dp", (0, 1), "b")])]
    kind, ranks, line = finding(answers(two))
    assert (kind, ranks) == ("differ", (0, 1)) and "in a" in line and "in b" in line
    made = {rank: step(rank) for rank in WORLD}
    made[1] = step(1, send=[0, 3, 3, 4])
    kind, ranks, line = finding(answers([record_of(r, m) for r, m in made.items()]))
    assert (kind, ranks) == ("differ", (1,)) and "rank 1 sends 0 rows to rank 0, which expects 1" in line


def test_a_collective_left_out_at_the_end_of_a_step_is_found_where_all_stand_at_one_place() -> None:
    made = {rank: step(rank)[: 4 - (rank == 2)] for rank in WORLD}
    found = answers([record_of(r, m) for r, m in made.items()], waits=dict.fromkeys(WORLD, "no"))
    assert diagnose(found, {}, limit_s=5.0, share=0.0) is None
    kind, ranks, _ = finding(found, share=0.0, settled=True)
    assert (kind, ranks) == ("differ", (2,))


def test_a_rank_that_went_on_without_the_others_is_missing_though_all_wait_for_each_other() -> None:
    made = {
        rank: [summed("dp", (0, 1, 2)), *([summed("dp", (0, 1, 2))] if rank != 1 else [summed("world", (0, 1, 2))])] for rank in range(3)
    }
    assert finding(answers([record_of(r, m) for r, m in made.items()]))[:2] == ("circle", (1,))
    two = {0: [summed("dp", (0, 1))], 1: [summed("world", (0, 1))]}
    assert finding(answers([record_of(r, m) for r, m in two.items()]))[:2] == ("circle", (0, 1))


def test_a_rank_that_a_library_ended_for_what_another_sent_is_not_the_culprit() -> None:
    made = {
        rank: [summed("dp", (0, 1, 2)), *([summed("dp", (0, 1, 2))] if rank != 1 else [summed("world", (0, 1, 2))])] for rank in range(3)
    }
    found = answers([record_of(r, m) for r, m in made.items()], failed={2: ABORTED})
    assert finding(found, share=0.0)[:2] == ("circle", (1,))
    found[1]["failed"] = "ValueError: boom"
    assert finding(found, share=0.0)[:2] == ("failed", (1, 2))


def test_a_message_that_was_sent_and_does_not_come_is_lost_and_one_not_sent_is_owed() -> None:
    records = [Record(rank) for rank in range(3)]
    records[0].message(0, 1, "F0")
    records[1].message(0, 1, "F0")
    records[2].message(1, 2, "F0")
    found = answers(records)
    assert finding(found)[:2] == ("lost", (0, 1))
    found[1]["waits"], found[1]["awaited"] = "no", None
    assert finding(found)[:2] == ("behind", (1,))


def test_ranks_inside_a_librarys_own_collectives_are_told_apart_by_where_they_stand() -> None:
    records = [record_of(r, step(r)) for r in WORLD]
    assert finding(answers(records, waits={1: "no"}, phase={1: "the backward pass"}))[:2] == ("engine", (1,))
    assert finding(answers(records, place={2: "y.py:2 g"}))[:2] == ("engine", (2,))
    kind, ranks, line = finding(answers(records, host={0: "a", 1: "a", 2: "b", 3: "b"}))
    assert (kind, ranks) == ("engine", WORLD) and "nothing arrives between a and b" in line


def test_an_echo_of_another_ranks_end_is_told_from_an_error_of_ones_own() -> None:
    assert is_echo(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"))
    assert not is_echo(ValueError("Connection closed by peer")) and not is_echo(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
