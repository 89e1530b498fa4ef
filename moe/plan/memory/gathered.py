"""Counts the bytes of ZeRO stage 3 in addition to a rank's shards: gathered weights, and gradients before they are reduced.

An engine's row of the catalog (parallel/data/kinds/) has a closed form for each moment of a step: the forward pass, the loss, a layer's
backward pass, the sums of its gradients, a bucket's sums, the gradients of the head and of the embedding. Weights without copies on other
ranks are never gathered. For other software, only the largest of all moments is computed.
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
    """Parameters of the layer that is in its backward pass. at_once: those that are whole at the same time. matrix: elements of its widest
    matrix. next: parameters of the next layer of the model, whose backward pass has just ended."""

    at_once: Elements = NOTHING
    matrix: float = 0.0
    next: Elements = NOTHING


def gathered(plan: Plan, stack: Stack, at: At, unit: Unit, *, held: Elements, table: float) -> float:
    """Bytes at one moment of a step, for this project's engines. held: parameters of the rank. table: parameters of the embedding."""
    form = plan.carrier.gathered
    if form is None:
        return 0.0
    table, layer = _shared(plan, Elements(table)), _shared(plan, unit.at_once)
    return form(
        at,
        Whole(
            compute_bytes=plan.compute_bytes,
            sum_bytes=stack.reduce_bytes,
            held=_shared(plan, held),
            table=table,
            layer=layer,
            behind=_shared(plan, unit.next),
            trained=_shared(plan, held.trained),
            trained_table=0.0 if held.frozen_dense else table,
            trained_layer=_shared(plan, unit.at_once.trained),
            trained_behind=_shared(plan, unit.next.trained),
            matrix=min(unit.matrix, layer),
            bucket=stack.bucket_elements,
            copies=plan.copies,
            stays=plan.pp > 1 or not plan.reshard,
            on_stages=plan.pp > 1,
            loss_chunks=plan.loss_chunks,
        ),
    )


def at_any_moment(plan: Plan, stack: Stack, *, held: float, table: float, units: Sequence[float]) -> float:
    """Bytes for other software: whole weights of a few layers, and the whole gradient of one layer before it is reduced.

    held: parameters of the rank. table: of the embedding. units: of each kind of its layers.
    """
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
    """Number of these parameters that have copies on several ranks. Only they are sharded."""
    return (elements.dense if plan.copies > 1 else 0.0) + (elements.expert if plan.edp > 1 else 0.0)
