"""The experts' feed-forward networks in torch operations: a few batched products instead of one product per expert.

    rows sorted by expert      | 0 0 0 | 1 1 | 2 2 2 2 2 2 2 | 3 3 |
    blocks of neighbors       [ 0 0 0 ; 1 1 . ] [ 2 2 2 2 2 2 2 ] [ 3 3 ]        . is a padding row

One batched product computes a block: neighboring experts, each padded to the largest number of rows among them. Padding makes a block at
most 1.25 times as large; in text generation, with few rows, 3 times. For 16-bit products on the CPU, the limit is 1.5 times, or 32 rows per
expert if that is more, and rows are then rounded up to multiples of 32. In fp32, a block's hidden rows fit into the CPU's cache.

Only the input and the pre-activations are saved for the backward pass (SonicMoE, arXiv 2512.14080), which gathers the rows and computes
the activation A again. The gate's gradient is <dA, A>, where dA is A's gradient without the factor gate. Biases are added to padding
rows too, but no gradient and no result reads these rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from moe.kernels.activation import Activation, activate, activate_backward
from moe.kernels.network import Counts, Matrices, Network, numbers, of_counted
from moe.kernels.rows import Plan, combine, permute
from parallel.numerics.precision import gradient_dtype, sum_dtype
from parallel.numerics.weight_gradient import if_deferrable, pending_for

# N source rows, R routed rows, Q routed rows with padding, E experts held, D model, F hidden, I and O a matrix's in and out

_HALF = (torch.bfloat16, torch.float16)
_FEW_ROWS = 32  # up to this number of rows of all experts together, one product with more padding is cheaper than several products
_BLOCK_BYTES = 3 * 2**20  # a block's fp32 scratch memory per thread: fits into a core's cache, and is small compared with the gradients

# tensors of all Q rows, saved for the backward pass: (gates, dropout factors, h = x w1 + b1 (relu: relu(h) instead), g = x w3 + b3)
_Kept = tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]
Factors = tuple["Block", Tensor, Tensor, Tensor | None]  # (block, activation A, gradient of h, gradient of g), for weight gradients


@dataclass(frozen=True)
class Block:
    """Experts [first, last), which one batched product computes. Their rows are [begin, end) of the R routed rows.
    In the padded buffer of Q rows they begin at row `start`, with `each` rows per expert.
    """

    first: int
    last: int
    each: int
    start: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        return (self.last - self.first) * self.each

    @property
    def padded(self) -> slice:
        return slice(self.start, self.start + self.size)

    @property
    def padding(self) -> int:
        return self.size - (self.end - self.begin)


def blocks(counts: list[int], *, row_bytes: int, dtype: torch.dtype, device: torch.device) -> list[Block]:
    """Cut the experts into blocks, given each expert's number of rows. `row_bytes`: scratch memory of a row.
    A block begins with an expert that has rows, so an expert without rows may be in no block. For 16-bit products on the CPU, blocks are
    larger and padded to multiples of 32 rows, so that fewer shapes occur. The first product of a new shape takes 15 times as long as
    later ones (measured by python -m tests.measured small-costs).
    """
    half = dtype in _HALF and device.type == "cpu"
    share, unit, scale = (1.5, 32, 6) if half else (1.25, 1, 1)
    max_rows = max(1, scale * _BLOCK_BYTES * torch.get_num_threads() // row_bytes)
    found: list[Block] = []
    first = rows = largest = begin = start = 0

    def close(last: int) -> None:
        nonlocal first, rows, largest, begin, start
        if rows:
            step = 2 * unit if half and largest >= 8 * unit else unit
            each = -(-largest // step) * step
            found.append(Block(first, last, each, start, begin, begin + rows))
            start += (last - first) * each
        first, begin, rows, largest = last, begin + rows, 0, 0

    for expert, count in enumerate(counts):
        padded = (expert + 1 - first) * max(largest, count)
        if rows and (padded > max_rows or padded > max(share * (rows + count), 32 * (expert + 1 - first) if half else 0)):
            close(expert)
        if not rows and not count:
            first = expert + 1
            continue
        rows, largest = rows + count, max(largest, count)
    close(len(counts))
    return found


@dataclass(frozen=True)
class Rows:
    """R routed rows arranged in blocks, and padded to Q rows. `source_Q`: index of the source row that each of the Q rows copies; for
    padding, any row's index. `place_R`: index of each routed row among the Q rows. `real_Q`: fp32, 1 for routed rows and 0 for padding.
    `place_R` and `real_Q` are None if there is no padding."""

    blocks: list[Block]
    source_Q: Tensor
    place_R: Tensor | None
    real_Q: Tensor | None


def one_block(counts: list[int]) -> list[Block]:
    """Return one block with all experts that have rows, for few rows (text generation). Return [] if the block would include many experts
    without rows, or much padding."""
    hit = [expert for expert, count in enumerate(counts) if count]
    if not hit or sum(counts) > _FEW_ROWS:
        return []
    first, last, each = hit[0], hit[-1] + 1, max(counts)
    if 4 * len(hit) < 3 * (last - first) or (last - first) * each > 3 * sum(counts):
        return []
    return [Block(first, last, each, 0, 0, sum(counts))]


def arrange(source_R: Tensor, counts: list[int], network: Network, dtype: torch.dtype, *, keep: bool = True) -> Rows:
    """Arrange routed rows, sorted by expert, in blocks. Row r copies source row source_R[r]. `keep`: True if a backward pass can follow."""
    width, hidden = network.w1.shape[1:]
    row_bytes = (hidden + 4 * width) * dtype.itemsize  # scratch memory of a row: its hidden units, and about four rows of width D
    cut = [] if keep or dtype in _HALF else one_block(counts)
    cut = cut or blocks(counts, row_bytes=row_bytes, dtype=dtype, device=source_R.device)
    if not any(b.padding for b in cut):
        return Rows(cut, source_R, None, None)
    starts = [b.start + expert * b.each for b in cut for expert in range(b.last - b.first)]  # each expert's first index among the Q rows
    held = [count for b in cut for count in counts[b.first : b.last]]
    ends, device = list(accumulate(held)), source_R.device
    shifts = [start - (end - count) for start, end, count in zip(starts, ends, held, strict=True)]
    place_R = torch.arange(ends[-1], device=device) + torch.repeat_interleave(
        torch.tensor(shifts, device=device), torch.tensor(held, device=device), output_size=ends[-1]
    )
    size = cut[-1].start + cut[-1].size
    source_Q = source_R.new_zeros(size).index_copy_(0, place_R, source_R)
    real_Q = torch.zeros(size, device=device).index_fill_(0, place_R, 1.0)
    return Rows(cut, source_Q, place_R, real_Q)


def _network(
    x_ND: Tensor, gate_R: Tensor | None, mask_RF: Tensor | None, rows: Rows, network: Network, *, keep: bool
) -> tuple[Tensor, _Kept]:
    """Return (results [N, D], tensors for the backward pass). With `gate_R`, a source row's result is the sum over its routed rows of gate
    times output. Without it, each source row has one routed row. `mask_RF`: dropout's factors of the hidden units. `keep`: False if no
    backward pass follows; h and g are then empty."""
    w1, w2, w3, b1, b3 = network.tensors
    size, hidden = len(rows.source_Q), w1.shape[2]
    gate_Q, mask_QF = _pad(gate_R, rows), _pad(mask_RF, rows)
    h_QF = x_ND.new_empty(size if keep else 0, hidden)
    g_QF = None if w3 is None else torch.empty_like(h_QF)
    out = x_ND.new_zeros(x_ND.shape, dtype=sum_dtype(x_ND.dtype)) if gate_Q is not None else torch.empty_like(x_ND)
    for b in rows.blocks:
        x = _gather(x_ND, rows, b)
        h = h_QF[b.padded] if keep else x.new_empty(b.size, hidden)
        _multiply(x, _weights(w1, b, x), h)
        _add_bias(h, b1, b)
        g = None
        if w3 is not None:
            g = g_QF[b.padded] if g_QF is not None and keep else torch.empty_like(h)
            _multiply(x, _weights(w3, b, x), g)
            _add_bias(g, b3, b)
        if network.activation.ffn == "relu":
            h.relu_()  # relu's derivative can be read off its output, so the output is saved
        a = _activated(h, g, network.activation, None if mask_QF is None else mask_QF[b.padded])
        y = x  # x is not read again, so its memory holds the result
        _multiply(a, _weights(w2, b, x), y)
        _put(out, y, rows, b, gate_Q)
    return out.to(x_ND.dtype), (gate_Q, mask_QF, h_QF, g_QF)


class _Network(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, gate_R: Tensor | None, mask_RF: Tensor | None, rows: Rows, activation: Activation, *tensors: Tensor | None
    ) -> Tensor:
        out, (gate_Q, mask_QF, h_QF, g_QF) = _network(x_ND, gate_R, mask_RF, rows, Network.of(tensors, activation), keep=True)
        w1, w2, w3, *ctx.biases = tensors
        ctx.save_for_backward(x_ND, gate_Q, w1, w2, w3, mask_QF, h_QF, g_QF)
        ctx.rows, ctx.activation, ctx.weights = rows, activation, if_deferrable(w1, w2, w3)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, gate_Q, w1, w2, w3, mask_QF, h_QF, g_QF = ctx.saved_tensors
        rows: Rows = ctx.rows
        grad_out = grad_out.contiguous()
        grad_x = x_ND.new_zeros(x_ND.shape, dtype=sum_dtype(x_ND.dtype)) if gate_Q is not None else torch.empty_like(x_ND)
        grad_gate_Q = None if gate_Q is None else torch.empty_like(gate_Q)
        grad_b1, grad_b3 = (None if b is None else torch.zeros_like(b, dtype=gradient_dtype(b), requires_grad=False) for b in ctx.biases)
        euler = ctx.activation.ffn == "relu" and gate_Q is not None and grad_b1 is None
        weights = ctx.weights or (w1, w2, w3)
        deferrable, deferred = tuple(w for w in weights if w is not None), list[Factors]()
        pending = pending_for(*deferrable)
        trained = [w if needed else None for w, needed in zip(weights, ctx.needs_input_grad[5:8], strict=True)]
        grads: list[Tensor | None] = [None] * 3 if pending is not None else _gradients(trained, rows)
        for b in rows.blocks:
            h, g = h_QF[b.padded], None if g_QF is None else g_QF[b.padded]
            mask = None if mask_QF is None else mask_QF[b.padded]
            gate = None if gate_Q is None else gate_Q[b.padded]
            grad_y = _gather(grad_out, rows, b)
            # if weight gradients are deferred, only x's shape and dtype are used here
            x = grad_y if pending is not None and not euler else _gather(x_ND, rows, b)
            a = _activated(h, g, ctx.activation, mask)
            grad_a = torch.empty_like(h)
            _multiply(grad_y, _weights(w2, b, h).mT, grad_a)
            if not euler and grad_gate_Q is not None:
                grad_gate_Q[b.padded] = _dot(grad_a, a)
            if mask is not None:
                grad_a.mul_(mask)
            grad_h, grad_g = activate_backward(grad_a, h, g, *ctx.activation)
            _bias_gradient(grad_h, gate, grad_b1, b)
            _bias_gradient(grad_g, gate, grad_b3, b)
            back = torch.empty_like(x)
            _multiply(grad_h, _weights(w1, b, x).mT, back)
            if w3 is not None and grad_g is not None:
                _multiply(grad_g, _weights(w3, b, x).mT, other := torch.empty_like(x))
                back += other
            if euler and grad_gate_Q is not None:
                # the gate's gradient <dY, Y> equals <dX, X> for relu without biases, as Y(c X) = c Y(X) for c > 0 (Euler's theorem)
                grad_gate_Q[b.padded] = _dot(back, x)
            if pending is None:
                _weight_gradients(grads, a, grad_h, grad_g, grad_y, x, gate, b)
            else:
                deferred.append((b, a, grad_h, grad_g))
            _put(grad_x, back, rows, b, gate_Q)
        if pending is not None:
            pending.add(deferrable, partial(_deferred_gradients, weights, x_ND, grad_out, gate_Q, rows, deferred))
        grad_gate_R = grad_gate_Q if rows.place_R is None or grad_gate_Q is None else grad_gate_Q.index_select(0, rows.place_R)
        return grad_x.to(x_ND.dtype), grad_gate_R, None, None, None, *grads, grad_b1, grad_b3


def _deferred_gradients(
    weights: Matrices, x_ND: Tensor, grad_out: Tensor, gate_Q: Tensor | None, rows: Rows, deferred: list[Factors]
) -> list[Tensor | None]:
    """Return the gradients of w1 and w2, and of w3 unless it is None. Zero-bubble schedules call this after the backward pass. The rows of
    x and grad_out are gathered again, so they need no memory until then. `deferred`: Factors of each block, from the backward pass."""
    grads = _gradients(weights, rows)
    for b, a, grad_h, grad_g in deferred:
        gate = None if gate_Q is None else gate_Q[b.padded]
        _weight_gradients(grads, a, grad_h, grad_g, _gather(grad_out, rows, b), _gather(x_ND, rows, b), gate, b)
    return grads[:2] if weights[2] is None else grads


def _gradients(weights: Sequence[Tensor | None], rows: Rows) -> list[Tensor | None]:
    """Allocate the weights' gradients, with zeros for experts without rows. Even if no expert has rows, the result is zeros and not None:
    autograd runs no hooks of a weight with gradient None. For a None in `weights`, return None."""
    grads = [None if w is None else torch.empty_like(w, dtype=gradient_dtype(w), requires_grad=False) for w in weights]
    for grad in grads:
        if grad is not None:
            done = 0
            for b in rows.blocks:
                grad[done : b.first].zero_()
                done = b.last
            grad[done:].zero_()
    return grads


def _activated(h: Tensor, g: Tensor | None, activation: Activation, mask: Tensor | None) -> Tensor:
    """Return the activation A [* mask], given the pre-activations h and g; for relu, h already is the activation."""
    a = h if activation.ffn == "relu" else activate(h, g, *activation)
    return a if mask is None else a * mask


def _times_gate(rows_QD: Tensor, gate_Q: Tensor) -> Tensor:
    """Multiply each row by its gate. The memory of `rows_QD` may be overwritten."""
    if rows_QD.dtype == gate_Q.dtype:
        return rows_QD.mul_(gate_Q.unsqueeze(1))
    high_Q1 = gate_Q.to(rows_QD.dtype).unsqueeze(1)  # gate = high + low, both 16 bits, so that rows are not cast to fp32
    low_Q1 = (gate_Q.unsqueeze(1) - high_Q1).to(rows_QD.dtype)
    return (rows_QD * high_Q1).addcmul_(rows_QD, low_Q1)


def _dot(a_QW: Tensor, b_QW: Tensor) -> Tensor:
    """Return the dot product of each pair of rows: [Q], fp32 or wider. Products of 16-bit elements are first added in groups of 16, and
    the sum of each group is rounded to 16 bits."""
    products_QW = a_QW * b_QW
    if products_QW.dtype in _HALF and products_QW.shape[1] % 16 == 0:
        products_QW = products_QW.view(len(products_QW), 16, -1).sum(1)
    return products_QW.sum(1, dtype=sum_dtype(products_QW.dtype))


def _pad(values_R: Tensor | None, rows: Rows) -> Tensor | None:
    """Copy values of rows [R, ...] to their padded positions [Q, ...]; padding gets 0."""
    if values_R is None or rows.place_R is None:
        return values_R
    return values_R.new_zeros(len(rows.source_Q), *values_R.shape[1:]).index_copy_(0, rows.place_R, values_R)


def _gather(source_ND: Tensor, rows: Rows, b: Block) -> Tensor:
    """Return the block's padded rows, copied from their source rows. Padding rows are zero."""
    taken = source_ND.index_select(0, rows.source_Q[b.padded])
    if rows.real_Q is not None and b.padding:
        taken.mul_(rows.real_Q[b.padded].to(taken.dtype).unsqueeze(1))
    return taken


