"""Predicts the bytes of tensors that exist for a short time: at the loss, in a layer's backward pass, and with ZeRO stage 3.

ZeRO stage 3 adds gathered weights and unreduced gradients to a rank's shards. Each engine in the catalog (parallel/data/kinds/) has a
formula for their bytes at each point of a step (`At`: in the forward pass, at the loss, ...). For other software than this project's
trainer, only the maximum over all points is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from moe.plan.job import counts
from moe.plan.job.counts import Elements
from moe.plan.job.network import Network, Plan, attention_shapes
from moe.plan.memory.kept import (
    bias_elements,
    cast_ahead,
    ends_kept,
    head_pending,
    keeps_scores,
    layer_kept,
    layer_parts,
    layer_pending,
    logits,
    recompute_of,
    tokens_of,
)
from moe.plan.memory.rows import FP32_BYTES, buffers_of, most_rows, padding
from moe.plan.memory.stack import Stack
from moe.recipe.shapes import DECODING
from parallel.data.kinds.kind import At, GatheredSizes
from parallel.mesh.grids import GRIDS

NOTHING = Elements()
NO_EXPERTS = -1  # layer index that stands for any layer without experts


def at_loss(network: Network, plan: Plan, stack: Stack) -> float:
    """Temporary bytes at the loss: copies of the logits in other dtypes, and gradients of the logits. With `loss_chunks`, only the logits
    of one chunk exist at a time, but the sum of the head's gradients over chunks is needed in addition."""
    shared = plan.tp > 1 and plan.tensor != "copied"
    if plan.loss_chunks > 1:
        narrow = plan.compute_bytes if plan.compute_bytes < FP32_BYTES else 0
        # bytes per logit; with a grid, autograd recomputes each chunk, with as many bytes as an unchunked loss needs
        one = stack.logits if plan.tensor in GRIDS else FP32_BYTES + narrow
        of_table = 0.0 if network.freezes(network.head) else FP32_BYTES * counts.embedding(network, plan)
        return logits(network, plan) * one / plan.loss_chunks + of_table
    return logits(network, plan) * (stack.logits + (stack.logits_shared if shared else 0.0) - stack.logits_kept)


def at_layer(network: Network, plan: Plan, stack: Stack, index: int, *, matrix_gradient: float) -> float:
    """Temporary bytes of a layer's backward pass: recomputed activations, gradients of its largest activations and of its largest matrix.
    matrix_gradient: bytes of the matrix's gradient, from `largest_gradient`; 0 for the action I of a split backward pass, which computes
    only gradients of inputs."""
    again = layer_kept(network, plan, stack, index, "none") - layer_kept(network, plan, stack, index, recompute_of(plan, index))
    at, c, e = tokens_of(network, plan, stack), plan.compute_bytes, network.experts
    sparse = e is not None and index in network.sparse_layers
    if e is not None and sparse:
        rows = most_rows(network, plan) + padding(network, plan, stack)
        wide = c * rows * ((2 if e.gated else 1) * e.hidden / plan.etp + (0 if _apart(network) else network.width))
        wide += matrix_gradient
        if form := network.blocks("experts"):  # quantized w2 is decoded before the activation's gradient exists
            decoding = DECODING[form].temporary * network.width * e.hidden
            wide = max(wide, decoding + c * rows * (e.hidden + network.width))
    else:
        wide = _of_network(network, stack, c * at.inside * network.hidden, matrix_gradient)
    if network.buckets and plan.sp == 1 and stack.biased == "fused":
        scores = _of_bias(network, plan, stack, index)
    else:
        scores = _scores(network, plan, stack)
    wide = max(wide, DECODING["fp8"].temporary * _widest_decoded(network, sparse=sparse))
    return again + max(wide, scores) + 2 * c * network.width * at.between + _gathered_input(network, plan, stack)


def _scores(network: Network, plan: Plan, stack: Stack) -> float:
    """Bytes of two tensors of attention scores; 0 if attention makes no such tensor."""
    one = plan.compute_bytes * network.heads * network.length * tokens_of(network, plan, stack).inside
    return 2 * one if stack.core == "scores" or keeps_scores(plan) else 0.0


