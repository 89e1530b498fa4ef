"""`pipeline.energy_plan`: a run executes the plan's order and, if NVML permits, sets its GPU clocks; losses stay equal. NVML is a fake."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe.checks.pipeline import check_pipeline
from moe.cli import main as cli
from moe.plan.pipeline import energy_plan, schedule_of
from moe.recipe.sections import Run
from moe.records import progress
from moe.train.parts import energy_clocks as clocks
from parallel.errors import BadInput
from parallel.pipeline.energy.clocks import Clock, PowerModel, Profile
from parallel.pipeline.energy.energy import EnergyPlan, plan_clocks
from parallel.pipeline.energy.nvml import ClockSetter, Gpus, NoControl, connect
from parallel.pipeline.energy.plan_file import read_plan, write_plan
from parallel.pipeline.schedule import Action, Op, Schedule
from parallel.pipeline.schedules import make_schedule
from parallel.pipeline.schedules.one_f_one_b import one_f_one_b
from tests.support import trained
from tests.support.fake_nvml import FakeNvml

STEPS, MICROBATCHES = 2, 4


def heavy_last(schedule: Schedule) -> Profile:
    """Return a profile in which actions of the last stage take 1.4 times as long."""
    model, last = PowerModel(), schedule.num_stages - 1
    seconds = {Op.F: 0.01, Op.B: 0.02, Op.I: 0.01, Op.W: 0.01}
    return lambda rank, a: model.clocks(seconds[a.op] * (1.4 if a.stage == last else 1)) if a.op in seconds else [Clock(0, 0, 0)]


def plan_of(schedule: Schedule) -> EnergyPlan:
    return plan_clocks(schedule, heavy_last(schedule), idle_power=40)


AHEAD = plan_of(one_f_one_b(2, MICROBATCHES, extra_warmup=[1, 0]))  # its order differs from the default 1F1B


def staged(home: Path, plan: Path | None, **pipeline: Any) -> Run:
    named = {"energy_plan": None if plan is None else str(plan)}
    return trained.recipe(
        home, degrees={"pp": 2}, pipeline={"microbatches": MICROBATCHES} | named | pipeline, train={"steps": STEPS, "save_every": 0}
    )


def planned(folder: Path, plan: EnergyPlan = AHEAD) -> Path:
    write_plan(plan, folder / "plan.json")
    return folder / "plan.json"


# --- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "chimera", "zb_h1", "dualpipe_v"])
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    schedule = make_schedule(name, ranks=2, microbatches=MICROBATCHES)
    plan = plan_of(schedule)
    found = read_plan(planned(tmp_path, plan), schedule, what="plan", fix="none")
    assert found.schedule == schedule
    for rank, order in enumerate(schedule.orders):
        assert found.mhz[rank] == {action: clock.mhz for action, clock in zip(order, plan.clocks[rank], strict=True)}


def test_the_order_of_a_plan_is_what_runs(home: Path, tmp_path: Path) -> None:
    run = staged(home, planned(tmp_path))
    assert schedule_of(run) == AHEAD.schedule != schedule_of(staged(home, None))


def test_a_plan_by_the_command_line_fits_its_recipe(home: Path, tmp_path: Path) -> None:
    for words in ("1f1b --stages 2 --microbatches 4", "chimera --stages 2 --microbatches 4"):
        out = tmp_path / f"{words[:4]}.json"
        assert cli.main(["energy", *words.split(), "--out", str(out)]) == 0
        run = staged(home, out, schedule=words.split()[0])
        check_pipeline(run)
        assert energy_plan(run).schedule == schedule_of(run)


def spoiled(change: Callable[[dict[str, Any]], Any]) -> str:
    """Return the JSON text of a plan that `change` has modified."""
    order = [[{"action": str(a), "mhz": c.mhz} for a, c in zip(*both, strict=True)] for both in zip(AHEAD.schedule.orders, AHEAD.clocks)]  # noqa: B905
    value = {"schedule": "1f1b", "ranks": order}
    change(value)
    return json.dumps(value)


@pytest.mark.parametrize(
    ("text", "got"),
    [
        (None, "No such file or directory"),
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "no plan"),
        ('{"schedule": "1f1b"}', "no plan"),
        ('{"schedule": "1f1b", "ranks": [3, 4]}', "no plan"),
        (spoiled(lambda v: v["ranks"][0][0].update(mhz="fast")), "no plan"),
        (spoiled(lambda v: v["ranks"][0][0].update(mhz=-1)), "no plan"),
        (spoiled(lambda v: v["ranks"][0][0].update(mhz=float("nan"))), "no plan"),
        (spoiled(lambda v: v.update(schedule="gpipe")), "a plan of gpipe"),
        (spoiled(lambda v: v["ranks"].append([])), "a plan of 3 ranks"),
        (spoiled(lambda v: v["ranks"][1].pop()), "rank 1 with 1U@1 0 times"),
        (spoiled(lambda v: v["ranks"][1].append(v["ranks"][1][0])), "rank 1 with 1F0 2 times"),
        (spoiled(lambda v: v["ranks"][0][0].update(action="0F9")), "rank 0 with 0F9"),
    ],
)
def test_another_file_is_refused_in_one_line(text: str | None, got: str, home: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    if text is not None:
        file.write_text(text)
    needed = "needed a plan of 1f1b with 2 ranks, 2 stages, 4 micro-batches, made by moe energy"
    fix = "fix: moe energy 1f1b --stages 2 --microbatches 4 --out plan.json, or set it to null"
    with pytest.raises(BadInput, match=re.escape(f"pipeline.energy_plan: got {file}: {got}, {needed}; {fix}")):
        check_pipeline(staged(home, file))


def test_an_order_that_cannot_end_and_plans_that_nothing_can_use_are_refused(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(spoiled(lambda v: v["ranks"][0].reverse()))
    with pytest.raises(BadInput, match="schedule 1f1b: got a deadlock"):
        check_pipeline(staged(home, file))
    for changed, said in (
        (
            {"degrees": {"pp": 1}},
            "pipeline.energy_plan: got a plan with degrees.pp=1, needed stages, .*; fix: set it to null, or degrees.pp to 2",
        ),
        ({"pipeline": {"schedule": "two_bw"}}, "got a plan with two_bw, .*; fix: set it to null, or pipeline.schedule to 1f1b"),
    ):
        run = staged(home, planned(tmp_path))
        run = run.model_copy(update={name: getattr(run, name).model_copy(update=fields) for name, fields in changed.items()})
        with pytest.raises(BadInput, match=said):
            check_pipeline(run)
    pairs = plan_of(make_schedule("dualpipe_v", ranks=2, microbatches=MICROBATCHES))
    orders = tuple((order[1], order[0], *order[2:]) for order in pairs.schedule.orders)
    with pytest.raises(BadInput, match="another order"):
        read_plan(planned(tmp_path, replace(pairs, schedule=replace(pairs.schedule, orders=orders))), pairs.schedule, what="p", fix="f")


# --- one rank's clocks -----------------------------------------------------------------------------------------------


def changes(plan: EnergyPlan, rank: int, *, steps: int = 1) -> list[str]:
    """Return the expected NVML calls: MHz to lock if an action's clock differs from the clock before, and "free" at an update."""
    told: list[str] = []
    for action, clock in list(zip(plan.schedule.orders[rank], plan.clocks[rank], strict=True)) * steps:
        word = "free" if action.op is Op.U else f"{clock.mhz:g}" if clock.mhz else ""
        if word and word != (told[-1] if told else "free"):
            told.append(word)
    return told


