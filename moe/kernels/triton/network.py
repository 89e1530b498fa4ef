"""The experts' networks, forward and backward, on rows (a token for one of its experts) sorted by expert. Of the activations, only X and
the pre-activations H and G are saved (SonicMoE, arXiv 2512.14080).

    forward    H, G = X[token] W1, W3 [+ b1, b3]    A = act(H) * G    Y = A W2    out = total of gate * Y       A and Y are freed
    backward   dA = dO[token] W2^T       d gate = <dA, A> = <dO, Y>, with A computed again from H and G
               dH, dG from gate * dA     dW2 = (gate * A)^T dO[token]       dW1, dW3 = X[token]^T dH, dG       db1, db3 = 1^T dH, dG
               dX = total of (dH W1^T + dG W3^T)

Products gather rows as they load them, so there is no permuted copy. `total` sums each token's rows. dX is the gradient of X,
and dO of out. The gradient of a weight or bias has the dtype of that weight or bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.kernels.activation import Activation
from moe.kernels.network import Counts, Matrices, Network, aligned_start
from moe.kernels.rows import Plan
from moe.kernels.triton import gemm, moves
from moe.kernels.triton.device import ALIGNED, Tile, check_dtype, held_tiles, most_rows, on, rows_each, tile, torch_groups
from moe.kernels.triton.routing import total
from parallel.mesh.host import on_device
from parallel.numerics.weight_gradient import if_deferrable, pending_for

# T tokens, K choices, R rows, E experts, D model, F hidden, I and O a matrix's input and output size

# function to call instead of `product` (below) for 16-bit dtypes; it reads rows in order, without a gather. None: call `product`
InOrder = Callable[..., Tensor] | None


@dataclass(frozen=True)
class Rows:
    """`number` rows sorted by expert. `ends_E` int32: the end of each expert's rows. `tiles` int32 [tiles, 3]: for each tile of `tile_rows`
    rows its expert, its first row, and the end of the expert's rows. `plan`: the rows of each token, if the
    network reads and returns tokens; None: it reads and returns rows. `used_tiles` int32 [1]: number of tiles that have rows. `in_order`:
    see InOrder.
    """

    number: int
    ends_E: Tensor
    tiles: Tensor
    tile_rows: int
    plan: Plan | None
    used_tiles: Tensor
    in_order: InOrder = None

    @property
    def choice_R(self) -> Tensor | None:
        return None if self.plan is None else self.plan.choice_R

    @property
    def choices(self) -> int:
        return 1 if self.plan is None else self.plan.row_TK.shape[1]


def arrange(counts_E: Tensor, *, rows: int, dtype: torch.dtype, plan: Plan | None, in_order: InOrder = None) -> Rows:
    """Return Rows, with the tile map made on the GPU. counts_E: number of rows of each expert, for which the host does not wait: it uses
    an upper bound of the number of tiles. rows: number of rows of all experts together."""
    num_experts, tile_rows = len(counts_E), rows_each(rows, len(counts_E), dtype)
    num_tiles = rows // tile_rows + min(num_experts, rows)
    ends, tiles = counts_E.new_empty(num_experts + 1, dtype=torch.int32), counts_E.new_empty(num_tiles, 3, dtype=torch.int32)
    block_e = max(2, triton.next_power_of_2(num_experts))
    block_t = max(1, min(64, 8192 // block_e))
    with on(ends):
        moves.tile_map[(max(1, triton.cdiv(num_tiles, block_t)),)](
            counts_E, ends, tiles, num_tiles, num_experts, TILE=tile_rows, BLOCK_T=block_t, BLOCK_E=block_e
        )
    return Rows(rows, ends[:num_experts], tiles, tile_rows, plan, ends[num_experts:], in_order)


def _grid(rows: Rows, t: Tile, columns: int) -> tuple[int]:
    return (len(rows.tiles) * triton.cdiv(columns, t.n),)


def _launch(t: Tile, inner: int, columns: int) -> dict[str, Any]:
    return {"EVEN": inner % t.k == 0 and columns % t.n == 0, "GROUP": t.group, **t.launch}


def _constants(activation: Activation) -> dict[str, Any]:
    ffn, s = activation
    if s is None or ffn != "swiglu":
        return {"FFN": ffn, "ALPHA": 1.0, "LIMIT": None, "OFFSET": 0.0}
    return {"FFN": ffn, "ALPHA": s.alpha, "LIMIT": s.limit, "OFFSET": s.offset}


def up(x: Tensor, network: Network, scale_RF: Tensor | None, rows: Rows, *, keep: bool) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return H, G and A, all [R, F]. G is None without w3. scale_RF: dropout's factors on A. keep: False if no backward pass follows; H and
    G are then None."""
    w1, _, w3, b1, b3 = network.tensors
    width, hidden = w1.shape[1:]
    t = tile(rows.tile_rows, x.dtype, x.device, products=1 if w3 is None else 2, epilogue=keep)
    a = x.new_empty(rows.number, hidden)
    h, g = torch.empty_like(a) if keep else None, torch.empty_like(a) if keep and w3 is not None else None
    with on(x):
        gemm.up[_grid(rows, t, hidden)](
            *(x, w1, w3, b1, b3, scale_RF, h, g, a, rows.choice_R, rows.tiles, len(rows.tiles), rows.choices, width, hidden),
            **_constants(network.activation),
            **_launch(t, width, hidden),
        )
    return h, g, a


