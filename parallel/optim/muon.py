"""Muon: a matrix's momentum, made orthogonal, is its step; everything else takes AdamW's.

    M  <-  mu M + G                                   U = G + mu M (Nesterov's form)
    X0 = U / |U|        X  <-  a X + b (X X^T) X + c (X X^T)^2 X, some times        about the orthogonal matrix nearest to U
    W  <-  W - lr s X - lr decay W                    s: see `scale`

The Newton-Schulz iteration needs products of matrices alone. a, b and c are Jordan's: they drive singular values towards 1 fast, and
only to about 0.7 to 1.2, which is enough. Experts are stacked, each a matrix of its own. Of the ranks that hold copies or parts of a matrix
(data parallelism, FSDP, tensor parallelism), one iterates, and the others get the result (parallel/optim/shared.py). The momentum
lies as the weight does, in copies or parts: checkpoints and audits treat both alike.
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
from parallel.optim.sgd import MOMENTUM, moved
from parallel.optim.shared import Stack, shared
from parallel.optim.step import AdamWBut, decay_and_subtract

A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
Scale = Literal["rms", "spectral"]
Orientation = Literal["out_in", "in_out"]  # which of a matrix's two dims are its outputs: [out, in] or [in, out]


@dataclass(frozen=True)
class Muon(Rule):
    """`matrix(name, dims)`: how a parameter's matrices lie, None for what is AdamW's. `lr_factor`: of their rate."""

    momentum: float
    scale: Scale
    lr_factor: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decays: Callable[[str, Tensor], bool]
    matrix: Callable[[str, int], Orientation | None]

    def flops(self, shape: tuple[int, int]) -> float:
        """Of one matrix's iterations."""
        m, n = sorted(shape)
        return ITERATIONS * (4.0 * n * m**2 + 2.0 * m**3)

    def kept(self, name: str, num_dims: int) -> StateDims:
        return {MOMENTUM: None} if self.matrix(name, num_dims) else dict.fromkeys(MOMENTS)

    def groups(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        parts: dict[Orientation | None, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in parameters:
            parts.setdefault(self.matrix(name, parameter.ndim), []).append((name, parameter))
        return [group | {"matrix": kind} for kind, held in parts.items() for group in super(Muon, self).groups(held)]

    def build(self, groups: list[dict[str, Any]], wholes: Mapping[int, Whole] | None = None) -> torch.optim.Optimizer:
        return Orthogonal(groups, rule=self, wholes=wholes or {})


class Orthogonal(AdamWBut):
    """AdamW, except that groups whose `matrix` is set take Muon's step."""

    def __init__(self, groups: list[dict[str, Any]], *, rule: Muon, wholes: Mapping[int, Whole]) -> None:
        super().__init__(groups, lr=0.0, betas=rule.betas, eps=rule.eps, fused=True)
        self.rule, self.wholes = rule, wholes

    def move(self, weight: nn.Parameter, group: dict[str, Any]) -> bool:
        return bool(group["matrix"])  # `step` moves them, all together

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        rule = self.rule
        held = [(p, group) for group in self.param_groups if group["matrix"] for p in group["params"] if p.grad is not None]
        stacks = [_stack(number, weight, self.wholes.get(id(weight), Whole(()))) for number, (weight, _) in enumerate(held)]

        def part(number: int) -> Tensor:
            weight, _ = held[number]
            assert weight.grad is not None
            momentum = moved(self.state[weight], weight, momentum=rule.momentum)
            ahead: Tensor = weight.grad.float().add(momentum, alpha=rule.momentum)  # Nesterov's form
            return ahead.reshape(stacks[number].count, *stacks[number].shape)

        def work(number: int, matrices: Tensor) -> Tensor:
            weight, group = held[number]
            factor = group["lr"] * rule.lr_factor * scale(rule.scale, tuple(matrices.shape), group["matrix"])
            found = orthogonal(matrices[0] if weight.ndim == 2 else matrices)
            return found.mul_(factor).to(weight.dtype).view(matrices.shape)

        for number, found in shared(stacks, part, work, cost=rule.flops):
            weight, group = held[number]
            lr = group["lr"] * rule.lr_factor
            decay_and_subtract(weight, found.view(weight.shape), lr=lr, decay=group["weight_decay"])


def _stack(number: int, weight: Tensor, whole: Whole) -> Stack:
    rows, columns = weight.shape[-2:]
    return Stack(number, math.prod(weight.shape[:-2]), (rows, columns), weight.dtype, whole)


def orthogonal(matrices: Tensor) -> Tensor:
    """Of each matrix [..., rows, columns] about U V^T of its singular value decomposition, in fp32; zero stays zero."""
    x: Tensor = matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the smaller square
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = A * x + (B * square + C * square @ square) @ x
    return x.mT if tall else x


def scale(kind: Scale, shape: tuple[int, ...], orientation: Orientation) -> float:
    """What an orthogonal step is multiplied by. rms: 0.2 sqrt(max(rows, columns)), the size of AdamW's steps (Liu et al., eq. 4), so both
    share a rate; spectral: sqrt(max(1, out / in)), Jordan's, with a rate of its own."""
    if kind == "rms":
        return 0.2 * math.sqrt(max(shape[-2:]))
    out_size, in_size = (shape[-2], shape[-1]) if orientation == "out_in" else (shape[-1], shape[-2])
    return math.sqrt(max(1.0, out_size / in_size))
