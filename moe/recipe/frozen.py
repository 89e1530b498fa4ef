"""Frozen weights, which training does not change: `train.freeze: [router, embedding, layers.0-3]`. Needs no torch.

A frozen weight has no gradient, no optimizer states and no weight decay. Gradients still pass through it to earlier layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_BLOCK = r"(layers\.\d+|ahead\.\d+\.block)"  # a layer, or the Transformer block of a multi-token prediction module
PARTS = {  # name in train.freeze -> pattern of parameters' names in checkpoints
    "embedding": r"embedding",
    "head": r"head\.weight",
    "attention": _BLOCK + r"\.(attention|cross)\..*",
    "dense": _BLOCK + r"\.(ffn|shared|shared_gate|residual|coefficient)\..*",
    "experts": r"layers\.\d+\.(experts\..*|output_bias)",
    "router": r"layers\.\d+\.router\..*",
    "norms": r"(.*[._])?norm\.(weight|bias)",
}
_LAYERS = re.compile(r"layers\.(0|[1-9]\d{0,5})(?:-(0|[1-9]\d{0,5}))?")  # one layer, or the first and the last of several


def layers_of(part: str) -> range | None:
    """Return the numbers of the layers that `part`, an entry of train.freeze, names (layers.0-3: 0 to 3). None for a key of PARTS."""
    if (found := _LAYERS.fullmatch(part)) is None:
        return None
    return range(int(found[1]), int(found[2] or found[1]) + 1)


def is_frozen(name: str, parts: Sequence[str]) -> bool:
    """Return whether `parts`, the list train.freeze, freezes the parameter whose name in checkpoints is `name`."""
    return any(_has(part, name) for part in parts)


def _has(part: str, name: str) -> bool:
    layers = layers_of(part)
    if layers is None:
        return re.fullmatch(PARTS[part], name) is not None
    words = name.split(".")
    return words[0] == "layers" and int(words[1]) in layers
