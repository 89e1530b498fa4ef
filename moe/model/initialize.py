"""Initial weights, as functions of only (seed, global name, index in the unsharded tensor), and the global names of parameters.

So initial weights are bitwise equal on every layout, and a rank computes only its shards (parallel/numerics/first_values.py). The
distribution is a normal one, truncated at 2 sigma, with sigma = sqrt(init_scale / fan_in) (Switch, arXiv 2101.03961, section 2.4,
init_scale 0.1).

Checkpoints use the global names too. They do not depend on tiling or on the stacking of experts:

name in the model                  global name
layers.3.moe.experts.w1            layers.3.experts.{}.w1      a stack: one name for each expert, with its global index in {}
layers.3.ffn.tiles.1.w1.weight     layers.3.ffn.w1.weight      a tile: the name of the matrix of which it is a part
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from moe.experts.experts import HIDDEN_DIM
from moe.recipe import sections
from parallel.data.tiling import tile_of, without_tiles
from parallel.mesh.layout import Box, Layout, stored
from parallel.mesh.mesh import Degrees, Mesh
from parallel.numerics.first_values import key_of_tensor, truncated_normal

_EXPERT_MATRIX = re.compile(r"(.*\.experts)\.(w[123](?:_[ab])?|b[13])")

AHEAD = "ahead."  # name prefix of the parameters of multi-token prediction, which only training uses


def global_name(name: str) -> str:
    """Return a parameter's global name: `layers.3.experts.w1` for `layers.3.moe.experts.w1`. A tile gets the name of its matrix."""
    name = without_tiles(name).replace(".moe.", ".")
    return "embedding" if name == "embedding.weight" else name


def is_bias(name: str) -> bool:
    """Return whether the parameter with this name is a bias. The number of dims cannot tell, because a stack of experts' biases
    has two."""
    last = name.removesuffix(".weight").rpartition(".")[2]
    return last in ("b1", "b3", "bias") or last.endswith("_bias")


def is_stack_of_biases(name: str) -> bool:
    """Return whether the parameter with this name holds a bias vector for each expert of a layer, [experts, outputs]."""
    return name.rpartition(".")[2] in ("b1", "b3", "output_bias")


def stack_of(name: str) -> str | None:
    """Return the global name of the tensors in a stack of experts, with `{}` for the expert's index; None if `name` is no stack."""
    found = _EXPERT_MATRIX.fullmatch(global_name(name))
    return None if found is None else f"{found[1]}.{{}}.{found[2]}"


def depth_ahead(name: str) -> int:
    """Return the number (from 1) of the multi-token prediction module that has this parameter; 0 for all other parameters."""
    return int(name.split(".")[1]) + 1 if name.startswith(AHEAD) else 0


def tiled_dim(name: str) -> int:
    """Return the dim in which tiles cut this parameter: hidden units of a feed-forward network, rows of the embedding or the head."""
    words = name.split(".")
    return HIDDEN_DIM.get(words[-1], 0) if stack_of(name) else int(words[-2:] == ["w2", "weight"])  # a plain weight is [out, in]


# (global name, unsharded shape, model) -> sigma; None: all values are 1
SigmaOf = Callable[[str, tuple[int, ...], sections.Model], float | None]


class FirstValues:
    """Initial values of this rank's shards. `fill(name, out)` writes a parameter's shard, or the region `within` of the shard, into
    `out`. spread: function that replaces `sigma_of`; None: `sigma_of` itself."""

    def __init__(
        self, model: sections.Model, layouts: Mapping[str, Layout], mesh: Mesh, *, seed: int, spread: SigmaOf | None = None
    ) -> None:
        self.model, self.layouts, self.mesh, self.seed, self.spread = model, layouts, mesh, seed, spread or sigma_of

    def fill(self, name: str, out: Tensor, within: Box | None = None) -> None:
        for tensor in stored(global_name(name), self.layouts[name], self.mesh, within):
            shard = out if tensor.entry is None else out[tensor.entry]
            sigma = self.spread(tensor.name, tensor.shape, self.model)
            if not sigma:
                shard.fill_(1.0 if sigma is None else 0.0)
                continue
            key = key_of_tensor(self.seed, tensor.name)
            truncated_normal(shard, key=key, shape=tensor.shape, region=tensor.region, sigma=sigma)


def sigma_of(name: str, shape: tuple[int, ...], model: sections.Model) -> float | None:
    """Return the standard deviation of a tensor's initial values, given its global name and unsharded shape. Return None for a gain, which
    starts at 1, and 0 for a bias, an attention sink, or LoRA's B, which start at 0."""
    if name.endswith(("norm.weight", ".expert_scale")):
        return None
    if name.endswith(("_bias.weight", ".sinks.weight", "_bias", ".b1", ".b3", ".lora_b", "w1_b", "w2_b", "w3_b")):
        return 0.0
    halves = model.kind == "encoder_decoder"
    if name == "embedding":  # smaller if it is also the head, except in T5, which divides the head's input by sqrt(D) instead
        return shape[1] ** -0.5 if model.tied_embeddings and not halves else 1.0
    if name.endswith(".attention.bias.weight"):  # T5's position bias: fan_in is the model's width, not the number of buckets or heads
        return math.sqrt(model.init_scale / model.d_model)
    fan_in = shape[0] if ".experts." in name else shape[1]  # an expert's matrix is [in, out], any other [out, in]
    if halves and name.endswith(".q.weight"):  # T5 does not divide logits by sqrt(head size), so queries start smaller
        fan_in *= model.head_size or model.d_model // model.num_heads
    return math.sqrt(model.init_scale / fan_in)


def initialize(model: nn.Module, first: FirstValues, *, device: torch.device | str | None = None) -> None:
    """Set every weight to its initial value, which `first` computes, and every buffer to 0. Weights on the meta device are made on
    `device`."""
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                parameter = nn.Parameter(torch.empty_like(parameter, device=device or "cpu"))
                setattr(module, name, parameter)
            first.fill(f"{path}.{name}" if path else name, parameter.data)
    zero_buffers(model, device=device or next(model.parameters()).device)


def zero_buffers(model: nn.Module, *, device: torch.device | str) -> None:
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros(buffer.shape, device=device))


def alone(model: nn.Module) -> tuple[dict[str, Layout], Mesh]:
    """Return (parameter's name -> layout, mesh of one process) for a model that is not sharded."""
    layouts = {}
    for name, parameter in model.named_parameters():
        tile, shape = tile_of(model, name, dim=tiled_dim(name)) or (None, tuple(parameter.shape))
        layouts[name] = Layout(shape, unstack=stack_of(name), tile=tile)
    return layouts, Mesh.of(Degrees())
