"""metrics.jsonl and summary.json: written lines are read back, also after a kill, and the file holds each step once."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe.records import metrics
from moe.records.metrics import METRICS, PREVIOUS, Records, finite, read, read_summary, whole_lines, write_summary
from moe.records.redone import going_on
from moe.records.summary import summary_rows
from moe.records.tracker import scalars
from parallel.errors import BadInput
from tests.support.fabricate import run_lines, step_line, summary


@pytest.fixture
def no_tensorboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    yield


def strict(text: str) -> Any:
    """Parse JSON by the standard: NaN and Infinity, which Python accepts, raise ValueError."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def test_lines_read_back_as_written_and_at_once(tmp_path: Path, no_tensorboard: None) -> None:
    lines = run_lines(12, eval_every=5)
    with closing(Records(tmp_path / "new" / "run", say=lambda _: None)) as records:
        for number, line in enumerate(lines, start=1):
            records.write(line)
            assert len(read(tmp_path / "new" / "run")) == number  # each line is flushed, so a kill would lose none
    assert read(tmp_path / "new" / "run" / METRICS) == lines


def test_kind_and_time_are_filled_in(tmp_path: Path, no_tensorboard: None) -> None:
    with closing(Records(tmp_path, say=lambda _: None)) as records:
        records.write({"step": 1, "loss": 2.0})
    (line,) = read(tmp_path)
    assert line["kind"] == "train" and line["time"] > 1.7e9


def test_numbers_that_are_not_finite_become_null_and_are_named(tmp_path: Path, no_tensorboard: None) -> None:
    line = step_line(3) | {"loss": math.nan, "grad_norm_parts": {"dense": 1.0, "expert": math.inf}}
    line["moe"][1]["z_loss"] = -math.inf
    with closing(Records(tmp_path, say=lambda _: None)) as records:
        records.write(line)
    found = strict((tmp_path / METRICS).read_text())
    assert found["nonfinite"] == ["loss", "grad_norm_parts.expert", "moe.1.z_loss"]
    assert found["loss"] is None and found["grad_norm_parts"] == {"dense": 1.0, "expert": None} and found["moe"][1]["z_loss"] is None
    assert "nonfinite" not in finite(step_line(3))


def test_scalars_of_arrays_and_tensors_become_numbers() -> None:
    line = finite({"a": np.float32(0.5), "b": np.array([1.0, math.nan]), "c": np.int64(3), "d": Path("x") / "y"})
    assert line == {"a": 0.5, "b": [1.0, None], "c": 3, "d": str(Path("x") / "y"), "nonfinite": ["b.1"]}


@given(cut=st.integers(0, 4000))
@settings(max_examples=60, deadline=None)
def test_a_file_cut_anywhere_reads_as_its_whole_lines(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    lines = [{"step": s, "kind": "train", "loss": s / 7, "note": "é" * s} for s in range(1, 30)]
    content = b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)[:cut]
    path = tmp_path_factory.mktemp("cut") / METRICS
    path.write_bytes(content)
    found = read(path)
    assert found == lines[: len(found)]
    assert len(found) - content.count(b"\n") in (0, 1)  # 1 if the last line lacks only its newline


@given(cut=st.integers(0, 12_000), resume=st.integers(0, 12))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_after_any_kill_a_resumed_run_holds_each_step_once(
    tmp_path_factory: pytest.TempPathFactory, no_tensorboard: None, cut: int, resume: int
) -> None:
    out = tmp_path_factory.mktemp("run")
    whole = [(json.dumps(line) + "\n").encode() for line in run_lines(10, eval_every=4)]
    (out / METRICS).write_bytes(b"".join(whole)[:cut])
    survived = read(out)
    with closing(Records(out, resume_step=resume, say=lambda _: None)) as records:
        kept = b"".join(text for text, line in zip(whole, survived, strict=False) if line["step"] <= resume)
        assert (out / METRICS).read_bytes() == kept
        for step in range(resume + 1, 14):
            records.write(step_line(step))
    steps = [line["step"] for line in read(out) if line["kind"] == "train"]
    assert len(steps) == len(set(steps)) and steps == sorted(steps)


