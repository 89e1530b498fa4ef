"""Counts the bytes of ZeRO stage 3 in addition to a rank's shards: gathered weights, and gradients before they are reduced.

The facts about an engine contain a closed form for each moment (parallel/data/kinds/): the forward pass, the loss, a layer at work, the
sums of its gradients, a bucket's sums, the gradients of the head and of the embedding. Weights without copies on other ranks are never
gathered. For other software, the largest amount of any moment is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moe.plan.job.counts import Elements
from moe.plan.job.network import Plan
from moe.plan.memory.stack import Stack
from parallel.data.kinds.kind import At, Whole

NOTHING = Elements()


class Unit(NamedTuple):
    """Elements of the layer at work. at_once: elements that are whole at the same time. matrix: of its widest matrix. behind: elements of
    the layer before it in the backward pass."""

    at_once: Elements = NOTHING
    matrix: float = 0.0
    behind: Elements = NOTHING


def gathered(plan: Plan, stack: Stack, at: At, unit: Unit, *, held: Elements, table: float) -> float:
    """Bytes at one moment of a step, for this project's engines. held: elements of the rank's stages. table: elements of the embedding."""
    form = plan.carrier.gathered
    if form is None:
        return 0.0
    table, layer, behind = _shared(plan, Elements(table)), _shared(plan, unit.at_once), _shared(plan, unit.behind)
    return form(
        at,
        Whole(
            compute_bytes=plan.compute_bytes,
            sum_bytes=stack.reduce_bytes,
            held=_shared(plan, held),
            table=table,
            layer=layer,
            behind=behind,
            trained=_shared(plan, held.trained),
            trained_table=0.0 if held.frozen_dense else table,
            trained_layer=_shared(plan, unit.at_once.trained),
            trained_behind=_shared(plan, unit.behind.trained),
            matrix=min(unit.matrix, layer),
            bucket=stack.bucket_elements,
            copies=plan.copies,
            stays=plan.pp > 1 or not plan.reshard,
            on_stages=plan.pp > 1,
            loss_chunks=plan.loss_chunks,
        ),
    )


def at_any_moment(plan: Plan, stack: Stack, *, held: float, table: float, units: Sequence[float]) -> float:
    """Bytes for other software: whole weights of the layers at work, and the whole gradient of one layer before it is reduced."""
    if plan.pp > 1:  # all of the rank's weights and gradients stay whole between micro-batches
        return (plan.compute_bytes + stack.reduce_bytes) * held
    largest = max([table, *units])
    if not plan.reshard:
        whole = held
    elif stack.gathers == "elements":
        whole = min(held, max(stack.gathered, largest))
    else:
        one = max(units, default=0.0)
        whole = min(held, max(stack.gathered * one, table + one))
    return plan.compute_bytes * whole + (plan.compute_bytes + stack.reduce_bytes) * largest


def _shared(plan: Plan, elements: Elements) -> float:
    """Number of the elements that have copies on several ranks. Only these are sharded."""
    return (elements.dense if plan.copies > 1 else 0.0) + (elements.expert if plan.edp > 1 else 0.0)
