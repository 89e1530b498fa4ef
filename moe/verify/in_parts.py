"""One process that sums within its layers as ranks of tp do: each rank's share in the compute dtype, then their sum.

    y = x W1_0 W2_0 + x W1_1 W2_1, each rounded, and in the backward pass the gradient of x likewise

In 16 bits such sums differ from whole ones, by as much as is measured here (moe/verify/expected.py). Nothing is sent.
An encoder-decoder's layers are also given what the encoder gave, whose gradient is such a sum in each layer, and a half's position bias,
of which a share sees its heads' columns.
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
    """Change the model, which is whole, as the recipe's degrees.tp and tensor.kind would cut it: attention of both kinds and dense
    networks.

    Shares are added up in the order of the ranks, from the `first` on.
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
    """The same parameters in another module: who listens to the layer hears the sum alone."""
    other = copy(layer)
    other._forward_hooks, other._forward_pre_hooks = type(layer._forward_hooks)(), type(layer._forward_pre_hooks)()
    return other


def _summed(layer: nn.Module, regions: list[dict[str, Box]], x: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Each part has its own x and source, whose gradients are sums of its own before the parts' are added up."""
    held = dict(layer.named_parameters())
    shares = []
    for region in regions:
        part = {name: held[name][box] for name, box in region.items()}
        given = {name: _share_of(value, layer, region) for name, value in named.items()}
        shares.append(functional_call(layer, part, (x.view_as(x), *rest), given))
    total: Tensor = reduce(Tensor.add, shares)
    return total


def _share_of(given: Any, layer: nn.Module, region: dict[str, Box]) -> Any:
    """Of what a layer is given beside x."""
    if isinstance(given, Bias):
        rows = region["q.weight"][0]
        return given._replace(table_UH=given.table_UH[:, rows.start // layer.head_size : rows.stop // layer.head_size])
    return given.view_as(given) if isinstance(given, Tensor) else given