def _put(out: Tensor, y: Tensor, rows: Rows, b: Block, gate_Q: Tensor | None) -> None:
    """Write the block's results into `out`. With gates, add each result times its gate to its source row. Without gates, copy the results
    to the block's rows."""
    if gate_Q is not None:
        out.index_add_(0, rows.source_Q[b.padded], y.to(out.dtype).mul_(gate_Q[b.padded].unsqueeze(1)))
    elif rows.place_R is None:
        out[b.begin : b.end] = y
    else:
        out[b.begin : b.end] = y.index_select(0, rows.place_R[b.begin : b.end] - b.start)


def _weights(weight_EIO: Tensor, b: Block, like: Tensor) -> Tensor:
    """Return the weights of the block's n experts, [n, I, O], or [I, O] for one expert, in the dtype of `like`."""
    held = weight_EIO[b.first] if b.last - b.first == 1 else weight_EIO[b.first : b.last]
    return held.to(like.dtype)


def _multiply(rows_QI: Tensor, weights: Tensor, out_QO: Tensor) -> None:
    if weights.ndim == 2:
        torch.mm(rows_QI, weights, out=out_QO)
    else:
        n = len(weights)
        torch.bmm(rows_QI.view(n, -1, rows_QI.shape[1]), weights, out=out_QO.view(n, -1, out_QO.shape[1]))


