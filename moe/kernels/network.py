"""The feed-forward networks of several experts as one value. Kernels fuse these operations:

    h, g = rows w1 [+ b1], rows w3 [+ b3]        out = activation(h, g) [* dropout's factors] w2

`ByProduct` does not fuse them: it calls a function for each matrix product. It serves products that kernels cannot fuse
(moe/kernels/products.py), LoRA adapters, and K-FAC, which reads each product's input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.kernels.activation import Activation, activate
from moe.kernels.rows import Plan

# T tokens, K choices, R rows, E experts, D model, F hidden, I and O a matrix's inputs and outputs

Matrices = tuple[Tensor, Tensor, Tensor | None]  # w1, w2, w3
Counts = list[int] | Tensor  # number of rows of each expert; a tensor, int64 [E] on the rows' device, if the host need not know the numbers
# (name of the matrices, such as "w1", rows [R, I], matrices [E, I, O], number of rows of each expert) -> rows times their matrices [R, O]
Product = Callable[[str, Tensor, Tensor, list[int]], Tensor]


@dataclass(frozen=True)
class Network:
    """Feed-forward networks of E experts: `w1`, `w3` [E, D, F] and `w2` [E, F, D]; `w3` is None without a gated activation.
    `b1`, `b3` [E, F] are added after w1 and w3. `adapters`: name of a matrix -> its two LoRA matrices; only `ByProduct` reads them.
    """

    w1: Tensor
    w2: Tensor
    w3: Tensor | None
    b1: Tensor | None
    b3: Tensor | None
    activation: Activation
    adapters: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], activation: Activation) -> Network:
        w1, w2, w3, b1, b3 = tensors
        assert w1 is not None and w2 is not None
        return cls(w1, w2, w3, b1, b3, activation)

    def split(self, each: int) -> list[Network]:
        """Split into networks of `each` experts. The chunks of a tensor are views that share an autograd node, which writes their gradients
        into one tensor."""
        count = len(self.w1) // each
        cut = zip(*([None] * count if t is None else t.split(each) for t in self.tensors), strict=True)
        pairs = {name: list(zip(*(t.split(each) for t in pair), strict=True)) for name, pair in self.adapters.items()}
        adapters = ({name: chunks[i] for name, chunks in pairs.items()} for i in range(count))
        return [replace(Network.of(chunk, self.activation), adapters=own) for chunk, own in zip(cut, adapters, strict=True)]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        return self.w1, self.w2, self.w3, self.b1, self.b3

    def recorded(self, *inputs: Tensor | None) -> bool:
        """Return whether autograd records operations on these inputs and the weights, so that a backward pass can follow."""
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*self.tensors, *inputs))

    def compute(
        self, rows_RD: Tensor, multiply: Callable[[str, Tensor, Tensor, Tensor | None], Tensor], *, dropped_RF: Tensor | None
    ) -> Tensor:
        """Return the network's output for rows [R, D]. `multiply(name, rows, matrices, biases)` returns rows W + b of each expert.
        `dropped_RF`: dropout's factors for the hidden units; None: no dropout."""
        gate_RF = None if self.w3 is None else multiply("w3", rows_RD, self.w3, self.b3)
        hidden_RF = activate(multiply("w1", rows_RD, self.w1, self.b1), gate_RF, *self.activation)
        return multiply("w2", hidden_RF if dropped_RF is None else hidden_RF * dropped_RF, self.w2, None)


def aligned_start(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if its start is not a multiple of 16 bytes: a weight may be a view of a flat buffer. Torch's grouped
    product refuses such an address, TMA fails, and other kernels would load two bytes at a time."""
    return tensor if tensor.storage_offset() * tensor.itemsize % 16 == 0 else tensor.clone()


def numbers(counts: Counts) -> list[int]:
    """Return the counts as a list. If they are on a GPU, the host waits for them."""
    return counts if isinstance(counts, list) else counts.tolist()


def of_counted(compute: Callable[..., Tensor], rows_RD: Tensor, network: Network, counts: list[int], dropped_RF: Tensor | None) -> Tensor:
    """Return compute(rows, network, counts, dropped_RF) for the first sum(counts) rows, and zeros for all further rows."""
    further = len(rows_RD) - sum(counts)
    if further:
        rows_RD, dropped_RF = rows_RD[:-further], None if dropped_RF is None else dropped_RF[:-further]
    out_RD = compute(rows_RD, network, counts, dropped_RF)
    return F.pad(out_RD, (0, 0, 0, further)) if further else out_RD


def resized(rows: Tensor, counts: list[int], new: list[int]) -> Tensor:
    """Return the rows with new[e] instead of counts[e] rows of each expert e: zeros are appended, or the last rows left out. rows: sorted
    by expert."""
    return torch.cat([F.pad(part, (0, 0, 0, size - len(part))) for part, size in zip(rows.split(counts), new, strict=True)])


class ByProduct:
    """Kernels with expert networks that call `times` for each matrix product. `kernels`: computes all other operations. `unit`: zeros
    are appended to each expert's rows until their number is a multiple of `unit`, so that products have few shapes."""

    def __init__(self, kernels: ModuleType | ByProduct, times: Product, *, unit: int = 1) -> None:
        self.kernels, self.times, self.unit = kernels, times, unit

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)

    def grouped_ffn(self, rows_RD: Tensor, network: Network, *, counts: Counts, dropped_RF: Tensor | None = None) -> Tensor:
        return of_counted(self._grouped_ffn if self.unit == 1 else self._padded, rows_RD, network, numbers(counts), dropped_RF)

    def _padded(self, rows_RD: Tensor, network: Network, counts: list[int], dropped_RF: Tensor | None) -> Tensor:
        padded = [-(-count // self.unit) * self.unit for count in counts]
        dropped_RF = None if dropped_RF is None else resized(dropped_RF, counts, padded)
        return resized(self._grouped_ffn(resized(rows_RD, counts, padded), network, padded, dropped_RF), padded, counts)

    def _grouped_ffn(self, rows_RD: Tensor, network: Network, counts: list[int], dropped_RF: Tensor | None) -> Tensor:

        def multiply(name: str, rows: Tensor, weight_EIO: Tensor, bias_EO: Tensor | None) -> Tensor:
            out = self.times(name, rows, weight_EIO, counts)
            if bias_EO is None:
                return out
            return out + bias_EO.to(out.dtype).repeat_interleave(torch.tensor(counts, device=out.device), dim=0)

        return network.compute(rows_RD, multiply, dropped_RF=dropped_RF)

    def routed_ffn(self, x_TD: Tensor, gate_TK: Tensor, plan: Plan, network: Network, *, dropped_RF: Tensor | None = None) -> Tensor:
        counts = numbers(plan.counts_E)
        plan = plan.cut(sum(counts))
        dropped_RF = None if dropped_RF is None else dropped_RF[: len(plan.choice_R)]
        rows_RD = self.grouped_ffn(self.permute(x_TD, plan), network, counts=counts, dropped_RF=dropped_RF)
        combined: Tensor = self.combine(rows_RD, gate_TK, plan)
        return combined
