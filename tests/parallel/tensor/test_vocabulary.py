"""A vocabulary split over ranks, also unevenly: looked-up rows, logits, loss and gradients equal the whole matrix's. No logits are sent."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.model.initialize import tiled_dim
from moe.nn.vocabulary import PADDING, Rows, TiledRows, look_up, project, summed_loss
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Degrees, Mesh
from parallel.process import process
from parallel.process.process import World
from parallel.tensor.style import Plan, apply, lay_out
from parallel.tensor.vocabulary import VocabularyRows
from tests.support.ranks import run_on_ranks

# B sequences, L length, D model, V vocabulary
B, L, D, V = 3, 7, 8, 26


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens_BL() -> Tensor:
    """Return random tokens, with padding, and with the first and the last token id of the vocabulary."""
    tokens = torch.randint(V, (B, L), generator=torch.Generator().manual_seed(1))
    tokens[0, :2] = torch.tensor([0, V - 1])
    tokens[1, L // 2 :] = PADDING
    return tokens


def held(mesh: Mesh, tiles: int) -> tuple[Rows | TiledRows, dict[str, Layout]]:
    with torch.device("meta"):
        rows = Rows(slice(0, V), D)
        model = nn.ModuleDict({"head": rows.in_tiles(tiles) if tiles > 1 else rows})
    plan = Plan((("head.weight", VocabularyRows()),))
    layouts = lay_out(model, plan, tiled_dim=tiled_dim)
    apply(model, plan, layouts, mesh)
    for name, layout in layouts.items():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, nn.Parameter(drawn(2, V, D)[layout.region(mesh)].clone()))
    matrix = model["head"]
    assert isinstance(matrix, Rows | TiledRows)
    return matrix, layouts


def grad_of(matrix: nn.Module) -> Tensor:
    return torch.cat([p.grad for p in matrix.parameters() if p.grad is not None])


@pytest.mark.parametrize(("tp", "tiles", "chunks", "recast"), [(2, 1, 1, False), (4, 1, 1, True), (4, 3, 1, False), (3, 2, 4, False)])
def test_a_cut_vocabulary_is_the_whole_one(tp: int, tiles: int, chunks: int, recast: bool) -> None:
    """Loss and gradients equal the whole matrix's. The 26 rows are 6, 7, 6 and 7 on 4 ranks. The matrix is embedding and head (tied)."""
    targets, seen = tokens_BL(), tokens_BL().clamp(min=0)
    whole, x = drawn(2, V, D).requires_grad_(), drawn(3, B, L, D).requires_grad_()
    loss = F.cross_entropy(F.linear(x, whole).flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=PADDING)
    rows = F.embedding(seen, whole)
    (0.3 * loss + (rows * drawn(4, B, L, D)).sum()).backward()

    def work(rank: int) -> tuple[int, int]:
        mesh = process.connect(Degrees(tp=tp), World(rank, tp))
        matrix, layouts = held(mesh, tiles)
        y = drawn(3, B, L, D).requires_grad_()
        got = summed_loss(y, targets, matrix, chunks=chunks, recast=recast)
        counts = mesh.communicator.counts()["tp", "all_reduce"]
        found = look_up(seen, matrix, dtype=torch.float64)
        (0.3 * got + (found * drawn(4, B, L, D)).sum()).backward()
        region = (slice(None), slice(None))
        parts = [layout.region(mesh)[0] for layout in layouts.values()]
        region = (slice(parts[0].start, parts[-1].stop), slice(None))
        torch.testing.assert_close(got, loss.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(found, rows.detach(), rtol=0, atol=0)
        torch.testing.assert_close(y.grad, x.grad, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(grad_of(matrix), whole.grad[region], rtol=1e-10, atol=1e-12)  # type: ignore[index]
        with torch.no_grad():
            torch.testing.assert_close(project(y, matrix, recast=recast), F.linear(x, whole), rtol=1e-12, atol=1e-12)
        return counts.calls, counts.bytes

    assert (
        run_on_ranks(work, tp) == [(2, 3 * B * L * 8)] * tp
    )  # one number a token for the maximum, two for sums of exponentials and targets' logits


def test_logits_are_differentiated_too() -> None:
    """Gradients of a loss computed from the gathered logits (`project`) equal those of the whole matrix."""
    whole, x = drawn(2, V, D).requires_grad_(), drawn(3, B, L, D).requires_grad_()
    (F.linear(x, whole) * drawn(5, B, L, V)).sum().backward()

    def work(rank: int) -> None:
        mesh = process.connect(Degrees(tp=4), World(rank, 4))
        matrix, layouts = held(mesh, 1)
        y = drawn(3, B, L, D).requires_grad_()
        (project(y, matrix) * drawn(5, B, L, V)).sum().backward()
        torch.testing.assert_close(y.grad, x.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad_of(matrix), whole.grad[layouts["head.weight"].region(mesh)], rtol=1e-12, atol=1e-12)  # type: ignore[index]

    run_on_ranks(work, 4)
