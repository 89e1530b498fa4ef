"""The bytes that data-parallel engines keep and send equal the closed forms, at small sizes."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from moe.bench.training import memory
from moe.bench.training.memory import Shape
from moe.bench.training.sharded import ShardedKind, kind_of, kinds_of, load_engines
from moe.plan.job.states import FP32, FP32_AND_COPY, MIXED, MIXED_FP32_GRADIENTS, Storage
from moe.train.start.prediction import storages
from parallel.data import load
from parallel.data.deepspeed import load_deepspeed
from parallel.errors import BadInput
from tests.counted import comm, resume, tiling
from tests.counted.sent import NUMBERS, ROWS, STATES, Sent
from tests.measured import kinds
from tests.support.ranks import run_on_ranks

COMM, TILES = (
    {"num_layers": 2, "d_model": 160, "d_ff": 640},
    {"d_model": 64, "d_ff": 512},
)  # small, because the ratio of measured to expected bytes does not depend on the size
TINY, TINY_SPARSE = Shape(layers=2, width=32, hidden=48), Shape(layers=2, width=32, hidden=48, experts=4)


@pytest.fixture
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the recipes of `comm` and `tiling` by narrower models."""

    def narrow(module: ModuleType, sizes: dict[str, int]) -> None:
        recipe = module.recipe

        def narrowed(*args: Any, **options: Any) -> dict[str, Any]:
            values = recipe(*args, **options)
            return values | {"model": values["model"] | sizes}

        monkeypatch.setattr(module, "recipe", narrowed)

    narrow(comm, COMM)
    narrow(tiling, TILES)


# --- bytes of memory of parameters, gradients and optimizer states --------------------------------------------------------


def _kept(rank: int, ranks: int, names: list[str], shape: Shape, precision: str, folder: str) -> list[dict[str, Any]]:
    return [memory.measure(rank, ranks, kind_of(name), shape, precision, 2 if shape.experts else 1, folder) for name in names]


@pytest.mark.parametrize(
    ("names", "ranks", "shape", "precision"),
    [
        ("ddp,zero1,zero2", 1, TINY, "fp32"),
        ("ddp,fsdp,zero1", 2, TINY_SPARSE, "fp32"),
        ("zero2,zero3", 2, TINY_SPARSE, "bf16"),
    ],
)
def test_an_engines_memory_equals_the_formula(names: str, ranks: int, shape: Shape, precision: str, tmp_path: Path) -> None:
    """Parameters, gradients and moments are compared separately. Step counters and padding to equal shards may add up to 3,000 bytes."""
    load_engines([kind_of(name) for name in names.split(",")])
    for row in chain(*run_on_ranks(_kept, ranks, ranks, names.split(","), shape, precision, str(tmp_path), timeout_s=60)):
        assert row["ranks"] == ranks and row["num_parameters"] > 10_000
        for part in ("parameters", "gradients", "optimizer"):
            assert 0 <= row[f"measured_{part}"] - row[f"expected_{part}"] <= 3000, (part, row)
        assert row["measured_other"] <= 1500, row


def test_offload_leaves_only_working_weights_on_the_device(tmp_path: Path) -> None:
    names = ["zero2+cpu", "zero3+cpu-all"]
    load_engines([kind_of(name) for name in names])
    for some, none in run_on_ranks(_kept, 2, 2, names, TINY, "bf16", str(tmp_path), timeout_s=60):
        assert some["device_bytes"] == pytest.approx(2 * some["num_parameters"], rel=0.1) and none["device_bytes"] < 3000
        assert all(row["passed"] and row["moved_bytes"] > 6 * row["num_parameters"] for row in (some, none))


def test_storages_are_counted_once() -> None:
    x = torch.zeros(3, 5)
    assert sum(storages([x, x.T, x[1:], torch.zeros(2, device="meta")]).values()) == 60


def test_the_memory_table_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "DENSE", TINY)
    memory.main(kinds="ddp", nproc=1, only="dense", json=str(tmp_path / "m.json"))
    (row,) = json.loads((tmp_path / "m.json").read_text())["rows"]
    assert {"kind", "ranks", "measured_bytes", "expected_bytes", "error", "resident_bytes", "resident_error", "passed"} <= row.keys()