def _widest_decoded(network: Network, *, sparse: bool) -> float:
    """Number of elements of a layer's largest matrix, outside of experts, that is quantized in blocks (`Network.blocks`) and so is
    decoded before use; 0 if there is none."""
    n, e = network, network.experts
    of_attention = attention_shapes(n.width, n.heads, n.groups, n.channels, n.latent) if n.blocks("attention") else []
    hidden = (e.shared_hidden if e is not None and sparse else n.hidden) if n.blocks("dense") else 0
    return max(n.width * hidden, *(rows * columns for rows, columns in of_attention), 0)


def _apart(network: Network) -> bool:
    """Return whether the experts' activation function has a backward kernel of its own, as with LoRA adapters. Then the layer needs the
    most memory while this kernel runs, and no rows are being sent between ranks at that moment."""
    return network.adapters is not None and network.experts is not None and not network.experts.fused


def _of_bias(network: Network, plan: Plan, stack: Stack, index: int) -> float:
    """Bytes of the gradient of T5's position bias, minus the bytes that the layer's feed-forward network or experts had kept and that
    their backward pass has freed. The gradient needs the larger of two sizes: a tensor for each sequence and one for their sum, in the
    compute dtype; or two fp32 tensors, the sum before and after masking."""
    parts = layer_parts(network, plan, stack, index)
    gone = parts["network"] + parts["activation"] + parts["experts"]
    return bias_elements(network, plan, stack) * max((plan.microbatch + 1) * plan.compute_bytes, 2 * FP32_BYTES) - gone


def _of_network(network: Network, stack: Stack, hidden: float, gradient: float) -> float:
    """Temporary bytes in the backward pass of a dense feed-forward network. hidden: bytes of one tensor of the hidden size. gradient: bytes
    of the largest weight matrix's gradient. In other programs (`stack.casts` False), this weight gradient exists together with the
    gradients of the activation's inputs (two with a gate). In this project, w2's gradient and the input of the product with w2 are freed
    before the gradients of the activation's inputs are allocated. Only relu keeps that input: it is relu's output, from which relu's
    gradient is computed."""
    if not stack.casts:
        return (2 if network.gated else 1) * hidden + gradient
    return max(hidden + gradient, (2 if network.gated or network.activation == "relu" else 1) * hidden)


def largest_gradient(network: Network, plan: Plan, stack: Stack, *, sparse: bool) -> float:
    """Bytes of the largest matrix's gradient before it is added to the gradients of other micro-batches. In this project, a dense matrix's
    gradient is computed in the compute dtype and then cast to fp32. The experts' kernels return the gradients of all their matrices in fp32
    at the same time."""
    c, e = plan.compute_bytes, network.experts
    largest = widest(network, plan, sparse=sparse)
    if not network.trains("experts" if sparse else "dense") or network.adapters is not None:
        return 0.0  # frozen matrices have no gradient, and adapters are small enough to be left out
    if not stack.casts:
        return c * largest
    if e is not None and sparse:
        return FP32_BYTES * largest * (3 / 2 if e.gated else 2)
    return (FP32_BYTES + (c if c < FP32_BYTES else 0)) * largest / (2 if network.gated else 1)


def widest(network: Network, plan: Plan, *, sparse: bool) -> float:
    """Number of elements that a rank holds of a layer's largest matrix: w1, together with the gate's matrix if there is one. In a layer
    with experts, these matrices of all the rank's experts count as one."""
    e = network.experts
    if e is not None and sparse:
        return e.count / plan.ep * network.width * e.hidden / plan.etp * (2 if e.gated else 1)
    return network.width * network.hidden / plan.grid.matrix * (2 if network.gated else 1)


def _gathered_input(network: Network, plan: Plan, stack: Stack) -> float:
    """Temporary bytes of `sliced` tensor parallelism (Megatron-LM's, with sequence parallelism): a product's gathered input, if it is not
    kept, and this input's gradient."""
    return (2 if stack.reads_again else 1) * _whole_input(network, plan) if plan.tensor == "sliced" else 0.0


