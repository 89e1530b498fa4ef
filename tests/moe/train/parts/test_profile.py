"""`moe train --profile`: the regions' times add up to the step, and a backward operation counts for its forward operation's region."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from moe.train.parts.profile import STEP, Recording, Spent, spent, table
from parallel.mesh.regions import PREFIX, in_region, region
from parallel.numerics.recompute import recomputed
from tests.support import trained


@in_region("small")
def small(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class _Slow(torch.autograd.Function):
    """An operation that takes at least 10 ms forward and 20 ms backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return grad


@in_region("large")
def large(x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _Slow.apply(x @ x)  # type: ignore[no-untyped-call]
    return out


@pytest.mark.parametrize("again", [False, True])
def test_regions_add_up_to_the_step_and_backward_counts_for_the_forward_region(again: bool) -> None:
    x = torch.randn(30, 30, requires_grad=True)
    work = (lambda x: recomputed(large, x)) if again else large
    (work(x) + small(x)).sum().backward()  # warm-up: one-time costs are not measured
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        large(x)  # not counted, because it is outside the step
        for _ in range(2):
            with region(STEP):
                loss = (work(x) + small(x)).sum()
                with region("outer"), region("inner"):
                    loss.backward()
    events = recorded.events()
    assert events is not None
    rows = {row.region: row for row in spent(events, steps=[1, 1])}
    assert rows.keys() == {"small", "large", "between", "outer", "inner"}
    steps = [event.cpu_time_total / 1e3 for event in events if event.name == PREFIX + STEP]
    assert sum(row.forward + row.backward for row in rows.values()) == pytest.approx(min(steps), rel=1e-3)
    assert rows["large"].forward >= 10 and rows["large"].backward >= (30 if again else 20) and rows["small"].backward > 0
    assert rows["inner"].backward == 0.0  # the region in which backward() is called does not count


def test_without_a_profiler_a_region_changes_nothing() -> None:
    x = torch.randn(3, 3)
    with region("here") as entered:
        assert entered is None
    assert torch.equal(small(x), x * 2) and small.__name__ == "small"


def test_steps_that_are_made_together_share_their_time() -> None:
    x = torch.randn(20, 20)
    with profile(activities=[ProfilerActivity.CPU]) as recorded, region(STEP):
        large(x)
    one, four = ({row.region: row.forward for row in spent(recorded.events() or (), steps=[n])} for n in (1, 4))
    assert one == pytest.approx({name: 4 * time for name, time in four.items()}) and one.keys() == {"large", "between"}


def test_a_run_writes_a_trace_and_a_table_of_its_regions(home: Path, tmp_path: Path) -> None:
    run = trained.recipe(home, degrees={"pp": 2}, train={"steps": 6, "save_every": 6}, pipeline={"microbatches": 2})
    trained.train(run, tmp_path, ranks=2, profile=True)
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {f"rank-{n}.{kind}" for n in (0, 1) for kind in ("json.gz", "txt")}
    for rank, own in ((0, "embedding"), (1, "head")):
        events = json.loads(gzip.decompress((tmp_path / f"profile/rank-{rank}.json.gz").read_bytes()))["traceEvents"]
        assert sum(event["name"] == PREFIX + STEP for event in events) == 3
        rows = {line.split("  ")[0]: line.split()[-1] for line in (tmp_path / f"profile/rank-{rank}.txt").read_text().splitlines()}
        assert {own, "attention", "network" if rank == 0 else "experts", "wait for a message", "optimizer", "between"} <= rows.keys()
        assert rows["all"] == "100.0%" and not {"embedding", "head"} - {own} & rows.keys()


def test_a_run_too_short_for_it_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    recording = Recording(tmp_path / "profile", "rank-0", note=said.append, device=torch.device("cpu"))
    assert recording.of(lambda: ["made"]) == ["made"]
    recording.close()
    assert said == ["--profile has no effect: it records from step 3 of a process on, and this one made 1"]
    assert not (tmp_path / "profile").exists()


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file in the place of the folder")
    said: list[str] = []
    recording = Recording(tmp_path / "profile", "rank-0", note=said.append, device=torch.device("cpu"))
    assert [recording.of(lambda: ["made"]) for _ in range(7)] == [["made"]] * 7
    assert len(said) == 1 and said[0].startswith(f"no profile in {tmp_path / 'profile'} (FileExistsError")


class Moment(NamedTuple):
    """The fields of torch's FunctionEvent that `spent` reads. cpu_parent: the enclosing event; None at the top of a thread."""

    name: str
    begin: float
    end: float
    cpu_parent: Any = None
    sequence_nr: int = -1

    @property
    def time_range(self) -> Any:
        return SimpleNamespace(start=self.begin, end=self.end)

    @property
    def self_cpu_time_total(self) -> float:
        return 1000.0

    self_device_time_total = 3000.0


def test_a_backward_pass_in_another_thread_counts_for_its_region() -> None:
    """With a GPU, autograd runs the backward pass in a thread of its own, so backward events are not inside the step's event."""
    step = Moment(PREFIX + STEP, 0, 100)
    route = Moment(PREFIX + "route", 1, 10, step)
    node = Moment("autograd::engine::evaluate_function: MulBackward0", 50, 60, sequence_nr=7)
    late = Moment("autograd::engine::evaluate_function: MulBackward0", 150, 160, sequence_nr=7)
    events = [step, route, Moment("aten::mul", 2, 3, route, 7), node, Moment("aten::mul", 51, 52, node), late]
    rows = {row.region: row for row in spent(events, steps=[1])}
    assert rows["route"] == Spent("route", 2.0, 2.0, 12.0) and rows["between"].forward == 1.0


def test_a_table_of_a_gpu_has_its_kernels() -> None:
    head, row, whole = table([Spent("experts", 1.0, 2.0, 8.0)])
    assert head.split()[-2:] == ["kernels", "ms"] and row.split()[-1] == whole.split()[-1] == "8.00"