def test_memory_measures_four_kinds_by_default_and_all_with_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default one model on two ranks; with --full all kinds, sizes and numbers of ranks."""
    ran: list[tuple[str, int, int]] = []
    monkeypatch.setattr(memory, "_run", lambda kind, shape, ranks: ran.append((kind.name, shape.width, ranks)) or {})
    monkeypatch.setattr(memory, "load_engines", lambda kinds: None)
    memory.main()
    assert ran == [(name, memory.QUICK.width, 2) for name in ("ddp", "zero1", "zero2", "zero3")]
    quick, ran[:] = len(ran), []
    memory.main(full=True)
    assert len(ran) > 4 * quick and {width for _, width, _ in ran} == {memory.DENSE.width, memory.SPARSE.width}


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero2", "zero3+cpu-all"])  # engines that load states by different code
def test_resuming_needs_no_more_memory_than_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does the step after it. Resident memory is not checked, because the small model is a minor part of it."""
    monkeypatch.setattr(load, "ELEMENTS_AT_ONCE", 2**14)
    monkeypatch.setattr(resume, "STEPS", 2)  # the second has moments
    load_engines([kind_of(name)])
    row = resume.case(kind_of(name), Shape(layers=2, width=128, hidden=512), 2)
    assert {"kind", "ranks", "measured_bytes", "expected_bytes", "error", "resident_bytes", "resident_error", "passed"} <= row.keys()
    assert 0 < row["measured_bytes"] <= 1.05 * row["expected_bytes"] and row["resuming_bytes"] <= row["measured_bytes"]


# --- bytes sent in collectives --------------------------------------------------------------------------------------------


def _collectives(rank: int) -> list[dict[str, int]]:
    """Call each collective once with 60 floats on each rank. Return for each call purpose -> bytes counted by `Sent`."""
    x, whole, part = torch.ones(60), torch.ones(120), torch.ones(30)
    send, receive = ([10, 50], [10, 20]) if rank == 0 else ([20, 40], [50, 40])
    calls = [
        lambda: dist.all_reduce(x),
        lambda: dist.reduce(x, 0),
        lambda: dist.broadcast(x, 0),
        lambda: dist.all_gather([x.clone(), x.clone()], x),
        lambda: dist.all_gather_into_tensor(whole, x),
        lambda: dist.reduce_scatter_tensor(part, x),
        lambda: dist.reduce_scatter(part, [part.clone(), part.clone()]),
        lambda: functional.all_reduce(x, "sum", dist.group.WORLD) + 1,
        lambda: dist.all_to_all_single(torch.ones(60), x),
        lambda: dist.all_to_all_single(torch.ones(sum(receive)), x, receive, send),
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.float64)),
        lambda: dist.barrier(),
    ]
    found = []
    for call in calls:
        with Sent() as sent:
            call()
        found.append(dict(sent.bytes))
    return found


def test_bytes_of_each_collective() -> None:
    """`Sent` counts (N - 1)/N of the whole tensor, twice that for an all-reduce, and for an all-to-all the rows to other ranks."""
    first, second = run_on_ranks(_collectives, 2, timeout_s=30)
    states = [240, 120, 120, 240, 240, 120, 120, 240]
    assert first[:8] == second[:8] == [{STATES: bytes} for bytes in states]
    assert first[8:] == [{ROWS: 120}, {ROWS: 200}, {NUMBERS: 24}, {}]
    assert second[9] == {ROWS: 80}


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.usefixtures("smaller")
def test_ddp_sends_one_all_reduce_a_step(sparse: bool) -> None:
    """Also with three micro-batches. Experts are reduced over edp, which has one rank here, so they send nothing."""
    for row in run_on_ranks(comm.measure, 2, 2, kind_of("ddp"), sparse, 3, "fp32", timeout_s=60):
        assert row["measured_bytes"] == row["expected_bytes"] and row["passed"], row
        assert {(c["collective"], c["dtype"], c["ranks"]) for c in row["collectives"]} == {("all_reduce", "float32", 2)}
        assert (row["rows_bytes"] > 0) == sparse and 0 < row["numbers_bytes"] < 1000


def _both_counts(rank: int) -> tuple[dict[str, int], int]:
    started = comm.start(kind_of("ddp"), comm.recipe(kind_of("ddp"), 2, sparse=True, microbatches=1), rank, 2)
    for number in range(3):  # the third step is counted, because torch's DDP rebuilds its buckets in the second
        started.mesh.communicator.reset_counts()
        with Sent() as sent:
            batch = comm.tokens_of(rank, sequences=1, length=comm.LENGTH)
            started.accumulate(batch, step=number)
    return dict(sent.bytes), sum(c.sent for c in started.mesh.communicator.counts().values())


@pytest.mark.usefixtures("smaller")
def test_sent_equals_the_communicators_own_count() -> None:
    for seen, counted in run_on_ranks(_both_counts, 2, timeout_s=60):
        assert sum(seen.values()) == counted and seen[ROWS] > 0


def _sent(rank: int, names: list[str], sparse: bool, microbatches: int, precision: str) -> list[dict[str, Any]]:
    return [comm.measure(rank, 2, kind_of(name), sparse, microbatches, precision) for name in names]


