"""The device that the kernels run on, and their tile sizes.

Tile sizes follow from shape, dtype and device by a fixed rule, never from timing, so two runs and two ranks give the same bits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from parallel.errors import BadInput
from parallel.fixes import Set

INTERPRETED = bool(triton.knobs.runtime.interpret)  # True: Triton's interpreter runs the kernels, without a GPU
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNED = 16  # widths of operands are padded to multiples of this number: rows of other widths are loaded element by element
_SPARE_BYTES = 8192  # shared memory left for the compiler's own use


def on(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which the tensor's GPU is current, so that Triton launches there. Raise BadInput for a tensor that is not on a
    GPU."""
    if INTERPRETED:
        return nullcontext()
    if not tensor.is_cuda:
        raise BadInput("experts.kernels", got=f"triton for a tensor on {tensor.device}", needed="tensors on a GPU", fix=Set("it", "auto"))
    return torch.cuda.device(tensor.device)


def check_dtype(tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES:
        fix = Set("it", "auto", "reference")
        raise BadInput("experts.kernels", got=f"triton for {tensor.dtype}", needed="float32, bfloat16 or float16", fix=fix)


@dataclass(frozen=True)
class Tile:
    """Tile [m, n] of a product's result, summed in steps of `k` by `warps` warps of 32 threads, with loads pipelined `stages` deep. For
    each column tile, `group` row tiles are computed one after another, so that the loaded columns stay in the L2 cache.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8

    @property
    def launch(self) -> dict[str, int]:
        return {"BLOCK_M": self.m, "BLOCK_N": self.n, "BLOCK_K": self.k, "num_warps": self.warps, "num_stages": self.stages}


def most_rows(dtype: torch.dtype) -> int:
    """Return the largest number of rows of a tile."""
    return 32 if INTERPRETED else 64 if dtype == torch.float32 else 128


def rows_each(rows: int, num_experts: int, dtype: torch.dtype) -> int:
    """Return the rows per tile. `rows`: of all experts together. Tiles are small if experts have few rows, since half a tile per expert is
    padding on average."""
    return min(64, most_rows(dtype)) if rows <= 256 * num_experts else most_rows(dtype)


def tile(m: int, dtype: torch.dtype, device: torch.device, *, products: int, epilogue: bool) -> Tile:
    """Return the tile for `m` rows. `products`: number of weights by which each loaded tile of rows is multiplied. `epilogue`: whether the
    kernel changes the sums before it stores them."""
    if INTERPRETED:
        return Tile(m, 32, 32, warps=4, stages=1)
    if dtype == torch.float32:  # no tensor cores: sums are exact fp32, as everywhere in this project
        n, k, warps = 64, 32, 4
    else:
        # with so much shared memory (from Hopper on), products read both operands from it: registers have room for twice the accumulators
        room = 2 if _shared_bytes(device) > 200 * 1024 else 1
        n = min(128 if epilogue else 256, 128 * room // products)
        k, warps = 64, 8 if m * n * products > 64 * 128 else 4
    each = (m + n * products) * k * dtype.itemsize
    return Tile(m, n, k, warps, stages=max(1, min(4, (_shared_bytes(device) - _SPARE_BYTES) // each)))


def held_tiles(t: Tile, height: int, width: int, rows: int, *, like: Tensor) -> tuple[int, bool]:
    """Return (group, across): the order of tiles (gemm.py, `placed`) in a weight gradient left^T right [height, width].

    A group is `group` tile rows, or tile columns if `across` (width < height). It reads the whole wider operand, but only some columns of
    the narrower one. These stay in the L2 cache if they fit. `rows`: mean rows of an expert. `like`: an operand, for dtype and device.
    """
    # a third: two copies, because each half of the cache may keep its own, and as much again for the wider operand
    room = _l2_bytes(like.device) // 3
    across = width < height
    size, side = (width, t.n) if across else (height, t.m)
    tiles, most = triton.cdiv(size, side), room // (side * max(rows, 1) * like.dtype.itemsize)
    return int(triton.cdiv(tiles, triton.cdiv(tiles, max(2 * t.group * t.m // side, most)))), across


def _l2_bytes(device: torch.device) -> int:
    return 0 if INTERPRETED else int(torch.cuda.get_device_properties(device).L2_cache_size)


def multiprocessors(device: torch.device) -> int:
    return 3 if INTERPRETED else int(torch.cuda.get_device_properties(device).multi_processor_count)


def _shared_bytes(device: torch.device) -> int:
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 64 * 1024))  # AMD has no such property


def torch_groups(device: torch.device) -> bool:
    """Return whether torch's grouped product is one kernel, which it is for compute capability 9 and 10. On other GPUs it is a loop over
    experts, for which the host waits until it knows their numbers of rows."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)


def has_tma(device: torch.device) -> bool:
    return INTERPRETED or (torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0))
