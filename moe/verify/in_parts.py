"""Sums within layers on one process as tp ranks do: each rank's partial result in the compute dtype, then their sum.

    y = x W1_0 W2_0 + x W1_1 W2_1, each rounded, and in the backward pass the gradient of x likewise

In 16 bits such sums differ from whole ones. moe/verify/expected.py measures by how much. Nothing is sent.
Layers of an encoder-decoder also get the encoder's output, whose gradient is such a sum in each layer, and the position bias of their half,
of which each partial result uses the columns of its heads.
"""

from __future__ import annotations

from copy import copy
from functools import partial, reduce
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from moe.model.transformer import Transformer
from moe.nn.core import Bias
from moe.parallelize.plan import lay_out, plan_for
from moe.recipe.sections import Run
from parallel.mesh.layout import Box
from parallel.mesh.mesh import Mesh


def in_parts(model: Transformer, run: Run, *, first: int) -> None:
    """Change a whole model as the recipe's degrees.tp and tensor.kind would cut it: self- and cross-attention, and dense networks.

    Partial results are summed in the order of the ranks, starting with rank `first`.
    """
    degrees = run.mesh_degrees()
    layouts = lay_out(model, plan_for(run))
    for number, block in enumerate(model.layers):
        for name in ("attention", "cross", "ffn"):
            layer = getattr(block, name)
            if layer is not None:
                regions: list[dict[str, Box]] = []
                for rank in range(first, first + degrees.tp):
                    mesh = Mesh.of(degrees, rank % degrees.tp)
                    regions.append({n: layouts[f"layers.{number}.{name}.{n}"].region(mesh) for n, _ in layer.named_parameters()})
                layer.forward = partial(_summed, _without_hooks(layer), regions)


def _without_hooks(layer: nn.Module) -> nn.Module:
    """A copy of the module with the same parameters and without hooks, so that hooks of the layer see only the sum."""
    other = copy(layer)
    other._forward_hooks, other._forward_pre_hooks = type(layer._forward_hooks)(), type(layer._forward_pre_hooks)()
    return other


def _summed(layer: nn.Module, regions: list[dict[str, Box]], x: Tensor, *rest: Any, **named: Any) -> Tensor:
    """The sum of the partial results. Each has its own x and source, so that their gradients are summed in the same order."""
    held = dict(layer.named_parameters())
    shares = []
    for region in regions:
        part = {name: held[name][box] for name, box in region.items()}
        given = {name: _share_of(value, layer, region) for name, value in named.items()}
        shares.append(functional_call(layer, part, (x.view_as(x), *rest), given))
    total: Tensor = reduce(Tensor.add, shares)
    return total


def _share_of(given: Any, layer: nn.Module, region: dict[str, Box]) -> Any:
    """The part of an argument other than x that one partial result gets."""
    if isinstance(given, Bias):
        rows = region["q.weight"][0]
        return given._replace(table_UH=given.table_UH[:, rows.start // layer.head_size : rows.stop // layer.head_size])
    return given.view_as(given) if isinstance(given, Tensor) else given
