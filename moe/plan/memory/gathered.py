"""Bytes of stage 3 in addition to a rank's shards: weights that are gathered, and gradients on their way to the ranks that keep them.

An engine's facts have a closed form of them at each moment (parallel/data/kinds/): the forward pass, the loss, a layer that works, the
sums of its gradients, a bucket's sums, the head's and the embedding's gradient. A rank holds nothing gathered if no other has a copy.
Other software is counted by what its layers hold at once, at any moment.
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
    """Elements of the layer that a moment is of: those whole `at_once`, of them its widest `matrix`, and those of the layer `behind` it in
    the backward pass."""

    at_once: Elements = NOTHING
    matrix: float = 0.0
    behind: Elements = NOTHING


def gathered(plan: Plan, stack: Stack, at: At, unit: Unit, *, held: Elements, table: float) -> float:
    """Bytes at a moment of this project's engines. `held`: elements of a rank's stages; `table`: of the vocabulary's."""
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
    """Bytes of other software: whole weights of the layers at work, and the whole gradient of one before it is reduced."""
    if plan.pp > 1:  # between micro-batches nothing is cut: all that the rank has is whole, and so are its gradients
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
    """Of them those that several ranks share: the others are never cut."""
    return (elements.dense if plan.copies > 1 else 0.0) + (elements.expert if plan.edp > 1 else 0.0)
