"""`moe verify --device`: cases on ranks that are started as `moe train` starts them. Here with gloo; on a GPU only the device differs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe.verify import verify
from moe.verify.cases import Case
from moe.verify.expected import Expected, twin_of
from moe.verify.started import run_started
from moe.verify.verify import judged
from parallel.errors import BadInput

CASE = Case("switch", "ddp", 2, 2, 1, "fp32")


def test_started_ranks_give_the_numbers_of_the_twin_and_their_errors() -> None:
    """Three cases in the same processes: experts over ranks, PipeDream's stream of steps, and kernels that do not exist."""
    streamed = replace(CASE, model="dense", ep=1, pp=2, schedule="pipedream")
    *found, (_, ran) = run_started([CASE, streamed, replace(CASE, kernels="fastest")], 2)
    for case, numbers in found:
        assert judged(case, numbers, Expected.of(twin_of(case)))["passed"], numbers
    assert isinstance(ran, str) and "rank 1 failed" in ran and "experts.kernels: got fastest" in ran


@pytest.mark.parametrize(
    ("device", "nproc", "seen", "line"),
    [
        ("tpu", None, 1, "--device: got tpu, needed one of cuda, cpu; fix: --device cuda"),
        ("cuda", None, 0, "--device: got cuda, but torch sees no GPU, needed a GPU; fix: "),
        ("cuda", 2, 1, "--nproc: got 2, needed at most the 1 GPU of this machine; fix: --nproc 1"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    device: str, nproc: int | None, seen: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "gpus", lambda: seen)
    with pytest.raises(BadInput, match=line):
        verify.main(device=device, nproc=nproc)


def test_on_a_gpu_one_process_runs_with_each_kind_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs are made up; no rank starts. Rows of several ranks take the kernels that the trainer would take."""
    monkeypatch.setattr(verify, "gpus", lambda: 2)
    tried: list[Case] = []

    def run(cases: list[Case], world: int, **_: object) -> list[tuple[Case, str]]:
        tried.extend(cases)
        return []

    monkeypatch.setattr(verify, "run_started", run)
    monkeypatch.setattr(verify, "computed_in_background", lambda twins: iter(()))
    assert verify.main(device="cuda", kinds="data", only="switch dp", say=lambda line: None) == 1  # no row passed
    alone = {case.kernels for case in tried if case.world == 1}
    assert alone == {"triton", "triton_persistent", "grouped_mm", "cpu", "reference"}
    assert {case.kernels for case in tried if case.world == 2} == {"auto"}
