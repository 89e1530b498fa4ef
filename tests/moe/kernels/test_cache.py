"""The order of a weight gradient's tiles reads each operand about once, in a model of an H100's L2 cache.

The 132 multiprocessors compute 132 tiles at a time, in step: each reads a block of its rows of the left operand and of its columns of the
right one. The cache drops the least recently used blocks. Its two halves may both keep a copy, so it holds half of its 50 MiB.
"""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
import triton
import triton.language as tl

import tests.support.interpreted  # noqa: F401
from moe.kernels.triton import device, gemm

L2_BYTES, PROGRAMS = 50 * 2**20, 132
BYTES_PER_S, FLOPS_PER_S = 3.35e12, 800e12  # of an H100's memory, and of its large bf16 products
TILE = device.Tile(128, 256, 64, warps=8, stages=4)
SHAPES = {
    "mixtral": (4096, 14336, 2048),
    "glam": (8192, 32768, 1024),
    "qwen3-30b-a3b": (2048, 768, 1024),
    "deepseek-v3": (7168, 2048, 2048),
}


@triton.jit
def _order(out, rows, columns, group, N: tl.constexpr):
    place_N = tl.minimum(tl.arange(0, N), rows * columns - 1)
    row_N, column_N = gemm.in_group(place_N, rows, columns, group)
    tl.store(out + 2 * place_N, row_N)
    tl.store(out + 2 * place_N + 1, column_N)


def order(rows: int, columns: int, group: int) -> list[tuple[int, int]]:
    """Return the (row, column) of each tile in the order in which Triton's programs compute them."""
    out = torch.empty(triton.next_power_of_2(rows * columns), 2, dtype=torch.int32)
    _order[(1,)](out, rows, columns, group, N=len(out))
    return [(row, column) for row, column in out[: rows * columns].tolist()]


def bytes_read(tiles: list[tuple[int, int]], rows: int) -> int:
    """Return the bytes that the cache reads from memory for these tiles of one expert with `rows` rows, in bf16."""
    size = {"left": 2 * TILE.m * TILE.k, "right": 2 * TILE.n * TILE.k}
    kept, held, read = OrderedDict[tuple[str, int, int], None](), 0, 0
    for first in range(0, len(tiles), PROGRAMS):
        together = tiles[first : first + PROGRAMS]
        wanted = [*(("left", row) for row in {row for row, _ in together}), *(("right", column) for column in {c for _, c in together})]
        for block in range(rows // TILE.k):
            for side, place in wanted:
                if (side, place, block) not in kept:
                    read, held = read + size[side], held + size[side]
                kept[side, place, block] = None
                kept.move_to_end((side, place, block))
                while held > L2_BYTES // 2:
                    held -= size[kept.popitem(last=False)[0][0]]
    return read


@pytest.fixture(autouse=True)
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_l2_bytes", lambda _: L2_BYTES)


def group_of(height: int, width: int, rows: int) -> int:
    return device.row_group(TILE, height, width, rows, like=torch.empty(0, dtype=torch.bfloat16))


def of_weight(height: int, width: int, rows: int, *, group: int) -> float:
    """Return the bytes read over the bytes of both operands."""
    tiles = order(triton.cdiv(height, TILE.m), triton.cdiv(width, TILE.n), group)
    return bytes_read(tiles, rows) / (2 * rows * (height + width))


@pytest.mark.parametrize(("rows", "columns", "group"), [(1, 1, 16), (7, 3, 16), (7, 3, 2), (16, 5, 1), (5, 9, 5)])
def test_every_tile_is_computed_once_by_groups_of_rows(rows: int, columns: int, group: int) -> None:
    found = order(rows, columns, group)
    assert found == [(r, c) for g in range(0, rows, group) for c in range(columns) for r in range(g, min(rows, g + group))]


@pytest.mark.parametrize("shape", SHAPES)
def test_weight_gradients_read_their_operands_about_once(shape: str) -> None:
    d_model, d_ff, rows = SHAPES[shape]
    for height, width in ((d_model, d_ff), (d_ff, d_model)):
        assert of_weight(height, width, rows, group=group_of(height, width, rows)) <= 1.3


def test_without_groups_the_wide_operand_would_be_read_again_and_again() -> None:
    assert of_weight(4096, 14336, 2048, group=1) > 10


@pytest.mark.parametrize(
    ("height", "width", "rows"), [(4096, 14336, 16384), (14336, 4096, 16384), (8192, 32768, 2048), (32768, 8192, 2048)]
)
def test_beyond_the_cache_reads_take_less_than_a_third_of_the_products_time(height: int, width: int, rows: int) -> None:
    """1.8 to 3.9 times the least."""
    times = of_weight(height, width, rows, group=group_of(height, width, rows))
    read_s = times * 2 * rows * (height + width) / BYTES_PER_S
    assert times < 4 and read_s < 2 * rows * height * width / FLOPS_PER_S / 3
