"""Diagnoses of hangs with known culprits, from traces in the format of torch's flight recorder: the culprits are named, and no other rank.

Only this file would notice blame of ranks that merely wait, a missed rank whose device hangs in a collective that it has entered, and a
reader that runs code of a pickle.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe.cli.main import main as moe
from parallel.errors import BadInput
from parallel.watch import flight_recorder
from parallel.watch.flight_recorder import diagnose, read_folder

Entry = dict[str, Any]
WORLD = 16
TP = {rank: tuple(range(rank - rank % 2, rank - rank % 2 + 2)) for rank in range(WORLD)}
EP = {rank: tuple(range(rank - rank % 8, rank - rank % 8 + 8)) for rank in range(WORLD)}
DP = {rank: tuple(range(rank % 4, WORLD, 4)) for rank in range(WORLD)}
GROUPS = {"tp": TP, "ep": EP, "dp": DP}


def name_of(kind: str, rank: int) -> str:
    return f"{kind}{GROUPS[kind][rank][0]}"


def entry(rank: int, kind: str, number: int, what: str, *, done: bool, shape: tuple[int, ...] = (64, 12), dtype: str = "Float") -> Entry:
    return {
        "record_id": number,
        "pg_id": list(GROUPS).index(kind),
        "process_group": (name_of(kind, rank), f"{kind.upper()}_GROUP"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{what}",
        "time_created_ns": 1758581237535563290,
        "input_sizes": [list(shape)],
        "input_dtypes": [dtype],
        "output_sizes": [list(shape)],
        "output_dtypes": [dtype],
        "state": "completed" if done else "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": done,
        "timeout_ms": 180000,
        "is_p2p": False,
    }


def write(folder: Path, entries: Callable[[int], list[Entry]], *, without: tuple[int, ...] = (), text: bool = False) -> Path:
    for rank in range(WORLD):
        if rank in without:
            continue
        config = {
            str(n): {"name": name_of(kind, rank), "desc": f"{kind.upper()}_GROUP", "ranks": str(list(GROUPS[kind][rank]))}
            for n, kind in enumerate(GROUPS)
        }
        trace = {"version": "2.9", "nccl_version": "2.27.3", "pg_config": config, "pg_status": {}, "entries": entries(rank)}
        (folder / f"_dump_{rank}").write_bytes(json.dumps(trace).encode() if text else pickle.dumps(trace, protocol=2))
    return folder


def step(rank: int, upto: dict[str, tuple[int, int]]) -> list[Entry]:
    """Return a rank's trace. upto: group -> (number of finished collectives, number of entered ones)."""
    kinds = {"tp": "_all_gather_base", "ep": "all_to_all", "dp": "all_reduce"}
    return [
        entry(rank, kind, number, kinds[kind], done=number <= done, shape=(64 + (7 * rank if kind == "ep" else 0), 12))
        for kind, (done, entered) in upto.items()
        for number in range(max(1, done - 2), entered + 1)
    ]


def left_out(rank: int) -> list[Entry]:
    """Return a rank's trace of a hang in which ranks 9 and 14 have not entered all-to-all 41. All others wait for them, some indirectly."""
    if rank in (9, 14):
        return step(rank, {"tp": (80, 80), "ep": (40, 40), "dp": (5, 5)})
    if rank in TP[9] + TP[14] or rank >= 8:
        return step(rank, {"tp": (80, 80), "ep": (40, 41), "dp": (5, 5)})
    return step(rank, {"tp": (82, 82), "ep": (41, 41), "dp": (5, 6)})


def stuck_device(rank: int) -> list[Entry]:
    """Return a rank's trace of a hang in which the devices of ranks 12 and 14 hang: they have entered collectives, but finished fewer."""
    if rank in (12, 14):
        return step(rank, {"tp": (60, 66), "ep": (29, 36 if rank == 12 else 38), "dp": (5, 5)})
    if rank >= 8:
        return step(rank, {"tp": (66 if rank in (13, 15) else 67, 67), "ep": (36, 38), "dp": (5, 5)})
    return step(rank, {"tp": (70, 70), "ep": (40, 40), "dp": (5, 6)})


def empty(rank: int) -> list[Entry]:
    """Return a rank's trace of a hang in which ranks 2 and 3 wrote empty traces, because a thread held Python's lock."""
    return [] if rank in (2, 3) else step(rank, {"tp": (80, 80), "ep": (40, 41 if rank < 8 else 40), "dp": (5, 6 if rank >= 8 else 5)})


@pytest.mark.parametrize(
    ("case", "culprits", "without"),
    [(left_out, (9, 14), ()), (stuck_device, (12, 14), ()), (empty, (2, 3), ()), (left_out, (9, 14), (9, 14)), (left_out, (9, 14), (14,))],
)
@pytest.mark.parametrize("text", [False, True], ids=["pickle", "json"])
def test_who_is_waited_for_and_waits_for_nobody_is_named(
    case: Callable[[int], list[Entry]], culprits: tuple[int, ...], without: tuple[int, ...], text: bool, tmp_path: Path
) -> None:
    assert diagnose(read_folder(write(tmp_path, case, without=without, text=text))).culprits == culprits


