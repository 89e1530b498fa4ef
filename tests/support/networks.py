"""A network of experts from its tensors, by the name of its activation."""

from __future__ import annotations

from torch import Tensor

from moe.kernels.activation import Activation
from moe.kernels.network import Network
from moe.recipe.sections import Swiglu


def network_of(ffn: str, *matrices: Tensor | None, swiglu: Swiglu | None = None, **biases: Tensor | None) -> Network:
    """The network with these weights. `matrices`: w1, w2 and, with a gated activation, w3. `biases`: b1 and b3, if any."""
    w1, w2, *gate = matrices
    tensors = (w1, w2, gate[0] if gate else None, biases.get("b1"), biases.get("b3"))
    return Network.of(tensors, Activation(ffn, swiglu))
