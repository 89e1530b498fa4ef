"""Frozen matrices quantized to 4 or 8 bits, in blocks of elements with one scale each. They are decoded to bf16 for each product.

    MXFP4   packed uint8 [..., G, 16]: 2 elements of 4 bits a byte, the low bits first; scales uint8 [..., G]: an exponent for 32 elements
            element = FP4[4 bits] * 2 ** (scale - 127)
    FP8     values fp8 e4m3 [M, N]; factors fp32 [ceil(M / m), ceil(N / n)]: one factor for each block of m x n elements
            element = fp8 * factor, rounded to bf16

`Blocks` holds a stack of experts' matrices in such blocks, or a linear layer's matrix as a stack of one. `put` encodes a matrix so that
decoding returns the same bits. This works for each matrix that was itself decoded from this format, as the matrices of published files
are. Source of MXFP4: OCP Microscaling, version 1.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.recipe.shapes import FP8_BLOCK, MXFP4_BLOCK

# letters of shapes below: E experts, I input and O output channels of a matrix, N blocks of an fp8 matrix, S elements of a block

Form = Literal["mxfp4", "fp8"]
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of E2M1, by the low 3 bits; the fourth bit is the sign
_AT_ONCE = 8  # number of fp8 blocks that are encoded together
_SAMPLE = 16  # the factor of an fp8 block is sought from every _SAMPLE-th element, and from all elements only if that fails
_LARGEST = (448, 416, 384, 352, 320, 288, 256, 240)  # the largest fp8 e4m3 number with each of the 8 significands


def of_mxfp4(packed: Tensor, scales: Tensor) -> Tensor:
    """Decode packed [..., G, 16] with scales [..., G] to bf16 [..., 32 G]."""
    values = torch.tensor((*FP4, *(-value for value in FP4)), dtype=torch.float32, device=packed.device)
    pairs = torch.stack((packed & 15, packed >> 4), dim=-1).to(torch.int32)
    return torch.ldexp(values[pairs], (scales.to(torch.int32) - 127)[..., None, None]).to(torch.bfloat16).flatten(-3)


def of_fp8(values: Tensor, factors: Tensor, size: tuple[int, int], skip: tuple[int, ...] = (0, 0)) -> Tensor:
    """Decode values [M, N] to bf16. factors: one for each block. size: rows and columns of a block. skip: row and column of the first value
    within the first block, for a shard that begins inside a block."""
    rows, columns = values.shape
    factors, wide = factors.repeat_interleave(size[1], 1).narrow(1, skip[1], columns), values.to(torch.float32)
    before = min(rows, -skip[0] % size[0])  # rows of the first block, if it is not whole
    whole = (rows - before) // size[0]
    parts = wide.split((before, whole * size[0], rows - before - whole * size[0]))
    counts = (min(before, 1), whole, len(factors) - min(before, 1) - whole)
    for part, of_blocks in zip(parts, factors.split(counts), strict=True):
        if len(part):
            part.unflatten(0, (len(of_blocks), -1)).mul_(of_blocks[:, None])
    return wide.to(torch.bfloat16)


@dataclass(frozen=True)
class Blocks:
    """A stack of frozen matrices [E, I, O] in blocks. `values`, `scales`: tensors of the format, with matrices stored as [O, I], as in
    published files. `blocks[e]` decodes the matrix of expert e to bf16 [I, O] or, if `turned`, [O, I]."""

    form: Form
    values: Tensor
    scales: Tensor
    turned: bool = False
    requires_grad = False

    @classmethod
    def empty(cls, form: Form, shape: tuple[int, ...], device: torch.device) -> Blocks:
        """Allocate blocks of this format for matrices of the shape (E, I, O)."""
        count, size_in, size_out = shape
        if form == "mxfp4":
            groups = size_in // MXFP4_BLOCK
            packed = torch.zeros(count, size_out, groups, MXFP4_BLOCK // 2, dtype=torch.uint8, device=device)
            return cls(form, packed, packed.new_zeros(count, size_out, groups))
        values = torch.zeros(count, size_out, size_in, device=device, dtype=torch.float8_e4m3fn)
        return cls(form, values, torch.zeros(count, -(-size_out // FP8_BLOCK), -(-size_in // FP8_BLOCK), device=device))

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (E, I, O), or (E, O, I) if `turned`."""
        count, size_out, last = self.values.shape[:3]
        size_in = last * MXFP4_BLOCK if self.form == "mxfp4" else last
        return (count, size_out, size_in) if self.turned else (count, size_in, size_out)

    def on(self, device: torch.device) -> Blocks:
        return replace(self, values=self.values.to(device), scales=self.scales.to(device))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the format, by name."""
        return {"blocks": self.values, "scales of blocks": self.scales}

    @property
    def mT(self) -> Blocks:  # noqa: N802 the name in torch
        return replace(self, turned=not self.turned)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, expert: int) -> Tensor:
        matrix_IO = self._decoded(expert).t().contiguous()  # because products of operands with other strides may round differently
        return matrix_IO.t() if self.turned else matrix_IO

    def to(self, dtype: torch.dtype) -> Tensor:
        """Decode a stack that holds only one matrix: [O, I] in this dtype."""
        return self._decoded(0).to(dtype)

    def _decoded(self, expert: int) -> Tensor:
        """Decode the matrix of an expert to bf16 [O, I]."""
        values, scales = self.values[expert], self.scales[expert]
        return of_mxfp4(values, scales) if self.form == "mxfp4" else of_fp8(values, scales, (FP8_BLOCK, FP8_BLOCK))

    def split(self, each: int) -> Iterator[Blocks]:
        """Yield the stack in chunks of `each` experts, as views."""
        parts = zip(self.values.split(each), self.scales.split(each), strict=True)
        return (replace(self, values=values, scales=scales) for values, scales in parts)

    def put(self, expert: int, matrix_IO: Tensor) -> bool:
        """Encode the matrix of an expert. Return False if the encoded blocks do not decode to exactly this matrix."""
        matrix_OI = matrix_IO.t().to(self.values.device, torch.float32)
        values, scales = (_to_mxfp4 if self.form == "mxfp4" else _to_fp8)(matrix_OI)
        self.values[expert], self.scales[expert] = values, scales
        return torch.equal(self[expert].to(torch.float32), matrix_IO.to(self.values.device, torch.float32))


def _to_mxfp4(matrix_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Encode each block with the smallest exponent e for which its largest element is at most 6 * 2^e: 6 is the largest FP4 number."""
    groups = matrix_OI.unflatten(-1, (-1, MXFP4_BLOCK))
    significand, exponent = torch.frexp(groups.abs().amax(-1))  # largest element = significand * 2 ** exponent; significand: 1/2 to 1
    scales = (exponent - torch.where(significand <= 0.75, 3, 2) + 127).clamp(0, 254)
    units = torch.ldexp(groups, (127 - scales)[..., None])
    bits = torch.bucketize(units.abs().contiguous(), torch.tensor(FP4, device=units.device)).clamp(max=len(FP4) - 1) + 8 * units.signbit()
    low, high = bits.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4, scales.to(torch.uint8)


