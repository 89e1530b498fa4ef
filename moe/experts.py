"""The experts of one layer: feed-forward networks stacked in one tensor a matrix, [experts, in, out].

A rank holds some of them, and of each the whole or a run of its hidden units (columns of w1 and w3, rows of w2); their
weights are made there and nowhere else. Parameters are named globally, one expert at a time: `layers.3.experts.17.w1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe.kernels import Plan, choose
from moe.kernels.activation import GATED

# R rows, D model, F hidden units, E experts held here

HIDDEN_DIM = {"w1": 2, "w2": 1, "w3": 2}  # of the stacked matrix


class Weights(NamedTuple):
    """The matrices of some experts."""

    w1: Tensor
    w2: Tensor
    w3: Tensor | None


class Experts(nn.Module):
    """`w1` [E, D, F], `w2` [E, F, D], and `w3` [E, D, F] for gated activations; no biases."""

    def __init__(self, num_experts: int, *, d_model: int, d_ff: int, ffn: str, kernels: str = "auto") -> None:
        super().__init__()
        self.num_experts, self.d_model, self.d_ff, self.ffn = num_experts, d_model, d_ff, ffn
        self.kernels = choose(kernels)
        self.hold(range(num_experts))

    def hold(self, held: Sequence[int], *, hidden: slice | None = None) -> None:
        """Keep only these experts, by global number, and of each these hidden units; call it before the weights are made."""
        self.held: tuple[int, ...] = tuple(held)
        self.hidden = hidden or slice(0, self.d_ff)
        count, units = len(self.held), self.hidden.stop - self.hidden.start
        before = self._parameters.get("w1")
        like: dict[str, Any] = {} if before is None else {"device": before.device, "dtype": before.dtype}
        self.w1 = nn.Parameter(torch.empty(count, self.d_model, units, **like))
        self.w2 = nn.Parameter(torch.empty(count, units, self.d_model, **like))
        self.w3 = nn.Parameter(torch.empty(count, self.d_model, units, **like)) if self.ffn in GATED else None

    @property
    def weights(self) -> Weights:
        return Weights(self.w1, self.w2, self.w3)

    def whole_shape(self, matrix: str) -> tuple[int, int]:
        """One expert's matrix over all hidden units."""
        return (self.d_ff, self.d_model) if matrix == "w2" else (self.d_model, self.d_ff)

    def part(self, matrix: str, whole: Tensor) -> Tensor:
        """What is held here of one expert's whole matrix."""
        return whole[self.hidden] if matrix == "w2" else whole[:, self.hidden]

    def runs(self, count: int) -> list[Weights]:
        """The held experts in so many equal runs; the gradients of all runs meet in one tensor a matrix."""
        each = len(self.held) // count
        first, second = self.w1.split(each), self.w2.split(each)
        third = [None] * count if self.w3 is None else self.w3.split(each)
        return [Weights(*matrices) for matrices in zip(first, second, third, strict=True)]

    def forward(self, rows_RD: Tensor, *, counts: list[int], dropped_RF: Tensor | None = None, weights: Weights | None = None) -> Tensor:
        """Rows [R, D] sorted by expert, `counts` of each, through the held experts or those of `weights`; the same shape and dtype back."""
        w1, w2, w3 = weights or self.weights
        out: Tensor = self.kernels.grouped_ffn(rows_RD, w1, w2, w3, counts=counts, ffn=self.ffn, dropped_RF=dropped_RF)
        return out

    def routed(self, x_TD: Tensor, gate_TK: Tensor, *, plan: Plan, dropped_RF: Tensor | None = None) -> Tensor:
        """Tokens [T, D] through the experts that the plan gives them, summed with their gates (fp32 [T, K]); all experts are here."""
        out: Tensor = self.kernels.routed_ffn(x_TD, gate_TK, plan, self.w1, self.w2, self.w3, ffn=self.ffn, dropped_RF=dropped_RF)
        return out
