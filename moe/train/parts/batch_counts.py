"""Sums each MoE layer's router statistics over the whole step: a balance loss over the global batch needs them in every forward pass.

    one micro-batch a rank     each layer all-reduces its statistics over the ranks that share the batch, in its forward pass
    several micro-batches      first, forward passes of all micro-batches without gradient and one all-reduce; then the usual passes

Passes with and without gradient route tokens equally: noise is a function of (seed, step, layer, token), and weights are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe.data.token_shard import TokenShard
from moe.router.losses import size_of_sums
from moe.train.parts.executor import Executor
from moe.train.parts.passes import Pass
from parallel.mesh.collectives import sum_over_all
from parallel.mesh.mesh import Axis

Sums = Callable[[int, Tensor], Tensor]  # (layer, its counts and scores in this pass) -> their sums over the whole step


def with_whole_step(executor: Executor, passes: Sequence[Pass], shard: TokenShard) -> list[Pass]:
    """Return the passes with the function `Context.whole_step`, which sums a MoE layer's router statistics over the whole step. Passes are
    returned unchanged if router.balance_scope is not global_batch, or if all balancing losses have weight 0: the reported balance loss is
    then a mean over micro-batches. Collective."""
    spec = executor.model.router_spec
    if not (executor.model.expert_counts and spec.balance_scope == "global_batch" and spec.asks_balance):
        return list(passes)
    sums = _summed_when_asked(shard.axes) if len(passes) == 1 else _counted(executor, passes, shard.axes)
    return [replace(p, context=replace(p.context, whole_step=sums)) for p in passes]


def _summed_when_asked(axes: Sequence[Axis]) -> Sums:
    known: dict[int, Tensor] = {}

    def sums(layer: int, mine: Tensor) -> Tensor:
        if layer not in known:  # recomputation gets the stored sums: ranks may recompute in different orders, so an all-reduce could hang
            known[layer] = sum_over_all(mine.clone(), [replace(axis, label=f"layers.{layer}.balance") for axis in axes])
        return known[layer]

    return sums


def _counted(executor: Executor, passes: Sequence[Pass], axes: Sequence[Axis]) -> Sums:
    device, counts = passes[0].inputs_BL.device, executor.model.expert_counts
    spec = executor.model.router_spec
    more = {"chances": bool(spec.load_weight), "probabilities": spec.own_balance is not None}
    sizes = {layer: size_of_sums(count, **more) for layer, count in counts.items()}
    totals = {layer: torch.zeros(size, dtype=torch.float64, device=device) for layer, size in sizes.items()}

    def note(layer: int, mine: Tensor) -> Tensor:
        totals[layer] += mine
        return mine

    counting = [replace(p, context=replace(p.context, whole_step=note)) for p in passes]
    executor.forward(counting, lambda number, output: None)
    flat = sum_over_all(torch.cat(list(totals.values())), (*axes, executor.pp_axis))
    known = dict(zip(totals, flat.split([len(t) for t in totals.values()]), strict=True))
    return lambda layer, _: known[layer]
