"""`python -m tests.counted tensor`: the bytes that a layer sends and keeps equal the closed forms."""

from __future__ import annotations

import pytest

from parallel.mesh.grids import Grid
from tests.counted.tensor import PAPER, SOURCE, forms_of, measured
from tests.counted.tensor_forms import cost


@pytest.mark.parametrize(
    ("kind", "ranks", "chunks", "source"),
    [("1d", 2, 3, 0), ("sliced", 2, 1, SOURCE), ("sliced", 2, 3, 0), ("2d", 4, 1, SOURCE), ("2.5d", 8, 1, 0), ("3d", 8, 1, SOURCE)],
)
def test_a_layer_sends_and_keeps_what_the_formula_says(kind: str, ranks: int, chunks: int, source: int) -> None:
    """In bf16, with all-reduces in fp32. With n chunks there are n times as many calls; kept bytes are the same. With a source, the layer
    has cross attention too."""
    for row in measured(kind, ranks, "bf16", chunks=chunks, source=source):
        assert row["measured_bytes"] == row["expected_bytes"] and row["passed"], row


def test_ranks_hold_each_weight_once_and_2d_to_3d_shard_all_activations() -> None:
    """Exceptions: 2.5D has copies of weights over its depth, and 1D has whole activations between layers on each rank."""
    for ranks in (4, 8, 16, 64):
        whole = cost(Grid("1d", 1, 1, 1), PAPER)
        for form in forms_of(ranks):
            found = cost(form, PAPER)
            assert form.ranks == ranks and found.weights * ranks == whole.weights * form.copies
            if form.kind not in ("1d", "sliced"):
                assert found.kept * ranks < whole.kept
            else:
                assert found.kept * ranks > whole.kept