def head_input(network: Network, plan: Plan, stack: Stack) -> float:
    """Bytes that `sliced` tensor parallelism adds at the loss; 0 without it. If the backward pass gathers inputs again
    (`Stack.reads_again`): the head's gathered input and this input's gradient. Otherwise: the gathered input,
    minus this rank's slice, which the kept activations already include."""
    if plan.tensor != "sliced" or stack.reads_again:
        return _gathered_input(network, plan, stack)
    return _whole_input(network, plan) * (1 - 1 / plan.tp)


def _whole_input(network: Network, plan: Plan) -> float:
    return plan.compute_bytes * network.width * plan.microbatch * network.length / plan.sp


@dataclass(frozen=True, eq=False)
class LayerBytes:
    """Sizes of one kind of layer on a rank. elements: its parameters. matrix: number of parameters in its largest matrix.

    gathered: those parameters of the layer that ZeRO stage 3 gathers at the same time. kept: bytes that a micro-batch keeps for the
    backward pass. work: temporary bytes of the layer's backward pass. If a schedule splits this pass into gradients of inputs (I) and later
    gradients of weights (W): pending: bytes that a micro-batch keeps from I until W; work_of_i, work_of_w: temporary bytes of I and of W.
    dispatch: bytes of the buffers for rows sent to and from experts.
    """

    elements: Elements
    gathered: Elements
    matrix: float
    kept: float
    pending: float
    work: float
    work_of_i: float
    work_of_w: float
    dispatch: float


@lru_cache(maxsize=20_000)
def layer_bytes(network: Network, plan: Plan, stack: Stack, sparse: bool) -> LayerBytes:
    """Return the sizes of a layer, with experts if it is `sparse`. plan.recompute: what this layer recomputes in the backward pass."""
    index = network.sparse_layers[0] if sparse else NO_EXPERTS
    of = (network, plan, stack, index)
    elements, matrix = counts.layer(network, plan, index), widest(network, plan, sparse=sparse)
    at_once = elements
    if plan.tiles > 1 and not sparse:  # ZeRO stage 3 gathers one tile after another
        of_network = counts.network_elements(network, network.hidden, gated=network.gated) / plan.grid.matrix
        at_once = elements + counts.dense(network, -of_network * (1 - 1 / plan.tiles), "dense")
    if stack.gathers == "elements":  # each product gathers its own matrix
        at_once = Elements(min(at_once.total, matrix))
    kept = layer_kept(*of, plan.recompute) * (1 - plan.offload_activations)
    work_of_w = largest_gradient(network, plan, stack, sparse=sparse)
    work, work_of_i = (at_layer(*of, matrix_gradient=size) for size in (work_of_w, 0.0))
    sizes = kept, layer_pending(*of), work, work_of_i, work_of_w, buffers_of(network, plan) if sparse and not _apart(network) else 0.0
    return LayerBytes(elements, at_once, matrix, *sizes)


def forward_alone(network: Network, plan: Plan, stack: Stack, of: LayerBytes, *, sparse: bool) -> LayerBytes:
    """Return the sizes `of` a layer for one that the backward pass does not reach: it keeps nothing. Its forward pass needs temporary
    tensors: with a gate four of the hidden size (both matrix products, the activation, and the product of activation and gate), without a
    gate two; and five of the model's width (the layer's input, the sum with attention's output, the norm's output, a message from and one
    to another stage). Experts also need their rows, before and after."""
    at, c, e = tokens_of(network, plan, stack), plan.compute_bytes, network.experts
    if e is not None and sparse:
        rows, gated = most_rows(network, plan), e.gated
        wide, hidden = 2 * rows * network.width, rows * e.hidden / plan.etp
    else:
        wide, gated, hidden = 0.0, network.gated, at.inside * network.hidden
    work = max(c * ((4 if gated else 2) * hidden + wide), _scores(network, plan, stack)) + 5 * c * network.width * at.between
    return replace(of, kept=0.0, pending=0.0, work=work, work_of_i=work, work_of_w=0.0)