def _to_fp8(matrix_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Encode values that were decoded from fp8, without loss, although their factors are not known. A few blocks at a time are encoded, so
    that a processor's cache holds them."""
    rows, columns = matrix_OI.shape
    padded = F.pad(matrix_OI, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    down, across = len(padded) // FP8_BLOCK, padded.shape[1] // FP8_BLOCK
    block_NS = padded.unflatten(1, (across, FP8_BLOCK)).unflatten(0, (down, FP8_BLOCK)).transpose(1, 2).flatten(2).flatten(0, 1)
    found = [_blocks_to_fp8(part_NS) for part_NS in block_NS.split(_AT_ONCE)]
    value_NS, factor_N = (torch.cat(parts) for parts in zip(*found, strict=True))
    values = value_NS.unflatten(0, (down, across)).unflatten(2, (FP8_BLOCK, FP8_BLOCK)).transpose(1, 2).flatten(2).flatten(0, 1)
    return values[:rows, :columns].view(torch.float8_e4m3fn), factor_N.view(down, across)


def _blocks_to_fp8(block_NS: Tensor) -> tuple[Tensor, Tensor]:
    """Return (fp8 values as uint8, factor) of each block. Each number in _LARGEST is tried as the fp8 value of the block's largest element.
    Almost always a sample of the elements determines the factor; if not, all elements do."""
    value_NS, factor_N = torch.zeros_like(block_NS, dtype=torch.uint8), torch.ones(len(block_NS), device=block_NS.device)
    left = block_NS.any(1).nonzero().flatten()  # indices of blocks whose factor is not yet known
    for every in (_SAMPLE, 1):
        for largest in _LARGEST:
            if len(left):
                values, factors, exact = _fitted(block_NS[left], largest, every)
                value_NS[left[exact]], factor_N[left[exact]] = values[exact], factors[exact]
                left = left[~exact]
    return value_NS, factor_N


def _fitted(block_NS: Tensor, largest: int, every: int) -> tuple[Tensor, Tensor, Tensor]:
    """Try to encode each block without loss, with `largest` as the fp8 value of its largest element. This determines the fp8 values of all
    elements. Every `every`-th element then gives a lower and an upper bound of the factor. Return for each block (fp8 values as uint8,
    factor, whether they decode to exactly this block)."""
    scale_N1 = (largest / block_NS.abs().amax(1)).unsqueeze(1)

    def exact(value_NS: Tensor, factor_N: Tensor, block_NS: Tensor) -> Tensor:
        return ((value_NS * factor_N.unsqueeze(1)).to(torch.bfloat16).float() == block_NS).all(1)

    some_NS = block_NS[:, ::every]
    value_NS = (some_NS * scale_N1).to(torch.float8_e4m3fn).float()
    factor_N, fits_N = torch.ones_like(scale_N1[:, 0]), torch.zeros(len(block_NS), dtype=torch.bool, device=block_NS.device)
    for candidate_N in _factors(some_NS.abs(), value_NS.abs()):
        factor_N = torch.where(fits_N, factor_N, candidate_N)
        fits_N |= exact(value_NS, candidate_N, some_NS)
    if not fits_N.any():
        return torch.zeros_like(block_NS, dtype=torch.uint8), factor_N, fits_N
    values = (block_NS * scale_N1).to(torch.float8_e4m3fn)
    return values.view(torch.uint8), factor_N, exact(values.float(), factor_N, block_NS)


def _factors(block_NS: Tensor, value_NS: Tensor) -> tuple[Tensor, ...]:
    """Return candidates for each block's factor: the middle of the interval that its bf16 elements allow, and the fp32 numbers just
    below and above it. Both arguments are magnitudes."""
    bits = block_NS.view(torch.int32)
    half = (bits & 0x7F800000).view(torch.float32) * 2.0**-8  # half of the distance to the next number in bf16
    below = torch.where(bits & 0x7FFFFF == 0, half / 2, half)
    least = ((block_NS - below) / value_NS).masked_fill_(value_NS == 0, 0.0).amax(1)
    middle = (least + ((block_NS + half) / value_NS).nan_to_num_(torch.inf).amin(1)) / 2
    return middle, middle.nextafter(torch.zeros_like(middle)), middle.nextafter(torch.full_like(middle, torch.inf))