def torch_multiplies(rows_RI: Tensor) -> bool:
    """Return whether to use torch's grouped product, which is CUTLASS's for bf16 on Hopper and B200. It needs at least one row."""
    return rows_RI.is_cuda and rows_RI.dtype == torch.bfloat16 and len(rows_RI) > 0 and torch_groups(rows_RI.device)


def product(a: Tensor, w: Tensor, rows: Rows, *, turned: bool, a_too: Tensor | None = None, w_too: Tensor | None = None) -> Tensor:
    """Multiply each row by its expert's matrix: a w [+ a_too w_too], [R, O] in a's dtype. w is [E, I, O], or [E, O, I] if `turned`."""
    if rows.in_order is not None and a.dtype.itemsize == 2:
        return rows.in_order(a, w, rows, turned=turned, a_too=a_too, w_too=w_too)
    if a_too is None and torch_multiplies(a):
        return F.grouped_mm(a, w.transpose(1, 2) if turned else w, offs=rows.ends_E)
    inner, columns = a.shape[1], w.shape[1] if turned else w.shape[2]
    t = tile(rows.tile_rows, a.dtype, a.device, products=1, epilogue=False)
    out = a.new_empty(rows.number, columns)
    with on(a):
        gemm.product[_grid(rows, t, columns)](
            *(a, w, a_too, w_too, out, rows.tiles, len(rows.tiles), inner, columns), TURNED=turned, **_launch(t, inner, columns)
        )
    return out


