"""Adapter for `moe verify --peer megatron_core`: runs megatron-core's GPTModel with tensor, sequence and expert parallelism and its
DistributedDataParallel. The layers are those without Transformer Engine ("local spec").

gpt      grouped-query attention, RMSNorm, SwiGLU
moe      as gpt, with MoE layers: four experts, top-2 routing and a shared expert
sigmoid  as moe, with sigmoid scores, two groups of experts and a selection bias

The axis fsdp means data parallelism here. Expert parallelism (ep) uses the ranks of fsdp and tp: with ep and tp, each expert is whole on
one rank; with ep, tp and fsdp, each expert is sharded over tp. In the printed rows of models with experts, the layout's name ends with
the token dispatcher. On a CPU, stand-ins replace CUDA devices and streams, and `Norm` replaces megatron-core's wrapper of torch's RMSNorm,
which refuses sequence parallelism.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe.verify.peer import VOCABULARY, Pair, adamw, batch, subsets, write_weights
from moe.verify.yours.recorder import record

PACKAGES = {"megatron.core": "megatron-core"}  # module -> package that pip installs
MODELS = ("gpt", "moe", "sigmoid")
DEGREES = ("ep", "tp", "fsdp")  # axes that this adapter supports
ROUTED = ("moe", "sigmoid")  # models with experts
DISPATCHERS = ("alltoall", "allgather")
_EXPERTS, _LENGTH = 4, batch().shape[1] - 1
_SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "normalization": "RMSNorm",
    "add_bias_linear": False, "gated_linear_unit": True, "activation_func": F.silu, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "use_cpu_initialization": True, "gradient_accumulation_fusion": False, "masked_softmax_fusion": False, "bias_dropout_fusion": False,
    "bias_activation_fusion": False, "apply_rope_fusion": False, "persist_layer_norm": False,
}  # fmt: skip
_MOE: dict[str, Any] = {
    "num_moe_experts": _EXPERTS, "moe_ffn_hidden_size": 24, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 24,
    "moe_router_load_balancing_type": "none",
}  # fmt: skip
_SIGMOID: dict[str, Any] = {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_num_groups": 2, "moe_router_group_topk": 1,
}  # fmt: skip


def load() -> None:
    """Import the modules that the ranks need."""
    warnings.simplefilter("ignore")
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs  # noqa: F401
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)  # release 0.16.1 reads this name and does not define it without Transformer Engine


def pairs(models: tuple[str, ...], degrees: dict[str, int], pin: bool) -> Iterator[Pair]:
    """Yield a pair (one process, many ranks) for each model and each non-empty subset of the axes in `degrees`. With tp, gpt has a pair
    with and one without sequence parallelism, other models only with it. Models with experts have a pair for each dispatcher. pin: routers
    repeat the single process's choices of experts."""
    heads = max(2, degrees.get("tp", 1))
    for model in models:
        for chosen in subsets(degrees):
            # ep uses the ranks of data parallelism (fsdp): with equal degrees, ep with fsdp is the same layout as ep alone
            same = list(chosen) == ["ep", "fsdp"] and chosen["fsdp"] <= chosen["ep"]
            if same or "ep" in chosen and model not in ROUTED:
                continue
            world = chosen.get("tp", 1) * chosen.get("fsdp", 1) if list(chosen) != ["ep"] else chosen["ep"]
            layout = " ".join(f"{'dp' if name == 'fsdp' else name}{degree}" for name, degree in chosen.items())
            sequence = (False, True) if "tp" in chosen and model == "gpt" else ("tp" in chosen,)
            for split, dispatcher in product(sequence, DISPATCHERS if model in ROUTED else ("",)):
                title = " ".join(filter(None, (layout, "sequence" if split else "", dispatcher)))
                many = partial(_many, model, heads, chosen, pin, split, dispatcher or DISPATCHERS[0])
                yield Pair(model, title, world, partial(_one, model, heads, pin), many)