def _weight_gradients(
    grads: list[Tensor | None], a: Tensor, grad_h: Tensor, grad_g: Tensor | None, grad_y: Tensor, x: Tensor, gate: Tensor | None, b: Block
) -> None:
    """Write the block's gradients of w1, w2 and w3 into `grads`. Each is a product of two tensors, one of them `x` or `grad_y`. The gates
    are multiplied into that one, so `a`, `grad_h` and `grad_g` are without gates."""
    grad_y, x = (rows if gate is None else _times_gate(rows, gate) for rows in (grad_y, x))
    for left, right, out in ((x, grad_h, grads[0]), (a, grad_y, grads[1]), (x, grad_g, grads[2])):
        _weight_gradient(left, right, out, b)


def _weight_gradient(rows_QI: Tensor, grad_QO: Tensor | None, out_EIO: Tensor | None, b: Block) -> None:
    """Write rows^T grad of each of the block's experts into `out_EIO`, in its dtype. `out_EIO` None: the weight is frozen or absent."""
    if grad_QO is None or out_EIO is None:
        return
    n, out_nIO = b.last - b.first, out_EIO[b.first : b.last]
    left_nIQ, right_nQO = rows_QI.view(n, b.each, -1).transpose(1, 2), grad_QO.view(n, b.each, -1)
    if out_EIO.dtype != rows_QI.dtype:
        out_nIO.copy_(torch.bmm(left_nIQ, right_nQO))
    elif n == 1:
        torch.mm(left_nIQ[0], right_nQO[0], out=out_nIO[0])
    else:
        torch.bmm(left_nIQ, right_nQO, out=out_nIO)


