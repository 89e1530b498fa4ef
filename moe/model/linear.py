"""The plain layers, with precision explicit: a weight lives in the master dtype and is cast where it is used."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.context import Context
from moe.kernels.activation import GATED, activate

# B batch, L length, D model, F hidden


class Linear(nn.Module):
    """x W^T in x's dtype; `weight` [out, in], no bias."""

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467) or LayerNorm with a gain and no bias; statistics in fp32, x's dtype back."""

    def __init__(self, size: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        gain = self.weight.float()
        if self.kind == "layernorm":
            return F.layer_norm(x.float(), gain.shape, gain, eps=1e-5).to(x.dtype)
        return F.rms_norm(x.float(), gain.shape, gain, eps=1e-6).to(x.dtype)


class FeedForward(nn.Module):
    """The dense network between attentions: activation(x W1) [* x W3] W2."""

    def __init__(self, d_model: int, d_ff: int, ffn: str) -> None:
        super().__init__()
        self.ffn = ffn
        self.w1 = Linear(d_model, d_ff)
        self.w2 = Linear(d_ff, d_model)
        self.w3 = Linear(d_model, d_ff) if ffn in GATED else None

    def forward(self, x_BLD: Tensor) -> Tensor:
        gate = self.w3(x_BLD) if self.w3 is not None else None
        return self.w2(activate(self.w1(x_BLD), gate, self.ffn))  # type: ignore[no-any-return]


def drop(x_BLD: Tensor, p: float, *, name: str, context: Context) -> Tensor:
    """Dropout keyed by token: the same elements on every layout."""
    return x_BLD * context.dropout_scale(name, x_BLD.shape[-1], p).view_as(x_BLD).to(x_BLD.dtype)
