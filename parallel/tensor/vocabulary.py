"""Vocabulary parallelism: embedding, head and loss, with the rows of the matrices split over an axis.

    tokens 3, 9      rank 0: rows 0..4   [row 3, 0]        rank 1: rows 5..9   [0, row 9]       sum: [row 3, row 9]

    x, equal         x W_0^T -> m_0, s_0, logit of a target in 0..4   |   x W_1^T -> m_1, s_1, logit of a target in 5..9
    on all ranks     loss = log sum over ranks of exp(m_r) s_r - target's logit: ranks never exchange logits

Cost on t ranks: V h / t elements of each matrix and of its gradient a rank, and V / t logits a token. One sum of b s h elements for the
embedding and one for the gradient before the head. For the loss three numbers a token: the maximum of the log-sum-exps, then the sum of
their exponentials and the target's logit. If t does not divide V, shards differ by one row. There is no padding, also not in
checkpoints. Source: Megatron-LM (arXiv 1909.08053), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.data.tiling import without_tiles
from parallel.mesh.collectives import all_gather, all_reduce, join_copies, max_over, reduce_backward, reduce_scatter, sum_over
from parallel.mesh.layout import Layout, Tile
from parallel.mesh.mesh import Axis, Mesh
from parallel.tensor.linear_1d import tensor_axis
from parallel.tensor.style import Shape

# N tokens, V vocabulary


@dataclass(frozen=True)
class VocabularyRows:
    """Splits dim 0 of [V, D] over an axis. Fills the module's slot `others`, and `first`: the first row of the module or of each tile."""

    axis: str = "tp"
    sliced: bool = False

    def layout(self, name: str, shape: Shape) -> Layout:
        return Layout(shape, {0: self.axis}, alike=(), uneven=(0,))

    def fill(self, model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh) -> None:
        for name, layout in layouts.items():
            path = without_tiles(name).rpartition(".")[0]
            rows = OtherRows(tensor_axis(mesh, path), layout.shape[0], sliced=self.sliced)
            model.get_submodule(path).others = rows  # type: ignore[assignment]
            model.get_submodule(name.rpartition(".")[0]).first = layout.region(mesh)[0].start  # type: ignore[assignment]


class OtherRows:
    """The exchange between ranks with shards of `size` rows (`Others` of moe/nn/vocabulary.py). `sliced`: x is a shard of the sequences."""

    def __init__(self, axis: Axis, size: int, *, sliced: bool) -> None:
        self.axis, self.size, self.sliced = axis, size, sliced
        self.product: Callable[[Tensor, Tensor], Tensor] | None = None

    def tokens(self, tokens: Tensor) -> Tensor:
        return tokens

    def columns(self, weight: Tensor) -> Tensor:
        return weight

    def rows(self, found: Tensor) -> Tensor:
        return reduce_scatter(found, self.axis, dim=1) if self.sliced else all_reduce(found, self.axis)

    def enter(self, x: Tensor) -> Tensor:
        return all_gather(x, self.axis, dim=1) if self.sliced else reduce_backward(x, self.axis)

    def targets(self, targets: Tensor) -> Tensor:
        return targets

    def scores(self, scores_2N: Tensor) -> Tensor:
        return merged(scores_2N, self.axis)

    def loss(self, loss: Tensor) -> Tensor:
        return loss

    def logits(self, logits: Tensor) -> Tensor:
        return joined(logits, self.axis, self.size)


def merged(scores_2N: Tensor, axis: Axis) -> Tensor:
    """Merge each rank's log-sum-exps and targets' logits [2, N] into the values for all rows, on every rank."""
    found: Tensor = _Merged.apply(scores_2N, axis)
    return found


def joined(logits: Tensor, axis: Axis, size: int) -> Tensor:
    """Gather each rank's shard of the logits to [..., size]. Shards are padded to the longest, because gathers need equal sizes."""
    counts = [(rows := Tile(0, i, axis.size).run(size)).stop - rows.start for i in range(axis.size)]
    padded = F.pad(logits, (0, max(counts) - logits.shape[-1]))
    parts = join_copies(padded, axis, dim=-1).split(max(counts), -1)
    return torch.cat([part[..., :count] for part, count in zip(parts, counts, strict=True)], -1)


class _Merged(torch.autograd.Function):
    """Merge scores [2, N] over ranks. The result and its gradient are equal on every rank.

    Backward: the gradient times the softmax's share of this rank's rows. Nothing is sent.
    """

    @staticmethod
    def forward(ctx: Any, scores_2N: Tensor, axis: Axis) -> Tensor:
        largest_N = max_over(scores_2N[0].clone(), axis)
        sums_2N = sum_over(torch.stack(((scores_2N[0] - largest_N).exp(), scores_2N[1])), axis)
        merged_2N = torch.stack((sums_2N[0].log() + largest_N, sums_2N[1]))
        ctx.save_for_backward((scores_2N[0] - merged_2N[0]).exp())
        return merged_2N

    @staticmethod
    def backward(ctx: Any, grad_2N: Tensor) -> tuple[Tensor, None]:
        (share_N,) = ctx.saved_tensors
        return torch.stack((grad_2N[0] * share_N, grad_2N[1])), None
