"""Sums gradients of parameters that several ranks of a pipeline hold: Chimera's replicas of a stage, and a tied embedding.

The action S starts the sum of a stage's gradients, which runs while other actions compute. `finish` waits for these sums and does the
sums that no S started.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from parallel.mesh.gradients import StartedSum, holders, start_sum
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Mesh


class StageReplicas:
    """Sums the gradients of those parameters of this rank that other pipeline ranks hold too (`holders` of their layout).

    parameters, layouts: of this rank, by name. of_stage: stage -> names of its parameters.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], layouts: dict[str, Layout], mesh: Mesh, *, of_stage: dict[int, list[str]]
    ) -> None:
        self.shared = {name: parameter for name, parameter in parameters.items() if layouts[name].holders}
        self.layouts, self.mesh, self.of_stage = layouts, mesh, of_stage
        self.flying: list[StartedSum] = []
        self.started: set[str] = set()

    def start(self, stage: int) -> None:
        self._start(self.of_stage.get(stage, ()))

    def finish(self) -> None:
        self._start(name for name in self.shared if name not in self.started)
        for one in self.flying:
            one.finish()
        self.flying.clear()
        self.started.clear()

    def _start(self, names: Iterable[str]) -> None:
        """Start one sum, over one flat tensor, for all names that the same ranks hold."""
        together: dict[tuple[int, ...], list[str]] = {}
        for name in names:
            if name in self.shared:
                together.setdefault(self.layouts[name].holders, []).append(name)
        for held in together.values():
            axis = holders(self.layouts[held[0]], self.mesh)
            self.flying.append(start_sum([self._gradient(name) for name in held], axis, first=held[0]))
            self.started.update(held)

    def _gradient(self, name: str) -> Tensor:
        parameter = self.shared[name]
        if parameter.grad is None:  # no token reached it on this rank, but every holder must take part in the sum
            parameter.grad = torch.zeros_like(parameter)
        local: Tensor = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad  # FSDP's local part
        return local
