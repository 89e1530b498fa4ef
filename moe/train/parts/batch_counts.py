"""Sums over the whole step, for each layer: a balance loss over the global batch needs them before the first backward pass.

    one micro-batch a rank     the layer's own forward pass sums them over the data ranks        one small all-reduce a layer
    several                    a counting pass first: forward over all micro-batches without
                               gradient, then one all-reduce; the real passes are given the sums    about one forward more

The counting pass routes as the real passes will: noise is a function of (seed, step, layer, token), and weights and biases do not change
within a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe.data.token_shard import TokenShard
from moe.model.transformer import Transformer
from moe.router.losses import size_of_sums
from moe.train.parts.executor import Executor
from moe.train.parts.passes import Pass
from parallel.mesh.collectives import sum_over_all
from parallel.mesh.mesh import Axis

Sums = Callable[[int, Tensor], Tensor]


def whole_step(executor: Executor, passes: Sequence[Pass], shard: TokenShard) -> Sums | None:
    """Return a function (layer, sums of this pass) -> sums over all passes of all ranks, or None if no layer needs it. Collective."""
    if not _asks(executor.model):
        return None
    return _on_the_spot(shard.axes) if len(passes) == 1 else _counted(executor, passes, shard.axes)


def _asks(model: Transformer) -> bool:
    """A loss with weight 0 is only reported, and for reports the mean over micro-batches is enough."""
    spec = model.router_spec
    return bool(model.expert_counts) and spec.balance_scope == "global_batch" and spec.asks_balance


def _on_the_spot(axes: Sequence[Axis]) -> Sums:
    known: dict[int, Tensor] = {}

    def sums(layer: int, mine: Tensor) -> Tensor:
        if layer not in known:  # a recomputed forward pass asks again, when ranks may be at different layers
            known[layer] = sum_over_all(mine.clone(), [replace(axis, label=f"layers.{layer}.balance") for axis in axes])
        return known[layer]

    return sums


def _counted(executor: Executor, passes: Sequence[Pass], axes: Sequence[Axis]) -> Sums:
    device, counts = passes[0].inputs_BL.device, executor.model.expert_counts
    chances = bool(executor.model.router_spec.load_weight)
    sizes = {layer: size_of_sums(count, chances=chances) for layer, count in counts.items()}
    totals = {layer: torch.zeros(size, dtype=torch.float64, device=device) for layer, size in sizes.items()}

    def note(layer: int, mine: Tensor) -> Tensor:
        totals[layer] += mine
        return mine

    counting = [replace(p, context=p.context.with_whole_step(note)) for p in passes]
    executor.forward(counting, lambda number, output: None)
    flat = sum_over_all(torch.cat(list(totals.values())), (*axes, executor.pp_axis))
    known = dict(zip(totals, flat.split([len(t) for t in totals.values()]), strict=True))
    return lambda layer, _: known[layer]
