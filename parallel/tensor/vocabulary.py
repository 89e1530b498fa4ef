"""Matrices with one row for each token of the vocabulary, their rows over an axis: embedding, head, and the loss between them.

    tokens 3, 9      rank 0: rows 0..4   [row 3, 0]        rank 1: rows 5..9   [0, row 9]       sum: [row 3, row 9]

    x, the same      x W_0^T -> m_0, s_0, logit of a target among 0..4   |   x W_1^T -> m_1, s_1, logit of one among 5..9
    on all ranks     loss = log sum over ranks of exp(m_r) s_r - target's logit: the logits of other ranks' rows are never sent

Cost: V h / t elements of each matrix and of its gradient a rank, and the logits of V / t tokens. One sum of b s h elements for the
embedding, one of the gradient before the head, and for the loss three numbers a token: the largest of the log-sum-exps, then the sum
of their exponentials beside the target's logit. Where t does not divide V, runs differ by one row: nothing is padded, and a
checkpoint has the rows that there are. Source: Megatron-LM (arXiv 1909.08053), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.collectives import all_gather, all_reduce, join_copies, max_over, reduce_backward, reduce_scatter, sum_over
from parallel.data.tiling import without_tiles
from parallel.layout import Layout, Tile
from parallel.mesh import Axis, Mesh
from parallel.tensor.linear_1d import tensor_axis
from parallel.tensor.style import Shape

# N tokens, V vocabulary


@dataclass(frozen=True)
class VocabularyRows:
    """Dim 0 of [V, D] over an axis. Fills the module's slot `others`, and `first`, the row that it, or each of its tiles, begins with."""

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
    """The ranks of an axis, each with a run of `size` rows. `sliced`: of what is looked up, and of x, each has a slice of the sequences."""

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
    """Log-sum-exps and targets' logits [2, N] of all rows of the axis from those of each rank's, on every rank of it."""
    found: Tensor = _Merged.apply(scores_2N, axis)
    return found


def joined(logits: Tensor, axis: Axis, size: int) -> Tensor:
    """[..., size] of each rank's run of them. Runs are sent at the longest one's length: gathers have equal parts."""
    counts = [(run := Tile(0, i, axis.size).run(size)).stop - run.start for i in range(axis.size)]
    padded = F.pad(logits, (0, max(counts) - logits.shape[-1]))
    parts = join_copies(padded, axis, dim=-1).split(max(counts), -1)
    return torch.cat([part[..., :count] for part, count in zip(parts, counts, strict=True)], -1)


class _Merged(torch.autograd.Function):
    """[2, N] of log-sum-exps and target's logits on each rank to those of all rows, the same on every rank, and so is the gradient.

    Backward: what a rank's rows have of the softmax, and nothing to send.
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
