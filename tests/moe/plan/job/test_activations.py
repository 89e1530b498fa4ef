"""The formulas of moe/plan/memory/kept.py give the bytes that autograd keeps for the backward pass, counted in tensors' storages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.nn.vocabulary import summed_loss
from moe.parallelize.build import save_memory
from moe.plan.job.network import Network, Plan
from moe.plan.job.of_recipe import compute_bytes, network_of, plan_of
from moe.plan.memory.kept import cast_weights, casts_kept, ends_kept, layer_kept, recompute_of
from moe.plan.memory.rows import router_kept
from moe.plan.memory.stack import OURS_ON_CPU
from moe.recipe import load as recipe
from moe.recipe.sections import Run
from moe.router.router import Router
from parallel.numerics.weight_gradient import splittable

B, L = 4, 128
SMALL = {"num_layers": 2, "moe_every": 2, "d_model": 48, "num_heads": 4, "d_ff": 112, "max_length": L, "vocab_size": 96}
CASES: dict[str, dict[str, str]] = {
    "relu": {},
    "gelu": {"model.ffn": "gelu"},
    "swiglu": {"model.ffn": "swiglu"},
    "rmsnorm": {"model.norm": "rmsnorm"},
    "rmsnorm, selective": {"model.norm": "rmsnorm", "recompute.kind": "selective"},
    "t5": {"model.positions": "t5"},
    "a window": {"model.sliding_window": "32", "model.sliding_layers": "[0, 1]", "model.num_kv_heads": "2"},
    "sinks": {"model.attention_sinks": "true", "model.out_bias": "true"},
    "clipped": {"model.clip_qkv": "0.1", "model.qk_norm": "heads", "model.num_kv_heads": "2", "model.rope.fraction": "0.5"},
    "latents": {"model.latent.key_rank": "20", "model.latent.query_rank": "28", "model.latent.rotary_size": "6", "model.norm": "rmsnorm"},
    "grouped queries": {"model.num_kv_heads": "2"},
    "norms of heads": {"model.qk_norm": "heads", "model.num_kv_heads": "2", "model.norm": "rmsnorm"},
    "dropout": {"model.dropout": "0.1"},
    "two choices": {"router.preset": "glam"},
    "fewer experts than choices": {"router.preset": "olmoe", "router.num_choices": "4", "experts.skip": "3"},
    "experts choose": {"router.preset": "expert_choice", "router.capacity_factor": "0.5", "router.allow_noncausal": "true"},
    "experts choose more than there are": {
        **{"router.preset": "expert_choice", "router.num_choices": "1", "router.capacity_factor": "3.0", "router.allow_noncausal": "true"},
    },
    "few places": {"router.preset": "switch", "router.capacity_factor": "0.3"},
    "shared": {"experts.shared": "2"},
    "a gate of the shared expert": {"experts.shared": "1", "experts.shared_gate": "true"},
    "residual": {"experts.residual": "true"},
    "expert dropout": {"experts.dropout": "0.1"},
    "full": {"recompute.kind": "full"},
    "selective": {"recompute.kind": "selective"},
}


def run_of(case: str, compute: str) -> Run:
    values = {f"model.{key}": str(value) for key, value in SMALL.items()} | {"precision.compute": compute, "experts.num_experts": "2"}
    return recipe.load("switch_tiny", values | {"router.jitter": "0.0"} | CASES[case])[0]


def planned(run: Run) -> tuple[Network, Plan]:
    """Return the planner's network and plan of this recipe, with micro-batches of B sequences."""
    run = run.resolve(1)
    return network_of(run), plan_of(run).but(microbatch=B)


def of_layer(run: Run, layer: int) -> float:
    """Return the predicted bytes that a layer keeps for a micro-batch, without copies of weights."""
    network, plan = planned(run)
    return layer_kept(network, plan, OURS_ON_CPU, layer, recompute_of(plan, layer))