def other(rank: int, **changed: Any) -> list[Entry]:
    made = step(rank, {"tp": (80, 80), "ep": (40, 40), "dp": (5, 6)})
    if rank == 7:
        made[-1] |= changed
    return made


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"input_sizes": [[64, 13]]}, "rank 7: all_reduce of Float[64, 13], the others all_reduce of Float[64, 12]"),
        ({"input_dtypes": ["BFloat16"]}, "rank 7: all_reduce of BFloat16[64, 12]"),
        ({"profiling_name": "nccl:broadcast"}, "rank 7: broadcast of"),
    ],
)
def test_who_made_another_collective_than_most_is_named(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    found = diagnose(read_folder(write(tmp_path, lambda rank: other(rank, **changed))))
    assert found.culprits == (7,) and said in found.said and "collective 6 over DP_GROUP" in found.said


def test_who_has_not_begun_a_message_is_named(tmp_path: Path) -> None:
    def entries(rank: int) -> list[Entry]:
        made = step(rank, {"tp": (80, 80)})
        send = entry(rank, "ep", 1, "send 0->1", done=False) | {"is_p2p": True}
        return [*made, send] if rank == 0 else made

    found = diagnose(read_folder(write(tmp_path, entries)))
    assert (found.culprits, found.said) == ((1,), "rank 1 has not begun a send or receive that another rank waits for")


def test_who_left_one_out_is_named_by_the_first_that_differs(tmp_path: Path) -> None:
    """Rank 5 skips all-reduce 4, so its fourth call has the shape of the other ranks' fifth. Rank 5 is named, with collective 4."""

    def entries(rank: int) -> list[Entry]:
        shapes = [(8,), (9,), (10,), (11,), (12,), (13,)]
        made = shapes[:3] + shapes[4:] if rank == 5 else shapes
        return [entry(rank, "dp", n, "all_reduce", done=n < 4, shape=shape) for n, shape in enumerate(made, start=1)]

    found = diagnose(read_folder(write(tmp_path, entries)))
    assert found.culprits == (5,) and "collective 4 over DP_GROUP" in found.said


def test_no_culprit_where_all_have_come_or_nobody_waits(tmp_path: Path) -> None:
    for number, upto in enumerate(({"ep": (40, 41)}, {"ep": (41, 41), "dp": (6, 6)})):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert diagnose(read_folder(write(folder, lambda rank, upto=upto: step(rank, upto)))).culprits == ()


def test_the_command_prints_one_line_and_who_waits_for_whom(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    write(traces, left_out)
    assert moe(["doctor", "--trace", str(traces), "--json", str(tmp_path / "F.json")]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    missed = "has not entered all_reduce 6 over DP_GROUP"
    assert first.startswith(f"ranks 9 14: rank 9 {missed}, rank 14 {missed}; ranks 1 2 5 6 8 10 11 12 13 15 wait")
    assert [row.split()[0] for row in rows[1:]] == ["0", "1", "2", "3", "4", "5", "6", "7", "8", "10", "11", "12", "13", "15"]
    assert all(row.split()[1:] == ["all_to_all", "41", "EP_GROUP", "9", "14"] for row in rows[9:])
    assert json.loads((tmp_path / "F.json").read_text())["culprits"] == [9, 14]


class _Run:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


DEEP: Any = "x"
for _ in range(60):  # a pickle of a few hundred bytes, whose text would not fit into memory
    DEEP = [DEEP, DEEP]


def test_a_trace_that_is_not_there_any_more_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "_dump_0").symlink_to(tmp_path / "gone")
    with pytest.raises(BadInput, match="^--trace: got .*_dump_0: No such file"):
        read_folder(tmp_path)


def test_a_trace_that_is_too_large_is_to_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "MOST_BYTES", 8)
    (tmp_path / "_dump_0").write_bytes(b"123456789")
    with pytest.raises(BadInput, match="_dump_0, of 9 bytes, needed .*, at most 8 bytes; fix: move .*_dump_0 to another folder$"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(_Run()),
        pickle.dumps({"entries": [_Run()], "pg_config": {}}, protocol=0),
        pickle.dumps({"entries": [], "pg_config": {1, 2}}),
        b"cos\nsystem\n(S'touch executed'\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0etouch executed\x85R.",
        b"\x80\x02}r\xff\xff\xff\x7f.",
        b"\x80\x04\x8d" + (2**62).to_bytes(8, "little") + b"x.",
        pickle.dumps([1, 2]),
        pickle.dumps({"pg_config": {}, "entries": [{"process_group": None}]}),
        pickle.dumps({"pg_config": {}, "entries": [{"process_group": (DEEP, "x")}]}),
        b"not a pickle",
        b"",
    ],
)
def test_what_is_no_trace_is_one_line_and_runs_nothing(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "_dump_0").write_bytes(content)
    with pytest.raises(BadInput, match="^--trace: got ") as refused:
        read_folder(tmp_path / "traces")
    assert len(str(refused.value).splitlines()) == 1 and not (tmp_path / "executed").exists()
