"""Counts the bytes of ZeRO stage 3 in addition to a rank's shards: gathered weights, and gradients before they are reduced.

c: bytes of a weight in the compute dtype. r: bytes of a gradient that is reduced. L: elements of the layer at work. P: all elements.

    FSDP        forward pass      -                   torch's fully_shard gathers one unit at a time (parallel/data/fsdp.py)
                the loss          -                   other weights are freed; with a loss in chunks, the head's table is whole (c table)
                a layer works     2 c L + r B         weights of this layer and the next; B: elements of the previous layer's gradient
                it has worked     2 c L + r (B + L)   also its own gradient, after its activations are freed; then its weights are freed
                                  c L + 2 r L         and its gradient is copied into a buffer. The head is similar
    kept whole  any of them       c (P - B) + sums    without `reshard`; with pipeline stages c P, because other micro-batches need them
    ZeRO-3      forward pass      c (W + F)           DeepSpeed (parallel/data/zero3.py) gathers weight by weight and frees late. W: whole
                the loss          c W                 elements (two buckets, or the widest matrix). F: elements of an arriving bucket
                a layer works     c W (+ c F)         F counts only if not all elements are whole
                a bucket's sums   c W + (2 + 1/N) r K K gradients of a bucket: as sent, as received, and this rank's sums

Weights without copies on other ranks are never gathered. For other software, the largest amount of any moment is counted.
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
    """Elements of the layer at work. at_once: elements that are whole at the same time. matrix: of its widest matrix. behind: elements of
    the layer before it in the backward pass."""

    at_once: Elements = NOTHING
    matrix: float = 0.0
    behind: Elements = NOTHING


def gathered(plan: Plan, stack: Stack, at: At, unit: Unit, *, held: Elements, table: float) -> float:
    """Bytes at one moment of a step, for this project's engines. held: elements of the rank's stages. table: elements of the embedding."""
    c, r, whole = plan.compute_bytes, stack.reduce_bytes, _shared(plan, held)
    table, layer, behind = _shared(plan, Elements(table)), _shared(plan, unit.at_once), _shared(plan, unit.behind)
    of_table = 0.0 if held.frozen_dense else table  # elements with gradients
    of_layer, of_behind = _shared(plan, unit.at_once.trained), _shared(plan, unit.behind.trained)
    if plan.engine == "zero3" and plan.pp == 1:  # with pipeline stages, zero3 is done by FSDP
        bucket, sums = min(stack.bucket_elements, whole), min(stack.bucket_elements, _shared(plan, held.trained))
        widest = min(unit.matrix, layer) if at == "work" else table
        live = min(whole, max(2 * stack.bucket_elements, widest))
        if at == "bucket":  # the layers whose gradients fill it are freed
            return c * min(live, whole - bucket) + (2 + 1 / plan.copies) * r * sums
        return c * (live + (bucket if at == "forward" or (at == "work" and live < whole) else 0.0))
    kept = plan.pp > 1 or not plan.reshard
    left = whole - behind if plan.pp == 1 else whole  # layers that have worked are freed, unless other micro-batches need them
    match at:
        case "loss":
            return c * (whole if kept else table if plan.loss_chunks > 1 else 0.0)
        case "work":
            return c * (left if kept else 2 * layer) + r * of_behind
        case "head":  # here `behind` is the layer that works next
            return max(c * (whole if kept else table + behind) + r * of_table, c * (whole - table if kept else behind) + 2 * r * of_table)
        case "sums":
            most = c * (left if kept else 2 * layer) + r * (of_behind + of_layer)
            return max(most, c * (left - layer if kept else layer) + 2 * r * of_layer)
        case "embedding":
            return c * (whole if plan.pp > 1 else 0.0) + (2 * r - c) * of_table
    return 0.0


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
