"""1D tensor parallelism of the whole model: its all-reduces equal the formula to the byte, each rank has whole logits, and `moe show
--plan` shows the shards that a rank holds.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.checks.together import check_run
from moe.parallelize.build import build
from moe.parallelize.shown import plan_rows, table
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.verify.cases import BATCH, LENGTH, Case
from parallel.mesh.mesh import Mesh
from tests.support.ranks import run_on_ranks
from tests.support.tiny import start

LAYERS, WIDTH = 3, 24


def run_of(tp: int, *, precision: str = "fp32", recompute: str = "none") -> Run:
    case = Case("dense", "ddp", tp, 1, 1, precision, recompute, layers=LAYERS, tp=tp, tensor="1d")
    return check_run(case.run(), tp)


def all_reduces_over_tp(case: Case) -> tuple[int, int]:
    """Return (calls, bytes) of all-reduces over tp in the forward and backward pass of one step."""

    def work(rank: int) -> tuple[int, int]:
        tiny = start(case, rank)
        tiny.mesh.communicator.reset_counts()
        tiny.accumulate(0)
        found = tiny.mesh.communicator.counts()["tp", "all_reduce"]
        return found.calls, found.bytes

    first, *others = run_on_ranks(work, case.world)
    assert others == [first] * len(others)
    return first  # type: ignore[no-any-return]


@pytest.mark.parametrize(("precision", "recompute", "microbatches"), [("fp32", "none", 3), ("bf16", "none", 1), ("fp32", "full", 1)])
def test_all_reduces_are_four_for_each_layer_and_microbatch(precision: str, recompute: str, microbatches: int) -> None:
    """Each all-reduce has tokens * d_model elements. Embedding and head add one each, and the loss three numbers per token. A recomputed
    layer repeats the two all-reduces of its forward pass.
    """
    case = Case("dense", "ddp", 2, 1, microbatches, precision, recompute, layers=LAYERS, tp=2, tensor="1d")
    tokens, width = BATCH // microbatches * LENGTH, WIDTH * (4 if precision == "fp32" else 2)
    layers = LAYERS * (4 + 2 * (recompute == "full"))
    calls, sent = all_reduces_over_tp(case)
    assert (calls, sent) == (microbatches * (layers + 2 + 2), microbatches * tokens * ((layers + 2) * width + 3 * 4))


def test_every_rank_has_the_logits_of_one_process() -> None:
    tokens = torch.randint(256, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    alone, _ = build(run_of(1), Mesh.of(run_of(1).mesh_degrees()), device=torch.device("cpu"))
    with torch.no_grad():
        want = alone.eval()(tokens).logits_BLV

    def work(rank: int) -> Tensor:
        case = Case("dense", "ddp", 4, 1, 1, "fp32", layers=LAYERS, tp=4, tensor="1d")
        with torch.no_grad():
            logits: Tensor = start(case, rank).model.eval()(tokens).logits_BLV
        return logits

    for got in run_on_ranks(work, 4):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


VALUES: dict[str, Any] = {
    "model": {"num_layers": 2, "d_model": 24, "num_heads": 4, "num_kv_heads": 2, "d_ff": 20, "moe_every": 2, "tied_embeddings": False},
    "experts": {"num_experts": 8, "shared": 1},
    "degrees": {"tp": 4, "ep": 2, "etp": 2},
    "tiling": {"head": 3},
}


@pytest.mark.parametrize("rank", [0, 3])
def test_the_shown_plan_equals_the_shards_that_a_rank_holds(rank: int) -> None:
    run = check_run(build_run(VALUES), 4)
    rows = plan_rows(run, rank=rank)
    model, layouts = build(run, Mesh.of(run.mesh_degrees(), rank), device=torch.device("cpu"))
    assert {row["parameter"]: row["here"] for row in rows} == {name: list(p.shape) for name, p in model.named_parameters()}
    assert all(row["bytes"] == 4 * math.prod(row["here"]) and row["whole"] == list(layouts[row["parameter"]].shape) for row in rows)
    found = {row["parameter"]: row for row in rows}
    head, copies = found["layers.0.attention.k.weight"], ["tp_row_copies"]
    assert (head["style"], head["cut"], head["copies"], head["summed_over"]) == ("Column", {"0": ["tp_row_heads"]}, copies, copies)
    assert (found["layers.1.moe.experts.w1"]["cut"], found["norm.weight"]["summed_over"]) == ({"0": ["ep"], "2": ["etp"]}, [])
    assert found["head.tiles.1.weight"]["tile"] == "2 of 3" and found["layers.1.moe.shared.w1.weight"]["summed_over"] == ["tp"]


def test_layers_that_are_alike_are_one_line() -> None:
    lines = table(plan_rows(check_run(build_run(VALUES), 4), rank=0), rank=0, world=4)
    (keys,) = [line.split() for line in lines if line.startswith("layers.*.attention.k.weight")]
    assert " ".join(keys) == "layers.*.attention.k.weight Column dim 0 over tp_row_heads 12 x 24 6 x 24 tp_row_copies 2 x 1,152"
    total = sum(row["bytes"] for row in plan_rows(check_run(build_run(VALUES), 4), rank=0))
    assert lines[-1].startswith(f"rank 0 of 4 holds {total:,} bytes of weights")
