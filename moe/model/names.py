"""Global names of parameters, used in checkpoints and for initial values. They do not depend on tiling or on the stacking of experts.

name in the model                  global name
layers.3.moe.experts.w1            layers.3.experts.{}.w1      a stack: one name for each expert, with its global index in {}
layers.3.ffn.tiles.1.w1.weight     layers.3.ffn.w1.weight      a tile: the name of the matrix of which it is a part
"""

from __future__ import annotations

import re

from moe.experts.experts import HIDDEN_DIM
from parallel.data.tiling import without_tiles

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
