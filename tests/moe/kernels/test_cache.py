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
def _order(out, rows, columns, group, across, N: tl.constexpr):
    place_N = tl.minimum(tl.arange(0, N), rows * columns - 1)
    row_N, column_N = gemm.placed(place_N, rows, columns, group, across)
    tl.store(out + 2 * place_N, row_N)
    tl.store(out + 2 * place_N + 1, column_N)


def order(rows: int, columns: int, group: int, across: bool) -> list[tuple[int, int]]:
    """Return the (row, column) of each tile in the order in which Triton's programs compute them."""
    out = torch.empty(triton.next_power_of_2(rows * columns), 2, dtype=torch.int32)
    _order[(1,)](out, rows, columns, group, int(across), N=len(out))
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


def of_weight(height: int, width: int, rows: int, held: tuple[int, bool] | None = None) -> float:
    """Return the bytes read over the bytes of both operands. held: number of tiles computed together, and whether they lie side by side;
    None: as the kernel does."""
    if held is None:
        held = device.held_tiles(TILE, height, width, rows, like=torch.empty(0, dtype=torch.bfloat16))
    tiles = order(triton.cdiv(height, TILE.m), triton.cdiv(width, TILE.n), *held)
    return bytes_read(tiles, rows) / (2 * rows * (height + width))


@pytest.mark.parametrize(("rows", "columns", "group"), [(1, 1, 16), (7, 3, 16), (7, 3, 2), (16, 5, 1), (5, 9, 5)])
def test_every_tile_is_computed_once_by_groups_of_rows_or_columns(rows: int, columns: int, group: int) -> None:
    want = [(r, c) for g in range(0, rows, group) for c in range(columns) for r in range(g, min(rows, g + group))]
    assert order(rows, columns, group, False) == want
    assert order(columns, rows, group, True) == [(c, r) for r, c in want]


@pytest.mark.parametrize("shape", SHAPES)
def test_weight_gradients_read_their_operands_about_once(shape: str) -> None:
    d_model, d_ff, rows = SHAPES[shape]
    for height, width in ((d_model, d_ff), (d_ff, d_model)):
        assert of_weight(height, width, rows) <= 1.05


def test_without_groups_the_wide_operand_would_be_read_again_and_again() -> None:
    assert of_weight(4096, 14336, 2048, (1, False)) > 10


def test_of_a_narrow_operand_beyond_the_cache_the_wide_one_is_read_once_for_each_part_that_fits() -> None:
    """GLaM, 2,048 rows: 34 MB in a cache for 26 MB, so 134 MB are read twice: 1.8 times the least. More parts are worse, and so are parts
    of the wide operand. With the gradient that is written, it is at most 1.2 times the least in bf16, and 1.11 in fp32."""
    found, least, written = of_weight(32768, 8192, 2048), 2 * 2048 * (32768 + 8192), 32768 * 8192
    assert found == of_weight(8192, 32768, 2048) == pytest.approx(1.8, abs=0.01)
    assert found < min(of_weight(32768, 8192, 2048, held) for held in ((11, True), (86, False), (52, False), (37, False)))
    assert found * least + 2 * written <= 1.2 * (least + 2 * written) and found * least + 4 * written <= 1.11 * (least + 4 * written)


@pytest.mark.parametrize(("height", "width", "rows"), [(4096, 14336, 16384), (14336, 4096, 16384)])
def test_beyond_the_cache_reads_take_less_than_a_third_of_the_products_time(height: int, width: int, rows: int) -> None:
    times = of_weight(height, width, rows)
    read_s = times * 2 * rows * (height + width) / BYTES_PER_S
    assert times < 3.4 and read_s < 2 * rows * height * width / FLOPS_PER_S / 3