def kept_by_blocks(run: Run, casts: str = "kept") -> list[int]:
    """Return the bytes of storages that autograd keeps for each block, without parameters. casts: `kept`, or `again`: products cast their
    weights again in the backward pass, as on pipeline stages."""
    compute = torch.bfloat16 if run.precision.compute == "bf16" else torch.float32
    model = Transformer(run.model, run.experts, run.router, vocab_size=run.vocab_size, compute=compute).train()
    save_memory(model, recompute=run.recompute)
    if casts == "again":
        splittable(model)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    context = Context.fresh(torch.zeros(B, L, dtype=torch.int64)).remembering()
    x_BLD = torch.randn(B, L, run.model.d_model, dtype=compute, requires_grad=True)
    found = []
    for block in model.layers:
        kept: dict[int, Tensor] = {}

        def pack(t: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            if t.untyped_storage().data_ptr() not in weights:
                kept[t.untyped_storage().data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y_BLD, _ = block(x_BLD, context)
        found.append(sum(t.untyped_storage().nbytes() for t in kept.values()))
        x_BLD = y_BLD.detach().requires_grad_()
    return found


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_a_block_keeps_the_predicted_bytes(case: str, compute: str) -> None:
    """Within 3 % for a dense block; within 15 % with experts, because kernels pad each expert's rows to whole tiles."""
    run = run_of(case, compute)
    network, plan = planned(run)
    for layer, kept in enumerate(kept_by_blocks(run)):
        said = of_layer(run, layer) + (cast_weights(network, plan, layer) if casts_kept(plan, OURS_ON_CPU) else 0.0)
        assert said == pytest.approx(kept, rel=0.15 if layer in run.model.layers_with_experts() else 0.03)


ROUTERS: dict[str, dict[str, str]] = {
    "jitter": {"router.jitter": "0.1"},
    "norm": {"router.input_norm": "rmsnorm"},
    "jitter and norm": {"router.jitter": "0.1", "router.input_norm": "rmsnorm"},
    "noise": {"router.noise": "noisy_top_k"},
    "capped": {"router.logit_cap": "3.0"},
    "sparsemixer": {"router.select": "sparsemixer", "router.num_choices": "3", "router.capacity_factor": "null"},
}


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("case", ROUTERS)
def test_router_options_keep_the_predicted_additional_bytes(case: str, compute: str) -> None:
    """Bytes that a router with the option keeps in addition to a router without it, to 12 bytes per choice."""
    values = {f"model.{key}": str(value) for key, value in SMALL.items()} | {"precision.compute": compute, "experts.num_experts": "6"}
    runs = [recipe.load("switch_tiny", values | {"router.jitter": "0.0"} | own)[0] for own in ({}, ROUTERS[case])]
    plain, own = (router_kept(network_of(run), OURS_ON_CPU, compute_bytes(run)) for run in runs)
    more = own - plain
    assert more == pytest.approx((kept_by_router(runs[1]) - kept_by_router(runs[0])) / (B * L), abs=12 * runs[1].router.num_choices)
    assert more > 0


def kept_by_router(run: Run) -> int:
    """Return the bytes of storages that autograd keeps for a router, without its weights and its input."""
    compute = torch.bfloat16 if run.precision.compute == "bf16" else torch.float32
    router = Router(run.router, num_experts=6, d_model=run.model.d_model).train()
    x_TD = torch.randn(B * L, run.model.d_model, dtype=compute, requires_grad=True)
    known = {t.untyped_storage().data_ptr() for t in (*router.parameters(), x_TD)}
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        routing = router(x_TD, sequence_tokens=L, context=Context.fresh(torch.zeros(B, L, dtype=torch.int64)))
    assert routing.gate_TK.requires_grad
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in known)


@pytest.mark.parametrize("case", ["relu", "swiglu"])
def test_stages_keep_no_cast_weights(case: str) -> None:
    """On a pipeline stage, the backward pass casts weights again, so that a dense layer keeps only activations."""
    run = run_of(case, "bf16")
    network, plan = planned(run)
    said = of_layer(run, 0)
    assert said == pytest.approx(kept_by_blocks(run, "again")[0], rel=0.03)
    assert cast_weights(network, plan, 0) > 0.03 * said and not casts_kept(plan.but(pp=2), OURS_ON_CPU)


@pytest.mark.parametrize(
    ("chunks", "norm", "cap"), [(1, "layernorm", "null"), (4, "layernorm", "null"), (4, "rmsnorm", "3"), (1, "rmsnorm", "3")]
)
def test_the_head_keeps_its_logits_unless_they_come_in_chunks(chunks: int, norm: str, cap: str) -> None:
    values = {"recompute.loss_chunks": str(chunks), "model.num_layers": "1", "model.norm": norm, "precision.compute": "fp32"}
    values |= {"model.logit_cap": cap, "model.max_length": str(L)}
    run = recipe.load("dense_tiny", values)[0]
    model = Transformer(run.model, vocab_size=run.vocab_size)
    x_BLD = torch.randn(B, L, run.model.d_model, requires_grad=True)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t):
        targets = torch.zeros(B, L, dtype=torch.int64)
        loss = summed_loss(model.norm(x_BLD), targets, model.embedding, chunks=chunks, cap=run.model.logit_cap)
    assert loss.requires_grad
    found = sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights)
    assert ends_kept(*planned(run), OURS_ON_CPU, first=False, last=True) == pytest.approx(found, rel=0.03)
