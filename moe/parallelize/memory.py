"""Methods that save memory and cost time, applied to a model before its parameters are laid out: recomputation and tiles.

recompute    blocks, or the feed-forward part of each, run once more in the backward pass; the loss in chunks of tokens
tiling       TILED and the vocabulary's matrices become sums of narrower ones (parallel/data/tiling.py), values kept
"""

from __future__ import annotations

from torch import nn

from moe.model.transformer import Block, Transformer, embedding_as_module
from moe.recipe import sections
from parallel.tensor.style import fits

TILED = ("layers.*.ffn", "layers.*.moe.experts", "layers.*.moe.shared", "layers.*.moe.residual", "ahead.*.block.ffn")
VOCABULARY = ("embedding", "head")


def save_memory(model: Transformer, *, recompute: sections.Recompute | None = None, tiling: sections.Tiling | None = None) -> Transformer:
    """Set recomputation and tiles in place, and return the same model."""
    recompute, tiling = recompute or sections.Recompute(), tiling or sections.Tiling()
    model.loss_chunks = recompute.loss_chunks
    for block in model.modules():
        if isinstance(block, Block):  # also blocks of multi-token prediction, numbered after the layers
            block.recompute = recompute.of_layer(block.layer)
    if tiling.head > 1:
        embedding_as_module(model)
        _tile(model, VOCABULARY, tiling.head)
    if tiling.ffn > 1:
        _tile(model, TILED, tiling.ffn)
    return model


def _tile(model: nn.Module, patterns: tuple[str, ...], count: int) -> None:
    for path in [path for path, _ in model.named_modules() if any(fits(pattern, path) for pattern in patterns)]:
        parent, _, last = path.rpartition(".")
        setattr(model.get_submodule(parent), last, model.get_submodule(path).in_tiles(count))  # type: ignore[operator]
