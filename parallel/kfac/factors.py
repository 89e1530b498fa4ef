"""Mathematics of K-FAC for one linear layer, or for a stack of them (experts): two small matrices replace a large one.

    y = W a, g = dL/dy of a row      A = mean over rows of a a^T      G = mean over rows of g g^T       I inputs, O outputs
    Fisher information of W  ~  G (x) A             [O I, O I]  ~  [O, O] and [I, I]        (x): Kronecker product
    direction                =  (G + s I)^-1 M (A + t I)^-1         M: gradient of W, or the gradient's mean over steps

Damping is relative: t = sqrt(damping) tr A / I and s = sqrt(damping) tr G / O, which is Martens and Grosse's choice (arXiv 1503.05671,
section 6.3) for lambda = damping (tr A / I) (tr G / O). tr: trace. With this choice the scale of a factor does not matter, so each factor
is stored with a mean eigenvalue of 1. All matrices are fp32. A factor is zero until its linear layer has received a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from parallel.numerics.supposed import supposed

# R rows, W width of a factor (I or O), E matrices of a stack (1 for a single linear layer), I input width, O output width


def summed_products(rows_RW: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """Return the sum of r r^T over all rows r, fp32 [1, W, W]. counts: number of rows of each expert; then one sum an expert, [E, W, W]."""
    wide_RW = rows_RW.float()
    if counts is None:
        return (wide_RW.t() @ wide_RW).unsqueeze(0)
    sums_EWW = wide_RW.new_zeros(len(counts), wide_RW.shape[1], wide_RW.shape[1])
    for sum_WW, part_RW in zip(sums_EWW, wide_RW.split(list(counts)), strict=True):
        if len(part_RW):
            torch.mm(part_RW.t(), part_RW, out=sum_WW)
    return sums_EWW


def mean_eigenvalue(factor_EWW: Tensor) -> Tensor:
    """Return the mean eigenvalue of each matrix, [E, 1, 1]."""
    return factor_EWW.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]


def averaged(running_EWW: Tensor, sums_EWW: Tensor, *, ema: float) -> Tensor:
    """Return the updated running factor: ema * running + (1 - ema) * new, where `new` is sums_EWW scaled to a mean eigenvalue of 1.
    sums_EWW: sums of r r^T over the new rows r. While the running factor is still zero, `new` is returned. An expert without new rows keeps
    its running factor."""
    scale_E11 = mean_eigenvalue(sums_EWW)
    has_rows, has_running = scale_E11 > 0, mean_eigenvalue(running_EWW) > 0
    new_EWW = sums_EWW / torch.where(has_rows, scale_E11, 1.0)
    weight_E11 = torch.where(has_rows, torch.where(has_running, 1 - ema, 1.0), 0.0)
    return torch.lerp(running_EWW, new_EWW, weight_E11)


def damped_inverse(factor_EWW: Tensor, *, damping: float) -> Tensor:
    """Return (F + sqrt(damping) I)^-1 by Cholesky, for factors F with a mean eigenvalue of 1; zero for a factor that is zero.
    sqrt(damping) is raised to at least fp32's rounding error for this width, then multiplied by ten until F + sqrt(damping) I is positive
    definite."""
    width = factor_EWW.shape[-1]
    least = width * torch.finfo(torch.float32).eps
    eye_WW = torch.eye(width, device=factor_EWW.device)
    nonzero_E11 = mean_eigenvalue(factor_EWW) > 0
    added_E11 = torch.full_like(mean_eigenvalue(factor_EWW), max(damping**0.5, least))
    for _ in range(2 + math.ceil(math.log10(width / least))):
        lower_EWW, failed_E = torch.linalg.cholesky_ex(factor_EWW + added_E11 * eye_WW)  # failed: above 0 if not positive definite
        failed_E = supposed(failed_E, partial(torch.zeros, len(failed_E)))  # in a rehearsal (on fake tensors, without values): none failed
        if not failed_E.any():
            break
        added_E11 = torch.where(failed_E[:, None, None] > 0, 10 * added_E11, added_E11)
    return torch.cholesky_inverse(lower_EWW) * nonzero_E11


def direction(gradient: Tensor, a_inverse_EII: Tensor, g_inverse_EOO: Tensor) -> Tensor:
    """Return K-FAC's direction in fp32: G^-1 M A^-1 for a gradient M [O, I]; A^-1 M G^-1 for a stack of gradients M [E, I, O]."""
    if gradient.ndim == 2:
        return g_inverse_EOO[0] @ gradient.float() @ a_inverse_EII[0]
    return a_inverse_EII @ gradient.float() @ g_inverse_EOO
