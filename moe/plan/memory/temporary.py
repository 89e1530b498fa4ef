"""Temporary bytes in addition to the activations that micro-batches keep: at the loss, in a layer's backward pass, of ZeRO stage 3.

ZeRO stage 3 adds gathered weights, and gradients before they are reduced, to a rank's shards. An engine's row of the catalog
(parallel/data/kinds/) has a closed form for each moment of a step: the forward pass, the loss, a layer's backward pass, the sums of its
gradients, a bucket's sums, the gradients of the head and of the embedding. Weights without copies on other ranks are never gathered. For
other software, only the largest of all moments is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moe.plan.job import counts
from moe.plan.job.counts import Elements
from moe.plan.job.network import Network, Plan
from moe.plan.memory.kept import FP32_BYTES, bias_elements, keeps_scores, layer_kept, layer_parts, logits, recompute_of, rows_of, tokens_of
from moe.plan.memory.stack import Stack
from parallel.data.kinds.kind import At, Whole
from parallel.mesh.grids import GRIDS

NOTHING = Elements()


def at_loss(network: Network, plan: Plan, stack: Stack) -> float:
    """Bytes at the loss: copies of the logits in other dtypes, and their gradients. With `loss_chunks`: the bytes of one chunk, and the
    head's gradient, which is summed over the chunks."""
    shared = plan.tp > 1 and plan.tensor != "copied"
    if plan.loss_chunks > 1:
        narrow = plan.compute_bytes if plan.compute_bytes < FP32_BYTES else 0
        one = stack.logits if plan.tensor in GRIDS else FP32_BYTES + narrow  # on a grid, autograd recomputes a chunk's whole loss
        of_table = FP32_BYTES * counts.embedding(network, plan) if network.adapters is None else 0.0
        return logits(network, plan) * one / plan.loss_chunks + of_table
    return logits(network, plan) * (stack.logits + (stack.logits_shared if shared else 0.0) - stack.logits_kept)


def at_layer(network: Network, plan: Plan, stack: Stack, index: int) -> float:
    """Bytes of a layer's backward pass: recomputed activations, gradients of its widest tensors and of its largest matrix."""
    again = layer_kept(network, plan, stack, index, "none") - layer_kept(network, plan, stack, index, recompute_of(plan, index))
    at, c, e = tokens_of(network, plan, stack), plan.compute_bytes, network.experts
    sparse = e is not None and index in network.sparse_layers
    if e is not None and sparse:
        wide = c * rows_of(network, plan) * ((2 if e.gated else 1) * e.hidden / plan.etp + network.width)
        wide += _gradient(network, plan, stack, sparse=True)
    else:
        wide = _of_network(network, plan, stack, c * at.inside * network.hidden)
    if network.buckets and plan.sp == 1 and stack.biased == "fused":
        scores = _of_bias(network, plan, stack, index)
    else:
        scores = 2 * c * network.heads * network.length * at.inside if stack.core == "scores" or keeps_scores(plan) else 0.0
    return again + max(wide, scores) + 2 * c * network.width * at.between + _gathered_input(network, plan, stack)


def _of_bias(network: Network, plan: Plan, stack: Stack, index: int) -> float:
    """Bytes of the gradient of T5's bias, less the bytes that the layer's second half has freed. The gradient needs the larger of: one
    tensor for each sequence and their sum; the sum in fp32 before and after masking."""
    parts = layer_parts(network, plan, stack, index)
    gone = parts["network"] + parts["activation"] + parts["experts"]
    return bias_elements(network, plan, stack) * max((plan.microbatch + 1) * plan.compute_bytes, 2 * FP32_BYTES) - gone


def _of_network(network: Network, plan: Plan, stack: Stack, hidden: float) -> float:
    """Bytes of a dense network's backward pass. hidden: bytes of one tensor of the hidden size.

    In this project the gradients of the activation (two with a gate) come after the last product's backward pass, which frees that
    product's input, except for relu, which needs this input: its own output.
    """
    gradient = _gradient(network, plan, stack, sparse=False)
    if not stack.casts:
        return (2 if network.gated else 1) * hidden + gradient
    return max(hidden + gradient, (2 if network.gated or network.activation == "relu" else 1) * hidden)


def _gradient(network: Network, plan: Plan, stack: Stack, *, sparse: bool) -> float:
    """Bytes of the largest matrix's gradient before it is added to the sum.

    In this project each dense matrix has its own product, with a result in the compute dtype that is then cast to the weights' dtype.
    Products of experts give the gradients of all their matrices in the weights' dtype.
    """
    c, e = plan.compute_bytes, network.experts
    largest = widest(network, plan, sparse=sparse)
    if network.adapters is not None and not (sparse and network.trains("experts")):
        return 0.0  # frozen matrices have no gradient, and adapters are small
    if not stack.casts:
        return c * largest
    if e is not None and sparse:
        return FP32_BYTES * largest * (3 / 2 if e.gated else 2)
    return (FP32_BYTES + (c if c < FP32_BYTES else 0)) * largest / (2 if network.gated else 1)


def widest(network: Network, plan: Plan, *, sparse: bool) -> float:
    """Elements of a layer's largest matrix. Gate and first product count as one matrix, and so do all experts of a rank."""
    e = network.experts
    if e is not None and sparse:
        return e.count / plan.ep * network.width * e.hidden / plan.etp * (2 if e.gated else 1)
    return network.width * network.hidden / plan.grid.matrix * (2 if network.gated else 1)


def _gathered_input(network: Network, plan: Plan, stack: Stack) -> float:
    """Bytes with `sliced` activations: a product's gathered input (if it is not kept), and its gradient before the reduce-scatter."""
    return (2 if stack.reads_again else 1) * _whole_input(network, plan) if plan.tensor == "sliced" else 0.0


def head_input(network: Network, plan: Plan, stack: Stack) -> float:
    """Bytes that the head's gathered input adds at the loss with `sliced` activations, less the slice that it replaces if it is kept."""
    if plan.tensor != "sliced" or stack.reads_again:
        return _gathered_input(network, plan, stack)
    return _whole_input(network, plan) * (1 - 1 / plan.tp)


def _whole_input(network: Network, plan: Plan) -> float:
    return plan.compute_bytes * network.width * plan.microbatch * network.length / plan.sp


# --- ZeRO stage 3 -------------------------------------------------------------------------------------------------------


class Unit(NamedTuple):
    """Parameters of the layer that is in its backward pass. at_once: those that are whole at the same time. matrix: elements of its widest
    matrix. next: parameters of the next layer of the model, whose backward pass has just ended."""

    at_once: Elements = NOTHING
    matrix: float = 0.0
    next: Elements = NOTHING


def gathered(plan: Plan, stack: Stack, at: At, unit: Unit, *, held: Elements, table: float) -> float:
    """Bytes of gathered weights and unreduced gradients at a moment, in this project. held: rank's parameters. table: the embedding's."""
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
    """Bytes of ZeRO stage 3 in other software: whole weights of a few layers, and one layer's whole gradient before it is reduced.

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
    """Number of these parameters that several ranks would hold without ZeRO, and that it shards."""
    return (elements.dense if plan.copies > 1 else 0.0) + (elements.expert if plan.edp > 1 else 0.0)