@pytest.mark.parametrize(("sparse", "microbatches", "precision"), [(False, 1, "bf16"), (True, 3, "fp32")])
@pytest.mark.usefixtures("smaller")
def test_sharded_engines_send_the_bytes_of_the_closed_form(
    sparse: bool, microbatches: int, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["fsdp", "zero1", "zero2", "zero3"]
    load_engines([kind_of(name) for name in names])
    rows = run_on_ranks(_sent, 2, names, sparse, microbatches, precision, timeout_s=90)[0]
    for row in rows:
        assert abs(row["error"]) <= (comm.TOLERANCE if row["kind"] == "fsdp" else 0.005), row
        comm.print_row(row)
    gathered = sum(c["bytes"] for c in rows[1]["collectives"] if c["collective"] == "all_gather")
    assert gathered == pytest.approx(rows[1]["expected_bytes"] / (2 if precision == "fp32" else 3), rel=comm.TOLERANCE)
    assert f"reduce of float32 over 2, {'3' if sparse else '1'} all_gather" in capsys.readouterr().out


# --- bytes of gathered weights with tiling --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fsdp", "zero3"])
@pytest.mark.usefixtures("smaller")
def test_tiling_divides_the_bytes_of_gathered_weights(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiling, "TILES", (1, 4))
    load_engines([kind_of(name)])
    one, four = run_on_ranks(tiling.measure, 2, 2, kind_of(name), True, "bf16", str(tmp_path), timeout_s=60)[0]
    assert one["measured_bytes"] == one["expected_bytes"] == 4 * four["measured_bytes"] and four["passed"]


# --- `moe bench`: seconds and losses of kinds of data parallelism ---------------------------------------------------------


def test_a_step_of_each_implementation_finds_the_same_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kinds, "BATCH", 2)
    monkeypatch.setattr(kinds, "LENGTH", 9)
    load_deepspeed()
    kind = kind_of("zero1")
    row = kinds.row_of(kind, run_on_ranks(kinds.measure, 2, 2, kind, 1, str(tmp_path), timeout_s=60))
    assert row["losses_apart"] < 1e-5 and row["seconds"] > 0
    assert {"kind", "ranks", "over_torch", "over_deepspeed", "torch_seconds", "deepspeed_seconds", "passed"} <= row.keys()


def _found(*, ours: float, deepspeed: float, loss: float = 2.0) -> list[dict[str, Any]]:
    seconds = {"torch": [1.0, 1.0, 1.0], "ours": [ours] * 3, "deepspeed": [deepspeed] * 3}
    return [{"seconds": seconds, "losses": {"torch": [3.0, 2.0], "ours": [3.0, loss], "deepspeed": [3.0, 2.0]}}] * 2


def test_a_kind_fails_if_it_is_slower_than_its_engine_or_has_another_loss() -> None:
    kind = ShardedKind("zero2", 2, {"kind": "zero", "stage": 2})
    good = kinds.row_of(kind, _found(ours=1.2, deepspeed=1.18))
    assert good["passed"] and good["over_torch"] == pytest.approx(1.2) and good["over_deepspeed"] == pytest.approx(1.2 / 1.18)
    assert not kinds.row_of(kind, _found(ours=1.25, deepspeed=1.18))["passed"]
    assert not kinds.row_of(kind, _found(ours=1.0, deepspeed=1.18, loss=2.1))["passed"]


# --- names of kinds of data parallelism -----------------------------------------------------------------------------------


def test_kinds_by_name() -> None:
    ddp, fsdp, zero3, moved = map(kind_of, ("ddp", "fsdp", "zero3", "zero2+cpu"))
    assert (ddp.stage, fsdp.stage, zero3.stage, zero3.by_deepspeed, zero3.place) == (0, 3, 3, True, "device")
    assert all(kind.storage(precision) == FP32 for kind in (ddp, fsdp) for precision in ("fp32", "bf16"))
    assert (zero3.storage("fp32"), zero3.storage("bf16"), kind_of("deepspeed1").storage("bf16")) == (
        FP32_AND_COPY,
        MIXED_FP32_GRADIENTS,
        MIXED,
    )
    assert [comm.travels(fsdp, precision) for precision in ("fp32", "bf16")] == [FP32, Storage(2, FP32.gradients, FP32.optimizer)]
    assert moved.sharding == {"kind": "zero", "stage": 2, "offload": {"optimizer": "cpu", "parameters": "none"}} and moved.place == "cpu"
    disk = kind_of("zero3+nvme-all").with_path("disk")
    assert disk.sharding["offload"] == {"optimizer": "nvme", "parameters": "nvme", "path": "disk"}
    assert moved.with_path("disk") == moved
    assert [kind.name for kind in kinds_of("zero1,ddp")] == ["zero1", "ddp"] and {"ddp", "zero1"} <= {k.name for k in kinds_of(None)}


@pytest.mark.parametrize("name", ["zero4", "ddp,", "zero2+disk", "FSDP", "zero2+nvme", "ddp+cpu"])
def test_an_unknown_kind_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(BadInput, match="--kinds: got") as refused:
        kinds_of(name)
    assert "\n" not in str(refused.value)
