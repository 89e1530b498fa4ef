"""The planner's number of parameters on a rank is what the rank holds under each kind of tensor parallelism."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moe.model.transformer import Transformer, embedding_as_module
from moe.parallelize.plan import lay_out, plan_for
from moe.plan.job import counts
from moe.plan.job.of_recipe import network_of, plan_of
from moe.recipe.load import build_run
from parallel.mesh.mesh import Mesh

SMALL = {"num_layers": 2, "d_model": 48, "num_heads": 8, "d_ff": 56, "max_length": 8, "vocab_size": 64, "ffn": "swiglu"}
MODELS: dict[str, dict[str, Any]] = {
    "shared": {
        "model": SMALL | {"moe_every": 1, "qk_norm": "whole", "num_kv_heads": 2},
        "experts": {"num_experts": 8, "d_ff": 24, "shared": 1, "shared_d_ff": 40, "shared_gate": True},
    },
    "residual": {
        "model": SMALL | {"moe_every": 2, "qk_norm": "heads", "tied_embeddings": False},
        "experts": {"num_experts": 8, "residual": True},
        "router": {"input_norm": "rmsnorm"},
    },
    "layernorm": {"model": SMALL | {"qk_norm": "whole", "qkv_bias": True, "out_bias": True, "norm": "layernorm", "attention_sinks": True}},
    "t5": {"model": SMALL | {"kind": "encoder_decoder", "encoder_layers": 1, "positions": "t5", "ffn": "relu"}},
}
TENSORS: list[dict[str, Any]] = [
    {"degrees": {"tp": 4}, "tensor": {"kind": "1d"}},
    {"degrees": {"tp": 4}, "tensor": {"kind": "1d", "sequence_parallel": True}},
    {"degrees": {"tp": 2}, "tensor": {"kind": "dtensor"}},
    {"degrees": {"tp": 4}, "tensor": {"kind": "2d"}},
    {"degrees": {"tp": 8}, "tensor": {"kind": "2.5d"}},
    {"degrees": {"tp": 8}, "tensor": {"kind": "3d"}},
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda one: "".join(map(str, one["tensor"].values())))
@pytest.mark.parametrize("model", MODELS)
def test_a_ranks_parameters_are_those_of_the_layouts(model: str, tensor: dict[str, Any]) -> None:
    world = tensor["degrees"]["tp"]
    run = build_run(MODELS[model] | tensor | {"train": {"global_batch": 8}}).resolve(world)
    with torch.device("meta"):
        made = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size)
    embedding_as_module(made)
    network, plan = network_of(run), plan_of(run)
    found = counts.held(network, plan, (range(2),), (0,))
    layouts = lay_out(made, plan_for(run)).items()
    held = [sum(math.prod(layout.local_shape(Mesh.of(run.mesh_degrees(), rank))) for _, layout in layouts) for rank in range(world)]
    assert found.total == sum(held) / world
