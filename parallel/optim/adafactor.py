"""Adafactor (Shazeer and Stern, arXiv 1804.04235, algorithms 4 and 5) without first moment. For an n x m matrix it keeps n + m numbers.

    R  <-  b R + (1 - b) mean of (G^2 + eps) over columns        C: the same over rows        b = 1 - t^-0.8
    V = R C^T / mean(R)        U = G / sqrt(V)        U  <-  U / max(1, rms(U))
    W  <-  W - a U - lr decay W        a = lr max(floor, rms(W)) if `step` is relative, or lr if it is absolute

W weights, G gradient, R and C optimizer states (one number for each row and column), t number of the step, lr learning rate. A vector has
one optimizer state, the running mean of its squared gradients. Each expert is a separate matrix, and each row of a stack of biases a
separate vector. If ranks hold shards of a matrix, means are computed from all-reduced sums: a vector each for R and C, and one number
each for mean(R), rms(U) and (in a relative step) rms(W).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from parallel.data.engine import Rule, StateDims
from parallel.data.whole import Cut, Whole
from parallel.mesh.collectives import sum_over
from parallel.optim.shared import Group, PerWeight, decay_and_subtract

ROW, COLUMN, SQUARE = "exp_avg_sq_row", "exp_avg_sq_column", "exp_avg_sq"  # names of the optimizer states: R and C; V of a vector
DECAY = 0.8  # in step t, the newest squares have weight t^-DECAY in the running means
EPS = 1e-30  # added to squared gradients, so that V is never 0
FLOOR = 1e-3  # lower bound of rms(W) in a relative step


@dataclass(frozen=True)
class Adafactor(Rule):
    """Settings of Adafactor. step: relative to rms(W), or absolute. decays: (name, parameter) -> True if weight decay applies. vectors:
    name of a parameter -> True if it is a stack of vectors."""

    step: Literal["relative", "absolute"]
    weight_decay: float
    decays: Callable[[str, Tensor], bool]
    vectors: Callable[[str], bool]

    def kept(self, name: str, num_dims: int) -> StateDims:
        return {ROW: -1, COLUMN: -2} if num_dims > 1 and not self.vectors(name) else {SQUARE: None}

    def groups(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> list[Group]:
        parts: dict[bool, list[tuple[str, nn.Parameter]]] = {True: [], False: []}
        for name, parameter in parameters:
            parts[parameter.ndim == 1 or self.vectors(name)].append((name, parameter))
        return [group | {"vectors": vectors} for vectors, held in parts.items() for group in super(Adafactor, self).groups(held)]

    def build(self, groups: list[Group], wholes: Mapping[int, Whole] | None = None) -> torch.optim.Optimizer:
        return PerWeight(groups, partial(self._update, wholes=wholes or {}))

    def _update(self, weight: Tensor, state: dict[str, Tensor], group: Group, *, wholes: Mapping[int, Whole]) -> None:
        assert weight.grad is not None
        grad, lr, cuts = weight.grad.float(), group["lr"], wholes.get(id(weight), Whole(())).cuts
        square, mean, dims = grad.square(), partial(_mean, cuts=cuts), (-1,) if group["vectors"] else (-2, -1)
        means = {SQUARE: square} if group["vectors"] else {ROW: mean(square, (-1,)).squeeze(-1), COLUMN: mean(square, (-2,)).squeeze(-2)}
        means = {kind: now + EPS for kind, now in means.items()}
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            state |= {kind: torch.zeros_like(now, dtype=weight.dtype) for kind, now in means.items()}
        state["step"] += 1
        new = state["step"] ** -DECAY  # weight of the newest squares; 1 in the first step
        for kind, now in means.items():
            state[kind].copy_(torch.lerp(state[kind].float(), now, new))
        if group["vectors"]:
            update = grad * state[SQUARE].float().rsqrt()
        else:
            rows, columns = state[ROW].float().unsqueeze(-1), state[COLUMN].float().unsqueeze(-2)
            update = (grad * (rows / mean(rows, (-2,))).rsqrt()).mul_(columns.rsqrt())
        factor = lr / _rms(update, dims, cuts=cuts).clamp_min(1.0)
        if self.step == "relative":
            factor *= _rms(weight.float(), dims, cuts=cuts).clamp_min(FLOOR)
        decay_and_subtract(weight, update.mul_(factor), lr=lr, decay=group["weight_decay"])


def _rms(x: Tensor, dims: tuple[int, ...], *, cuts: tuple[Cut, ...]) -> Tensor:
    """Return the root mean square of unsharded matrices over all their dims `dims`, like `_mean`. Norms of norms need no tensor of squares,
    and on a CPU they round less than one norm."""
    total = x
    for dim in reversed(dims):
        total = torch.linalg.vector_norm(total, dim=dim, keepdim=True)
    return _mean(total.square(), dims, cuts=cuts, counts=x.shape).sqrt()


def _mean(x: Tensor, dims: tuple[int, ...], *, cuts: tuple[Cut, ...], counts: torch.Size | None = None) -> Tensor:
    """Return the mean over these dims (negative; kept with size 1) of unsharded matrices, of which x is this rank's shard. cuts: how the
    matrices are sharded. counts: shape of the shard, if x is already its sum. Collective over the axes of `cuts`."""
    total, shape, count = x.sum(dims, keepdim=True), counts or x.shape, 1
    for dim in dims:
        of_dim = [cut for cut in cuts if cut.dim == dim]
        count *= max((cut.size for cut in of_dim), default=shape[dim])
        for cut in of_dim:
            total = sum_over(total, cut.axis)
    return total / count
