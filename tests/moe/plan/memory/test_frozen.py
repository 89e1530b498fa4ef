"""Memory of train.freeze: frozen weights have no gradients and optimizer states."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from moe.checks.together import check_run
from moe.model.initialize import global_name
from moe.model.transformer import Transformer
from moe.plan.choose.legal import refusal
from moe.plan.job import counts
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.memory.memory import memory, peak
from moe.plan.memory.moments import ranks_of
from moe.plan.memory.stack import OURS
from moe.recipe.frozen import PARTS, is_frozen
from moe.recipe.load import build_run
from parallel.errors import BadInput
from parallel.process.fork import run_on_ranks
from tests.planner import runs as planner_runs

SMALL: dict[str, Any] = {"num_layers": 4, "d_model": 24, "num_heads": 4, "num_kv_heads": 2, "d_ff": 20, "max_length": 8, "vocab_size": 40}
EXPERTS = {"num_experts": 6, "d_ff": 12, "shared": 1, "shared_gate": True, "biases": True}
MODELS: dict[str, dict[str, Any]] = {
    "untied": {
        "model": SMALL
        | {"ffn": "swiglu", "moe_every": 2, "tied_embeddings": False, "qk_norm": "heads", "attention_sinks": True, "ahead": 1},
        "experts": EXPERTS,
        "router": {"input_norm": "rmsnorm", "noise": "noisy_top_k"},
    },
    "halves": {
        "model": SMALL | {"kind": "encoder_decoder", "encoder_layers": 2, "positions": "t5", "ffn": "relu", "moe_every": 2},
        "experts": {"num_experts": 6},
    },
}


@pytest.mark.parametrize("freeze", [*([part] for part in PARTS), ["norms", "layers.1-2"], ["layers.0", "layers.3", "head"]], ids="+".join)
@pytest.mark.parametrize("model", MODELS)
def test_trained_elements_are_those_of_the_model(model: str, freeze: list[str]) -> None:
    run = build_run(MODELS[model] | {"train": {"freeze": freeze}}).resolve(1)
    with torch.device("meta"):
        made = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size)
    trained = {name: p for name, p in made.named_parameters() if not is_frozen(global_name(name), freeze)}
    network, plan = network_of(run), plan_of(run)
    (of_moments,) = ranks_of(network, plan, OURS, "all")  # computes each kind of layer once
    for found in (counts.held(network, plan, (range(4),), (0,)), of_moments.held):
        assert found.total == sum(p.numel() for p in made.parameters())
        assert found.trained.expert == sum(p.numel() for name, p in trained.items() if ".moe.experts." in name)
        assert found.trained.total == sum(p.numel() for p in trained.values())


@pytest.mark.parametrize("case", ["freeze", "frozen stage"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_predicted_memory_equals_measured_memory(precision: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 10 %, with a frozen embedding, frozen experts and a frozen layer, also if no weight of the first pipeline stage is trained."""
    small = {"num_layers": 2, "d_model": 96, "d_ff": 384, "vocab_size": 512, "max_length": 64}
    monkeypatch.setattr(planner_runs, "MODEL", planner_runs.MODEL | small)
    rows = run_on_ranks(planner_runs.measure, 2, 2, case, precision, timeout_s=90)
    assert all(abs(row["predicted_bytes"] / row["measured_bytes"] - 1) < planner_runs.WITHIN for row in rows)


def test_the_fullest_stage_is_found_by_its_trained_weights() -> None:
    """The first stage has more weights, of which the embedding is frozen; the last stage has more optimizer states."""
    model = SMALL | {"d_ff": 400, "vocab_size": 4000, "tied_embeddings": False}
    pipeline = {"microbatches": 2, "layers": [3, 1]}
    values = {"model": model, "degrees": {"pp": 2}, "pipeline": pipeline, "train": {"global_batch": 2, "freeze": ["embedding"]}}
    run = build_run(values).resolve(2)
    network, plan = network_of(run), plan_of(run)
    first, last = memory(network, plan)
    assert first.parts["parameters"] > last.parts["parameters"]
    assert peak(network, plan) == last
    assert first.allocated < last.allocated


@pytest.mark.parametrize(
    ("given", "kind", "refused"),
    [
        ({"train": {"freeze": ["layers.0"]}}, "zero", "train.freeze: got .* and zero1"),
        ({"train": {"freeze": ["attention", "norms"]}}, "zero", "train.freeze: got .* and zero1"),
        ({"train": {"freeze": ["attention", "dense"]}}, "zero", ""),
        ({"train": {"freeze": ["layers.0"]}}, "ddp", ""),
        ({"lora": {"rank": 2, "targets": ["experts"]}}, "zero", "lora.targets: got .* and zero1"),
        ({"lora": {"rank": 2, "targets": ["experts"]}}, "ddp", ""),
        ({"lora": {"rank": 2}, "pipeline": {"layers": [4, 0]}}, "zero", "pipeline.layers: got .* no adapters to train"),
        ({"lora": {"rank": 2}, "pipeline": {"layers": [4, 0]}}, "ddp", ""),
    ],
)
def test_stages_without_trained_weights_are_refused_by_planner_and_checks(given: dict[str, Any], kind: str, refused: str) -> None:
    """DeepSpeed's optimizer cannot be empty."""
    base = {"model": SMALL | {"vocab_size": 256, "moe_every": 2}, "degrees": {"pp": 2}, "sharding": {"kind": kind}, **given}
    base["pipeline"] = {"microbatches": 4} | given.get("pipeline", {})
    run = build_run(base | {"train": {"global_batch": 4, "eval_sequences": 4} | given.get("train", {})})
    assert (refusal(network_of(run), plan_of(run.resolve(2))) is None) == (not refused)
    with pytest.raises(BadInput, match=refused) if refused else nullcontext():
        check_run(run, 2)
