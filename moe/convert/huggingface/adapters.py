"""`moe convert RUN hf:DIR --adapters`: writes a run's LoRA adapters in the format of PEFT.

    layers.0.attention.q.lora_a [r, in]      base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight [r, in]
    layers.0.attention.q.lora_b [out, r]     base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight [out, r]
    layers.1.experts.3.w1_a     [in, r]      base_model.model.model.layers.1.mlp.experts.3.gate_proj.lora_A.weight [r, in]

PEFT's format has a pair of matrices for each module. So experts' adapters can be written only if the model's files have one tensor for each
matrix of each expert.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from torch import Tensor

from moe.convert.huggingface.families import Family
from moe.convert.huggingface.tensors import by_key, write_file
from moe.nn.lora import pair_of
from moe.recipe.sections import Lora
from moe.train.start.restore import Merged
from moe.train.start.state import EXTRA
from parallel.errors import BadInput

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"  # names of PEFT's files
_PREFIX = "base_model.model."  # prefix of modules' names in PEFT's model


def write_adapters(folder: Path, reader: Merged, lora: Lora, family: Family, *, base: str | None) -> int:
    """Write the LoRA adapters of the run that `reader` reads, in fp32, and PEFT's configuration; return the number of tensors. `base`: name
    of the imported transformers model; the configuration names it if the adapters were trained on that model unchanged. Raises
    BadInput for what PEFT's files cannot store: adapters of experts, if the model's files have several experts in one tensor; adapters of
    dense or shared networks in a model with experts; selection biases of routers, if training changed them."""
    for name, shape in reader.names(EXTRA).items():
        now, before = (one.region(name, EXTRA, tuple(slice(0, size) for size in shape)) for one in (reader, reader.base))
        if not torch.equal(now, before):
            fix = "leave out --adapters to write merged weights, or train with --router.bias_rate 0"
            raise BadInput(
                "--adapters", got=f"{name}, which training has changed", needed="an unchanged bias: PEFT's files cannot store it", fix=fix
            )
    named = None if isinstance(reader.base, Merged) or reader.base.state["counters"]["step"] > 0 else base
    stored, modules = reader.adapters.names(), set[str]()  # modules: regular expressions for the names of modules with adapters
    found: dict[str, tuple[str, bool]] = {}  # key in PEFT's file -> (name in the checkpoint, whether it is transposed)
    keys = by_key(reader.names(), family)
    joined = any(re.search(r"\.experts\.\d+\.", key) for key in keys)
    for key, names in keys.items():
        held = [name for name in names if pair_of(name)[0] in stored]
        if held and (len(names) > 1 or not key.endswith(".weight")):
            needed = f"adapters of modules with one matrix each: {family.architecture} has several experts in {key}"
            raise BadInput("--adapters", got="adapters of experts", needed=needed, fix="leave out --adapters to write merged weights")
        if held and joined and re.search(r"(?<!\d\.)(gate|up|down)_proj\.weight$", key):
            needed = f"adapters of attention and experts: PEFT takes those of {key} for experts'"
            fix = "leave out --adapters to write merged weights"
            raise BadInput("--adapters", got="adapters of dense networks", needed=needed, fix=fix)
        for name in held:
            left, right = pair_of(name)
            expert = left.endswith("_a")  # then left is [in, r], right is [r, out]: the transposes of PEFT's A and B
            module = key.removesuffix(".weight")
            found[f"{_PREFIX}{module}.lora_A.weight"] = (left if expert else right, expert)
            found[f"{_PREFIX}{module}.lora_B.weight"] = (right if expert else left, expert)
            modules.add(_pattern(module))

    def read(key: str) -> Tensor:
        name, turned = found[key]
        tensor = reader.adapters.region(name, "weight", tuple(slice(0, size) for size in stored[name])).float()
        return tensor.t().contiguous() if turned else tensor

    forms = {key: (torch.float32, stored[name][::-1] if turned else stored[name]) for key, (name, turned) in found.items()}
    write_file(folder / TENSORS, forms, read)
    about = {
        "peft_type": "LORA", "task_type": "SEQ_2_SEQ_LM" if family.halves else "CAUSAL_LM", "base_model_name_or_path": named,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0, "target_modules": "|".join(sorted(modules)), "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True, "use_rslora": False, "use_dora": False, "modules_to_save": None,
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")
    return len(found)


def _pattern(module: str) -> str:
    """Return the regular expression of a module's name in any layer. transformers 5 joins a layer's experts, and PEFT looks for
    `mlp.experts.gate_proj`, so the expert's number is optional: without a match PEFT leaves experts' adapters out, with a warning."""
    numbers = re.sub(r"\\\.\d+", r"\\.\\d+", re.escape(module))
    return numbers.replace(r"experts\.\d+", r"experts(\.\d+)?").replace("block_sparse_moe", "(block_sparse_moe|mlp)")
