"""Compares the positions that each rank holds, and the blocks that it computes, with lists written by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest

from parallel.errors import BadInput
from parallel.sequence.balanced import steps, task
from parallel.sequence.order import ALL, ORDERS, Block, Order, cut


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize(("size", "inner", "each"), [(1, 1, 6), (1, 1, 7), (2, 1, 4), (3, 1, 8), (5, 2, 4), (2, 3, 12)])
def test_every_place_is_held_once_and_blocks_are_the_causal_pairs(kind: str, size: int, inner: int, each: int) -> None:
    order = Order(kind, size, size * each * inner, inner)
    places = [order.positions(rank) for rank in range(size * inner)]
    assert Counter(place for held in places for place in held) == Counter(range(order.length))
    assert all(list(held) == sorted(held) for held in places)
    outer = [[place for part in range(inner) for place in places[rank * inner + part]] for rank in range(size)]
    for queries in range(size):
        for keys in range(size):
            seen = [
                (q, k)
                for rows, columns, triangle in order.blocks(queries, keys)
                for row, q in enumerate(outer[queries][rows])
                for column, k in enumerate(outer[keys][columns])
                if not triangle or column <= row
            ]
            assert Counter(seen) == Counter((q, k) for q in outer[queries] for k in outer[keys] if k <= q)
            assert len(seen) == order.seen(queries, keys)
            assert replace(order, causal=False).blocks(queries, keys) == (Block(ALL, ALL, False),)


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("part", [slice(None), slice(5), slice(3, 9), slice(1, None), slice(None, -1), slice(11, 12), slice(4, 4)])
def test_a_part_of_runs_is_that_part_of_their_places(kind: str, part: slice) -> None:
    order = Order(kind, 3, 36)
    for rank in range(3):
        cut_out = cut(order.ranges(rank), part)
        assert [place for run in cut_out for place in run] == list(order.positions(rank))[part] and all(cut_out)


@pytest.mark.parametrize("size", [2, 4, 7, 64])
def test_zigzag_is_even_striped_nearly_and_contiguous_waits(size: int) -> None:
    def work(kind: str) -> list[int]:
        order = Order(kind, size, size * 8)
        return [sum(order.seen(rank, other) for other in range(size)) for rank in range(size)]

    assert len(set(work("zigzag"))) == 1
    assert max(work("striped")) - min(work("striped")) == (size - 1) * 8  # one pair for each of the 8 queries and each rank of distance
    blocks = [sum(bool(Order("contiguous", size, size).blocks(rank, other)) for other in range(size)) for rank in range(size)]
    assert 1 - Fraction(sum(blocks), size * max(blocks)) == Fraction(size - 1, 2 * size)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 16, 33])
def test_the_balanced_schedule_computes_each_causal_block_once_and_hardly_waits(size: int) -> None:
    tasks = [task(rank, step, size) for step in range(steps(size)) for rank in range(size)]
    done = Counter((job.queries, job.keys) for job in tasks if job is not None)
    assert done == Counter((queries, keys) for queries in range(size) for keys in range(queries + 1))
    idle = Fraction(sum(job is None for job in tasks), len(tasks))
    assert idle == (Fraction(1, size + 2) if size % 2 == 0 else 0)
    for step in range(steps(size)):
        for rank in range(size):
            job = task(rank, step, size)
            assert job is None or (
                rank == (job.queries if job.own else job.keys) and (job.queries - job.keys) % size in (step, size - step)
            )


def test_a_length_that_does_not_divide_is_refused_with_one_that_does() -> None:
    with pytest.raises(BadInput, match=r"model.max_length: got 20, needed a multiple of 2 \* degrees.sp = 8 .* set it to 24|16"):
        Order("zigzag", 4, 20)
