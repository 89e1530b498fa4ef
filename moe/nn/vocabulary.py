"""Matrices with one row for each token of the vocabulary: the embedding, the projection to logits, and the loss.

    loss of a token = log sum_v exp(logit_v) - logit_target          with a cap c, each logit becomes c tanh(logit / c)

The loss is computed in tiles of the vocabulary and chunks of tokens. For each tile, two scores are kept for each token: the log-sum-exp,
and the target's logit (online softmax, arXiv 1805.02867). The backward pass computes the logits of a tile and chunk again. If ranks hold
shards of the rows, `Others` merges their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.recipe.shapes import PADDING as PADDING
from moe.recipe.shapes import unmarked
from parallel.data.tiling import Tiled, as_it_is, take, with_branches
from parallel.mesh.layout import Tile, cut
from parallel.numerics.precision import gradient_dtype, sum_dtype
from parallel.numerics.recompute import recomputed
from parallel.numerics.weight_gradient import linear

# N tokens, D model, V vocabulary or a tile of it


def as_inputs(tokens: Tensor) -> Tensor:
    """Return input ids. A token that is read but not predicted is stored as a negative code, its mark (moe/recipe/shapes.py). Each mark is
    replaced by the token's id. PADDING stays."""
    return torch.where(tokens < PADDING, unmarked(tokens), tokens)


def as_targets(tokens: Tensor) -> Tensor:
    """Return target ids: marks become PADDING, so that they do not count in the loss."""
    return tokens.masked_fill(tokens < PADDING, PADDING)


Product = Callable[[Tensor, Tensor], Tensor]


class Others(Protocol):
    """The exchange with ranks that hold other rows (vocabulary parallelism). Each method except `columns` is called once for all tiles of
    this rank. product: function (x, a tile's rows) -> x rows^T, for ranks that hold only shards of the columns; None if they hold all
    columns."""

    product: Product | None

    def tokens(self, tokens: Tensor) -> Tensor:
        """Return the tokens that this rank must look up in its rows: its own `tokens`, and the tokens of the ranks that hold other rows."""

    def columns(self, weight: Tensor) -> Tensor:
        """Return the matrix in which the look-up reads rows: `weight` (a tile's rows), in 3D with its columns gathered over depth."""

    def rows(self, found: Tensor) -> Tensor:
        """Sum the rows found by all ranks and return the rows of this rank's tokens. `found` is zero for rows of other ranks."""

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of the product with this rank's rows: x, or x gathered from all ranks if each has x of other tokens. Backward:
        sum the gradient of x over the ranks, if `product` does not."""

    def targets(self, targets: Tensor) -> Tensor:
        """Return the targets of the tokens for which this rank computes logits, given the targets of its own tokens."""

    def scores(self, scores_2N: Tensor) -> Tensor:
        """Merge all ranks' scores [2, N]: log-sum-exps and targets' logits."""

    def loss(self, loss: Tensor) -> Tensor:
        """Return the loss of this rank's own tokens, given the loss of the tokens for which it computes logits."""

    def logits(self, logits: Tensor) -> Tensor:
        """Gather logits: [..., rows on this rank] to [..., V]."""


class Rows(nn.Module):
    """Consecutive rows of a matrix [V, D], from row `first` on. The weight is read only in `forward`, because FSDP and ZeRO-3 gather it by
    hooks on `forward`."""

    def __init__(self, rows: slice, d_model: int) -> None:
        super().__init__()
        self.first = rows.start
        self.others: Others | None = None
        self.weight = nn.Parameter(torch.empty(rows.stop - rows.start, d_model))

    def forward(self, x: Tensor, use: Callable[[Tensor, int, Tensor], Tensor]) -> Tensor:
        return use(x, self.first, self.weight)

    def in_tiles(self, count: int) -> TiledRows:
        """Cut the rows into `count` tiles of about equal size."""

        def tile(i: int) -> nn.Module:
            rows = Tile(0, i, count).run(len(self.weight))
            with torch.device("meta"):
                made = Rows(slice(self.first + rows.start, self.first + rows.stop), self.weight.shape[1])
            return take(made, self, lambda name: Tile(0, i, count))

        return TiledRows(tile(i) for i in range(count))


