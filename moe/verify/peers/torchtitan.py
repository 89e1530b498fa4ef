"""Adapter for `moe verify --peer torchtitan`: runs tiny random models of its families, built and parallelized by torchtitan's own functions
with FSDP2, tensor and expert parallelism.

The last word of a layout's name ("tp2 fsdp2 full_dtensor") is torchtitan's SPMD backend. partial_dtensor: weights are DTensors inside
layers that are sharded. full_dtensor: weights and activations are DTensors everywhere. spmd_types, torchtitan's default, cannot run: torch
2.13's FSDP2 refuses its types. `moe verify` prints this error in the layout's row.

On a CPU, F.scaled_dot_product_attention replaces the two attention kernels for text (FlexAttention and varlen), which have no backward pass
there. FSDP2 scales gradients in a separate operation, because gloo has no sum with a factor.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from moe.verify.peer import VOCABULARY, Pair, adamw, batch, subsets, write_weights
from moe.verify.yours.recorder import record

PACKAGES = {"torchtitan": "torchtitan", "spmd_types": "spmd_types==0.2.3"}
MODELS = ("llama3", "qwen3_moe", "deepseek_v3")
DEGREES = ("ep", "tp", "fsdp")
ROUTED = ("qwen3_moe", "deepseek_v3")
BACKENDS = ("partial_dtensor", "full_dtensor", "spmd_types")
_WIDTH, _EXPERTS, _ROPE = 32, 4, {"max_seq_len": 64, "theta": 1e4}
_SHARED = {"n_layers": 2, "dim": _WIDTH, "n_heads": 4, "attn_backend": "varlen"}  # `_built` replaces the attention


def load() -> None:
    """Import the modules that the ranks need. torchtitan's trainer, which imports packages for datasets, is replaced by an empty class."""
    sys.modules.setdefault("torchtitan.trainer", SimpleNamespace(Trainer=SimpleNamespace(Config=type("Config", (), {}))))  # type: ignore[arg-type]
    for name in (
        "components.loss",
        "components.optimizer",
        "distributed.spmd_types",
        "models.llama3",
        "models.qwen3",
        "models.deepseek_v3",
    ):
        importlib.import_module(f"torchtitan.{name}")
    from torchtitan.distributed import parallel_dims

    parallel_dims.device_type = "cpu"
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def pairs(models: tuple[str, ...], degrees: dict[str, int], pin: bool) -> Iterator[Pair]:
    """Yield a comparison for each model, each subset of the axes in `degrees` and each backend. Subsets with ep alone are left out, because
    torchtitan spreads experts over the ranks of tp and fsdp. pin: routers repeat the single process's choices of experts."""
    heads = max(2, degrees.get("tp", 1))
    for model in models:
        for chosen in subsets(degrees):
            if list(chosen) == ["ep"] or ("ep" in chosen and model not in ROUTED):
                continue
            world = chosen.get("tp", 1) * chosen.get("fsdp", 1)
            layout = " ".join(f"{name}{degree}" for name, degree in chosen.items())
            for backend in BACKENDS:
                many = partial(_many, model, heads, chosen, pin, backend)
                yield Pair(model, f"{layout} {backend}", world, partial(_one, model, heads, pin), many)


def _layers(model: str, heads: int) -> tuple[Any, Any, Any]:
    """Return torchtitan's module for the model's family, the class of the model's configuration, and the configurations of two layers.
    heads: number of key-value heads."""
    from torchtitan.models import deepseek_v3, llama3, qwen3
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE

    moe = {"num_experts": _EXPERTS, "moe_hidden_dim": 32, "moe_comm_backend": "standard"}
    if model == "llama3":
        layers = llama3._build_llama3_layers(**_SHARED, n_kv_heads=heads, hidden_dim=48, rope=ComplexRoPE.Config(dim=8, **_ROPE))
        return llama3, llama3.Llama3Model.Config, layers
    if model == "qwen3_moe":
        layers = qwen3._build_qwen3_moe_layers(
            **_SHARED, **moe, n_kv_heads=heads, head_dim=8, top_k=2, rope=CosSinRoPE.Config(dim=8, **_ROPE)
        )
        return qwen3, qwen3.Qwen3Model.Config, layers
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "mscale": 1.0}
    router = {"router_top_k": 2, "router_score_func": "sigmoid", "router_num_expert_groups": 2, "router_num_limited_groups": 1}
    layers = deepseek_v3._build_dsv3_layers(
        **_SHARED, **moe, **latent, **router, n_dense_layers=1, dense_hidden_dim=48, num_shared_experts=1,
        non_blocking_capacity_factor=None, rope=ComplexRoPE.Config(dim=4, **_ROPE),
    )  # fmt: skip
    return deepseek_v3, deepseek_v3.DeepSeekV3Model.Config, layers