def _add_bias(hidden_QF: Tensor, bias_EF: Tensor | None, b: Block) -> None:
    if bias_EF is not None:
        hidden_QF.view(b.last - b.first, b.each, -1).add_(bias_EF[b.first : b.last].to(hidden_QF.dtype).unsqueeze(1))


def _bias_gradient(grad_QF: Tensor | None, gate_Q: Tensor | None, out_EF: Tensor | None, b: Block) -> None:
    """Write the sum of each expert's rows, times their gates, into `out_EF`. Sums are in fp32 or wider."""
    if grad_QF is None or out_EF is None:
        return
    wide_QF = grad_QF.to(sum_dtype(grad_QF.dtype))
    wide_QF = wide_QF if gate_Q is None else wide_QF * gate_Q.unsqueeze(1)
    out_EF[b.first : b.last] = wide_QF.view(b.last - b.first, b.each, -1).sum(1)


def _run(x_ND: Tensor, gate_R: Tensor | None, mask_RF: Tensor | None, rows: Rows, network: Network, *, keep: bool) -> Tensor:
    if not keep:
        return _network(x_ND, gate_R, mask_RF, rows, network, keep=False)[0]
    out: Tensor = _Network.apply(x_ND, gate_R, mask_RF, rows, network.activation, *network.tensors)
    return out


