"""The matrices of a model that K-FAC handles, and the hooks through which it sees their rows.

    plain linears   attention's four, feed-forward networks, shared and residual experts: a hook on each module
    experts         each expert's matrices on the rows routed to it: in a step that updates factors, its network runs matrix by
                    matrix instead of fused, so that inputs and gradients of each matrix can be seen

Embedding, vocabulary projection, router, gates and norms take AdamW's steps. q, k and v read the same rows, as do w1 and w3: they share
a factor of inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe.experts.experts import MATRICES, Experts
from moe.kernels import Plan
from moe.kernels.activation import activate
from moe.nn.linear import Linear as Plain
from parallel.kfac.kfac import Kfac, Linear, Settings
from parallel.mesh.gradients import sum_gradients, sum_over_holders
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Mesh

if TYPE_CHECKING:
    from moe.recipe.sections import Swiglu

# R rows, D model, F hidden, E experts held, T tokens, K choices

_READS_WHAT = {"k": "q", "v": "q", "w3": "w1"}  # a matrix, and the first matrix that reads the same input rows
_GATES = ("shared_gate", "coefficient")  # with one or two outputs a token, in fp32


def watched(model: nn.Module, layouts: dict[str, Layout], mesh: Mesh, *, settings: Settings, experts: bool) -> Kfac:
    """Return K-FAC over the model's linears, with hooks that report inputs and gradients to it. `experts`: hook the experts' matrices,
    too.
    """
    linears: dict[str, Linear] = {}
    plain: list[tuple[str, Plain]] = []
    stacks: list[tuple[str, Experts]] = []

    def add(name: str, weight: nn.Parameter, inputs: str) -> None:
        linears[name] = Linear(name, weight, layouts[name], inputs)

    for path, module in model.named_modules():
        stem, _, last = path.rpartition(".")
        if isinstance(module, Plain) and last not in _GATES:
            add(f"{path}.weight", module.weight, f"{stem}.{_READS_WHAT.get(last, last)}.weight".removeprefix("."))
            plain.append((f"{path}.weight", module))
        elif isinstance(module, Experts) and experts and module.num_tiles == 1:
            for name in MATRICES if module.w3 is not None else MATRICES[:2]:
                weight = getattr(module, name)
                add(f"{path}.{name}", weight, f"{path}.{_READS_WHAT.get(name, name)}")
            stacks.append((path, module))
    kfac = Kfac(linears, settings, partial(_total, mesh=mesh), partial(_place, mesh=mesh))
    for name, module in plain:
        module.register_forward_hook(_hook(kfac, name))
    for path, module in stacks:
        module.kernels = Seen(module.kernels, kfac, path)  # type: ignore[assignment]
    return kfac


def _total(sums: dict[str, Tensor], layouts: dict[str, Layout], *, mesh: Mesh) -> None:
    """Sum over the ranks that saw other tokens, then over pipeline ranks that hold the same stage, in the same order on every rank."""
    sum_gradients(sums, layouts, mesh)
    sum_over_holders(sums, layouts, mesh)


def _place(layout: Layout, *, mesh: Mesh) -> tuple[int, int]:
    """Return this rank's index among the ranks that `_total` sums over, and their number."""
    place, count = 0, 1
    for axis in map(mesh.axis, layout.summed_over()):
        place, count = place * axis.size + axis.index, count * axis.size
    if layout.holders:
        place, count = place * len(layout.holders) + layout.holders.index(mesh.axis("pp").index), count * len(layout.holders)
    return place, count


def _hook(kfac: Kfac, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    return lambda _, inputs, output: kfac.watch(name, inputs[0], output)


class Seen:
    """Kernels with expert networks that report to K-FAC; everything else is delegated to `kernels`."""

    def __init__(self, kernels: ModuleType, kfac: Kfac, path: str) -> None:
        self.kernels, self.kfac, self.path = kernels, kfac, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)

    @property
    def _looks(self) -> bool:
        """True if this forward pass is recorded. Recomputation gets the same answer, since both passes must do the same operations."""
        return self.kfac.records and torch.is_grad_enabled()

    def grouped_ffn(
        self,
        rows_RD: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor | None,
        *,
        counts: list[int],
        ffn: str,
        dropped_RF: Tensor | None = None,
        b1: Tensor | None = None,
        b3: Tensor | None = None,
        swiglu: Swiglu | None = None,
    ) -> Tensor:
        if not self._looks:
            form: dict[str, Any] = {"ffn": ffn, "dropped_RF": dropped_RF, "b1": b1, "b3": b3, "swiglu": swiglu}
            out: Tensor = self.kernels.grouped_ffn(rows_RD, w1, w2, w3, counts=counts, **form)
            return out
        gate_RF = None if w3 is None else self._times("w3", rows_RD, w3, counts, b3)
        hidden_RF = activate(self._times("w1", rows_RD, w1, counts, b1), gate_RF, ffn, swiglu)
        if dropped_RF is not None:
            hidden_RF = hidden_RF * dropped_RF
        return self._times("w2", hidden_RF, w2, counts)

    def routed_ffn(
        self,
        x_TD: Tensor,
        gate_TK: Tensor,
        plan: Plan,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor | None,
        **form: Any,
    ) -> Tensor:
        if not self._looks:
            out: Tensor = self.kernels.routed_ffn(x_TD, gate_TK, plan, w1, w2, w3, **form)
            return out
        counts: list[int] = plan.counts_E.tolist()
        rows_RD = self.grouped_ffn(self.kernels.permute(x_TD, plan), w1, w2, w3, counts=counts, **form)
        combined: Tensor = self.kernels.combine(rows_RD, gate_TK, plan)
        return combined

    def _times(self, name: str, rows: Tensor, weight_EIO: Tensor, counts: list[int], bias_EO: Tensor | None = None) -> Tensor:
        parts = [part @ weight.to(rows.dtype) for part, weight in zip(rows.split(counts), weight_EIO, strict=True)]
        out = torch.cat(parts)
        self.kfac.watch(f"{self.path}.{name}", rows, out, counts)
        if bias_EO is None:
            return out
        return out + bias_EO.to(out.dtype).repeat_interleave(torch.tensor(counts, device=out.device), dim=0)
