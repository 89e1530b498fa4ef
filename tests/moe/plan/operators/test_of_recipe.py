"""The operators made of a recipe have the model's parameters, the FLOPs of `size`, and the products of torch's FLOP counter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.plan.job.flops import size
from moe.plan.operators.of_recipe import graph_of
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from parallel.annotations.graph import Graph

B, L, V = 3, 12, 53
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model": {"moe_every": 0}},
    "gated, grouped, untied": {"model": {"ffn": "swiglu", "num_kv_heads": 2, "tied_embeddings": False}},
    "norms and biases of heads": {"model": {"num_kv_heads": 2, "qk_norm": "whole", "qkv_bias": True}},
    "windows, sinks": {"model": {"sliding_window": 3, "sliding_layers": (1,), "attention_sinks": True, "out_bias": True}},
    "t5, wide heads": {"model": {"positions": "t5", "head_size": 10, "qk_norm": "heads", "norm": "layernorm", "document_mask": True}},
    "experts": {"model": {"moe_every": 2}, "experts": {"num_experts": 6, "d_ff": 28}, "router": {"preset": "glam"}},
    "shared and gated": {"model": {"moe_every": 1}, "experts": {"num_experts": 4, "shared": 2, "shared_gate": True, "ffn": "geglu"}},
    "biases": {
        "model": {"moe_every": 2, "ffn": "swiglu"},
        "experts": {"biases": True, "skip": 1},
        "router": {"preset": "mixtral", "logits": "affine"},
    },
    "norm, noise and scale of the router": {
        "model": {"moe_every": 2},
        "router": {"preset": "glam", "input_norm": "rmsnorm", "noise": "noisy_top_k", "expert_scale": "learned"},
    },
    "encoder and decoder": {
        "model": {"kind": "encoder_decoder", "encoder_layers": 1, "positions": "t5", "qk_norm": "heads", "document_mask": True},
        "data": {"objective": "span_corruption"},
    },
    "encoder and decoder with experts": {
        "model": {"kind": "encoder_decoder", "positions": "t5", "moe_every": 2, "tied_embeddings": False, "num_kv_heads": 2},
        "experts": {"num_experts": 4},
        "router": {"preset": "glam"},
        "data": {"objective": "span_corruption"},
    },
    "latents": {"model": {"ffn": "swiglu", "latent": {"key_rank": 10, "query_rank": 14, "rotary_size": 4, "value_size": 5}}},
    "tokens ahead of latents and experts": {
        "model": {"moe_every": 1, "ahead": 2, "latent": {"key_rank": 7, "rotary_size": 2}, "tied_embeddings": False, "out_bias": True},
        "experts": {"num_experts": 4, "shared": 1},
    },
    "pyramid, residual": {"model": {"moe_every": 2}, "experts": {"num_experts": (3, 6), "residual": True, "d_ff": 20}},
}
EVERY = pytest.mark.parametrize("values", [pytest.param(v, id=name) for name, v in MODELS.items()])


def run_of(values: dict[str, Any]) -> Run:
    model = {"num_layers": 4, "d_model": 24, "num_heads": 4, "d_ff": 40, "max_length": L, "vocab_size": V} | values.get("model", {})
    router = {"capacity_factor": None} | values.get("router", {})  # no padding: 12 tokens divide evenly among these experts
    return build_run({**values, "model": model, "router": router, "data": {"tokenizer": "bytes"} | values.get("data", {})})


def graph(values: dict[str, Any]) -> Graph:
    return graph_of(run_of(values), sequences=B)


@EVERY
def test_every_parameter_is_there_once_and_flops_are_those_of_the_sizes(values: dict[str, Any]) -> None:
    run, made = run_of(values), graph(values)
    whole = size(run)
    assert sum(map(made.size, made.parameters.values())) == whole.total
    assert made.flops == pytest.approx(B * run.model.read_length * whole.training / 3, rel=1e-12)
    assert {op.layer for op in made.operators} == {-1, 0, 1, 2, 3, 4}


DENSE = [name for name, v in MODELS.items() if not v["model"].get("moe_every") and not v["model"].get("attention_sinks")]


@pytest.mark.parametrize("values", [pytest.param(MODELS[name], id=name) for name in DENSE])
def test_dense_products_equal_torchs_flop_counter(values: dict[str, Any]) -> None:
    """Without attention, of which torch also counts masked pairs and the channels that pad latent attention's values, and without experts,
    whose rows depend on data."""
    run = run_of(values)
    with torch.device("meta"):
        model = Transformer(run.model, run.experts, run.router, vocab_size=V).eval()
    counter, m = FlopCounterMode(display=False), run.model
    with counter, torch.no_grad():
        tokens = torch.empty(B, m.read_length, dtype=torch.int64, device="meta")
        model(tokens, Context.of(tokens, source=m.source_length))
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    made = graph(values)
    products = sum(op.flops for op in made.operators if op.kind == "product")
    if not any("attention" in str(op) for op in counter.get_flop_counts()["Global"]):  # torch computes attention by plain products
        products += sum(2 * 2.0 * made.size(op.terms[0] + op.terms[1][1]) for op in made.operators if op.kind == "attention")
    assert products == counted


def test_a_cut_factor_cuts_tensors_by_position() -> None:
    made = graph(MODELS["gated, grouped, untied"])
    core = made.named["layers.1.attention.core"]
    assert core.rule == "blkgc,bskc,bskc->blkgc" and core.summed == "s" and core.whole == "sc"
    assert [edge.writer for edge in made.edges if edge.reader == core.name] == [f"layers.1.attention.{part}" for part in "qkv"]
    roles = {dim.name: dim.size for dim in made.dims.values()}
    assert roles == {
        "batch": B, "length": L, "places": L, "width": 24, "vocab": V, "heads": 2, "queries": 2, "channels": 6, "hidden": 40,
    }  # fmt: skip


def test_cross_attention_reads_the_encoders_output_in_every_layer_of_the_decoder() -> None:
    made = graph(MODELS["encoder and decoder"])
    for layer in (1, 2, 3):
        assert [edge.writer for edge in made.edges if edge.reader == f"layers.{layer}.cross.k"] == ["encoder_norm"]
        assert "layers.1.attention.bias.weight" in made.named[f"layers.{layer}.attention.core"].inputs
    core = made.named["layers.2.cross.core"]
    sizes = [[made.dims[letter].size for letter in term[:2]] for term in (*core.terms, core.output)]
    assert sizes == [[B, 4], [B, L], [B, L], [B, 4]]  # 12 tokens read, 4 written


def test_layers_that_differ_have_letters_of_their_own() -> None:
    made = graph(MODELS["pyramid, residual"])
    counts = {math.prod(made.dims[a].size for a in made.parameters[f"layers.{layer}.moe.router.weight"]) // 24 for layer in (1, 3)}
    assert counts == {3, 6}
    assert made.named["layers.1.moe.dispatch"].rule != made.named["layers.3.moe.dispatch"].rule


@pytest.mark.parametrize(("factor", "filled"), [(1.5, 1.0), (0.75, 0.75)])
def test_slots_of_an_expert_follow_from_capacity_and_choices(factor: float, filled: float) -> None:
    """Experts that compute nothing (`skip`, `zero`) get their part of the choices. A capacity above 1 adds no slots."""
    router = {"preset": "mixtral", "capacity_factor": factor}
    made = graph({"model": {"moe_every": 2}, "experts": {"num_experts": 3, "skip": 2, "zero": 1}, "router": router})
    assert {dim.size for dim in made.dims.values() if dim.name == "slots"} == {math.ceil(filled * 2 * L / 6)}
