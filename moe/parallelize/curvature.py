"""Finds the matrices of a model that K-FAC updates, and sets the hooks that give K-FAC their input rows and output gradients.

    plain linears   q, k, v, out of attention and cross attention; feed-forward, shared and residual networks: a hook on each module
    experts         each expert's matrices, with the rows routed to that expert; steps that update K-FAC's factors do not fuse products

AdamW updates embedding, vocabulary projection, router, gates and norms.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe.experts.experts import MATRICES, Experts
from moe.kernels.network import ByProduct
from moe.nn.linear import Linear as Plain
from parallel.kfac.kfac import Kfac, Linear, Settings
from parallel.mesh.gradients import sum_gradients, sum_over_holders
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Mesh

# R rows, E experts of this rank, I and O sizes of a matrix (in, out)

_READS_WHAT = {"k": "q", "v": "q", "w3": "w1"}  # matrix -> the first matrix with the same input rows
_CROSS_READS = {"v": "k"}  # for cross attention, in which k and v read the encoder's output
_GATES = ("shared_gate", "coefficient")  # linears with one or two outputs a token, in fp32, which K-FAC leaves to AdamW


def watched(model: nn.Module, layouts: dict[str, Layout], mesh: Mesh, *, settings: Settings, experts: bool) -> Kfac:
    """Return a Kfac for the trained linears, and set hooks that give it their inputs and gradients. `experts`: also for experts'
    matrices."""
    linears: dict[str, Linear] = {}
    plain: list[tuple[str, Plain]] = []
    stacks: list[tuple[str, Experts]] = []

    def add(name: str, weight: nn.Parameter, inputs: str) -> None:
        linears[name] = Linear(name, weight, layouts[name], inputs)

    for path, module in model.named_modules():
        stem, _, last = path.rpartition(".")
        if isinstance(module, Plain) and last not in _GATES and module.weight.requires_grad:
            reads = _CROSS_READS if stem.endswith(".cross") else _READS_WHAT
            add(f"{path}.weight", module.weight, f"{stem}.{reads.get(last, last)}.weight".removeprefix("."))
            plain.append((f"{path}.weight", module))
        elif isinstance(module, Experts) and experts and module.num_tiles == 1 and module.w1.requires_grad:
            for name in MATRICES if module.w3 is not None else MATRICES[:2]:
                weight = getattr(module, name)
                add(f"{path}.{name}", weight, f"{path}.{_READS_WHAT.get(name, name)}")
            stacks.append((path, module))
    kfac = Kfac(linears, settings, partial(_total, mesh=mesh), partial(_place, mesh=mesh))
    for name, module in plain:
        module.register_forward_hook(_hook(kfac, name))
    for path, module in stacks:
        module.kernels = Seen(module, kfac, path)
    return kfac


def _total(sums: dict[str, Tensor], layouts: dict[str, Layout], *, mesh: Mesh) -> None:
    """All-reduce K-FAC's factors or inverses over the ranks with other tokens, then over the pipeline ranks that hold the same stage."""
    sum_gradients(sums, layouts, mesh)
    sum_over_holders(sums, layouts, mesh)


def _place(layout: Layout, *, mesh: Mesh) -> tuple[int, int]:
    """Return (index of this rank among the ranks over which `_total` sums, their number)."""
    place, count = 0, 1
    for axis in map(mesh.axis, layout.summed_over()):
        place, count = place * axis.size + axis.index, count * axis.size
    if layout.holders:
        place, count = place * len(layout.holders) + layout.holders.index(mesh.axis("pp").index), count * len(layout.holders)
    return place, count


def _hook(kfac: Kfac, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    return lambda _, inputs, output: kfac.watch(name, inputs[0], output)


class Seen(ByProduct):
    """Kernels that give K-FAC the input and output of each matrix product of the experts. In passes that K-FAC records, products are not
    fused."""

    def __init__(self, experts: Experts, kfac: Kfac, path: str) -> None:
        def times(name: str, rows: Tensor, weight_EIO: Tensor, counts: list[int]) -> Tensor:
            out = experts.products.product(rows, weight_EIO, counts)
            kfac.watch(f"{path}.{name}", rows, out, counts)
            return out

        super().__init__(experts.kernels, times)
        self.kfac = kfac

    @property
    def _looks(self) -> bool:
        """Whether K-FAC records this forward pass. With activation recomputation, the second run of the pass gets the same value, because
        it must repeat the same operations."""
        return self.kfac.records and torch.is_grad_enabled()

    def grouped_ffn(self, *given: Any, **named: Any) -> Tensor:
        out: Tensor = (super().grouped_ffn if self._looks else self.kernels.grouped_ffn)(*given, **named)
        return out

    def routed_ffn(self, *given: Any, **named: Any) -> Tensor:
        out: Tensor = (super().routed_ffn if self._looks else self.kernels.routed_ffn)(*given, **named)
        return out