def _on_a_cpu() -> None:
    """Replace the CUDA device, streams and random states that megatron-core asks for, until the process ends."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.moe import token_dispatcher

    stream = mock.MagicMock()
    for name, value in {"current_device": torch.device("cpu"), "Stream": stream, "current_stream": stream, "stream": nullcontext()}.items():
        setattr(torch.cuda, name, mock.Mock(return_value=value))
    # the original converts only CUDA tensors
    token_dispatcher.maybe_move_tensor_to_cpu = lambda x, as_numpy=False, **_: x.numpy() if as_numpy and torch.is_tensor(x) else x
    get_cuda_rng_tracker().fork = lambda *_: nullcontext()  # guards dropout's random numbers; dropout is 0


class Norm(nn.RMSNorm):
    """torch's RMSNorm, with the attribute that makes megatron-core sum the weight's gradient over tp."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def _model(model: str, heads: int, degrees: dict[str, int], sequence: bool, dispatcher: str) -> Any:
    """Return this rank's part of the model, with initial values. heads: number of key-value heads. degrees: axis -> number of ranks; {}:
    one process. sequence: with sequence parallelism. dispatcher: one of DISPATCHERS."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    _on_a_cpu()
    tp, ep = degrees.get("tp", 1), degrees.get("ep", 1)
    shared = 1 if tp * ep > dist.get_world_size() else tp  # number of ranks over which an expert is sharded
    sizes = {"tensor_model_parallel_size": tp, "expert_model_parallel_size": ep, "expert_tensor_parallel_size": shared}
    parallel_state.initialize_model_parallel(**sizes)
    keys = _SIZES | sizes | {"num_query_groups": heads, "sequence_parallel": sequence}
    if model in ROUTED:
        keys |= _MOE | {"moe_token_dispatcher_type": dispatcher} | (_SIGMOID if model == "sigmoid" else {})
    layer = get_gpt_layer_local_spec(_EXPERTS if model in ROUTED else None, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    block = TransformerBlockSubmodules([layer] * _SIZES["num_layers"], Norm)
    return GPTModel(
        TransformerConfig(**keys), block, VOCABULARY, _LENGTH, position_embedding_type="rope", share_embeddings_and_output_weights=False
    )


def _one(model: str, heads: int, pin: bool, folder: Path) -> None:
    from megatron.core.distributed import finalize_model_grads

    torch.manual_seed(0)
    net = _model(model, heads, {}, False, DISPATCHERS[0])
    write_weights(net, folder)
    net.finish_grad_sync = lambda **_: None  # finalize_model_grads calls it, and only DistributedDataParallel has it
    optimizer = adamw(net)
    for step in record(folder, net, optimizer, pin=folder if pin else None):
        loss = _loss(net, batch())
        step.note("loss", loss)
        loss.backward()
        finalize_model_grads([net])  # updates the routers' selection biases
        optimizer.step()


def _many(model: str, heads: int, degrees: dict[str, int], pin: bool, sequence: bool, dispatcher: str, folder: Path) -> None:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    net = _model(model, heads, degrees, sequence, dispatcher)
    whole = torch.load(folder.parent / "one" / "weights.pt")
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(_shard(name, parameter, whole))
    engine = DistributedDataParallel(net.config, DistributedDataParallelConfig(overlap_grad_reduce=False), net)
    rank, dp = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    optimizer, tokens = adamw(net), batch().chunk(dp)[rank]
    for step in record(folder, net, optimizer, pin=folder.parent / "one" if pin else None):
        loss = _loss(engine, tokens)
        loss.backward()
        mean = loss.detach() / dp
        dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
        step.note("loss", mean)
        finalize_model_grads([engine])
        for parameter in net.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()


def _loss(net: Any, tokens: Tensor) -> Tensor:
    """Return the mean loss of these token ids [B, L + 1]."""
    positions, mask = torch.arange(_LENGTH).expand(len(tokens), -1), torch.ones(_LENGTH, _LENGTH).triu(1).bool()[None, None]
    losses: Tensor = net(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return losses.mean()


def _shard(name: str, parameter: Any, whole: dict[str, Tensor]) -> Tensor:
    """Return this rank's part of the parameter from the unsharded weights `whole`. An expert's name has its index among the rank's experts,
    from 0. The two halves of SwiGLU's fused first matrix are sharded separately."""
    from megatron.core import parallel_state

    start, _, rest = name.partition(".local_experts.")
    expert = bool(rest)
    if expert:
        number, _, rest = rest.partition(".")
        each = _EXPERTS // parallel_state.get_expert_model_parallel_world_size()
        name = f"{start}.local_experts.{parallel_state.get_expert_model_parallel_rank() * each + int(number)}.{rest}"
    value = whole[name]
    if value.shape == parameter.shape:
        return value
    rank = parallel_state.get_expert_tensor_parallel_rank() if expert else parallel_state.get_tensor_model_parallel_rank()
    dim, ranks = parameter.partition_dim, value.numel() // parameter.numel()
    halves = value.chunk(2 if "linear_fc1" in name else 1, dim)
    return torch.cat([half.chunk(ranks, dim)[rank] for half in halves], dim)