class TiledRows(Tiled):
    """Rows of a vocabulary matrix, cut into tiles. The exchange with other ranks, `others`, is set here, not on each tile."""

    def __init__(self, tiles: Iterable[nn.Module]) -> None:
        super().__init__(tiles)
        self.others: Others | None = None


Matrix = Tensor | Rows | TiledRows  # a parameter, a module, or tiles


def _others(matrix: Matrix) -> Others | None:
    return None if isinstance(matrix, Tensor) else matrix.others


def _each(matrix: Matrix, x: Tensor, use: Callable[[Tensor, int, Tensor], Tensor]) -> list[Tensor]:
    """Return use(x, index of the first row, rows) of each tile of the matrix."""
    if isinstance(matrix, Tensor):
        return [use(x, 0, matrix)]
    if isinstance(matrix, Rows):
        return [matrix(x, use)]
    shared = with_branches(matrix.tiles, x) if x.is_floating_point() else ((tile, x) for tile in matrix.tiles)
    return [tile(x, use) for tile, x in shared]


def look_up(tokens: Tensor, matrix: Matrix, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the tokens' rows, [..., D], in `dtype` (None: the matrix's dtype)."""
    others = _others(matrix)
    found = _look_up_here(tokens if others is None else others.tokens(tokens), matrix, others)
    found = found if dtype is None else found.to(dtype)
    return found if others is None else others.rows(found)


def _look_up_here(tokens: Tensor, matrix: Matrix, others: Others | None) -> Tensor:
    """Return the tokens' rows in the matrix's dtype, zeros for rows of other ranks."""

    def use(tokens: Tensor, first: int, weight: Tensor) -> Tensor:
        if others is None and not isinstance(matrix, Tiled):
            return _embedded(tokens, weight)
        weight = weight if others is None else others.columns(weight)
        row, here = _local(tokens, first, weight)
        return _embedded(row, weight) * here.unsqueeze(-1)

    found = _each(matrix, tokens, use)
    return torch.stack(found).sum(0) if len(found) > 1 else found[0]


def _embedded(row: Tensor, weight_VD: Tensor) -> Tensor:
    if weight_VD.dtype not in (torch.bfloat16, torch.float16):
        return F.embedding(row, weight_VD)
    found: Tensor = _Embedded16.apply(row, weight_VD)
    return found


class _Embedded16(torch.autograd.Function):
    """Look-up in a 16-bit table. Backward sums each token's gradients in fp32; torch's embedding would round each sum to 16 bits."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(row)
        ctx.size, ctx.dtype = len(weight_VD), gradient_dtype(weight_VD)
        return F.embedding(row, weight_VD)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (row,) = ctx.saved_tensors
        summed = torch.ops.aten.embedding_dense_backward(grad.float(), row, ctx.size, -1, False)
        return None, summed.to(ctx.dtype)


def project(x: Tensor, matrix: Matrix, *, recast: bool = False) -> Tensor:
    """Return logits [..., V] in x's dtype: x W^T, with the vocabulary's `matrix` W [V, D]. recast: cast the weight again in the backward
    pass instead of keeping the cast one."""
    others = _others(matrix)
    x = x if others is None else others.enter(x)
    parts = _each(matrix, x, lambda x, _, weight: _product(x, weight, others, recast=recast))
    logits = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    return logits if others is None else others.logits(logits)