def _built(model: str, heads: int, parallelism: Any) -> tuple[Any, Any]:
    """Return the model on the meta device (without values), and torchtitan's function that parallelizes it."""
    from torchtitan.models.common import Embedding, Linear
    from torchtitan.models.common.attention import ScaledDotProductAttention

    family, config, layers = _layers(model, heads)
    head_init = family._output_linear_init(_WIDTH) if hasattr(family, "_output_linear_init") else family._LINEAR_INIT
    ends = {
        "tok_embeddings": Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=_WIDTH, param_init=family._EMBEDDING_INIT),
        "norm": replace(layers[0].ffn_norm),
        "lm_head": Linear.Config(in_features=_WIDTH, out_features=VOCABULARY, param_init=head_init),
    }
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    chosen = config(dim=_WIDTH, vocab_size=VOCABULARY, layers=layers, **ends)
    chosen.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    with torch.device("meta"):
        net = chosen.build()
    return net, next(value for name, value in vars(family).items() if name.startswith("parallelize_"))


def _one(model: str, heads: int, pin: bool, folder: Path) -> None:
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims, utils

    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    utils.set_spmd_backend(parallelism.spmd_backend)
    net, _ = _built(model, heads, parallelism)
    torch.manual_seed(0)
    net.to_empty(device="cpu")
    with torch.no_grad():
        net.init_weights(buffer_device=None)
    write_weights(net, folder)
    _train(folder, net, ParallelDims.from_config(parallelism, 1), batch(), pin)


def _many(model: str, heads: int, degrees: dict[str, int], pin: bool, backend: str, folder: Path) -> None:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, utils

    names = {"ep": "expert_parallel_degree", "tp": "tensor_parallel_degree", "fsdp": "data_parallel_shard_degree"}
    given = {names[axis]: degree for axis, degree in ({"fsdp": 1} | degrees).items()}
    parallelism = ParallelismConfig(spmd_backend=backend, **given)
    utils.set_spmd_backend(backend)
    net, parallelize = _built(model, heads, parallelism)
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    net = parallelize(
        net, parallel_dims=dims, training=TrainingConfig(mixed_precision_param="float32"), parallelism=parallelism,
        compile_config=CompileConfig(enable=False), ac_config=None, dump_folder="",
    )  # fmt: skip
    net.to_empty(device="cpu")
    whole = torch.load(folder.parent / "one" / "weights.pt")
    with torch.no_grad():
        net.init_weights(buffer_device=None)
        for name, value in [*net.named_parameters(), *net.named_buffers()]:
            shards = isinstance(value, DTensor)
            value.copy_(distribute_tensor(whole[name], value.device_mesh, value.placements) if shards else whole[name])  # type: ignore[attr-defined]
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    fsdp = degrees.get("fsdp", 1)
    _train(folder, net, dims, batch().chunk(fsdp)[dist.get_rank() // (dist.get_world_size() // fsdp)], pin)


def _train(folder: Path, net: Any, dims: Any, tokens: torch.Tensor, pin: bool) -> None:
    """Record a step as torchtitan's trainer makes it: the loss is a sum over the rank's tokens, divided by the number of all tokens."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import register_moe_load_balancing_hook
    from torchtitan.config import CompileConfig
    from torchtitan.distributed import full_dtensor, spmd_types, utils

    net.train()
    inputs, targets, optimizer = tokens[:, :-1], tokens[:, 1:], adamw(net)
    register_moe_load_balancing_hook(optimizer, [net], dims)
    loss_of = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY).build(compile_config=CompileConfig(enable=False))
    several = dist.get_world_size() > 1
    if several and dims.spmd_backend != "partial_dtensor":
        shared = full_dtensor.parallelize_inputs if dims.spmd_backend == "full_dtensor" else spmd_types.annotate_input_spmd_types
        inputs, targets, _ = shared(dims, inputs, targets, {})
    for step in record(folder, net, optimizer, pin=folder.parent / "one" if pin else None):
        with utils.get_spmd_context(parallel_dims=dims if several else None)():
            loss, _ = loss_of(net(inputs), targets, torch.tensor(float(batch()[:, 1:].numel())))
            step.note("loss", utils.dist_sum(loss.detach(), dims.get_optional_mesh("loss")))
            loss.backward()
        optimizer.step()
