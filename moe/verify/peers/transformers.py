"""transformers: a tiny random model of a family, in one process and by transformers' own tensor, expert and FSDP2 parallelism.

ep alone: ranks compute the same batch and hold different experts. ep with fsdp: each rank has a batch of its own, and tokens are sent to
the ranks that hold their experts.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe.verify.pair import VOCABULARY, Pair, batch, train

PACKAGES = {"transformers": "moe-parallel[hf]"}
MODELS = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3")
DEGREES = ("ep", "tp", "fsdp")
ROUTED = MODELS
_EXPERTS, _PRODUCTS = 4, ("eager", "batched_mm", "grouped_mm")  # _PRODUCTS: values of experts_implementation
_SIZES: dict[str, Any] = {  # keys of all families; `config_of` takes those that a configuration has
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "num_local_experts": _EXPERTS,
    "num_experts": _EXPERTS, "n_routed_experts": _EXPERTS, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "sliding_window": 4, "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def load() -> None:
    """Import the modules that the ranks need, and turn off transformers' log messages and warnings."""
    import transformers
    from transformers.distributed import configuration_utils, mixin  # noqa: F401

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for model in MODELS:
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING[transformers.CONFIG_MAPPING[model]]
    warnings.simplefilter("ignore")


def pairs(models: tuple[str, ...], degrees: dict[str, int], pin: bool) -> Iterator[Pair]:
    """Yield a pair for each model and each subset of `degrees`. If a subset has ep and one other axis, it also has a pair for each
    implementation of the experts' products."""
    for model in models:
        for names in (names for size in range(1, len(degrees) + 1) for names in combinations(degrees, size)):
            chosen = {name: degrees[name] for name in names}
            shared = chosen.get("tp", 1) * chosen.get("fsdp", 1)
            layout = " ".join(f"{name}{degree}" for name, degree in chosen.items())
            for products in (None, *(_PRODUCTS if "ep" in chosen and len(chosen) == 2 else ())):
                many = partial(_many, model, chosen, pin, products)
                title = layout if products is None else f"{layout} {products}"
                yield Pair(model, title, shared if shared > 1 else chosen["ep"], partial(_one, model, pin), many)


def config_of(model: str) -> Any:
    """Return the configuration of a tiny model of this family."""
    import transformers

    config = transformers.CONFIG_MAPPING[model]()
    known = {name: value for name, value in _SIZES.items() if hasattr(config, name)}
    if model == "deepseek_v3":
        known |= {"num_key_value_heads": 4, "head_dim": 4}
    return transformers.CONFIG_MAPPING[model](**known)


def _one(model: str, pin: bool, folder: Path) -> None:
    import transformers

    torch.manual_seed(0)
    net = transformers.AutoModelForCausalLM.from_config(config_of(model), dtype=torch.float32)
    with torch.no_grad():
        for parameter in net.parameters():  # initial values of 0 or 1 would hide faults
            if parameter.dim() == 1 or not bool(parameter.any()):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    net.save_pretrained(folder / "weights")
    _train(net, folder, pin, batch())


def _many(model: str, degrees: dict[str, int], pin: bool, products: str | None, folder: Path) -> None:
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.integrations import accelerate

    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    # transformers wants accelerate to be installed, but does not use it without a device map
    vars(accelerate)["is_accelerate_available"] = lambda *_: True
    given: dict[str, Any] = {f"{name}_size": degree for name, degree in degrees.items()}
    if "ep" in degrees and not {"tp", "fsdp"} & degrees.keys():
        given |= {"tp_size": degrees["ep"], "tp_plan": {}}
    own = {} if products is None else {"experts_implementation": products}
    net = transformers.AutoModelForCausalLM.from_pretrained(
        folder.parent / "one" / "weights", distributed_config=DistributedConfig(**given), dtype=torch.float32, **own
    )
    fsdp = degrees.get("fsdp", 1)
    tokens = batch().chunk(fsdp)[rank // (world // fsdp)]
    _train(net, folder, pin, tokens)


def _train(net: torch.nn.Module, folder: Path, pin: bool, tokens: torch.Tensor) -> None:
    net.train()
    train(folder, net, lambda inputs: net(inputs, use_cache=False).logits, tokens, pin=pin)
