"""Matrices in MXFP4 and fp8 blocks: encoding is the inverse of decoding, to the bit, and refuses values that no blocks have.

tests/moe/convert/test_published_blocks.py compares the decoders with plain loops over the formats' bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe.nn.blocks import Blocks, Form, of_fp8, of_mxfp4
from moe.recipe.shapes import BLOCK_BYTES, FP8_BLOCK

DRAWS = torch.Generator().manual_seed(4)
ALONE = torch.device("cpu")


def mxfp4(count: int, size_in: int, size_out: int) -> Tensor:
    """Return matrices [E, I, O] of random bits, with every exponent whose values bf16 has. Some blocks are zero, of both signs."""
    packed = torch.randint(256, (count, size_out, size_in // 32, 16), dtype=torch.uint8, generator=DRAWS)
    packed[0, 0, 0], packed[0, 1, 0] = 0, 128
    return of_mxfp4(packed, torch.randint(1, 253, packed.shape[:-1], dtype=torch.uint8, generator=DRAWS)).mT


def fp8(count: int, size_in: int, size_out: int) -> Tensor:
    """Return matrices [E, I, O] as a quantizer makes them: by the largest element of a block, by a power of two, or by a larger factor."""
    found = []
    for nth in range(count):
        weight = torch.randn(size_out, size_in, generator=DRAWS) * torch.rand(size_out, 1, generator=DRAWS)
        padded = torch.nn.functional.pad(weight, (0, -size_in % FP8_BLOCK, 0, -size_out % FP8_BLOCK))
        most = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK)).abs().amax((1, 3))
        factors = [most / 448, (most / 448).log2().ceil().exp2(), most / torch.randint(1, 448, most.shape, generator=DRAWS)][nth % 3]
        each = factors.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)[:size_out, :size_in]
        found.append(of_fp8((weight / each).to(torch.float8_e4m3fn), factors, (FP8_BLOCK, FP8_BLOCK)).t())
    return torch.stack(found)


def bits(matrix: Tensor) -> Tensor:
    return matrix.contiguous().view(torch.int16)


@pytest.mark.parametrize(("form", "sizes"), [("mxfp4", (3, 96, 40)), ("fp8", (6, 256, 384)), ("fp8", (3, 200, 70))])
def test_a_decoded_matrix_is_encoded_to_the_bit(form: Form, sizes: tuple[int, int, int]) -> None:
    given = (mxfp4 if form == "mxfp4" else fp8)(*sizes)
    blocks = Blocks.empty(form, sizes, ALONE)
    assert all(blocks.put(expert, matrix.float()) for expert, matrix in enumerate(given))
    assert blocks.shape == sizes and blocks.mT.shape == (sizes[0], sizes[2], sizes[1]) and len(blocks) == sizes[0]
    for part, expert in ((next(iter(blocks.split(2))), 1), (blocks, 2)):
        assert torch.equal(bits(part[expert]), bits(given[expert])) and torch.equal(bits(part.mT[expert]), bits(given[expert].t()))
    held = blocks.values.nbytes + blocks.scales.nbytes
    assert held >= BLOCK_BYTES[form] * given.numel() and (held == BLOCK_BYTES[form] * given.numel() or sizes[1] % FP8_BLOCK)


def test_a_block_whose_sample_has_no_factor_that_fits_is_encoded_from_all_elements() -> None:
    """Most elements are 0, so that a sample bounds the factor too little. There are more blocks than are encoded at a time."""
    (matrix,) = fp8(1, 10 * FP8_BLOCK, FP8_BLOCK)
    mostly = torch.rand(matrix.shape, generator=DRAWS) < 0.998
    mostly[5:, :FP8_BLOCK:2] = True
    matrix = matrix.masked_fill(mostly, 0.0)
    blocks = Blocks.empty("fp8", (1, *matrix.shape), ALONE)
    assert blocks.put(0, matrix) and torch.equal(bits(blocks[0]), bits(matrix)) and blocks.scales.unique().numel() > 8


@pytest.mark.parametrize("form", ["mxfp4", "fp8"])
def test_a_matrix_with_one_other_value_is_refused(form: Form) -> None:
    """One element of one block is moved by the distance between neighbors in bf16."""
    sizes = (1, 256, 128)
    (matrix,) = (mxfp4 if form == "mxfp4" else fp8)(*sizes)
    blocks = Blocks.empty(form, sizes, ALONE)
    assert blocks.put(0, matrix)
    at = matrix.abs().argmin().item() if form == "mxfp4" else (matrix.abs() - matrix.abs().median()).abs().argmin().item()
    moved = matrix.clone(memory_format=torch.contiguous_format)
    moved.view(-1).view(torch.int16)[at] += 1
    assert not torch.equal(moved, matrix) and not blocks.put(0, moved)
    assert not blocks.put(0, torch.randn(sizes[1:], generator=DRAWS))
