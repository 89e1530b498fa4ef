"""What a parameter is called in checkpoints and by the generator of first values, wherever it lies in the tree of modules.

layers.3.moe.experts.w1            layers.3.experts.{}.w1      a stack: one tensor for each expert, by its global number
layers.3.ffn.tiles.1.w1.weight     layers.3.ffn.w1.weight      a tile: a part of it
"""

from __future__ import annotations

import re

from moe.experts.experts import HIDDEN_DIM
from parallel.data.tiling import without_tiles

_EXPERT_MATRIX = re.compile(r"(.*\.experts)\.(w[123](?:_[ab])?|b[13])")


def global_name(name: str) -> str:
    """A module path as checkpoints spell it: `layers.3.moe.experts.w1` is `layers.3.experts.w1`; a tile has the name of its whole."""
    name = without_tiles(name).replace(".moe.", ".")
    return "embedding" if name == "embedding.weight" else name


def is_bias(name: str) -> bool:
    """Whether a parameter, by its module path, is added to what a product gave: of several dims where experts are stacked."""
    last = name.removesuffix(".weight").rpartition(".")[2]
    return last in ("b1", "b3", "bias") or last.endswith("_bias")


def stack_of(name: str) -> str | None:
    """For a module path that is a stack of tensors, their global names with `{}` in the place of the number."""
    found = _EXPERT_MATRIX.fullmatch(global_name(name))
    return None if found is None else f"{found[1]}.{{}}.{found[2]}"


def tiled_dim(name: str) -> int:
    """The dim of a parameter that tiles cut: hidden units of a feed-forward network, rows of the embedding and the head."""
    words = name.split(".")
    return HIDDEN_DIM.get(words[-1], 0) if stack_of(name) else int(words[-2:] == ["w2", "weight"])  # a plain weight is [out, in]
