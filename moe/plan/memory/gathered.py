"""Bytes of stage 3 beside a rank's parts: weights that are gathered, and gradients on their way to the ranks that keep them.

With c bytes of an element in the compute dtype, r of a gradient that is reduced, L elements of the layer at work, P of all:

    FSDP        forward pass      -                   torch's fully_shard, a unit at a time (parallel/data/fsdp.py): of each moment here
                the loss          -                   the rest has been given back; where it comes in chunks, the head's table
                a layer works     2 c L + r B         its own and those of the next, asked for ahead; B: the gradient behind, in its buffer
                it has worked     2 c L + r (B + L)   its own gradient besides, when its activations are gone; then its weights go back,
                                  c L + 2 r L         and its gradient is put into a buffer. So with the head, while all layers wait
    kept whole  any of them       c (P - B) + sums    without `reshard`; with stages c P, since other micro-batches need it
    ZeRO-3      forward pass      c (W + F)           DeepSpeed (parallel/data/zero3.py) gathers weight by weight and frees late: W elements
                the loss          c W                 are whole, two buckets or the widest matrix, F of a bucket as they arrived
                a layer works     c W (+ c F)         ... but where W is all there is
                a bucket's sums   c W + (2 + 1/N) r K the K gradients of a bucket as they are sent, as they arrive, and this rank's sums

A rank holds nothing gathered where no other has a copy. Other software is counted by what its layers hold at once, at any moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from moe.plan.job.counts import Elements
from moe.plan.job.network import Plan
from moe.plan.memory.stack import Stack

At = Literal["forward", "loss", "head", "work", "sums", "bucket", "embedding"]
NOTHING = Elements()


class Unit(NamedTuple):
    """Elements of the layer that a moment is of: those whole `at_once`, of them its widest `matrix`, and those of the layer `behind` it in
    the backward pass."""

    at_once: Elements = NOTHING
    matrix: float = 0.0
    behind: Elements = NOTHING


def gathered(plan: Plan, stack: Stack, at: At, unit: Unit, *, held: Elements, table: float) -> float:
    """Bytes at a moment of this project's engines. `held`: elements of a rank's stages; `table`: of the vocabulary's."""
    c, r, whole = plan.compute_bytes, stack.reduce_bytes, _shared(plan, held)
    table, layer, behind = _shared(plan, Elements(table)), _shared(plan, unit.at_once), _shared(plan, unit.behind)
    of_table = 0.0 if held.frozen_dense else table  # elements with gradients
    of_layer, of_behind = _shared(plan, unit.at_once.trained), _shared(plan, unit.behind.trained)
    if plan.engine == "zero3" and plan.pp == 1:  # with stages FSDP carries it out
        bucket, sums = min(stack.bucket_elements, whole), min(stack.bucket_elements, _shared(plan, held.trained))
        widest = min(unit.matrix, layer) if at == "work" else table
        live = min(whole, max(2 * stack.bucket_elements, widest))
        if at == "bucket":  # the layers that filled it have been given back
            return c * min(live, whole - bucket) + (2 + 1 / plan.copies) * r * sums
        return c * (live + (bucket if at == "forward" or (at == "work" and live < whole) else 0.0))
    kept = plan.pp > 1 or not plan.reshard
    left = whole - behind if plan.pp == 1 else whole  # what has worked is given back, unless other micro-batches need it
    match at:
        case "loss":
            return c * (whole if kept else table if plan.loss_chunks > 1 else 0.0)
        case "work":
            return c * (left if kept else 2 * layer) + r * of_behind
        case "head":  # `behind`: the layer that works next
            return max(c * (whole if kept else table + behind) + r * of_table, c * (whole - table if kept else behind) + 2 * r * of_table)
        case "sums":
            most = c * (left if kept else 2 * layer) + r * (of_behind + of_layer)
            return max(most, c * (left - layer if kept else layer) + 2 * r * of_layer)
        case "embedding":
            return c * (whole if plan.pp > 1 else 0.0) + (2 * r - c) * of_table
    return 0.0


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
