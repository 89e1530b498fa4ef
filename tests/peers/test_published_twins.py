"""Tiny twins of the models in recipes/published/ train as in transformers: equal losses in three steps, and equal logits after them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="pip install moe-parallel[hf]")

from moe.convert.huggingface.convert import to_run
from moe.train.use import opened
from tests.moe.convert import test_huggingface as families

UNGROUPED = {"n_group": 1, "topk_group": 1, "q_lora_rank": None}
# family of transformers, and what these models have otherwise than the family's tiny model of tests/moe/convert/test_huggingface.py
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_30b_a3b": ("Qwen3Moe", {"use_sliding_window": False, "sliding_window": None, "mlp_only_layers": []}),
    "gpt_oss_20b": ("GptOss", {}),
    "olmoe_1b_7b": ("Olmoe", {"clip_qkv": None}),
    "deepseek_v2_lite": ("DeepseekV2", UNGROUPED | {"topk_method": "greedy", "routed_scaling_factor": 1.0}),
    "moonlight_16b": ("DeepseekV3", UNGROUPED | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}),
    "mixtral_8x7b": ("Mixtral", {}),
}


@pytest.mark.parametrize("name", TWINS)
def test_three_steps_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, values = TWINS[name]
    monkeypatch.setitem(families.FAMILIES, family, families.FAMILIES[family] | values)
    theirs = families.made(tmp_path / "theirs", family)
    to_run(tmp_path / "theirs", tmp_path / "run", overrides={"router.balance_weight": "0"})
    ours = opened.open(tmp_path / "run").model
    with torch.no_grad():
        before = families.logits(theirs)
    want, got = (
        trained(theirs, lambda model: model(families.TOKENS, use_cache=False).logits),
        trained(ours, lambda m: m(families.TOKENS).logits_BLV),
    )
    assert want[2] < want[0] and got == pytest.approx(want, rel=2e-6)
    after = families.logits(theirs)
    scale = float((after - before).abs().max())  # of what training changed
    assert float((families.logits(ours) - after).abs().max()) < 1e-4 * scale


def trained(model: nn.Module, logits: Any) -> list[float]:
    """Train the model for three steps of gradient descent on the same tokens, and return the loss before each step."""
    model.train()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(3):
        optimizer.zero_grad()
        loss: Tensor = nn.functional.cross_entropy(logits(model)[:, :-1].flatten(0, 1).float(), families.TOKENS[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
