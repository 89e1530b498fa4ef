"""What each layer of a recipe's model costs, without a model: what a pipeline is cut and simulated by.

    layer_flops(run)   forward FLOPs per token of each layer, in order; the head's are with the last one
    cut(...)           parallel/pipeline/stage.py: how many of them each stage gets

To look a token up runs no product, so the embedding adds nothing to the first layer's FLOPs.
"""

from __future__ import annotations

from moe.config import Run
from moe.model.flops import block_size, head_forward


def layer_flops(run: Run) -> tuple[float, ...]:
    """Forward FLOPs per token of each layer, with those of the vocabulary's projection on the last; experts by the choices of a token."""
    flops = [block_size(run.model, run.experts, run.router, layer=layer).forward for layer in range(run.model.num_layers)]
    flops[-1] += head_forward(run.model, vocab_size=run.vocab_size)
    return tuple(flops)