def back(
    grad: Tensor, w2: Tensor, gate_TK: Tensor | None, scale_RF: Tensor | None, h: Tensor, g: Tensor | None, rows: Rows, *, form: Activation
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return dH, dG, gate * A (all [R, F]) and the gates' gradient [T, K], given `grad`, the gradient of the output. `scale_RF`: dropout's
    factors on A. `form`: the activation."""
    hidden, width = w2.shape[1:]
    t = tile(rows.tile_rows, h.dtype, h.device, products=1, epilogue=True)
    grad_h, grad_g, a_gated = torch.empty_like(h), None if g is None else torch.empty_like(h), torch.empty_like(h)
    parts = None if gate_TK is None else h.new_empty(rows.number, triton.cdiv(hidden, t.n), dtype=torch.float32)
    with on(h):
        gemm.back[_grid(rows, t, hidden)](
            *(grad, w2, gate_TK, scale_RF, h, g, grad_h, grad_g, a_gated, parts),
            *(rows.choice_R, rows.tiles, len(rows.tiles), rows.choices, width, hidden),
            **_constants(form),
            **_launch(t, width, hidden),
        )
    if gate_TK is None or parts is None or rows.plan is None:
        return grad_h, grad_g, a_gated, None
    if not rows.number:
        return grad_h, grad_g, a_gated, torch.zeros_like(gate_TK)
    grad_gate, number = torch.empty_like(gate_TK), gate_TK.numel()
    block_p = triton.next_power_of_2(min(64, parts.shape[1]))
    with on(h):
        moves.gate_gradient[(triton.cdiv(number, 64),)](
            parts, rows.plan.row_TK.contiguous(), grad_gate, number, parts.shape[1], BLOCK_N=64, BLOCK_P=block_p
        )
    return grad_h, grad_g, a_gated, grad_gate


def weight_gradient(left: Tensor, right: Tensor, like: Tensor, rows: Rows, *, gathered: str) -> Tensor:
    """Return left^T right of each expert, in the shape and dtype of the weight `like`, without the zero columns that `_aligned` appended.
    `gathered`: the operand that has tokens instead of rows: left, right or neither.
    """
    height, width = left.shape[1], right.shape[1]
    t = tile(most_rows(left.dtype), left.dtype, left.device, products=1, epilogue=False)
    group, across = held_tiles(t, height, width, rows.number // len(like), like=left)
    out = like.new_empty(len(like), height, width)
    with on(left):
        gemm.weights[(len(like) * triton.cdiv(height, t.m) * triton.cdiv(width, t.n),)](
            *(left, right, out, *(rows.choice_R if gathered == side else None for side in ("left", "right"))),
            *(rows.ends_E, rows.choices, height, width, group, int(across)),
            EVEN=height % t.m == 0 and width % t.n == 0,
            **t.launch,
        )
    return out[:, : like.shape[1], : like.shape[2]]


def bias_gradient(grad_RF: Tensor | None, like: Tensor | None, rows: Rows) -> Tensor | None:
    """Return the gradient [E, F] of b1 or b3: the sum of each expert's rows; None for an absent bias. `like`: b1, for shape and dtype."""
    if grad_RF is None or like is None:
        return None
    ones = grad_RF.new_ones(rows.number, ALIGNED)
    return weight_gradient(ones, grad_RF, like.unsqueeze(1).expand(-1, ALIGNED, -1), rows, gathered="neither")[:, 0]


class _Network(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, gate_TK: Tensor | None, scale_RF: Tensor | None, rows: Rows, keep: bool, *given: Any) -> Tensor:
        form, w1, w2, w3, b1, b3 = given  # the network's activation, then its tensors
        wide_b1, wide_b3 = (None if b is None else _aligned(b, 1) for b in (b1, b3))
        first, gate = _cast_both(w1, w3, x_TD)
        h, g, a = up(x_TD, Network(first, w2, gate, wide_b1, wide_b3, form), scale_RF, rows, keep=keep)
        del first, gate
        y_RD = product(a, _cast(w2, x_TD), rows, turned=False)
        if keep:
            ctx.save_for_backward(x_TD, gate_TK, w1, w2, w3, scale_RF, h, g)
            ctx.rows, ctx.form, ctx.weights, ctx.b1 = rows, form, if_deferrable(w1, w2, w3), b1
        return y_RD if rows.plan is None else total(y_RD, rows.plan.row_TK, gate_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, gate_TK, w1, w2, w3, scale_RF, h, g = ctx.saved_tensors
        rows: Rows = ctx.rows
        grad_out = grad_out.contiguous()
        grad_h, grad_g, a_gated, grad_gate = back(grad_out, _cast(w2, x_TD), gate_TK, scale_RF, h, g, rows, form=ctx.form)
        grad_b1, grad_b3 = (bias_gradient(grad, ctx.b1, rows) for grad in (grad_h, grad_g))
        grad_w1 = grad_w2 = grad_w3 = grad_x = None
        weights = ctx.weights or (w1, w2, w3)
        deferrable = tuple(w for w in weights if w is not None)
        pending = pending_for(*deferrable)
        if pending is not None:
            pending.add(deferrable, partial(_deferred_gradients, weights, x_TD, a_gated, grad_out, grad_h, grad_g, rows))
        elif ctx.needs_input_grad[7]:
            grad_w2 = weight_gradient(a_gated, grad_out, w2, rows, gathered="right")
        del a_gated
        if pending is None and (ctx.needs_input_grad[6] or ctx.needs_input_grad[8]):
            grad_w1, grad_w3 = _first_gradients(x_TD, (grad_h, grad_g), w1, rows)
        if ctx.needs_input_grad[0]:
            first, gate = _cast_both(w1, w3, x_TD)
            grad_x = product(grad_h, first, rows, turned=True, a_too=grad_g, w_too=gate)
            if rows.plan is not None:
                grad_x = total(grad_x, rows.plan.row_TK, None)
        return grad_x, grad_gate, None, None, None, None, grad_w1, grad_w2, grad_w3, grad_b1, grad_b3


def _deferred_gradients(
    weights: Matrices, x_TD: Tensor, a_gated: Tensor, grad_out: Tensor, grad_h: Tensor, grad_g: Tensor | None, rows: Rows
) -> tuple[Tensor | None, ...]:
    grad_w2 = weight_gradient(a_gated, grad_out, weights[1], rows, gathered="right")
    grad_w1, grad_w3 = _first_gradients(x_TD, (grad_h, grad_g), weights[0], rows)
    return (grad_w1, grad_w2) if weights[2] is None else (grad_w1, grad_w2, grad_w3)


def _first_gradients(x_TD: Tensor, grads: Sequence[Tensor | None], like: Tensor, rows: Rows) -> list[Tensor | None]:
    """Return the gradients of w1 and w3, in the dtype of `like` (w1), given `grads` = (dH, dG). Without w3, dG and the gradient of w3
    are None."""
    return [None if g is None else weight_gradient(x_TD, g, like, rows, gathered="left") for g in grads]


def _cast(weight: Tensor, like: Tensor) -> Tensor:
    """Return the weight in the dtype of the rows `like`, contiguous and aligned. It is cast here once per product, not once per tile."""
    return _aligned(weight.to(like.dtype).contiguous(), 2)


def _cast_both(w1: Tensor, w3: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return (_cast(w1, like), _cast(w3, like)), computed by one kernel."""
    if w3 is None or w1.dtype == like.dtype:
        return _cast(w1, like), None if w3 is None else _cast(w3, like)
    w1, w3 = w1.contiguous(), w3.contiguous()
    made = torch.empty_like(w1, dtype=like.dtype), torch.empty_like(w3, dtype=like.dtype)
    with on(w1):
        moves.cast[(triton.cdiv(w1.numel(), 4096), 2)](w1, w3, *made, w1.numel(), BLOCK=4096)
    return _aligned(made[0], 2), _aligned(made[1], 2)


def _aligned(tensor: Tensor, dims: int) -> Tensor:
    """Return the tensor with zeros appended to its last `dims` dims up to a multiple of ALIGNED. If no zeros are needed and its start is
    aligned, return the tensor itself."""
    missing = [n for size in reversed(tensor.shape[-dims:]) for n in (0, -size % ALIGNED)]
    return F.pad(tensor, missing) if any(missing) else aligned_start(tensor)


def _apply(x_TD: Tensor, gate_TK: Tensor | None, scale_RF: Tensor | None, rows: Rows, network: Network) -> Tensor:
    """Compute the network. Zeros are appended to D and F up to a multiple of ALIGNED, in copies of the operands; they change no result."""
    check_dtype(x_TD)
    keep, width = network.recorded(x_TD, gate_TK), x_TD.shape[1]
    x_TD, scale_RF = _aligned(x_TD.contiguous(), 1), None if scale_RF is None else _aligned(scale_RF.contiguous(), 1)
    out: Tensor = _Network.apply(x_TD, gate_TK, scale_RF, rows, keep, network.activation, *network.tensors)
    return out if width == out.shape[1] else out[:, :width]


def grouped_ffn(rows_RD: Tensor, network: Network, *, counts: Counts, dropped_RF: Tensor | None = None, in_order: InOrder = None) -> Tensor:
    counts_E = on_device(torch.tensor(counts), rows_RD.device) if isinstance(counts, list) else counts
    rows = arrange(counts_E, rows=len(rows_RD), dtype=rows_RD.dtype, plan=None, in_order=in_order)
    return _apply(rows_RD, None, dropped_RF, rows, network)


def routed_ffn(
    x_TD: Tensor, gate_TK: Tensor, plan: Plan, network: Network, *, dropped_RF: Tensor | None = None, in_order: InOrder = None
) -> Tensor:
    """Return combine(grouped_ffn(permute(x))), [T, D], computed by fused kernels. The host does not wait for the experts' numbers of rows.
    dropped_RF: dropout's factors on the hidden units. in_order: a function that replaces `product` for 16-bit dtypes, or None."""
    rows = arrange(plan.counts_E, rows=len(plan.choice_R), dtype=x_TD.dtype, plan=plan, in_order=in_order)
    return _apply(x_TD, gate_TK.contiguous(), dropped_RF, rows, network)
