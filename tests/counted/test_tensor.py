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
    """Exact in bf16, with sums in fp32. n chunks make n times the calls, and keep as many bytes."""
    for row in measured(kind, ranks, "bf16", chunks=chunks):
        assert row["measured_bytes"] == row["expected_bytes"] and row["passed"], row


def test_a_forms_weights_and_activations_lie_on_all_its_ranks_once() -> None:
    """Exceptions: 2.5D copies weights over its depth, and 1D keeps whole activations between layers on each rank."""
    for ranks in (4, 8, 16, 64):
        whole = cost(Grid("1d", 1, 1, 1), PAPER)
        for form in forms_of(ranks):
            found = cost(form, PAPER)
            assert form.ranks == ranks and found.weights * ranks == whole.weights * form.copies
            if form.kind not in ("1d", "sliced"):
                assert found.kept * ranks < whole.kept
            else:
                assert found.kept * ranks > whole.kept
