"""LoRA adapters (arXiv 2106.09685) as plain functions: weights W + alpha / r B A from frozen weights W and two narrow matrices B and A.

Takes nothing from moe/nn/lora.py. Dense matrices are [out, in], so B is [out, r] and A is [r, in]. Experts' matrices are [in, out], so
theirs are transposed: w1_a [in, r], w1_b [r, out].
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.recipe.sections import Lora

_EXPERT = ("w1", "w2", "w3")


def adapters(names: list[str]) -> list[str]:
    """The names of adapters among the names of a checkpoint."""
    found = [name for name in names if name.endswith((".lora_a", ".lora_b"))]
    return found + [name for name in names if name.endswith(tuple(f".{w}_{half}" for w in _EXPERT for half in "ab"))]


def effective(weights: dict[str, Tensor], lora: Lora) -> dict[str, Tensor]:
    """The weights with their adapters added, by the names of the weights."""
    found = {name: w for name, w in weights.items() if name not in adapters(list(weights))}
    for name in weights:
        if name.endswith(".lora_a"):
            stem = name.removesuffix(".lora_a")
            added = torch.einsum("or,ri->oi", weights[f"{stem}.lora_b"], weights[name])
            found[f"{stem}.weight"] = found[f"{stem}.weight"] + added * (lora.alpha / lora.rank)
        elif name.endswith(tuple(f".{w}_a" for w in _EXPERT)):
            stem = name.removesuffix("_a")
            added = torch.einsum("ir,ro->io", weights[name], weights[f"{stem}_b"])
            found[stem] = found[stem] + added * (lora.alpha / lora.rank)
    return found
