"""Vocabulary parallelism on the grids of 2D, 2.5D and 3D: embedding, head and loss, with the matrices split into blocks.

    2D, 2.5D   rows over tp_col, channels over tp_row           3D   rows over tp_row, channels over tp_col, then tp_depth

The head is an ordinary weight: its product gives logits split by rows over ranks with the same tokens, and the loss merges three numbers
a token (parallel/tensor/vocabulary.py). For the embedding, a rank looks up the tokens of all ranks that hold its channels, with zeros
for rows of other ranks, and a reduce-scatter sums them on the ranks of these tokens. In 2D the result is transposed, sequences by column
and channels by row, so each rank (row, column) sends it to rank (column, row).

Cost in addition to a product: the sum of looked-up rows, (q - 1) times a rank's x, and in 2D one more x to transpose. In 3D the table's
channels are gathered over depth. q need not divide the vocabulary. Sources: Optimus (arXiv 2104.05343), 3D (arXiv 2105.14450).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from parallel.data.tiling import without_tiles
from parallel.mesh.collectives import all_gather, gathered, reduce_scatter
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import GRID, Mesh
from parallel.tensor import linear_2d, linear_3d
from parallel.tensor.grid import Turn, of_one, transposed
from parallel.tensor.style import Shape
from parallel.tensor.vocabulary import joined, merged


@dataclass(frozen=True)
class VocabularyBlock:
    """A vocabulary matrix in 2D and 2.5D. Fills the module's slot `others`, and `first`: the first row of the module or of each tile."""

    def layout(self, name: str, shape: Shape) -> Layout:
        return Layout(shape, {0: "tp_col", 1: "tp_row"}, GRID, alike=(), uneven=(0,))

    def fill(self, model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh) -> None:
        _fill(BlockRows, model, layouts, mesh)


@dataclass(frozen=True)
class VocabularyCube:
    """A vocabulary matrix in 3D. Fills the slots that VocabularyBlock fills."""

    def layout(self, name: str, shape: Shape) -> Layout:
        return Layout(shape, {0: "tp_row", 1: ("tp_col", "tp_depth")}, GRID, alike=(), uneven=(0,))

    def fill(self, model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh) -> None:
        _fill(CubeRows, model, layouts, mesh)


class BlockRows:
    """The exchange in 2D and 2.5D for a matrix of `size` rows (`Others` of moe/nn/vocabulary.py)."""

    def __init__(self, mesh: Mesh, size: int, label: str) -> None:
        self.size = size
        self.row, self.column = (replace(mesh.axis(axis), label=label) for axis in ("tp_col", "tp_row"))
        self.grid = replace(mesh.axis("tp_row", "tp_col"), label=label)
        self.product = of_one(linear_2d.products_of(mesh, label))

    def tokens(self, tokens: Tensor) -> Tensor:
        return gathered(tokens, self.column)

    def columns(self, weight: Tensor) -> Tensor:
        return weight

    def rows(self, found: Tensor) -> Tensor:
        return transposed(reduce_scatter(found, self.row), self.grid)

    def enter(self, x: Tensor) -> Tensor:
        return x

    def targets(self, targets: Tensor) -> Tensor:
        return targets

    def scores(self, scores_2N: Tensor) -> Tensor:
        return merged(scores_2N, self.row)

    def loss(self, loss: Tensor) -> Tensor:
        return loss

    def logits(self, logits: Tensor) -> Tensor:
        return joined(logits, self.row, self.size)


class CubeRows:
    """The exchange in 3D. Logits have other sequences than x, like the output of a first product."""

    def __init__(self, mesh: Mesh, size: int, label: str) -> None:
        self.size = size
        self.row, self.depth = (replace(mesh.axis(axis), label=label) for axis in ("tp_row", "tp_depth"))
        self.turn = Turn(self.row, replace(mesh.axis("tp_col"), label=label))
        self.product = of_one(linear_3d.products_of(mesh, "first", label))

    def tokens(self, tokens: Tensor) -> Tensor:
        return gathered(tokens, self.row)

    def columns(self, weight: Tensor) -> Tensor:
        return all_gather(weight, self.depth, dim=1)

    def rows(self, found: Tensor) -> Tensor:
        return reduce_scatter(found, self.row)

    def enter(self, x: Tensor) -> Tensor:
        return x

    def targets(self, targets: Tensor) -> Tensor:
        return self.turn(targets)

    def scores(self, scores_2N: Tensor) -> Tensor:
        return merged(scores_2N, self.row)

    def loss(self, loss: Tensor) -> Tensor:
        return self.turn.back(loss.unsqueeze(0)).squeeze(0)

    def logits(self, logits: Tensor) -> Tensor:
        return self.turn.back(joined(logits, self.row, self.size))


def _fill(others: type[BlockRows] | type[CubeRows], model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh) -> None:
    for name, layout in layouts.items():
        path = without_tiles(name).rpartition(".")[0]
        model.get_submodule(path).others = others(mesh, layout.shape[0], path)  # type: ignore[assignment]
        model.get_submodule(name.rpartition(".")[0]).first = layout.region(mesh)[0].start  # type: ignore[assignment]
