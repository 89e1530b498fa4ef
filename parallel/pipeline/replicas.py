"""Sums gradients of parameters that several ranks of a pipeline hold: Chimera's replicas of a stage, and a tied embedding.

S (Schedule) starts summing a stage's gradients while other actions run. `finish` waits for those sums and does the rest.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.collectives import count
from parallel.layout import Layout
from parallel.mesh import Axis, Mesh


class StageReplicas:
    """This rank's shared parameters. `parameters` and `layouts` by name; `of_stage`: the names that belong to a single stage."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], layouts: dict[str, Layout], mesh: Mesh, *, of_stage: dict[int, list[str]]
    ) -> None:
        self.shared = {name: parameter for name, parameter in parameters.items() if layouts[name].holders}
        self.layouts, self.mesh, self.of_stage = layouts, mesh, of_stage
        self.flying: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
        self.started: set[str] = set()

    def start(self, stage: int) -> None:
        self._start(self.of_stage.get(stage, ()))

    def finish(self) -> None:
        self._start(name for name in self.shared if name not in self.started)
        for work, flat, grads in self.flying:
            work.wait()
            for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view_as(grad))
        self.flying.clear()
        self.started.clear()

    def _start(self, names: Iterable[str]) -> None:
        """Start one flat fp32 sum for all names that the same ranks hold."""
        together: dict[tuple[int, ...], list[str]] = {}
        for name in names:
            if name in self.shared:
                together.setdefault(self.layouts[name].holders, []).append(name)
        for holders, held in together.items():
            axis = self.mesh.part("pp", holders, label="replicas")
            assert axis is not None
            grads = [self._gradient(name) for name in held]
            flat = torch.cat([g.reshape(-1).float() for g in grads])
            count(Axis(axis.name, axis.ranks, axis.index, axis.group, f"the gradients from {held[0]} on"), "all_reduce", flat)
            work = dist.all_reduce(flat, group=axis.group, async_op=True)
            assert work is not None
            self.flying.append((work, flat, grads))
            self.started.update(held)

    def _gradient(self, name: str) -> Tensor:
        parameter = self.shared[name]
        if parameter.grad is None:  # no token reached it here, but the other holders' sum is still needed
            parameter.grad = torch.zeros_like(parameter)
        local: Tensor = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad  # FSDP's local part
        return local
