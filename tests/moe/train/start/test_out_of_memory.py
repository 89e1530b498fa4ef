"""When memory runs out, one line names what did not fit and keys to set; following the advice repeatedly never repeats it."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.plan.job import flops
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.records.summary import size
from moe.train.start.prediction import EVALUATION, PASSES, RESUMING, STATES, STEP, WEIGHTS, did_not_fit, during, next_step


def run_with(flags: str = "") -> Run:
    """Return a small recipe with the flags of a line's advice, such as "--sharding.kind zero"."""
    values: dict[str, Any] = {"model": {"num_layers": 2}, "train": {"global_batch": 8}}
    words = flags.split()
    for key, value in zip(words[::2], words[1::2], strict=True):
        section, *path, last = key.removeprefix("--").split(".")
        place = values.setdefault(section, {})
        for name in path:
            place = place.setdefault(name, {})
        place[last] = int(value) if value.isdecimal() else value
    return build_run(values)


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"), torch.OutOfMemoryError("CUDA out of memory. Tried ...")]
)
def test_errors_of_memory_are_known(error: BaseException) -> None:
    line = did_not_fit(error, run_with(), world=1, cpu=True)
    assert line is not None and line.startswith("memory: got none left for training, needed ") and "\n" not in line


def test_a_failed_allocation_says_how_much_was_asked_for_and_by_whom() -> None:
    with pytest.raises(RuntimeError) as caught, during(STEP), during(STATES):
        torch.empty(2**50, dtype=torch.float32)
    line = did_not_fit(caught.value, run_with(), world=1, cpu=True)
    assert line is not None and f"none left for {STATES} (4096.00 TiB more asked for)" in line


@pytest.mark.parametrize(("flags", "trained", "frozen"), [("", 16, 0), ("--optimizer.kind sgd", 12, 0), ("--lora.rank 1", 16, 4)])
def test_the_line_counts_the_states_of_the_recipes_optimizer(flags: str, trained: int, frozen: int) -> None:
    """A trained parameter has a weight, a gradient and the optimizer's states; under LoRA only the adapters are trained."""
    run = run_with(flags)
    total = flops.size(run_with()).total
    adapters = run.model.num_layers * 4 * 2 * run.model.d_model  # rank 1: queries, keys, values and output, each of d_model x d_model
    bytes_of = trained * adapters + frozen * total if frozen else trained * total
    line = did_not_fit(MemoryError(), run, world=1, cpu=True)
    assert line is not None and f"({size(bytes_of)} are weights, gradients and optimizer states of " in line


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), OSError(errno.ENOSPC, "No space"), ValueError("x")]
)
def test_other_errors_are_not(error: BaseException) -> None:
    assert did_not_fit(error, run_with(), world=1, cpu=True) is None


def test_an_evaluation_is_made_smaller_not_the_model() -> None:
    assert str(next_step(run_with("--train.eval_sequences 512"), EVALUATION, world=1, cpu=True)) == "add --train.eval_sequences 8"


def test_long_sequences_are_sharded_first() -> None:
    """If one sequence's activations exceed the model states, the advice is sequence parallelism; else it is ZeRO."""
    one = {"global_batch": 1, "eval_sequences": 1}
    for sp, advice in ((1, "add --degrees.sp 2, and add --nproc 2"), (64, "add --sharding.kind zero")):
        values = {"model": {"num_layers": 2, "max_length": 65536}, "train": one, "recompute": {"kind": "full"}, "degrees": {"sp": sp}}
        assert str(next_step(build_run(values), PASSES, world=sp, cpu=True)).startswith(advice)
    assert "degrees.sp" not in str(next_step(build_run(values), STEP, world=1, cpu=True))


@pytest.mark.parametrize("where", [WEIGHTS, STATES, RESUMING, PASSES, STEP])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("cpu", [True, False])
def test_every_step_leads_to_another_one_and_ends_in_tiles(where: str, world: int, cpu: bool) -> None:
    flags, seen = "", []
    while "--tiling.ffn" not in flags:
        new = str(next_step(run_with(flags), where, world=world, cpu=cpu)).removeprefix("add ")
        assert new not in seen, "the same advice twice"
        seen.append(new)
        flags = " ".join([flags, new]).strip()
    order = [flag for text in seen for flag in text.split()]
    assert "nvme" in order and order.index("nvme") < order.index("--tiling.ffn")
    assert ("cpu" in order) == (not cpu), "a CPU's own memory is no place to move to"
    assert (seen[0] == "--recompute.kind full") == (where == PASSES)
    if world > 1:
        assert any(text == "--sharding.kind zero --sharding.stage 3" for text in seen)


_FREED = """
import torch
from parallel.process import libc
def held():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
for choose in (libc.give_freed_memory_back, libc.keep_freed_memory):
    choose()
    before, tensors = held(), [torch.zeros(2**20) for _ in range(64)]
    tensors = tensors[-1:]
    print((held() - before) / 2**28)
    del tensors
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="tells glibc's allocator, which other systems have not")
def test_freed_memory_is_given_back_or_kept() -> None:
    """After 63 of 64 tensors of 4 MiB are freed, the process holds a 64th of the memory, or all of it with `keep_freed_memory`."""
    found = subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True, timeout=60, check=True)
    assert [float(share) for share in found.stdout.split()] == pytest.approx([1 / 64, 1.0], abs=0.01)


def test_a_run_that_does_not_fit_ends_with_one_line(tmp_path: Path) -> None:
    """A model too large for the process's memory limit (ulimit -d) fails with one line about its weights, without a traceback."""
    out = tmp_path / "run"
    limited = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30)); sys.argv = ['launch', *sys.argv[1:]]; "
    )
    command = [
        sys.executable,
        "-c",
        limited + "runpy.run_module('moe.launch.launch', run_name='__main__')",
        "dense_tiny",
        "--out",
        str(out),
    ]
    flags = [
        "--model.d_model",
        "8192",
        "--model.d_ff",
        "65536",
        "--train.steps",
        "1",
        "--force",
    ]  # --force: else the predicted memory is refused
    found = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120)
    assert found.returncode == 1, found.stderr
    lines = [line for line in found.stderr.splitlines() if "memory: got" in line]
    assert len(lines) == 1 and "Traceback" not in found.stderr
    assert (
        lines[0].startswith("error on rank 0: memory: got none left for the model's weights")
        and "fix: add --sharding.kind zero" in lines[0]
    )
    assert not out.exists()  # no run was begun
