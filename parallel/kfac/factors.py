"""The mathematics of K-FAC for one linear layer, or for a stack of them (experts): two small matrices replace a large one.

    y = W a, g = dL/dy of a row      A = mean over rows of a a^T      G = mean over rows of g g^T
    Fisher information of W  ~  G (x) A             [O I, O I]  ~  [O, O] and [I, I]
    direction                =  (G + s I)^-1 M (A + t I)^-1         M: W's gradient, or its mean over steps

Damping is shared between the two as by Martens and Grosse (arXiv 1503.05671, section 6.3): t = pi sqrt(lambda), s = sqrt(lambda) / pi,
pi^2 = (tr A / I) / (tr G / O). Here lambda is relative: `damping` times the mean eigenvalue of G (x) A, which is (tr A / I) (tr G / O).
Then t = sqrt(damping) tr A / I and s = sqrt(damping) tr G / O. So a factor matters only up to a scalar, and is stored with a mean
eigenvalue of 1: the loss's divisor, its scale in fp16 and the number of tokens all cancel. Everything is fp32.

An expert's rows are those routed to it. Its share of the tokens only scales its G, so it cancels too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.numerics.supposed import supposed

# R rows, W width, E matrices of a stack (1 for a single linear), I in, O out


def summed_products(rows_RW: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """Sum of r r^T over rows: fp32 [1, W, W]. With `counts`, rows are sorted by expert and summed for each expert: [E, W, W]."""
    wide_RW = rows_RW.float()
    if counts is None:
        return (wide_RW.t() @ wide_RW).unsqueeze(0)
    sums_EWW = wide_RW.new_zeros(len(counts), wide_RW.shape[1], wide_RW.shape[1])
    for sum_WW, part_RW in zip(sums_EWW, wide_RW.split(list(counts)), strict=True):
        if len(part_RW):
            torch.mm(part_RW.t(), part_RW, out=sum_WW)
    return sums_EWW


def mean_eigenvalue(factor_EWW: Tensor) -> Tensor:
    """The mean eigenvalue of each matrix, [E, 1, 1]; 0 for one that has seen no row."""
    return factor_EWW.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]


def averaged(running_EWW: Tensor, sums_EWW: Tensor, *, ema: float) -> Tensor:
    """The running factor after new sums: the exponential mean of factors scaled to mean eigenvalue 1.

    The first factor gets full weight. Without new rows (an expert without tokens) the old factor stays.
    """
    scale_E11 = mean_eigenvalue(sums_EWW)
    came, had = scale_E11 > 0, mean_eigenvalue(running_EWW) > 0
    new_EWW = sums_EWW / torch.where(came, scale_E11, 1.0)
    weight_E11 = torch.where(came, torch.where(had, 1 - ema, 1.0), 0.0)
    return torch.lerp(running_EWW, new_EWW, weight_E11)


def damped_inverse(factor_EWW: Tensor, *, damping: float) -> Tensor:
    """(F + sqrt(damping) I)^-1 by Cholesky, for F of mean eigenvalue 1; 0 where no row was ever seen.

    However small `damping` is, at least fp32's rounding error for a matrix of this width is added. If the matrix is still not positive
    definite, the addition is multiplied by ten until it is. That ends, since no eigenvalue is further from 0 than the width.
    """
    width = factor_EWW.shape[-1]
    least = width * torch.finfo(torch.float32).eps
    eye_WW = torch.eye(width, device=factor_EWW.device)
    seen_E11 = mean_eigenvalue(factor_EWW) > 0
    added_E11 = torch.full_like(mean_eigenvalue(factor_EWW), max(damping**0.5, least))
    for _ in range(2 + math.ceil(math.log10(width / least))):
        lower_EWW, failed_E = _cholesky(factor_EWW + added_E11 * eye_WW)
        if not failed_E.any():
            break
        added_E11 = torch.where(failed_E[:, None, None] > 0, 10 * added_E11, added_E11)
    return torch.cholesky_inverse(lower_EWW) * seen_E11


def _cholesky(matrix_EWW: Tensor) -> tuple[Tensor, Tensor]:
    """The lower triangles, and above 0 for each matrix that is not positive definite, of which a rehearsal has none."""
    lower_EWW, failed_E = torch.linalg.cholesky_ex(matrix_EWW)
    return lower_EWW, supposed(failed_E, lambda: torch.zeros(len(failed_E)))


def direction(gradient: Tensor, a_inverse_EII: Tensor, g_inverse_EOO: Tensor) -> Tensor:
    """G^-1 M A^-1 for M [O, I], or for a stack [E, I, O], whose matrices are transposed; fp32."""
    if gradient.ndim == 2:
        return g_inverse_EOO[0] @ gradient.float() @ a_inverse_EII[0]
    return a_inverse_EII @ gradient.float() @ g_inverse_EOO
