"""Builds an expert's network from its weights."""

from __future__ import annotations

from torch import Tensor

from moe.kernels.activation import Activation
from moe.kernels.network import Network
from moe.recipe.sections import Swiglu


def network_of(ffn: str, *matrices: Tensor | None, swiglu: Swiglu | None = None, **biases: Tensor | None) -> Network:
    """Return a network with these weights. ffn: its activation. matrices: w1, w2 and, with a gated activation, w3. biases: b1, b3."""
    w1, w2, *gate = matrices
    tensors = (w1, w2, gate[0] if gate else None, biases.get("b1"), biases.get("b3"))
    return Network.of(tensors, Activation(ffn, swiglu))