class Told(FakeNvml):
    """A fake NVML that appends each call to `file`: the MHz of a lock, or "free" for an unlock."""

    def __init__(self, file: Path, **settings: Any) -> None:
        super().__init__(**settings)
        self.file = file

    def say(self, word: str) -> None:
        with self.file.open("a") as file:
            print(word, file=file)

    def nvmlDeviceSetGpuLockedClocks(self, handle: int, low: int, high: int) -> None:  # noqa: N802
        super().nvmlDeviceSetGpuLockedClocks(handle, low, high)
        self.say(str(low))

    def nvmlDeviceResetGpuLockedClocks(self, handle: int) -> None:  # noqa: N802
        super().nvmlDeviceResetGpuLockedClocks(handle)
        self.say("free")


def test_a_clock_changes_when_the_gpu_has_done_what_was_before() -> None:
    nvml, seen = FakeNvml(), []
    with connect(["GPU-1"], nvml) as gpus:
        tried = len(nvml.set)
        mhz = {Action(Op.F, 0, 0): 900.0, Action(Op.F, 0, 1): 900.0, Action(Op.B, 0, 0): 1530.0, Action(Op.S, 0, version=1): 0.0}
        pace = ClockSetter(gpus, mhz, settle=lambda: seen.append(dict(nvml.locked)), lost=pytest.fail)
        for action in (*mhz, Action(Op.U, 0, version=1), Action(Op.U, 1, version=1)):
            pace.before(action)
    assert nvml.set[tried:] == [(1, 900), (1, 1530)] and seen == [{}, {1: 900}, {1: 1530}] and not nvml.locked


def test_a_driver_that_begins_to_refuse_is_asked_no_more() -> None:
    nvml, said = FakeNvml(), []
    gpus = Gpus(nvml, [0], [0.0])
    nvml.open = True
    pace = ClockSetter(gpus, {Action(Op.F, 0, j): 900.0 + j for j in range(3)}, settle=lambda: None, lost=said.append)
    pace.before(Action(Op.F, 0, 0))
    nvml.allowed = False
    pace.before(Action(Op.F, 0, 1))
    pace.before(Action(Op.F, 0, 2))
    assert said == ["Insufficient Permissions"] and nvml.set == [(0, 900)] and not nvml.locked and gpus.locked == [0]


