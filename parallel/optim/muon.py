"""Muon: a matrix takes a step along its orthogonalized momentum; all other parameters take AdamW's step.

    M  <-  mu M + G                                   U = G + mu M (Nesterov momentum)
    X0 = U / |U|        X  <-  a X + b (X X^T) X + c (X X^T)^2 X, 5 times (Newton-Schulz)        X: nearly orthogonal
    W  <-  W - lr s X - lr decay W                    s: a factor that depends on the matrix's shape (`scale`)

W weights, G gradient, M momentum, lr learning rate, |U| Frobenius norm. Each expert is a separate matrix. If several ranks hold copies or
shards of a matrix, one of them computes the iterations (parallel/optim/shared.py).
Sources: Jordan et al. 2024, "Muon" (kellerjordan.github.io/posts/muon); Liu et al., arXiv 2502.16982 (the scale that matches AdamW's).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from parallel.data.engine import MOMENTS, Rule, StateDims
from parallel.data.whole import Whole
from parallel.optim.sgd import MOMENTUM, updated_momentum
from parallel.optim.shared import AdamWExcept, Group, Stack, decay_and_subtract, shared

A, B, C = 3.4445, -4.7750, 2.0315  # Jordan's coefficients a, b and c of the iteration
ITERATIONS = 5
Scale = Literal["rms", "spectral"]
Orientation = Literal["out_in", "in_out"]  # which of a matrix's two dims are its outputs: [out, in] or [in, out]


@dataclass(frozen=True)
class Muon(Rule):
    """Settings of Muon, from which `build` makes torch's optimizer.

    momentum: mu. scale: kind of the factor s (see the function `scale`). matrix: (name, number of dims) -> orientation of the parameter's
    matrices; None: the parameter takes AdamW's step. lr_factor: learning rate of matrices / learning rate of other parameters. betas, eps:
    AdamW's. decays: (name, parameter) -> True if weight decay applies."""

    momentum: float
    scale: Scale
    lr_factor: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decays: Callable[[str, Tensor], bool]
    matrix: Callable[[str, int], Orientation | None]

    def flops(self, shape: tuple[int, int]) -> float:
        """Return the floating-point operations of all Newton-Schulz iterations on one matrix of this shape."""
        m, n = sorted(shape)
        return ITERATIONS * (4.0 * n * m**2 + 2.0 * m**3)

    def kept(self, name: str, num_dims: int) -> StateDims:
        return {MOMENTUM: None} if self.matrix(name, num_dims) else dict.fromkeys(MOMENTS)

    def groups(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> list[Group]:
        parts: dict[Orientation | None, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in parameters:
            parts.setdefault(self.matrix(name, parameter.ndim), []).append((name, parameter))
        return [group | {"matrix": kind} for kind, held in parts.items() for group in super(Muon, self).groups(held)]

    def build(self, groups: list[Group], wholes: Mapping[int, Whole] | None = None) -> torch.optim.Optimizer:
        return MuonOptimizer(groups, rule=self, wholes=wholes or {})


class MuonOptimizer(AdamWExcept):
    """AdamW, but groups with a "matrix" orientation take Muon's step. wholes: id of a weight -> the ranks with its copies or shards."""

    def __init__(self, groups: list[Group], *, rule: Muon, wholes: Mapping[int, Whole]) -> None:
        super().__init__(groups, lr=0.0, betas=rule.betas, eps=rule.eps, fused=True)
        self.rule, self.wholes = rule, wholes

    def update_itself(self, weight: nn.Parameter, group: Group) -> bool:
        return bool(group["matrix"])  # `step` then updates all matrices together

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        rule = self.rule
        held = [(p, group) for group in self.param_groups if group["matrix"] for p in group["params"] if p.grad is not None]
        stacks = [
            Stack(number, math.prod(w.shape[:-2]), (w.shape[-2], w.shape[-1]), w.dtype, self.wholes.get(id(w), Whole(())))
            for number, (w, _) in enumerate(held)
        ]

        def part(number: int) -> Tensor:
            weight, _ = held[number]
            assert weight.grad is not None
            momentum = updated_momentum(self.state[weight], weight, momentum=rule.momentum)
            nesterov: Tensor = weight.grad.float().add(momentum, alpha=rule.momentum)
            return nesterov.reshape(stacks[number].count, *stacks[number].shape)

        def work(number: int, matrices: Tensor) -> Tensor:
            weight, group = held[number]
            factor = group["lr"] * rule.lr_factor * scale(rule.scale, tuple(matrices.shape), group["matrix"])
            found = orthogonal(matrices[0] if weight.ndim == 2 else matrices)
            return found.mul_(factor).to(weight.dtype).view(matrices.shape)

        for number, found in shared(stacks, part, work, cost=rule.flops):
            weight, group = held[number]
            lr = group["lr"] * rule.lr_factor
            decay_and_subtract(weight, found.view(weight.shape), lr=lr, decay=group["weight_decay"])


def orthogonal(matrices: Tensor) -> Tensor:
    """Return an approximation of U V^T in fp32 for each matrix [..., rows, columns] with the SVD U S V^T. A zero matrix stays zero."""
    x: Tensor = matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # so that x x^T is the smaller square
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = A * x + (B * square + C * square @ square) @ x
    return x.mT if tall else x


def scale(kind: Scale, shape: tuple[int, ...], orientation: Orientation) -> float:
    """Return the factor s that multiplies an orthogonal step, for matrices of this shape [..., rows, columns].
    rms: 0.2 sqrt(max(rows, columns)), so that steps have the size of AdamW's (Liu et al., eq. 4) and both use the same learning rate.
    spectral: Jordan's sqrt(max(1, out / in)), with which matrices need another learning rate than AdamW's parameters."""
    if kind == "rms":
        return 0.2 * math.sqrt(max(shape[-2:]))
    out_size, in_size = (shape[-2], shape[-1]) if orientation == "out_in" else (shape[-1], shape[-2])
    return math.sqrt(max(1.0, out_size / in_size))
