"""`moe verify --peer transformers`: compares a tiny random model on one process with the same model under transformers' tensor, expert and
FSDP2 parallelism.

ep alone: ranks compute the same batch and hold different experts. ep with fsdp: each rank has a batch of its own, and tokens are sent to
the ranks that hold their experts. Releases of transformers differ in their arguments: see `_asked`. `python -m tests.peers.releases`
verifies several releases.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe.verify.peer import VOCABULARY, Pair, batch, subsets, train

PACKAGES = {"transformers": "moe-parallel[hf]"}
MODELS = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3")
DEGREES = ("ep", "tp", "fsdp")
ROUTED = MODELS
_EXPERTS, _PRODUCTS = 4, ("eager", "batched_mm", "grouped_mm")  # _PRODUCTS: values of experts_implementation
_MOST = 2_000_000  # largest number of parameters of a tiny model; a larger model has a size that `_SIZES` does not set
_SIZES: dict[str, Any] = {  # `config_of` uses the entries that the family's configuration has
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "head_dim": 8, "max_position_embeddings": 64, "num_local_experts": _EXPERTS,
    "num_experts": _EXPERTS, "n_routed_experts": _EXPERTS, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "moe_num_experts": _EXPERTS, "moe_topk": 2, "num_dense_layers": 1, "mlp_only_layers": [], "dense_intermediate_size": 48,
    "shared_intermediate_size": 24, "shared_expert_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24,
    "linear_num_heads": 4, "linear_head_dim": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 8, "linear_num_value_heads": 4,
    "linear_value_head_dim": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_d_state": 8,
    "ssm_state_size": 8, "n_groups": 2, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 8, "rel_extent": 16,
    "index_n_heads": 4, "index_head_dim": 8, "index_topk": 4, "o_groups": 2, "o_lora_rank": 8, "unpadded_vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
    "sliding_window": 4, "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_OF_FAMILY: dict[str, dict[str, Any]] = {  # family -> settings of its tiny model that replace or extend `_SIZES`
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
}


def load() -> None:
    """Import the modules that the ranks need, and turn off transformers' log messages and warnings."""
    import transformers

    with contextlib.suppress(ImportError):  # earlier releases lack this module
        from transformers.distributed import mixin  # noqa: F401
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for model in MODELS:
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING[transformers.CONFIG_MAPPING[model]]
    warnings.simplefilter("ignore")


