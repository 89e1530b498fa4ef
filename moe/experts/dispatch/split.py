"""Tensor parallelism inside the experts: every matrix is split over etp by hidden units, so each rank computes a shard of every row.

    rows_RD of each etp rank --all-gather--> rows of all, by expert --1/etp of the hidden units--> partial sums
    rows_RD back             <--reduce-scatter, fp32--------------------------------------------------'

w1 and w3 are split by columns, w2 by rows, so one sum after w2 is enough (Megatron-LM, arXiv 1909.08053, section 3; on an axis of
its own as in arXiv 2504.14960). Ranks may have different numbers of rows, or none: each pads its block to the longest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.experts.dispatch.base import Dropout
from moe.experts.experts import ExpertChunk, Experts
from parallel.mesh.collectives import all_gather, reduce_scatter
from parallel.mesh.exchange import by_bin, collect, spread
from parallel.mesh.mesh import Axis

# R rows here, A rows of all ranks, D model, F hidden units held here, E experts, P ranks of the etp axis


class Split:
    """A dispatcher's network for `degrees.etp` above 1."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def __call__(
        self,
        rows_RD: Tensor,
        experts: Experts,
        *,
        counts: list[int],
        weights: ExpertChunk = None,
        position_R: Tensor | None = None,
        dropout: Dropout | None = None,
    ) -> Tensor:
        counts_PE = all_gather(torch.tensor([counts], device=rows_RD.device), self.axis)
        longest = int(counts_PE.sum(1).max())
        order_A = by_bin(counts_PE, stride=longest)  # positions of all ranks' real rows in the padded blocks, sorted by expert
        rows_AD = collect(self._gather(rows_RD, longest), order_A)
        dropped_AF = None
        if dropout is not None and position_R is not None:
            dropped_AF = dropout.scale(self._gather(position_R, longest)[order_A])[:, experts.hidden]
        out_AD = experts(rows_AD, counts=counts_PE.sum(0).tolist(), dropped_RF=dropped_AF, weights=weights)
        partial = spread(out_AD.float(), order_A, slots=longest * self.axis.size)
        return reduce_scatter(partial, self.axis)[: len(rows_RD)].to(rows_RD.dtype)

    def _gather(self, values: Tensor, longest: int) -> Tensor:
        return all_gather(torch.cat((values, values.new_zeros(longest - len(values), *values.shape[1:]))), self.axis)
