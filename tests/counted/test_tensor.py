"""`python -m tests.counted tensor`: a layer sends and keeps the bytes of its formula; which grids exist."""

from __future__ import annotations

import pytest

from moe.plan.time.tensor import cost
from parallel.mesh.grids import Grid
from tests.counted.tensor import PAPER, forms_of, measured


@pytest.mark.parametrize(
    ("kind", "ranks", "chunks"), [("1d", 2, 3), ("sliced", 2, 1), ("sliced", 2, 3), ("2d", 4, 1), ("2.5d", 8, 1), ("3d", 8, 1)]
)
def test_a_layer_sends_and_keeps_what_the_formula_says(kind: str, ranks: int, chunks: int) -> None:
    """Exact in 16 bits with wide sums. With n chunks there are n times the calls, and no more bytes are kept."""
    for row in measured(kind, ranks, "bf16", chunks=chunks):
        assert row["measured_bytes"] == row["expected_bytes"] and row["passed"], row


def test_a_forms_weights_and_activations_lie_on_all_its_ranks_once() -> None:
    """But for 2.5D, whose weights are copied over depth, and for 1D, whose activations between layers are whole."""
    for ranks in (4, 8, 16, 64):
        whole = cost(Grid("1d", 1, 1, 1), PAPER)
        for form in forms_of(ranks):
            found = cost(form, PAPER)
            assert form.ranks == ranks and found.weights * ranks == whole.weights * form.copies
            if form.kind not in ("1d", "sliced"):
                assert found.kept * ranks < whole.kept
            else:
                assert found.kept * ranks > whole.kept