def test_a_gpu_that_is_not_there_is_no_control() -> None:
    with pytest.raises(NoControl, match="Not Found"), connect(["GPU-7"], FakeNvml()):
        raise AssertionError


# --- training --------------------------------------------------------------------------------------------------------


def watched(folder: Path, *, allowed: tuple[bool, ...] | None = None, then: Callable[[], Any] | None = None) -> Callable[[int], None]:
    """Return a `before` function that writes a rank's notes to a file. allowed: whether each rank may set its fake GPU's clock (None: no
    GPUs). then: called when step 1 is recorded."""

    def before(rank: int) -> None:
        def note(self: Any, text: str) -> None:
            with (folder / f"notes-{rank}").open("a") as file:
                print(text, file=file)

        progress.Progress.note = note  # type: ignore[method-assign]
        if allowed is not None:
            sys.modules["pynvml"] = Told(folder / f"told-{rank}", allowed=allowed[rank])  # type: ignore[assignment]
            clocks.gpu_of = lambda device: f"GPU-{rank}"
        if then is not None:
            trained.on_line(1, then)

    return before


def told(folder: Path, rank: int) -> list[str]:
    return (folder / f"told-{rank}").read_text().split()


@pytest.fixture(scope="module")
def plain(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without a plan."""
    out = tmp_path_factory.mktemp("plain")
    trained.train(staged(home, None), out, ranks=2)
    return out


@pytest.mark.parametrize(
    ("allowed", "why"),
    [
        (None, "this rank computes on a CPU, and plans are for GPUs"),
        ((False, False), "the clocks of these GPUs may not be set: Insufficient Permissions (setting them needs root)"),
        ((True, False), "rank 1 cannot set its GPU's clock"),
    ],
)
def test_without_control_of_the_clocks_a_run_says_so_and_is_the_same(
    allowed: tuple[bool, ...] | None, why: str, home: Path, plain: Path, tmp_path: Path
) -> None:
    trained.train(staged(home, planned(tmp_path)), tmp_path / "run", ranks=2, before=watched(tmp_path, allowed=allowed))
    assert trained.losses(tmp_path / "run") == trained.losses(plain) and len(trained.losses(plain)) == STEPS
    said = [line for line in (tmp_path / "notes-0").read_text().splitlines() if line.startswith("energy plan")]
    assert said == [f"energy plan: not applied: {why}; training continues at the current clocks"]
    for rank, may in enumerate(allowed or ()):
        assert told(tmp_path, rank) == ["1530", "free"] if may else not (tmp_path / f"told-{rank}").exists()


def test_training_locks_what_the_plan_says_and_gives_it_back(home: Path, plain: Path, tmp_path: Path) -> None:
    trained.train(staged(home, planned(tmp_path)), tmp_path / "run", ranks=2, before=watched(tmp_path, allowed=(True, True)))
    assert trained.losses(tmp_path / "run") == trained.losses(plain)
    for rank in range(2):
        assert told(tmp_path, rank) == ["1530", "free", *changes(AHEAD, rank, steps=STEPS)]
    assert len(set(told(tmp_path, 0))) > 2 and "clocks of 2 GPUs follow" in (tmp_path / "notes-0").read_text()


@pytest.mark.parametrize("how", ["error", "signal"])
def test_clocks_are_given_back_however_a_run_ends(how: str, home: Path, tmp_path: Path) -> None:
    """GPU clocks are unlocked after a signal, and after an error in the middle of a step."""

    def before(rank: int) -> None:
        watched(tmp_path, allowed=(True, True))(rank)
        if how == "signal":
            trained.stop_at(1)(rank)
            return
        pace = ClockSetter.before

        def broken(self: ClockSetter, action: Action) -> None:
            pace(self, action)
            if action == Action(Op.B, rank, 1):
                raise ZeroDivisionError

        ClockSetter.before = broken  # type: ignore[method-assign]

    run = staged(home, planned(tmp_path))
    run = run.model_copy(update={"train": run.train.model_copy(update={"steps": 5})})
    if how == "error":
        with pytest.raises(AssertionError, match="ZeroDivisionError"):
            trained.train(run, tmp_path / "run", ranks=2, before=before)
    else:
        assert trained.train(run, tmp_path / "run", ranks=2, before=before) == [trained.STOPPED] * 2
    for rank in range(2):
        words = told(tmp_path, rank)
        assert words[-1] == "free" and len(words) > 3
        assert words[2:-1] == changes(AHEAD, rank, steps=5)[: len(words) - 3]
