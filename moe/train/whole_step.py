"""What a balance loss over the global batch needs before the first backward pass: each layer's sums over the whole step.

    one micro-batch a rank     the layer's own forward pass sums them over the data ranks        one small all-reduce a layer
    several                    a counting pass first: forward over all micro-batches without
                               gradient, then one all-reduce; the real passes are given the sums    about one forward more

The counting pass decides what the real ones will: noise is a function of (seed, step, layer, token), weights and
biases stand still within a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from moe.context import Context
from moe.model.transformer import moe_layers
from moe.spec import RouterSpec
from parallel.collectives import sum_over
from parallel.mesh import Axis

Sums = Callable[[int, Tensor], Tensor]
Pass = tuple[Tensor, Context, Tensor]  # inputs, what is known of them, targets: without these all logits would be made


def whole_step(model: nn.Module, passes: Iterable[Pass], *, axis: Axis) -> Sums | None:
    """(layer, sums of this pass) -> sums over all passes of all ranks of the axis; None where no layer asks. Collective."""
    if not any(_asks(layer.router.settings) for layer in moe_layers(model)):
        return None
    passes = list(passes)
    return _on_the_spot(axis) if len(passes) == 1 else _counted(model, passes, axis)


def _asks(spec: RouterSpec) -> bool:
    """A loss of weight 0 is only reported, and the mean of the parts will do for that."""
    return spec.balance_scope == "global_batch" and bool(spec.balance_weight or spec.importance_weight)


def _on_the_spot(axis: Axis) -> Sums:
    known: dict[int, Tensor] = {}

    def sums(layer: int, mine: Tensor) -> Tensor:
        if layer not in known:  # a recomputed pass asks again, and its ranks may be at different layers by then
            known[layer] = sum_over(mine.clone(), replace(axis, label=f"layers.{layer}.balance"))
        return known[layer]

    return sums


def _counted(model: nn.Module, passes: list[Pass], axis: Axis) -> Sums:
    totals: dict[int, Tensor] = {}

    def note(layer: int, mine: Tensor) -> Tensor:
        totals[layer] = totals[layer] + mine if layer in totals else mine
        return mine

    with torch.no_grad():
        for inputs_BL, context, targets_BL in passes:
            model(inputs_BL, context.with_whole_step(note), targets_BL)
    flat = sum_over(torch.cat(list(totals.values())), axis)
    known = dict(zip(totals, flat.split([len(t) for t in totals.values()]), strict=True))
    return lambda layer, _: known[layer]