def test_a_cut_that_fails_leaves_the_old_file(tmp_path: Path, no_tensorboard: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Records(tmp_path, say=lambda _: None)) as records:
        for line in run_lines(6):
            records.write(line)
    before = (tmp_path / METRICS).read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(BadInput, match="No space left on device"):
        Records(tmp_path, resume_step=3)
    assert [p.name for p in tmp_path.iterdir()] == [METRICS] and (tmp_path / METRICS).read_bytes() == before


def test_a_new_run_sets_the_lines_of_the_one_before_aside(tmp_path: Path, no_tensorboard: None) -> None:
    for loss in (3.0, 2.0):
        with closing(Records(tmp_path, say=lambda _: None)) as records:
            records.write({"step": 1, "loss": loss})
    assert [line["loss"] for line in read(tmp_path)] == [2.0]
    assert [line["loss"] for line in read(tmp_path / PREVIOUS)] == [3.0]


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(Records(None)) as records:
        records.write(step_line(1))
    assert not list(tmp_path.iterdir())


def test_bad_folders_and_files_get_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="run folder"):
        Records(tmp_path / "file")
    with pytest.raises(BadInput, match="name the run's folder"):
        read(tmp_path / "nowhere")
    (tmp_path / METRICS).write_text('{"step": 1}\nnot JSON\n{"step": 3}\n')
    with pytest.raises(BadInput, match="line 2.*delete that line"):
        read(tmp_path)


def test_without_tensorboard_one_line_says_so_and_json_goes_on(tmp_path: Path, no_tensorboard: None) -> None:
    said: list[str] = []
    with closing(Records(tmp_path, say=said.append)) as records:
        records.write(step_line(1))
        records.write(step_line(2))
    assert len(said) == 1 and "TensorBoard is off" in said[0] and "\n" not in said[0]
    assert len(read(tmp_path)) == 2


def test_a_tensorboard_that_breaks_midway_does_not_stop_the_run(tmp_path: Path) -> None:
    class Broken:
        def log(self, values: object, step: int, time: float) -> None:
            raise RuntimeError("disk\nfull")

    said: list[str] = []
    with closing(Records(tmp_path, say=said.append)) as records:
        records._boards = {"TensorBoard": Broken()}  # type: ignore[dict-item]
        records.write(step_line(1))
        records.write(step_line(2))
    assert len(read(tmp_path)) == 2 and len(said) == 1 and "\n" not in said[0]


def test_scalars_say_what_the_line_says() -> None:
    line = step_line(7, experts=6)
    found = dict(scalars(line))
    assert found["loss"] == line["loss"] and found["grad_norm/expert"] == line["grad_norm_parts"]["expert"]
    for layer in line["moe"]:
        where, load = f"layer_{layer['layer']}", layer["load"]
        assert found[f"{where}/load_mean"] == pytest.approx(1)
        assert found[f"{where}/load_max"] == pytest.approx(6 * max(load)) and found[f"{where}/load_min"] == pytest.approx(6 * min(load))
        assert found[f"{where}/dropped"] == layer["dropped"]
    assert not {"step", "kind", "time", "skipped"} & set(found)
    assert dict(scalars({"kind": "eval", "step": 7, "validation_loss": 2.0, "bits_per_byte": 3.0})) == {
        "validation/loss": 2.0,
        "validation/bits_per_byte": 3.0,
    }
    assert not list(scalars({"kind": "event", "step": 7, "event": "saved", "bytes": 3}))
    assert dict(scalars({"step": 1, "loss": None, "grad_norm_parts": None, "moe": [{"layer": 0, "load": [None, 1.0]}]})) == {}


def test_tensorboard_holds_the_same_numbers_also_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with closing(Records(tmp_path)) as records:
        for step in range(1, 7):
            records.write(step_line(step) | {"loss": 10.0 + step})
    with closing(Records(tmp_path, resume_step=4)) as records:
        for step in range(5, 9):
            records.write(step_line(step) | {"loss": 20.0 + step})
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    shown = [(event.step, event.value) for event in board.Scalars("loss")]
    assert shown == [(line["step"], line["loss"]) for line in read(tmp_path)]


def test_summary_reads_back_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    assert read_summary(tmp_path) is None
    write_summary(tmp_path, summary())
    assert read_summary(tmp_path) == summary()
    write_summary(tmp_path, {"validation_loss": math.nan})
    assert strict((tmp_path / "summary.json").read_text()) == {"validation_loss": None, "nonfinite": ["validation_loss"]}
    for damage in ("{", "[1]"):
        (tmp_path / "summary.json").write_text(damage)
        with pytest.raises(BadInput, match="summary.json"):
            read_summary(tmp_path)


