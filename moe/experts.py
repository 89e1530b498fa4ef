"""The experts of one layer: feed-forward networks stacked in one tensor a matrix, [experts, in, out].

A rank holds `range(first, first + count)` of them; their weights are made there and nowhere else. Parameters are named
globally, one expert at a time: `layers.3.experts.17.w1`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe.kernels import Plan, choose
from moe.kernels.activation import GATED

# R rows, D model, F hidden, E experts held here


class Experts(nn.Module):
    """`w1` [E, D, F], `w2` [E, F, D], and `w3` [E, D, F] for gated activations; no biases."""

    def __init__(self, num_experts: int, *, d_model: int, d_ff: int, ffn: str, kernels: str = "auto") -> None:
        super().__init__()
        self.num_experts, self.d_model, self.d_ff, self.ffn = num_experts, d_model, d_ff, ffn
        self.kernels = choose(kernels)
        self.held = range(num_experts)
        self._shape(num_experts)

    def _shape(self, count: int) -> None:
        self.w1 = nn.Parameter(torch.empty(count, self.d_model, self.d_ff))
        self.w2 = nn.Parameter(torch.empty(count, self.d_ff, self.d_model))
        self.w3 = nn.Parameter(torch.empty(count, self.d_model, self.d_ff)) if self.ffn in GATED else None

    def hold(self, held: range) -> None:
        """Keep only these experts, by global number; call it before the weights are made (on the meta device)."""
        self.held = held
        with torch.device(self.w1.device):
            self._shape(len(held))

    def forward(self, rows_RD: Tensor, *, counts: list[int], dropped_RF: Tensor | None = None) -> Tensor:
        """Rows [R, D] sorted by held expert, `counts` of each; the same shape and dtype back."""
        out: Tensor = self.kernels.grouped_ffn(rows_RD, self.w1, self.w2, self.w3, counts=counts, ffn=self.ffn, dropped_RF=dropped_RF)
        return out

    def routed(self, x_TD: Tensor, gate_TK: Tensor, *, plan: Plan, dropped_RF: Tensor | None = None) -> Tensor:
        """Tokens [T, D] through the experts that the plan gives them, summed with their gates (fp32 [T, K]); all experts are here."""
        out: Tensor = self.kernels.routed_ffn(x_TD, gate_TK, plan, self.w1, self.w2, self.w3, ffn=self.ffn, dropped_RF=dropped_RF)
        return out