def _product(x: Tensor, weight_VD: Tensor, others: Others | None, *, recast: bool) -> Tensor:
    if others is not None and others.product is not None:
        return others.product(x, weight_VD)
    return linear(x, weight_VD) if recast else F.linear(x, weight_VD.to(x.dtype))


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(logits / cap) (Gemma 2, arXiv 2408.00118), or the logits if `cap` is None."""
    return logits if cap is None else cap * (logits / cap).tanh()


def cross_entropy(logits_BLV: Tensor, targets_BL: Tensor, cap: float | None = None) -> Tensor:
    logits_NV = capped(logits_BLV.flatten(0, 1).to(sum_dtype(logits_BLV.dtype)), cap)
    return F.cross_entropy(logits_NV, targets_BL.flatten(), reduction="sum", ignore_index=PADDING)


CrossEntropy = Callable[[Tensor, Tensor, float | None], Tensor]  # (logits [B, L, V], targets [B, L], logits' cap or None) -> summed loss
# (logp [B, L], select) -> summed loss. logp: log-probabilities of the targets of some tokens. select: function that returns the values of
# these tokens, given a tensor of this rank's own tokens
OfTokens = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]


def summed_loss(
    x_BLD: Tensor,
    targets_BL: Tensor,
    matrix: Matrix,
    *,
    chunks: int,
    recast: bool = False,
    cap: float | None = None,
    whole: CrossEntropy = cross_entropy,
    own: OfTokens | None = None,
) -> Tensor:
    """Project x to logits by `matrix`, and return the cross-entropy summed over tokens, fp32 or wider. PADDING targets do not count. `cap`:
    c in the module's docstring. `own`: computes a user's loss instead.

    With one chunk and no tiles, logits are kept for the backward pass, in which the weight is cast again if `recast`. If this rank also
    holds all rows and `own` is None, `whole` computes the loss from the logits. With chunks or tiles, logits are freed chunk by chunk and
    computed again. Then zero-bubble schedules cannot defer the gradient of the matrix, and `recast` has no effect."""
    others, one_piece = _others(matrix), chunks == 1 and not isinstance(matrix, Tiled)
    if one_piece and others is None and own is None:
        return whole(project(x_BLD, matrix, recast=recast), targets_BL, cap)
    arranged = as_it_is if others is None else others.targets
    targets_BL = arranged(targets_BL)
    targets_N = targets_BL.flatten()
    x_ND = (x_BLD if others is None else others.enter(x_BLD)).flatten(0, 1)

    def use(x_ND: Tensor, first: int, weight_VD: Tensor) -> Tensor:
        if one_piece:
            return _kept_scores(_product(x_ND, weight_VD, others, recast=recast), *_local(targets_N, first, weight_VD), cap)
        if others is not None and others.product is not None:
            return _recomputed_scores(x_ND, weight_VD, targets_N, first, chunks, others.product, cap)
        scores: Tensor = _Scores.apply(x_ND, weight_VD, targets_N, first, chunks, cap)
        return scores

    scores = _each(matrix, x_ND, use)
    total_N = scores[0][0] if len(scores) == 1 else torch.stack([s[0] for s in scores]).logsumexp(0)
    target_N = torch.stack([s[1] for s in scores]).sum(0)
    if others is not None:
        total_N, target_N = others.scores(torch.stack((total_N, target_N)))
    logp_N = (target_N - total_N).masked_fill(targets_N == PADDING, 0.0)
    loss = -logp_N.sum() if own is None else own(logp_N.view_as(targets_BL), arranged)
    return loss if others is None else others.loss(loss)


def _recomputed_scores(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, first: int, chunks: int, product: Product, cap: float | None
) -> Tensor:
    """Return scores [2, N] of one tile: log-sum-exp of each token's logits, and its target's logit. `first`: index of the tile's first row.
    `cap`: bound of the logits; None: unbounded. The backward pass computes the logits again, in `chunks` chunks of tokens. `product` may
    contain collectives."""

    def scores(x_ND: Tensor, targets_N: Tensor) -> Tensor:
        return _kept_scores(product(x_ND, weight_VD), *_local(targets_N, first, weight_VD), cap)

    return torch.cat([recomputed(scores, x_ND[chunk], targets_N[chunk]) for chunk in cut(len(x_ND), chunks)], 1)


def _kept_scores(logits_NV: Tensor, row_N: Tensor, here_N: Tensor, cap: float | None) -> Tensor:
    """Return scores [2, N]: each token's log-sum-exp of logits, and its target's logit (0 if another tile has it). `row_N`: index of the
    target among these logits. `here_N`: whether the target is among them. `cap`: bound of the logits; None: unbounded."""
    logits_NV = capped(logits_NV.to(sum_dtype(logits_NV.dtype)), cap)
    return torch.stack((logits_NV.logsumexp(1), logits_NV.gather(1, row_N.unsqueeze(1)).squeeze(1) * here_N))


def _local(tokens: Tensor, first: int, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
    """Return (index of each token's row in the tile that begins at row `first`, or 0 if the tile lacks it; bool: the tile has it)."""
    row = tokens - first
    here = (row >= 0) & (row < len(weight_VD))
    return row.masked_fill(~here, 0), here


class _Scores(torch.autograd.Function):
    """Scores [2, N] of one tile: log-sum-exp of each token's logits, and its target's logit (0 if another tile has it)."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, first: int, chunks: int, cap: float | None) -> Tensor:
        wide = sum_dtype(x_ND.dtype)
        row_N, here_N = _local(targets_N, first, weight_VD)
        weight = weight_VD.to(x_ND.dtype)
        scores = x_ND.new_empty(2, len(x_ND), dtype=wide)
        for chunk in cut(len(x_ND), chunks):
            logits = capped(F.linear(x_ND[chunk], weight).to(wide), cap)
            scores[1, chunk] = logits.gather(1, row_N[chunk].unsqueeze(1)).squeeze(1) * here_N[chunk]
            largest = logits.amax(1, keepdim=True)
            scores[0, chunk] = logits.sub_(largest).exp_().sum(1).log_() + largest.squeeze(1)
            del logits  # free them before the next chunk's logits are made
        ctx.save_for_backward(x_ND, weight_VD, row_N, here_N, scores)
        ctx.chunks, ctx.dtype, ctx.cap = chunks, gradient_dtype(weight_VD), cap
        return scores

    @staticmethod
    def backward(ctx: Any, grad_2N: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_VD, row_N, here_N, scores = ctx.saved_tensors
        weight = weight_VD.to(x_ND.dtype)
        # chunks are summed in fp32 or wider, even if FSDP has gathered the weight in 16 bits
        wide = sum_dtype(ctx.dtype) if ctx.chunks > 1 else ctx.dtype
        grad_x = torch.empty_like(x_ND)
        grad_weight = torch.zeros_like(weight_VD, dtype=wide) if ctx.needs_input_grad[1] else None
        for chunk in cut(len(x_ND), ctx.chunks):
            logits = capped(F.linear(x_ND[chunk], weight).to(scores.dtype), ctx.cap)
            slope = None if ctx.cap is None else 1 - (logits / ctx.cap).square()  # the derivative of c tanh(l / c)
            logits.sub_(scores[0, chunk].unsqueeze(1)).exp_().mul_(grad_2N[0, chunk].unsqueeze(1))
            logits.scatter_add_(1, row_N[chunk].unsqueeze(1), (grad_2N[1, chunk] * here_N[chunk]).unsqueeze(1))
            logits = logits if slope is None else logits.mul_(slope)
            grad_logits = logits.to(x_ND.dtype)
            del logits, slope  # free them before the next chunk's logits are made
            torch.mm(grad_logits, weight, out=grad_x[chunk])
            if grad_weight is not None and grad_weight.dtype == x_ND.dtype:
                grad_weight.addmm_(grad_logits.t(), x_ND[chunk])
            elif grad_weight is not None:
                grad_weight += grad_logits.t() @ x_ND[chunk]
            del grad_logits
        return grad_x, None if grad_weight is None else grad_weight.to(ctx.dtype), None, None, None, None
