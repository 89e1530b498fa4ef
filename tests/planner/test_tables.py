"""Tables of measured runs: a Row has the values of its line, rules fill gaps or refuse them, and speeds become seconds."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from moe.plan.job.states import FP32, MIXED, MIXED_FP32_GRADIENTS
from parallel.errors import BadInput
from tests.planner.read_tables import COLUMNS, Row, read_folder, read_table

GPT = {
    **{"kind": "measured", "source": "Megatron-LM SC21", "model": "GPT-39B", "family": "dense", "layers": 48, "hidden": 8192, "heads": 64},
    **{"seq": 2048, "vocab": 51200, "gpus": 512, "gpu_type": "A100-80GB", "tp": 8, "pp": 2, "microbatch": 4, "global_batch": 1536},
    **{"recompute": "full", "precision": "fp16"},
}
MIXTRAL = GPT | {
    **{"source": "Megatron-Core", "model": "Mixtral-8x22B", "family": "moe", "layers": 56, "hidden": 6144, "heads": 48, "kv_heads": 8},
    **{"experts": 8, "topk": 2, "moe_ffn": 16384, "ep": 4, "gpus": 128, "pp": 4, "vpp": 7, "precision": "bf16", "recompute": "none"},
}


def written(folder: Path, *lines: dict[str, Any], name: str = "runs.csv", columns: tuple[str, ...] = COLUMNS) -> Path:
    with (folder / name).open("w", newline="") as opened:
        writer = csv.DictWriter(opened, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(lines)
    return folder / name


def row_of(folder: Path, line: dict[str, Any]) -> Row:
    (row,) = read_table(written(folder, line)).rows
    return row


def test_a_row_is_its_network_and_its_plan(tmp_path: Path) -> None:
    row = row_of(tmp_path, GPT)
    network, plan = row.network, row.plan
    assert (network.layers, network.width, network.heads, network.hidden, network.length) == (48, 8192, 64, 4 * 8192, 2048)
    assert (plan.dp, plan.tp, plan.pp, plan.microbatch, plan.microbatches, plan.recompute) == (32, 8, 2, 4, 12, "full")
    assert plan.world == row.gpus == 512 and plan.global_batch == 1536
    assert (plan.tensor, plan.storage) == ("1d", MIXED), "this software's runs had no sequence parallelism, and gradients in 16 bits"
    assert {"dp", "ffn"} <= set(row.inferred)


def test_experts_stages_and_precision(tmp_path: Path) -> None:
    row = row_of(tmp_path, MIXTRAL)
    experts, plan = row.network.experts, row.plan
    assert experts and (experts.count, experts.choices, experts.hidden, experts.gated) == (8, 2, 16384, True)
    assert row.network.sparse_layers == tuple(range(56)) and row.network.groups == 8
    assert (plan.ep, plan.edp, plan.chunks, plan.schedule, plan.tensor) == (4, 8, 7, "interleaved", "sliced")
    assert plan.storage == MIXED_FP32_GRADIENTS
    fsdp = row_of(tmp_path, GPT | {"source": "torchtitan", "model": "Llama-3.1-8B", "zero": "3", "ffn": 14336})
    assert (fsdp.plan.engine, fsdp.plan.storage, fsdp.stack.name) == ("fsdp", FP32, "torchtitan")


@pytest.mark.parametrize(
    ("cells", "seconds"),
    [
        ({"iteration_time_s": "8.25"}, 8.25),
        ({"samples_per_s": "96"}, 1536 / 96),
        ({"tokens_per_s_per_gpu": "300"}, 1536 * 2048 / 300 / 512),
        # the SC21 paper's equation 3, which counts the recomputed forward pass of layers, and Korthikanti's, which does not
        (
            {"measured_tflops_per_gpu": "135"},
            96 * 1536 * 2048 * 48 * 8192**2 * (1 + 2048 / (6 * 8192) + 51200 / (16 * 48 * 8192)) / 135e12 / 512,
        ),
        (
            {"measured_tflops_per_gpu": "135", "source": "Korthikanti et al. 2022"},
            72 * 1536 * 2048 * 48 * 8192**2 * (1 + 2048 / (6 * 8192) + 51200 / (12 * 48 * 8192)) / 135e12 / 512,
        ),
        (
            {"mfu_pct": "50", "source": "Korthikanti et al. 2022"},
            72 * 1536 * 2048 * 48 * 8192**2 * (1 + 2048 / (6 * 8192) + 51200 / (12 * 48 * 8192)) / 156e12 / 512,
        ),
    ],
)
def test_speeds_become_seconds(tmp_path: Path, cells: dict[str, str], seconds: float) -> None:
    assert row_of(tmp_path, GPT | cells).seconds == pytest.approx(seconds, rel=1e-9)


def test_memory_keeps_its_kind_and_unit(tmp_path: Path) -> None:
    said = {"memory_GB": "25.5", "memory_kind": "GiB torch max ALLOCATED over ranks"}
    row = row_of(tmp_path, GPT | said)
    assert (row.memory, row.memory_kind) == (25.5 * 2**30, "allocated")
    assert row_of(tmp_path, GPT | said | {"memory_kind": "GB max (nvidia-smi style)"}).memory_kind == "nvidia-smi"
    other = row_of(tmp_path, GPT | said | {"memory_kind": "GB by the user"})
    assert (other.memory, other.memory_kind) == (25.5e9, "unknown")


def test_what_lacks_memory_is_told_from_what_failed(tmp_path: Path) -> None:
    assert row_of(tmp_path, GPT | {"status": "OOM"}).status == "out of memory"
    assert row_of(tmp_path, GPT | {"status": "OOM/failed"}).status == "failed"


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"family": "cnn"}, "no Transformer"),
        ({"hidden": ""}, "width or length not stated"),
        ({"tp": "", "pp": "", "dp": ""}, "layout not stated"),
        ({"dp": 30}, "not 512 GPUs"),
        ({"params_b": 100}, "parameters"),
        ({"schedule": "1f1b (redis)"}, "not stated"),
        ({"heads": 0}, "heads is 0"),
        ({"layers": "1e400"}, "layers is 1e400"),
        ({"iteration_time_s": -3}, "iteration_time_s is -3"),
        ({"gpus": "1.2.3"}, "number of GPUs not stated"),
    ],
)
def test_a_row_that_no_rule_completes_is_counted_with_its_reason(tmp_path: Path, cells: dict[str, Any], reason: str) -> None:
    table = read_table(written(tmp_path, GPT, GPT | cells))
    assert len(table.rows) == 1 and table.unusable[0][0] == 3 and reason in table.unusable[0][1]


def test_missing_layers_follow_from_the_parameters(tmp_path: Path) -> None:
    row = row_of(tmp_path, GPT | {"layers": "", "params_b": 39.1, "pp": 4})
    assert row.network.layers == 48 and "layers" in row.inferred


def test_a_table_of_other_columns_is_named(tmp_path: Path) -> None:
    lacking = tuple(name for name in COLUMNS if name not in ("layers", "status"))
    with pytest.raises(BadInput, match="layers, status"):
        read_table(written(tmp_path, GPT, columns=lacking))
    with pytest.raises(BadInput, match="layers, status"):
        read_folder(tmp_path)
    written(tmp_path, GPT, name="whole.csv")
    other, whole = read_folder(tmp_path)
    assert other.missing == ("layers", "status") and len(whole.rows) == 1
    with pytest.raises(BadInput, match="no .csv"):
        read_folder(tmp_path / "nowhere")
