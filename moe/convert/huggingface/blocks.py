"""Reads quantized tensors of published files as bf16. moe/nn/blocks.py has the formats and decodes them.

    MXFP4 (GPT-OSS)     key_blocks uint8 [E, N, G, 16] and key_scales uint8 [E, N, G]: E experts, N outputs, G groups of 32 inputs. The
                        tensor `key` is read as bf16 [E, 32 G, N], as transformers stores it
    FP8 (DeepSeek-V3)   key fp8 e4m3 [rows, columns] and key_scale_inv fp32 [ceil(rows / m), ceil(columns / n)]: one factor for each
                        block of m x n elements

`quantization_config` in config.json names the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe.nn.blocks import of_fp8, of_mxfp4
from moe.recipe.shapes import MXFP4_BLOCK
from parallel.errors import BadInput
from parallel.mesh.layout import Box
from parallel.store.stored import TensorFile

_BLOCKS, _SCALES, _FACTORS = "_blocks", "_scales", "_scale_inv"
_AS_BF16 = "save the model in bf16 with transformers: from_pretrained(PATH, dtype=torch.bfloat16), save_pretrained(NEW)"


@dataclass(frozen=True)
class Plain:
    """A tensor that is not quantized, or the raw values of one that is."""

    file: TensorFile
    key: str

    @property
    def dtype(self) -> torch.dtype:
        return self.file.places[self.key].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.places[self.key].shape

    def read(self, box: Box) -> Tensor:
        """Return a region of the tensor. `box`: a slice for each dim."""
        return self.file.read(self.key, box)


@dataclass(frozen=True)
class Mxfp4:
    """A stack of experts' matrices in MXFP4, which is read as bf16 [E, in, out]."""

    blocks: Plain
    scales: Plain
    dtype = torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        experts, out, groups, _ = self.blocks.shape
        return experts, groups * MXFP4_BLOCK, out

    def read(self, box: Box) -> Tensor:
        """Return a region of the stack. Reads only the blocks that overlap it. `box`: a slice for each of E, in and out."""
        experts, rows, columns = box
        groups = slice(rows.start // MXFP4_BLOCK, -(-rows.stop // MXFP4_BLOCK))
        packed = self.blocks.read((experts, columns, groups, slice(0, MXFP4_BLOCK // 2)))
        decoded = of_mxfp4(packed, self.scales.read((experts, columns, groups)))
        first = groups.start * MXFP4_BLOCK
        return decoded[:, :, rows.start - first : rows.stop - first].transpose(1, 2)


@dataclass(frozen=True)
class Fp8:
    """A matrix in fp8, which is read as bf16. It has a factor for each block of elements; size: rows and columns of a block."""

    values: Plain
    factors: Plain
    size: tuple[int, int]
    dtype = torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read(self, box: Box) -> Tensor:
        """Return a region of the matrix. `box`: a slice of its rows and a slice of its columns."""
        over = [slice(part.start // size, -(-part.stop // size)) for part, size in zip(box, self.size, strict=True)]
        skip = tuple(part.start % size for part, size in zip(box, self.size, strict=True))
        return of_fp8(self.values.read(box), self.factors.read(tuple(over)).to(torch.float32), self.size, skip)


Stored = Plain | Mxfp4 | Fp8


def decoded(tensors: Mapping[str, Plain], quantization: Any) -> dict[str, Stored]:
    """Return key -> tensor; a pair of values and scales becomes one tensor. `quantization`: quantization_config of config.json, or None.
    Raises BadInput for an unknown format, and for a tensor without scales, or with scales of another shape."""
    if quantization is None:
        fp8 = next((key for key, tensor in tensors.items() if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point), None)
        if fp8 is not None:
            raise BadInput(
                f"tensor {fp8}", got="fp8", needed="quantization_config in config.json, with the size of its blocks", fix=_AS_BF16
            )
        return dict(tensors)
    given = quantization if isinstance(quantization, Mapping) else {}
    method, size = given.get("quant_method"), given.get("weight_block_size")
    if method == "mxfp4":
        return _decoded_mxfp4(tensors)
    if method == "fp8" and isinstance(size, list | tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        return _decoded_fp8(tensors, (size[0], size[1]))
    got = f"{method}" + (f" with weight_block_size {size}" if method == "fp8" else "") if given else repr(quantization)
    needed = "quant_method mxfp4, or fp8 with weight_block_size [rows, columns]"
    raise BadInput("config.json: quantization_config", got=got, needed=needed, fix=_AS_BF16)


def _decoded_mxfp4(tensors: Mapping[str, Plain]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for key, tensor in tensors.items():
        name = key.removesuffix(_BLOCKS)
        if name != key:
            scales = _scales(tensors, key, name + _SCALES, tensor.shape[:-1])
            if len(tensor.shape) != 4 or tensor.shape[-1] != MXFP4_BLOCK // 2 or {tensor.dtype, scales.dtype} != {torch.uint8}:
                raise _wrong(key, tensor, "bytes of shape [experts, outputs, inputs / 32, 16]")
            found[name] = Mxfp4(tensor, scales)
        elif not (key.endswith(_SCALES) and key.removesuffix(_SCALES) + _BLOCKS in tensors):
            found[key] = tensor
    return found


def _decoded_fp8(tensors: Mapping[str, Plain], size: tuple[int, int]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for key, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            if len(tensor.shape) != 2:
                raise _wrong(key, tensor, "a matrix")
            blocks = tuple(-(-n // block) for n, block in zip(tensor.shape, size, strict=True))
            found[key] = Fp8(tensor, _scales(tensors, key, key + _FACTORS, blocks), size)
        elif not (key.endswith(_FACTORS) and key.removesuffix(_FACTORS) in tensors):
            found[key] = tensor
    return found


def _scales(tensors: Mapping[str, Plain], key: str, name: str, shape: tuple[int, ...]) -> Plain:
    scales = tensors.get(name)
    if scales is None:
        raise BadInput(f"tensor {key}", got=f"no {name}", needed="the scales of its blocks", fix="download all files of the model")
    if scales.shape != shape:
        raise _wrong(name, scales, f"shape {list(shape)}")
    return scales


def _wrong(key: str, tensor: Plain, needed: str) -> BadInput:
    got = f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
    return BadInput(f"tensor {key}", got=got, needed=needed, fix="take the config.json that belongs to the files")