@dataclass(frozen=True, eq=False)
class Outside:
    """Sizes of a rank outside of its layers: embedding, head, final norms, loss.

    elements: (rank has the first stage, rank has the last stage) -> its parameters outside of layers. keeps: the same pair -> bytes that a
    micro-batch keeps. crossing: bytes of a tensor sent between stages. loss, head_input: temporary bytes at the loss. embedding, head:
    their parameters. ahead: parameters of one depth of multi-token prediction. casts: bytes of this depth's weights as copies in the
    compute dtype, kept for the backward pass. head_pending: bytes that a micro-batch keeps outside of layers between its gradients of
    inputs and of weights, if a schedule computes these separately.
    """

    elements: dict[tuple[bool, bool], Elements]
    keeps: dict[tuple[bool, bool], float]
    crossing: float
    loss: float
    head_input: float
    embedding: Elements
    head: Elements
    ahead: float
    casts: float
    head_pending: float


@lru_cache(maxsize=20_000)
def outside_of(network: Network, plan: Plan, stack: Stack) -> Outside:
    """Return the sizes of embedding, head, loss and multi-token prediction. plan: without pipeline stages (pp is 1)."""
    ends = [(first, last) for first in (False, True) for last in (False, True)]
    return Outside(
        {(first, last): counts.ends(network, plan, first=first, last=last) for first, last in ends},
        {(first, last): ends_kept(network, plan, stack, first=first, last=last) for first, last in ends},
        plan.compute_bytes * network.width * sum(tokens_of(run, plan, stack).between for run in network.halves),
        at_loss(network, plan, stack),
        head_input(network, plan, stack),
        counts.table(network, plan, "embedding"),
        counts.table(network, plan, network.head),
        counts.ahead(network, plan).total if network.ahead else 0.0,
        cast_ahead(network, plan) if network.ahead else 0.0,
        head_pending(network, plan, stack),
    )


# --- ZeRO stage 3 -------------------------------------------------------------------------------------------------------


class Unit(NamedTuple):
    """A layer in its backward pass. at_once: its parameters that ZeRO stage 3 gathers at the same time. matrix: number of elements of
    its largest matrix. next: parameters of the layer after it, whose backward pass has just ended."""

    at_once: Elements = NOTHING
    matrix: float = 0.0
    next: Elements = NOTHING


def gathered(
    plan: Plan, stack: Stack, unit: Unit, *, held: Elements, table: Elements, to_come: Elements = NOTHING
) -> Callable[[At], float]:
    """Return a function: point of a step -> bytes of gathered weights and unreduced gradients, with an engine of this project (with other
    frameworks: `at_any_moment`). held: the rank's parameters. table: parameters of the embedding or head. to_come: trained parameters
    without a gradient yet."""
    form = plan.carrier.gathered
    if form is None:
        return lambda at: 0.0
    copies = plan.copies
    shared = _Shared(copies > 1, plan.edp > 1)
    layer = shared.of(unit.at_once)
    whole = GatheredSizes(
        compute_bytes=plan.compute_bytes,
        sum_bytes=stack.reduce_bytes,
        held=shared.of(held),
        table=shared.of(table),
        layer=layer,
        behind=shared.of(unit.next),
        trained=shared.of(held.trained + to_come.times(-1)),
        trained_table=shared.of(table.trained),
        trained_layer=shared.of(unit.at_once.trained),
        trained_behind=shared.of(unit.next.trained),
        matrix=min(unit.matrix, layer),
        bucket=stack.bucket_elements,
        copies=copies,
        stays=plan.pp > 1 or not plan.reshard,
        on_stages=plan.pp > 1,
        once=plan.pp > 1 and not plan.reshard,
        loss_chunks=plan.loss_chunks,
    )
    return lambda at: form(at, whole)


def at_any_moment(plan: Plan, stack: Stack, *, held: float, table: float, units: Sequence[float]) -> float:
    """Bytes of gathered weights and unreduced gradients at the peak of ZeRO stage 3, in frameworks other than this project. held, table:
    numbers of parameters of the rank and of the embedding. units: for each kind of layer, the number of its parameters that are gathered at
    the same time."""
    if plan.pp > 1:  # with pipeline stages, weights stay gathered and gradients unreduced for the whole step
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


class _Shared(NamedTuple):
    """Whether ZeRO shards the parameters outside of experts (dense) and in experts (expert): it does if several data-parallel ranks would
    hold copies of them."""

    dense: bool
    expert: bool

    def of(self, elements: Elements) -> float:
        """Return how many of the parameters that `elements` counts are sharded by ZeRO."""
        return (elements.dense if self.dense else 0.0) + (elements.expert if self.expert else 0.0)
