"""Vocabulary parallelism: the rows (tokens of the vocabulary) of embedding and head are split over ranks; on grids, also the channels.

    tokens 3, 9      rank 0: rows 0..4   [row 3, 0]        rank 1: rows 5..9   [0, row 9]       sum: [row 3, row 9]

    x (all ranks)    x W_0^T -> l_0, logit of a target in 0..4   |   x W_1^T -> l_1, logit of a target in 5..9
                     loss = log(sum over ranks r of exp(l_r)) - target's logit

l_r is the log-sum-exp of rank r's logits. For the loss, ranks exchange only l_r (a maximum, then a sum) and the target's logit. If V is
not a multiple of the number of ranks, shards differ by one row; none is padded. On grids, a rank looks up the tokens of all ranks that hold
the same channels. Tokens in other ranks' rows give zeros. A reduce-scatter sums the results and sends them to the ranks that hold the
tokens. In 2D, rank (row, column) then sends its result to rank (column, row). In 3D, the table's channels are first gathered over depth.
Costs: docs/parallel/tensor_1d.md, tensor_grids.md. Sources: Megatron-LM (arXiv 1909.08053), Optimus (2104.05343), 3D (2105.14450).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.data.tiling import Slot, as_it_is, without_tiles
from parallel.mesh.collectives import all_gather, all_reduce, gathered, join_copies, max_over, reduce_backward, reduce_scatter, sum_over
from parallel.mesh.layout import Layout, Layouts, Tile
from parallel.mesh.mesh import GRID, Axis, Mesh
from parallel.tensor import linear_2d, linear_3d
from parallel.tensor.grid import Turn, of_one, transposed
from parallel.tensor.style import Shape, Style

# N tokens, V vocabulary


class _Vocabulary(Style):
    """A vocabulary matrix [V, D]. `fill` sets the attribute `others` of its module to this rank's collectives, and the attribute `first`
    of the module, or of each of its tiles, to the index of this rank's first row."""

    def fill(self, model: nn.Module, layouts: Layouts, mesh: Mesh) -> None:
        for name, layout in layouts.items():
            path = without_tiles(name).rpartition(".")[0]
            model.get_submodule(path).others = self.others(mesh, layout.shape[0], path)  # type: ignore[assignment]
            model.get_submodule(name.rpartition(".")[0]).first = layout.region(mesh)[0].start  # type: ignore[assignment]

    def others(self, mesh: Mesh, size: int, path: str) -> OtherRows:
        """Return the collectives for a vocabulary matrix of `size` rows in the module at `path`."""
        raise NotImplementedError


@dataclass(frozen=True)
class VocabularyRows(_Vocabulary):
    """1D: rows are split over tp. sliced: whether tp ranks hold shards of the sequences between layers (Megatron-LM's
    sequence parallelism)."""

    sliced: bool = False

    def layout(self, name: str, shape: Shape) -> Layout:
        return Layout(shape, {0: "tp"}, alike=(), uneven=(0,))

    def others(self, mesh: Mesh, size: int, path: str) -> OtherRows:
        axis = mesh.axis("tp", label=path)
        if self.sliced:
            return OtherRows(axis, size, rows=partial(reduce_scatter, axis=axis, dim=1), enter=partial(all_gather, axis=axis, dim=1))
        return OtherRows(axis, size, rows=partial(all_reduce, axis=axis), enter=partial(reduce_backward, axis=axis))


@dataclass(frozen=True)
class VocabularyBlock(_Vocabulary):
    """2D and 2.5D: rows over tp_col, channels over tp_row."""

    def layout(self, name: str, shape: Shape) -> Layout:
        return Layout(shape, {0: "tp_col", 1: "tp_row"}, GRID, alike=(), uneven=(0,))

    def others(self, mesh: Mesh, size: int, path: str) -> OtherRows:
        row, column, grid = (mesh.axis(*axes, label=path) for axes in (("tp_col",), ("tp_row",), ("tp_row", "tp_col")))

        def rows(found: Tensor) -> Tensor:
            return transposed(reduce_scatter(found, row), grid)

        product = of_one(linear_2d.products_of(mesh, path))
        return OtherRows(row, size, rows=rows, tokens=partial(gathered, axis=column), product=product)


@dataclass(frozen=True)
class VocabularyCube(_Vocabulary):
    """3D: rows over tp_row, channels over tp_col, then tp_depth. A rank's logits belong to other sequences than its x (linear_3d.py)."""

    def layout(self, name: str, shape: Shape) -> Layout:
        return Layout(shape, {0: "tp_row", 1: ("tp_col", "tp_depth")}, GRID, alike=(), uneven=(0,))

    def others(self, mesh: Mesh, size: int, path: str) -> OtherRows:
        row, column, depth = (mesh.axis(axis, label=path) for axis in ("tp_row", "tp_col", "tp_depth"))
        turn = Turn(row, column)

        def loss(of_logits: Tensor) -> Tensor:
            return turn.back(of_logits.unsqueeze(0)).squeeze(0)

        return OtherRows(
            row,
            size,
            rows=partial(reduce_scatter, axis=row),
            tokens=partial(gathered, axis=row),
            columns=partial(all_gather, axis=depth, dim=1),
            targets=turn,
            loss=loss,
            turned_back=turn.back,
            product=of_one(linear_3d.products_of(mesh, "first", path)),
        )


@dataclass(frozen=True)
class OtherRows:
    """The collectives of embedding, head and loss between the ranks of `axis`, which hold shards of a vocabulary matrix of `size` rows.
    They implement the protocol `Others` of moe/nn/vocabulary.py, which describes each. In 3D, `turned_back` sends the
    logits of each sequence, over the whole vocabulary, to the ranks that hold this sequence between layers."""

    axis: Axis
    size: int
    rows: Slot
    tokens: Slot = as_it_is
    columns: Slot = as_it_is
    enter: Slot = as_it_is
    targets: Slot = as_it_is
    loss: Slot = as_it_is
    turned_back: Slot = as_it_is
    product: Callable[[Tensor, Tensor], Tensor] | None = None

    def scores(self, scores_2N: Tensor) -> Tensor:
        return merged(scores_2N, self.axis)

    def logits(self, logits: Tensor) -> Tensor:
        return self.turned_back(joined(logits, self.axis, self.size))


def merged(scores_2N: Tensor, axis: Axis) -> Tensor:
    """Return [2, N] for the whole vocabulary, equal on all ranks: log-sum-exps and targets' logits. scores_2N: these two numbers computed
    from this rank's rows of the vocabulary; the logit of a target in another rank's rows is 0."""
    found: Tensor = _Merged.apply(scores_2N, axis)
    return found


def joined(logits: Tensor, axis: Axis, size: int) -> Tensor:
    """Return logits [..., size], gathered from all ranks. Shards are padded to the longest, because gathers need equal sizes."""
    counts = [(rows := Tile(0, i, axis.size).run(size)).stop - rows.start for i in range(axis.size)]
    padded = F.pad(logits, (0, max(counts) - logits.shape[-1]))
    parts = join_copies(padded, axis, dim=-1).split(max(counts), -1)
    return torch.cat([part[..., :count] for part, count in zip(parts, counts, strict=True)], -1)


class _Merged(torch.autograd.Function):
    """Merge [log-sum-exps, targets' logits] [2, N] over ranks. Backward sends nothing: each rank multiplies the log-sum-exp's gradient,
    which is equal on every rank, by the total probability of its own part of the vocabulary."""

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