def others() -> tuple[str, ...]:
    """Return the other families of the installed release that have a plan of expert parallelism. Their names are those of `model_type`."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

    return tuple(name for name in known if name not in MODELS and getattr(CONFIG_MAPPING[name], "base_model_ep_plan", None))


def pairs(models: tuple[str, ...], degrees: dict[str, int], pin: bool) -> Iterator[Pair]:
    """Yield a pair (runs on one process and on many) for each model and each non-empty subset of the axes in `degrees`. For MODELS, the
    subset {ep} also has a pair for each implementation of experts' products. Newer releases of transformers spread experts only over ranks
    of tp or fsdp. With them, {ep} runs on ranks of tp with tp_plan={}, and only if `degrees` has no other axis; the subsets of ep and one
    other axis have the pairs for products.
    pin: in the run on many processes, tokens get the experts that routers chose on one process."""
    alone = "ep_size" not in _keys()  # whether ep has its own ranks; newer releases spread experts over the ranks of tp or fsdp
    heads = max(2, degrees.get("tp", 1))
    for model in models:
        for chosen in subsets(degrees):
            if list(chosen) == ["ep"] != list(degrees) and not alone:
                continue
            shared = chosen.get("tp", chosen.get("ep", 1) if alone else 1) * chosen.get("fsdp", 1)
            layout = " ".join(f"{name}{degree}" for name, degree in chosen.items())
            for products in (None, *(_PRODUCTS if model in MODELS and "ep" in chosen and len(chosen) == 2 - alone else ())):
                many = partial(_many, model, chosen, pin, products)
                title = layout if products is None else f"{layout} {products}"
                yield Pair(model, title, shared if shared > 1 else chosen["ep"], partial(_one, model, heads, pin), many)


def config_of(model: str, heads: int = 2) -> Any:
    """Return the configuration of a tiny model of this family. heads: number of key/value heads, at least the number of ranks of tp."""
    import transformers

    config = transformers.CONFIG_MAPPING[model]()
    # each tp rank gets a multiple of 12 fp32 numbers (48 bytes): grouped_mm needs rows of a multiple of 16 bytes
    sizes: dict[str, Any] = _SIZES | {"num_key_value_heads": heads, "moe_intermediate_size": 12 * heads}
    known = {name: value for name, value in sizes.items() if _has(config, name)}
    if "kv_lora_rank" in known:  # latent attention has a key head for each query head, and rotates 4 elements of each
        known |= {"num_key_value_heads": 4, "head_dim": 4}
    return transformers.CONFIG_MAPPING[model](**known | _OF_FAMILY.get(model, {}))


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except RuntimeError:  # raised by transformers if the value differs between layers
        return True


def _one(model: str, heads: int, pin: bool, folder: Path) -> None:
    import transformers

    config = config_of(model, heads)
    with torch.device("meta"):
        shapes = dict(transformers.AutoModelForCausalLM.from_config(config).named_parameters())
    if (count := sum(p.numel() for p in shapes.values())) > _MOST:
        raise ValueError(f"{model} has {count:,} parameters with the tiny sizes, needed at most {_MOST:,}: add its sizes to _SIZES")
    if not any(".experts." in name for name in shapes):
        raise ValueError(f"{model} has no experts with the tiny sizes: set its layers in _OF_FAMILY")
    torch.manual_seed(0)
    net = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in net.parameters():  # initial values of 0 or 1 would hide faults
            if parameter.dim() == 1 or not bool(parameter.any()):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    net.save_pretrained(folder / "weights")
    _train(net, folder, pin, batch())


def _many(model: str, degrees: dict[str, int], pin: bool, products: str | None, folder: Path) -> None:
    import transformers
    from transformers.integrations import accelerate

    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    # transformers checks that accelerate is installed, but does not use it without a device map
    vars(accelerate)["is_accelerate_available"] = lambda *_: True
    own = {} if products is None else {"experts_implementation": products}
    net = transformers.AutoModelForCausalLM.from_pretrained(
        folder.parent / "one" / "weights", **_asked(degrees), dtype=torch.float32, **own
    )
    if "ep" in degrees and not net._ep_plan:
        raise ValueError(f"{type(net).__name__} has no plan of expert parallelism: each rank has all experts")
    fsdp = degrees.get("fsdp", 1)
    tokens = batch().chunk(fsdp)[rank // (world // fsdp)]
    _train(net, folder, pin, tokens)


def _asked(degrees: dict[str, int]) -> dict[str, Any]:
    """Return the arguments of from_pretrained for these degrees, in the installed release. Raises ValueError if this release does not
    support them."""
    from transformers.distributed.configuration_utils import DistributedConfig

    given: dict[str, Any] = {f"{name}_size": degree for name, degree in degrees.items()}
    keys = _keys()
    if "ep_size" in keys:
        alone: dict[str, Any] = {"tp_size": degrees["ep"], "tp_plan": {}} if set(degrees) == {"ep"} else {}
        return {"distributed_config": DistributedConfig(**given, **alone)}
    if {"ep", "tp"} <= set(degrees):
        raise ValueError("in this release the ranks of tp have either a part of each layer or experts")
    if "ep" in degrees:
        given = {"tp_size": given.pop("ep_size"), "enable_expert_parallel": True} | given
    if "tp_size" in keys:
        return {"distributed_config": DistributedConfig(**given)}
    if "fsdp" in degrees:
        raise ValueError("this release has no FSDP2 of its own")
    return {"distributed_config": DistributedConfig(enable_expert_parallel=True)} if "ep" in degrees else {"tp_plan": "auto"}


def _keys() -> set[str]:
    """Return the keys of the installed release's DistributedConfig."""
    from transformers.distributed.configuration_utils import DistributedConfig

    return set(DistributedConfig.__dataclass_fields__)


def _train(net: torch.nn.Module, folder: Path, pin: bool, tokens: torch.Tensor) -> None:
    net.train()
    for module in net.modules():
        if type(module).__name__.endswith("Router"):
            module.eval()  # in training, Phi-MoE's router chooses at random: its choices would depend on the layout
    train(folder, net, lambda inputs: net(inputs, use_cache=False).logits, tokens, pin=pin)