def grouped_ffn(rows_RD: Tensor, network: Network, *, counts: Counts, dropped_RF: Tensor | None = None) -> Tensor:
    return of_counted(_grouped_ffn, rows_RD, network, numbers(counts), dropped_RF)


def _grouped_ffn(rows_RD: Tensor, network: Network, counts: list[int], dropped_RF: Tensor | None) -> Tensor:
    rows = arrange(torch.arange(len(rows_RD), device=rows_RD.device), counts, network, rows_RD.dtype)
    return _run(rows_RD, None, dropped_RF, rows, network, keep=network.recorded(rows_RD))


def routed_ffn(x_TD: Tensor, gate_TK: Tensor, plan: Plan, network: Network, *, dropped_RF: Tensor | None = None) -> Tensor:
    counts = numbers(plan.counts_E)
    plan = plan.cut(sum(counts))
    dropped_RF = None if dropped_RF is None else dropped_RF[: len(plan.choice_R)]
    if x_TD.is_cuda:  # not fused, because index_add_ has no fixed order on a GPU
        return combine(grouped_ffn(permute(x_TD, plan), network, counts=counts, dropped_RF=dropped_RF), gate_TK, plan)
    keep = network.recorded(x_TD, gate_TK)
    rows = arrange(plan.token_R, counts, network, x_TD.dtype, keep=keep)
    gate_R = gate_TK.reshape(-1).index_select(0, plan.choice_R)
    return _run(x_TD, gate_R, dropped_RF, rows, network, keep=keep)
