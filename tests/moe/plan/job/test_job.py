"""Predicted bytes of encoder-decoders and of tensor parallelism equal the parameters that ranks hold and the bytes that autograd keeps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.parallelize.build import build, save_memory
from moe.parallelize.shown import plan_rows
from moe.plan.job.counts import held
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import load_cluster
from moe.plan.memory.kept import between_halves, cast_weights, casts_kept, ends_kept, layer_kept, recompute_of
from moe.plan.memory.memory import peak
from moe.plan.memory.rows import rows_of
from moe.plan.memory.stack import OURS_ON_CPU
from moe.plan.time.cost import step_time
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from parallel.process import process
from parallel.process.fork import run_on_ranks

MODEL = {"num_layers": 3, "d_model": 48, "num_heads": 6, "num_kv_heads": 2, "d_ff": 80, "max_length": 20, "tied_embeddings": False}
SPARSE = {"experts": {"num_experts": 4, "d_ff": 56}, "router": {"preset": "switch", "capacity_factor": None}}


HALVES: dict[str, dict[str, Any]] = {
    "dense": {},
    "gated, dropout, grouped queries": {"model": {"ffn": "geglu", "dropout": 0.1, "num_kv_heads": 2, "qk_norm": "heads"}},
    "documents": {"model": {"document_mask": True}},
    "tied, layernorm, experts": {"model": {"moe_every": 2, "tied_embeddings": True, "norm": "layernorm"}, **SPARSE},
}


@pytest.mark.parametrize("case", HALVES)
@pytest.mark.parametrize(("recompute", "every"), [("none", 1), ("selective", 1), ("full", 2)])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_encoder_decoder_layers_keep_the_predicted_bytes(case: str, recompute: str, every: int, compute: str) -> None:
    """Each layer within 3 %; with experts within 15 %, because their rows are padded to tiles; all layers and ends together within 3 %. The
    first layers of both halves are compared only in the sum: they also keep the embedding's or the encoder's output."""
    model = MODEL | {
        "kind": "encoder_decoder",
        "positions": "t5",
        "num_layers": 6,
        "encoder_layers": 2,
        "max_length": 96,
        "head_size": 10,
        "vocab_size": 300,
    }
    values = HALVES[case] | {"model": model | {"num_kv_heads": None} | HALVES[case].get("model", {}), "precision": {"compute": compute}}
    values |= {"data": {"objective": "span_corruption"}, "recompute": {"kind": recompute, "every": every}}
    run = build_run(values | {"train": {"global_batch": 3}, "degrees": {"dp": 1}}).resolve(1)
    network, plan = network_of(run), plan_of(run)
    kept, rest = _kept_by_layers(run)
    said = []
    for layer in range(network.depth):
        half, number = network.at(layer)
        cast = cast_weights(network, plan, layer) if casts_kept(plan, OURS_ON_CPU) else 0.0
        said.append(layer_kept(half, plan, OURS_ON_CPU, number, recompute_of(plan, layer)) + cast)
        if layer not in (0, network.before):
            assert said[-1] == pytest.approx(kept[layer], rel=0.15 if number in half.sparse_layers else 0.03)
    table = run.vocab_size * run.model.d_model * 2 if compute == "bf16" else 0  # the head's matrix in bf16, which no layer counts
    ends = ends_kept(network, plan, OURS_ON_CPU, first=True, last=True) + table
    ends += between_halves(network, plan, OURS_ON_CPU, range(network.depth), first=True, whole=False)
    assert sum(said) + ends == pytest.approx(sum(kept) + rest, rel=0.03)


def _kept_by_layers(run: Run) -> tuple[list[int], int]:
    """Return (bytes of storages that autograd keeps first in each layer, bytes outside of layers), without parameters."""
    compute = torch.bfloat16 if run.precision.compute == "bf16" else torch.float32
    model = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size, compute=compute).train()
    save_memory(model, recompute=run.recompute)
    seen, at, kept = {p.untyped_storage().data_ptr(): p for p in model.parameters()}, -1, [0] * (run.model.num_layers + 1)

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in seen:
            seen[storage.data_ptr()] = t  # keeps the tensor alive, so that no other storage gets its address
            kept[at] += storage.nbytes()
        return t

    def enter(layer: int) -> None:
        nonlocal at
        at = layer

    for layer, block in enumerate(model.layers):
        block.register_forward_pre_hook(lambda *_, layer=layer: enter(layer))
        block.register_forward_hook(lambda *_: enter(-1))
    m, draw = run.model, torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(m.vocab_size or 1, (3, length), generator=draw) for length in (m.read_length, m.target_length))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(tokens, Context.of(tokens, source=m.max_length), targets)
    return kept[:-1], kept[-1]


def test_only_the_padded_dispatcher_sends_empty_slots() -> None:
    """With a capacity above the number of choices, `padded` has larger buffers and takes longer. No dispatcher computes empty slots. All
    ranks get equally many rows."""

    def made(factor: float | None, kind: str) -> tuple[float, float, float]:
        router = {"preset": "glam", "capacity_factor": factor}
        model = MODEL | {"moe_every": 1, "d_ff": 240}  # wide enough that the memory peak is in a layer's backward pass, with the buffers
        values = {"model": model, "experts": {"num_experts": 4}, "router": router}
        values |= {"dispatch": {"kind": kind, "busiest": 1}}
        run = build_run(values | {"degrees": {"ep": 2}, "train": {"global_batch": 4}}).resolve(2)
        network, plan = network_of(run), plan_of(run)
        time = step_time(network, plan, load_cluster("h100-8").holding(2))
        return rows_of(network, plan), peak(network, plan).parts["dispatch buffers"], time.experts

    rows, buffers, seconds = made(None, "all_to_all")
    assert buffers > 0
    assert made(1.5, "all_to_all") == (rows, buffers, seconds)
    assert made(1.5, "padded")[:2] == (rows, 1.5 * buffers) and made(1.5, "padded")[2] > seconds
    assert made(0.5, "all_to_all")[:2] == (0.5 * rows, 0.5 * buffers)


@pytest.mark.parametrize("kv_heads", [6, 1])
@pytest.mark.parametrize(("tensor", "tp"), [("1d", 2), ("2d", 4), ("2.5d", 8), ("3d", 8)])
def test_counted_matrices_equal_those_that_a_rank_holds(tensor: str, tp: int, kv_heads: int) -> None:
    """With one key-value head, each tp rank of 1d holds a copy."""
    model = MODEL | {"num_kv_heads": kv_heads, "vocab_size": 260}
    run = build_run({"model": model, "degrees": {"dp": 1, "tp": tp}, "tensor": {"kind": tensor}}).resolve(tp)
    network, plan = network_of(run), plan_of(run)
    counted = held(network, plan, (range(network.layers),), (0,)).total
    assert counted == sum(math.prod(row["here"]) for row in plan_rows(run, rank=tp - 1))


@pytest.mark.parametrize("kv_heads", [6, 1])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tensor", "tp"), [("1d", 2), ("2.5d", 8), ("3d", 8)])
def test_of_both_halves_a_rank_of_tp_holds_what_is_counted(tensor: str, tp: int, tied: bool, kv_heads: int) -> None:
    model = MODEL | {"kind": "encoder_decoder", "positions": "t5", "vocab_size": 300, "tied_embeddings": tied, "num_kv_heads": kv_heads}
    values = {"model": model, "data": {"objective": "span_corruption"}, "degrees": {"dp": 1, "tp": tp}, "optimizer": {"kind": "adamw"}}
    run = build_run(values | {"tensor": {"kind": tensor}}).resolve(tp)
    network = network_of(run)
    counted = held(network, plan_of(run), (range(network.depth),), (0,)).total
    assert counted == sum(math.prod(row["here"]) for row in plan_rows(run, rank=tp - 1))


LATENTS = [{"key_rank": 20, "query_rank": 28, "rotary_size": 6, "value_size": 10}, {"key_rank": 20, "rotary_size": 6, "value_size": 10}]


@pytest.mark.parametrize("latent", LATENTS, ids=["query and key latents", "key latents"])
@pytest.mark.parametrize("sliced", [False, True], ids=["1d", "sliced"])
def test_latent_attention_with_tp_holds_and_keeps_the_predicted_bytes(sliced: bool, latent: dict[str, int]) -> None:
    """Parameters of a rank, and bytes that autograd keeps for two layers minus the bytes for one, equal the prediction."""
    values = {"model": MODEL | {"num_kv_heads": None, "latent": latent, "vocab_size": 96}, "train": {"global_batch": 3}}
    values |= {"degrees": {"dp": 1, "tp": 2}, "tensor": {"kind": "1d", "sequence_parallel": sliced}, "precision": {"compute": "bf16"}}
    run = build_run(values).resolve(2)
    network, plan = network_of(run), plan_of(run)
    rows = plan_rows(run, rank=1)
    assert held(network, plan, (range(network.layers),), (0,)).total == sum(math.prod(row["here"]) for row in rows)
    more, fewer = (run_on_ranks(_kept, 2, values | {"model": values["model"] | {"num_layers": layers}})[1] for layers in (2, 1))
    said = layer_kept(network, plan, OURS_ON_CPU, 0, "none") + cast_weights(network, plan, 0)
    assert said == pytest.approx(more - fewer, rel=0.01)


def _kept(rank: int, values: dict[str, Any]) -> int:
    """Return the bytes of storages that autograd keeps for a micro-batch on this rank, without parameters."""
    run = build_run(values).resolve(2)
    model, _ = build(run, process.connect(run.mesh_degrees(), process.World(rank, 2)), device=torch.device("cpu"))
    weights, found = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in weights:
            found[t.untyped_storage().data_ptr()] = t
        return t

    tokens_BL = torch.randint(96, (3, 20))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(tokens_BL, Context.fresh(tokens_BL), tokens_BL)
    return sum(t.untyped_storage().nbytes() for t in found.values())
