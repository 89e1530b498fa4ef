"""Chooses one of torch's fused attention kernels for a block of queries and keys, by device, dtype and channels of a head.

    device    dtype         kernel                                                channels of a head
    CPU       any           _scaled_dot_product_flash_attention_for_cpu           any
    CUDA      fp16, bf16    _scaled_dot_product_flash_attention, from sm_80       up to 192, 225 to 256
    otherwise               none: plain operations (softmax.py)

Keys and values may have fewer heads than queries. The backward kernels take the output and log-sum-exp of all blocks, merged.
If flash attention supports a case, torch's scaled_dot_product_attention chooses it too. In other cases torch would try its memory-efficient
kernel. This file does not, because that kernel pads log-sum-exps, and needs outputs in another memory order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

# B batch, L queries, S keys, H heads of queries, K heads of keys and values, C channels of a head

_aten = torch.ops.aten


class Fused(NamedTuple):
    """A fused attention kernel. forward: (q, k, v, causal) -> (out, log-sum-exp [B, H, L]). backward: (gradient of out, q, k, v, out,
    log-sum-exp, causal) -> gradients of q, k and v. causal: query i sees the first i + 1 keys."""

    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]


def kernel_for(q_BHLC: Tensor) -> Fused | None:
    """Return the kernel for queries of this device, dtype and shape; None if torch has none."""
    return CPU if q_BHLC.device.type == "cpu" else FLASH if flash_takes(q_BHLC) else None


def flash_takes(q_BHLC: Tensor) -> bool:
    """Return whether flash attention supports these queries on a GPU. 193 to 224 channels are refused, because only some GPUs have a
    backward kernel for them."""
    channels = q_BHLC.shape[-1]
    if q_BHLC.device.type != "cuda" or q_BHLC.dtype not in (torch.float16, torch.bfloat16) or 192 < channels <= 224 or channels > 256:
        return False
    return torch.cuda.get_device_capability(q_BHLC.device) >= (8, 0)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_BHL: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # the backward kernel expects log-sum-exps in the memory layout in which the forward kernel returns them
    lse = rearrange(rearrange(lse_BHL, "b h l -> b l h").contiguous(), "b l h -> b h l")
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    return dq, dk, dv


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    scale, (wide_q, wide_k, wide_v) = q.shape[-1] ** -0.5, map(_padded, (q, k, v))
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(wide_q, wide_k, wide_v, 0.0, causal, scale=scale)
    return out[..., : q.shape[-1]], lse


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    # `unread` is passed in place of dropout's random state; dropout is off, so the kernel does not read it
    channels, lengths, unread = q.shape[-1], (q.shape[2], k.shape[2]), q.new_empty(2, dtype=torch.uint64)
    given = (*map(_padded, (grad, q, k, v, out)), lse.contiguous(), None, None, *lengths, 0.0, causal, unread, unread)
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(*given, scale=channels**-0.5)
    return dq[..., :channels], dk[..., :channels], dv[..., :channels]


def _padded(x: Tensor) -> Tensor:
    """Return x with zeros up to a multiple of 8 channels, which the kernel requires."""
    return F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x


CPU = Fused(_cpu_forward, _cpu_backward)
FLASH = Fused(_flash_forward, _flash_backward)