def test_a_folder_that_is_removed_ends_the_run_in_one_line(tmp_path: Path) -> None:
    records = Records(tmp_path / "run")
    records.write({"step": 1})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(BadInput, match=r"metrics.jsonl or its folder was removed or renamed"):
        records.write({"step": 2})
    records.close()


def test_a_norm_beyond_whole_numbers_is_a_line_like_others(tmp_path: Path, no_tensorboard: None) -> None:
    records = Records(tmp_path)
    for step, norm in ((1, 1e30), (2, 1.0)):
        records.write({"step": step, "grad_norm": norm, "grad_norm_parts": {"dense": norm}})
    records.close()
    assert [line["grad_norm"] for line in read(tmp_path)] == [1e30, 1.0]


def test_what_was_made_again_is_counted_from_whole_lines_alone(tmp_path: Path) -> None:
    assert going_on(tmp_path, 3, None)["redone_steps"] == 0
    lines = [{"step": 4, "kind": "train"}, {"step": 5, "kind": "train", "step_seconds": 2.0}, {"step": 1, "so_far": {}}]
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = going_on(tmp_path, 3, None)
    assert (found["redone_steps"], found["redone_seconds"], found["so_far"]["resumes"]) == (2, 2.0, 1)
    (tmp_path / METRICS).unlink()
    os.mkfifo(tmp_path / METRICS)
    with pytest.raises(BadInput, match="not a regular file, needed a run's metrics.jsonl; fix: move it away"):
        going_on(tmp_path, 3, None)


def test_latest_lines_parses_only_the_lines_that_it_may_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`latest_lines` equals a filter of all lines, but parses only lines that may pass the filter."""
    path, lines = tmp_path / METRICS, [dict(line) for line in run_lines(40, eval_every=7)]
    lines[3] |= {"so_far": {"resumes": 1}}
    lines[5] = {"step": 60, "kind": "train", "note": '"step": 3'}  # as in a file that a user has edited
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 41, "ki')
    wanted = [line for line in whole_lines(path) if line["step"] > 35 or "so_far" in line]
    parsed: list[bytes] = []
    parse = metrics._parse
    monkeypatch.setattr(metrics, "_parse", lambda text: parsed.append(text) or parse(text))
    assert metrics.latest_lines(path, 35, key="so_far") == wanted and len(wanted) > 6
    assert len(parsed) <= len(wanted) + 2  # the half-written last line is parsed too
    parsed.clear()
    assert metrics.first_time(path) == lines[0]["time"] and len(parsed) == 1


@pytest.mark.parametrize("redone", [[1], {"resumes": "x"}, {"resumes": None}, 7])
def test_a_summary_whose_repeats_are_no_numbers_is_refused(redone: Any, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"redone": redone}))
    with pytest.raises(BadInput, match="summary.json: got values that no run writes"):
        read_summary(tmp_path)
    assert dict(summary_rows({"redone": {"resumes": 1}}))  # an earlier release may have written only this key


def test_a_board_that_cannot_close_does_not_hide_why_the_run_ends(tmp_path: Path) -> None:
    class Full:
        def close(self) -> None:
            raise OSError("No space left on device")

    said: list[str] = []
    records = Records(tmp_path, say=said.append)
    records._boards = {"TensorBoard": Full()}  # type: ignore[dict-item]
    records.close()
    assert len(said) == 1 and "No space left" in said[0]


@pytest.mark.parametrize(
    "line",
    [{"step": True}, {"step": 10**30}, {"step": 1, "moe": 5}, {"step": 1, "moe": [{"layer": "x"}]}, {"step": 1, "grad_norm_parts": 7}]
    + [
        {"step": 1, "so_far": 3},
        {"step": 1, "so_far": {"steps": None}},
        {"step": 1, "time": 10**12},
        {"step": 1, "loss": 10**400},
        {"step": 1, "moe": [{"layer": 1, "load": ["x"]}]},
    ],
)
def test_lines_that_no_run_writes_are_refused(line: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text(json.dumps(line) + "\n" + json.dumps({"step": 2}) + "\n")
    with pytest.raises(BadInput, match="line 1"):
        read(tmp_path)
