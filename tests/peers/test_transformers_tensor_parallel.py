"""Mixtral on two gloo ranks, once with transformers' tensor-parallel plan and once with this project's: same logits and gradients.

transformers cuts each expert's hidden units over the ranks, so here it is tp 2 with etp 2. Both begin with the same checkpoint.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.checks.together import check_run
from moe.nn.context import Context
from moe.parallelize.build import build
from moe.recipe.load import build_run
from parallel.mesh.gradients import sum_gradients
from parallel.process import process
from parallel.process.process import World
from tests.support.ranks import run_on_ranks

transformers = pytest.importorskip("transformers", reason="pip install moe-parallel[hf]")

# B sequences, L length, D model, F hidden (transformers' grouped product needs a multiple of 8), E experts, V vocabulary,
# H query heads, K key-value heads
B, L, D, F, E, V, H, K = 2, 5, 32, 24, 4, 264, 4, 2
VALUES: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 1, "d_model": D, "num_heads": H, "num_kv_heads": K, "d_ff": F, "max_length": L, "moe_every": 1, "vocab_size": V,
        "tied_embeddings": False, "norm": "rmsnorm", "ffn": "swiglu",
    },
    "experts": {"num_experts": E},
    "router": {"preset": "mixtral", "balance_weight": 0.0},
    "degrees": {"tp": 2, "etp": 2, "ep": 1},
    "precision": {"compute": "fp32"},
    "train": {"global_batch": B, "eval_sequences": B},
}  # fmt: skip
TOKENS = torch.tensor([[3, 17, 8, 39, 0], [5, 3, 21, 30, 11]])


def ours_of(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this project's parameter name -> weight or gradient of transformers, in this project's layout."""
    block = "model.layers.0."
    gate, up = theirs[f"{block}mlp.experts.gate_up_proj"].chunk(2, 1)  # [E, F, D] each
    found = {
        "embedding.weight": theirs["model.embed_tokens.weight"],
        "head.weight": theirs["lm_head.weight"],
        "norm.weight": theirs["model.norm.weight"],
        "layers.0.attention_norm.weight": theirs[f"{block}input_layernorm.weight"],
        "layers.0.ffn_norm.weight": theirs[f"{block}post_attention_layernorm.weight"],
        "layers.0.moe.router.weight": theirs[f"{block}mlp.gate.weight"],
        "layers.0.moe.experts.w1": gate.transpose(1, 2),
        "layers.0.moe.experts.w3": up.transpose(1, 2),
        "layers.0.moe.experts.w2": theirs[f"{block}mlp.experts.down_proj"].transpose(1, 2),
    }
    return found | {
        f"layers.0.attention.{a}.weight": theirs[f"{block}self_attn.{b}_proj.weight"]
        for a, b in zip(("q", "k", "v", "out"), "qkvo", strict=True)
    }


def weights(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def test_mixtral_by_transformers_plan_and_by_ours(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "intermediate_size": F, "num_attention_heads": H, "num_key_value_heads": K, "vocab_size": V}
    config = transformers.MixtralConfig(
        **sizes, num_hidden_layers=1, num_local_experts=E, num_experts_per_tok=2, rms_norm_eps=1e-6, rope_theta=1e4
    )
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)

    def work(rank: int) -> dict[str, float]:
        warnings.simplefilter("ignore")
        run = check_run(build_run(VALUES), 2)
        mesh = process.connect(run.mesh_degrees(), World(rank, 2))
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
        # transformers asks whether accelerate is installed, but does not use it without a device map
        transformers.integrations.accelerate.is_accelerate_available = lambda *_: True
        theirs = transformers.MixtralForCausalLM.from_pretrained(tmp_path, tp_plan="auto", dtype=torch.float32)
        assert any(p.to_local().shape != p.shape for p in theirs.parameters() if hasattr(p, "to_local"))
        want = theirs(TOKENS).logits
        (want * weights((B, L, V))).sum().backward()

        def whole(x: Any) -> Tensor:
            return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()

        model, layouts = build(run, mesh, device=torch.device("cpu"))
        values = ours_of({name: whole(p) for name, p in theirs.named_parameters()})
        assert values.keys() == layouts.keys()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(values[name][layouts[name].region(mesh)])
        got = model(TOKENS, Context.of(TOKENS)).logits_BLV
        (got * weights((B, L, V))).sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        sum_gradients(grads, layouts, mesh)
        expected = ours_of({name: whole(p.grad) for name, p in theirs.named_parameters()})
        off = {
            name: float((grads[name] - expected[name][layouts[name].region(mesh)]).abs().max() / expected[name].abs().max())
            for name in values
        }
        return off | {"logits": float((got - whole(want)).abs().max())}

    for off in run_on_ranks(work, 2, timeout_s=120):
        assert max(off.values()) < 2e-6, off
