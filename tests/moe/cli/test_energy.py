"""`moe energy` plans from a profile, a power model or a recipe. Only --apply sets GPU clocks (of a fake NVML), which are restored."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe.cli import main as cli
from parallel.pipeline.energy.clocks import PowerModel, read_profile
from parallel.pipeline.energy.energy import envpipe
from parallel.pipeline.energy.nvml import Gpus, NoControl, connect, rehearse
from parallel.pipeline.schedule import Action, Op
from tests.support.fake_nvml import FakeNvml, NvmlError

HEAVY = ["--microbatches", "16", "--forward-time", "0.01,0.01,0.01,0.013", "--backward-time", "0.02,0.02,0.02,0.026"]


def row_of(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text())
    assert value["verb"] == "energy" and len(value["rows"]) == 1
    return value["rows"][0]  # type: ignore[no-any-return]


def profile_file(path: Path, times: list[tuple[float, float]], idle_w: float = 40) -> Path:
    def of(seconds: float) -> dict[str, Any]:
        return {f"{clock.mhz}": {"s": clock.time, "j": clock.energy} for clock in PowerModel().clocks(seconds)}

    path.write_text(json.dumps({"idle_w": idle_w, "stages": [{"F": of(f), "B": of(b)} for f, b in times]}))
    return path


# --- the power model -------------------------------------------------------------------------------------------------


def test_the_power_model_has_a_valley_and_says_what_it_states() -> None:
    clocks = {clock.mhz: clock for clock in PowerModel().clocks(0.01)}
    full, slow = clocks[1530], clocks[810]
    assert list(clocks) == list(range(810, 1531, 90)) and full.time == 0.01 and full.energy == pytest.approx(0.01 * 300)
    assert slow.time == pytest.approx(0.01 * (0.2 + 0.8 * 1530 / 810))
    assert slow.energy / slow.time == pytest.approx(50 + 250 * 810 / 1530 * 0.65**2)
    above = [clock.energy - 40 * clock.time for clock in PowerModel(static_w=140, dynamic_w=160).clocks(0.01)]
    assert 0 < above.index(min(above)) < len(above) - 1  # with more fixed power, a clock between slowest and fastest is the cheapest


# --- moe energy ------------------------------------------------------------------------------------------------------


def test_the_claim_of_the_paper_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With one slow stage, over a fifth of the energy is saved at a slowdown below 1 % (EnvPipe's paper: up to 25.2 %)."""
    files = [tmp_path / name for name in ("row.json", "plan.json", "plan.png")]
    words = ["energy", *HEAVY, "--slowdown", "0.01", "--json", str(files[0])]
    assert cli.main([*words, "--out", str(files[1])]) == 0 and cli.main([*words, "--out", str(files[2])]) == 0
    row, plan = row_of(files[0]), json.loads(files[1].read_text())
    assert row["saved"] > 0.2 and 0 <= row["slowdown"] < 0.01 and row["uniform"]["slowdown"] > 0.5
    assert plan["saved"] == row["saved"] and sum(row["energy_j_by_rank"]) == pytest.approx(row["energy_j"]) == plan["energy_j"]
    assert files[2].read_bytes()[:4] == b"\x89PNG"
    said = capsys.readouterr().out
    assert "of the energy saved" in said and "assumed, not measured: 300 W at 1530 MHz" in said and "planned only" not in said


def test_a_measured_profile_gives_the_plan_of_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = [(0.01, 0.02), (0.012, 0.025), (0.011, 0.022)]
    file = profile_file(tmp_path / "profile.json", times)
    words = ["energy", "--profile", str(file), "--microbatches", "6", "--json", str(tmp_path / "row.json")]
    assert cli.main(words) == 0
    assert "assumed, not measured" not in capsys.readouterr().out
    measured = read_profile(file)
    row, plan = row_of(tmp_path / "row.json"), envpipe(3, 6, measured, idle_power=40)
    assert (row["stages"], row["energies"], row["saved"]) == (3, "measured", plan.saved)
    assert cli.main([*words, "--ahead", "0"]) == 0
    assert row_of(tmp_path / "row.json")["saved"] <= plan.saved
    half, whole = measured(1, Action(Op.W, 1, 0)), measured(1, Action(Op.B, 1, 0))
    assert [2 * clock.time for clock in half] == pytest.approx([clock.time for clock in whole])
    assert cli.main([*words[:3], "zb_h1", *words[3:]]) == 0 and row_of(tmp_path / "row.json")["schedule"] == "zb_h1"


