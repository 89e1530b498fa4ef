"""Multi-token prediction (`model.ahead`): two training steps, on one process and on ranks, equal the plain twin. Evaluation skips it.

Only these tests notice a depth whose input is the token that it should predict, or a loss that counts tokens after a sequence's end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from moe.checks.together import check_run
from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.parallelize.build import save_memory
from moe.recipe.load import build_run
from moe.recipe.sections import Experts, Model, Recompute, Router, Run, Tiling
from moe.verify.cases import Case
from moe.verify.expected import compare
from moe.verify.layouts import compute, run_world
from moe.verify.small import LINEAR
from moe.verify.twin import reference
from parallel.data.tiling import Tiled
from parallel.errors import BadInput


@dataclass(frozen=True)
class Further(Case):
    ahead: int = 2

    def run(self) -> Run:
        values = super().run().model_dump(mode="json")
        # LINEAR: Adam's first steps would turn the rounding of a tiny gradient into a large update
        optimizer = values["optimizer"] | LINEAR
        return build_run(values | {"model": values["model"] | {"ahead": self.ahead, "ahead_weight": 0.4}, "optimizer": optimizer})


@pytest.mark.usefixtures("two_steps")
@pytest.mark.parametrize(
    "case",
    [
        # tied embedding, T5 positions, dropout, micro-batches with unequal numbers of tokens
        Further("gshard", "ddp", 1, 1, 3, "fp32", padded=True),
        Further("dense", "ddp", 1, 1, 1, "fp32", ahead=1, tiles=5, head_tiles=3, chunks=7, recompute="full"),
    ],
    ids=["tied", "tiles"],
)
def test_two_steps_are_the_plain_twins(case: Further) -> None:
    for name, value in compare(compute(case), reference(case)).items():
        assert value < 1e-5, name


@pytest.mark.usefixtures("two_steps")
def test_two_steps_on_ranks_are_the_plain_twins() -> None:
    want = reference(Further("deepseek", "ddp", 1, 1, 1, "fp32"))
    cases: list[Case] = [Further("deepseek", "ddp", 2, 2, 3, "fp32"), Further("deepseek", "fsdp", 2, 1, 1, "fp32", "full", tiles=5)]
    for case, ran in run_world(cases, 2):
        assert not isinstance(ran, str), (case.layout, ran)
        assert max(compare(ran[0], want).values()) < 1e-5, case.layout


@pytest.mark.usefixtures("two_steps")
def test_next_tokens_of_other_ranks_and_embeddings_of_other_stages() -> None:
    """Tokens to predict may be on another rank, and the tied embedding on another pipeline stage. Only this test notices a wrong token at a
    shard's end, or a gradient of the embedding that is counted twice.
    """
    cases: list[Case] = [
        Further("dense", "fsdp", 2, 1, 3, "fp32", "full", tp=2, tensor="sliced", head_tiles=3, chunks=7),
        Further("gshard", "ddp", 2, 2, 1, "fp32", tp=2, tensor="dtensor"),  # tied embedding, dropout
        Further("gshard", "zero1", 2, 1, 1, "fp32", sp=2, attention="zigzag", length=24, padded=True),
        Further("packed", "ddp", 2, 1, 3, "fp32", sp=2, attention="striped", length=24),
        Further("dense", "ddp", 2, 1, 3, "fp32", pp=2, schedule="zb_h1", layers=3),
        Further("gshard", "ddp", 2, 1, 3, "fp32", "selective", pp=2, layers=3),
    ]
    for case, ran in run_world(cases, 2):
        assert not isinstance(ran, str), (case.layout, ran)
        twin = replace(case, kind="ddp", world=1, ep=1, tp=1, sp=1, pp=1, microbatches=1, recompute="none", head_tiles=1, chunks=1)
        assert max(compare(ran[0], reference(twin)).values()) < 1e-5, case.layout


def test_evaluation_and_the_reported_loss_leave_out_further_tokens() -> None:
    sizes: dict[str, Any] = {"num_layers": 2, "d_model": 24, "num_heads": 4, "d_ff": 20, "max_length": 9}
    with_it, without = (Transformer(Model(**sizes, ahead=ahead), Experts(), Router(), vocab_size=31) for ahead in (2, 0))
    missing = with_it.load_state_dict(without.state_dict(), strict=False).missing_keys
    assert missing and all(name.startswith("ahead.") for name in missing)
    tokens_BL = torch.randint(31, (3, 10), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens_BL[:, :-1], tokens_BL[:, 1:]
    for training in (True, False):
        losses = [model.train(training)(inputs, Context.of(inputs), targets).loss for model in (with_it, without)]
        assert torch.equal(*losses)
        losses[0].backward()
        assert all((p.grad is not None) == training for name, p in with_it.named_parameters() if name.startswith("ahead."))
        with_it.zero_grad()
    assert torch.equal(*(model.eval()(inputs).logits_BLV for model in (with_it, without)))


def test_recomputation_and_tiles_apply_to_its_blocks() -> None:
    with torch.device("meta"):
        model = Transformer(Model(num_layers=3, d_model=24, num_heads=4, d_ff=20, ahead=2), vocab_size=31)
    save_memory(model, recompute=Recompute(kind="full", every=2), tiling=Tiling(ffn=5))
    blocks = [*model.layers, *(depth.block for depth in model.ahead)]  # type: ignore[union-attr]
    assert [block.recompute for block in blocks] == ["full", "none", "full", "none", "full"]
    assert all(isinstance(block.ffn, Tiled) for block in blocks)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model": {"ahead_weight": 0.5}}, "model.ahead_weight: got 0.5 with model.ahead=0"),
        ({"model": {"ahead": 16, "max_length": 16}}, "model.ahead: got 16, needed less than model.max_length=16"),
        (
            {"model": {"ahead": 1, "moe_every": 1, "d_ff": 20}, "experts": {"d_ff": 24}, "tiling": {"ffn": 3}},
            "tiling.ffn: got 3, needed a divisor of model.d_ff=20",
        ),
        ({"model": {"ahead": 1}, "degrees": {"dp": 1, "tp": 4}, "tensor": {"kind": "2d"}}, "tensor.kind: got 2d with model.ahead=1"),
        (
            {
                "model": {"ahead": 1, "tied_embeddings": False},
                "degrees": {"dp": 1, "pp": 2},
                "pipeline": {"schedule": "pipedream"},
                "optimizer": {"clip_norm": None},
                "train": {"global_batch": 1},
            },
            "model.ahead: got 1 with pipedream, .*, needed 0: the first and the last stage",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        check_run(build_run(values), math.prod(values.get("degrees", {}).values()))