def test_a_recipe_and_a_csv_are_planned(tmp_path: Path) -> None:
    assert cli.main(["energy", "chimera", "--recipe", "dense_tiny", "--stages", "2", "--json", str(tmp_path / "a.json")]) == 0
    row = row_of(tmp_path / "a.json")
    assert row["saved"] > 0 and row["slowdown"] <= 1e-6 and row["makespan"] < 0.01
    (tmp_path / "mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert cli.main(["energy", str(tmp_path / "mine.csv"), "--json", str(tmp_path / "a.json")]) == 0
    assert row_of(tmp_path / "a.json")["makespan"] == pytest.approx(0.09)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("chimaera", "schedule: got chimaera, needed one of naive"),
        ("1f1b --stages 0", "--stages: got 0, needed at least 1; fix: --stages 1"),
        ("--slowdown -1", "--slowdown: got -1.0, needed a share from 0 to 10; fix: --slowdown 0.01"),
        ("gpipe --ahead 2", "--ahead: got --ahead for gpipe, needed at least 0, and the schedule 1f1b"),
        ("--ahead -1", "--ahead: got -1, needed at least 0"),
        ("--steps 2", "--steps: got 2, needed at least 1, with --apply; fix: --apply --steps 1"),
        ("--out x.csv", "--out: got x.csv, needed *.json (the plan), *.png (a picture); fix: --out x.json"),
        ("--out .", "--out: got ., needed *.json (the plan), *.png (a picture); fix: --out plan.json"),
        ("--out two.csv/x.png", "--out: got two.csv/x.png: {here}/two.csv is no folder, needed a file that can be written"),
        ("--out two.csv/x.json", "--out: got two.csv/x.json: {here}/two.csv is no folder"),
        ("--forward-time 0", "--forward_time: got 0, needed a time above 0"),
        ("--tflops 3", "--tflops: got --tflops without a recipe"),
        ("--model.d_ff 3", "--model.d_ff: got --model.d_ff without a recipe"),
        ("--recipe dense_tiny --forward-time 1", "--forward_time: got --forward_time with --recipe"),
        ("--profile none.json", "--profile: got none.json: No such file or directory, needed {\"idle_w\": 40"),
        ("--profile p.json --recipe dense_tiny", "--recipe: got --recipe with --profile"),
        ("--profile p.json --transfer-time 1", "--transfer_time: got --transfer_time with --profile"),
        ("--profile p.json --stages 4", "--profile: got 2 stages, needed the 4 stages of 1f1b; fix: other --stages, or another profile"),
        ("two.csv --microbatches 3", "--microbatches: got --microbatches with two.csv"),
    ],
)  # fmt: skip
def test_wrong_words_are_one_line(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    profile_file(tmp_path / "p.json", [(0.01, 0.02)] * 2)
    Path("two.csv").write_text("0F0,0B0\n1F0,1B0\n")
    assert cli.main(["energy", *words.split()]) == 2
    got = capsys.readouterr().err
    assert got.startswith(f"error: {said.replace('{here}', str(tmp_path))}") and got.count("\n") == 1


CLOCK = '{"1530": {"s": 1, "j": 2}}'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no JSON"),
        ("[]", "no list of stages"),
        ('{"stages": []}', "no list of stages"),
        ('{"stages": [3]}', "no list of stages"),
        ('{"stages": [{"F": {}}]}', "stage 0 with F"),
        ('{"stages": [{"F": CLOCK, "B": {}}]}', "stage 0 B without a clock"),
        ('{"stages": [{"F": CLOCK, "B": {"x": {"s": 1, "j": 2}}}]}', "stage 0 B without a clock"),
        ('{"stages": [{"F": CLOCK, "B": {"810": {"s": 0, "j": 2}}}]}', "stage 0 B without a clock"),
        ('{"stages": [{"F": CLOCK, "B": {"810": [1, 2]}}]}', "stage 0 B without a clock"),
        ('{"stages": [{"F": CLOCK, "B": {"DIGITS": {"s": 1, "j": 2}}}]}', "stage 0 B without a clock"),
        ('{"idle_w": -1, "stages": [{"F": CLOCK, "B": CLOCK}]}', "idle_w -1"),
        ('{"idle_w": true, "stages": [{"F": CLOCK, "B": CLOCK}]}', "idle_w True"),
    ],
)  # fmt: skip
def test_a_wrong_profile_is_one_line(content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.json").write_text(content.replace("CLOCK", CLOCK).replace("DIGITS", "9" * 5000))
    assert cli.main(["energy", "--profile", str(tmp_path / "p.json")]) == 2
    got = capsys.readouterr().err
    assert said in got and got.count("\n") == 1


# --- clocks of GPUs --------------------------------------------------------------------------------------------------


def test_a_plan_is_carried_out_in_its_order_and_every_clock_is_given_back() -> None:
    plan = envpipe(
        2, 3, lambda rank, a: PowerModel().clocks({Op.F: 1, Op.B: 2}[a.op]) if a.op in (Op.F, Op.B) else [NO_CLOCK], idle_power=40
    )
    nvml, clock = FakeNvml(), SimpleNamespace(now=5.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    with connect(2, nvml) as gpus:
        tried = len(nvml.set)
        assert nvml.set == [(0, 1530), (1, 1530)] and not nvml.locked  # `connect` locks a clock to test its rights, and unlocks it
        done = rehearse(plan, gpus, steps=2, sleep=sleep, now=lambda: clock.now)
    assert not nvml.locked and not nvml.open
    assert done.changes == len(nvml.set) - tried and done.latest_s == 0 and done.joules == (done.changes,) * 2
    for rank in range(2):
        wanted = [c.mhz for c in plan.clocks[rank] if c.mhz] * 2
        changes = [mhz for at, mhz in enumerate(wanted) if at == 0 or mhz != wanted[at - 1]]
        assert [mhz for gpu, mhz in nvml.set[tried:] if gpu == rank] == changes
    assert clock.now == pytest.approx(5.0 + plan.timeline.makespan + max(spans[-1].start for spans in plan.timeline.spans))


NO_CLOCK = PowerModel().clocks(1)[0]._replace(mhz=0, time=0, energy=0)


def test_clocks_are_given_back_after_an_error_too() -> None:
    nvml = FakeNvml()
    with pytest.raises(ZeroDivisionError), connect(2, nvml) as gpus:
        gpus.lock(1, 900)
        assert nvml.locked == {1: 900} and not gpus.lock(1, 900) and not gpus.lock(0, 0)
        raise ZeroDivisionError
    assert not nvml.locked and not nvml.open


def test_one_that_cannot_be_given_back_does_not_keep_the_others() -> None:
    nvml = FakeNvml()
    gpus = Gpus(nvml, ["gone", 1], [810, 900])  # type: ignore[list-item]
    nvml.locked = {1: 900}

    def reset(handle: Any) -> None:
        if handle == "gone":
            raise NvmlError("GPU is lost")
        del nvml.locked[handle]

    nvml.nvmlDeviceResetGpuLockedClocks = reset  # type: ignore[method-assign]
    with pytest.raises(NvmlError, match="lost"):
        gpus.release()
    assert not nvml.locked and gpus.locked == [810, 0]


@pytest.mark.parametrize(
    ("nvml", "said"),
    [
        (FakeNvml(starts=False), "NVML does not start: Driver Not Loaded"),
        (FakeNvml(gpus=1), "1 GPU here, 2 needed: one a rank"),
        (FakeNvml(allowed=False), "the clocks of these GPUs may not be set: Insufficient Permissions (setting them needs root)"),
    ],
)
def test_without_gpus_or_the_right_to_set_them_one_line_says_so(
    nvml: FakeNvml, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NoControl), connect(2, nvml):
        raise AssertionError
    assert not nvml.set and not nvml.open
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    assert cli.main(["energy", "--stages", "2", "--apply"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"planned only: {said}"


def test_only_apply_touches_clocks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    fast = ["energy", "--stages", "2", "--forward-time", "1e-4", "--backward-time", "2e-4"]
    assert cli.main(fast) == 0 and not nvml.set
    assert cli.main([*fast, "--apply", "--steps", "2"]) == 0
    assert nvml.set and not nvml.locked and "then restored" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
    assert cli.main([*fast, "--apply"]) == 0
    assert "planned only: no NVML here: pip install nvidia-ml-py" in capsys.readouterr().out
