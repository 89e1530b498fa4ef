"""Runs plain torch modules as pipeline stages on the project's pipeline runtime, so that a step's time and memory can be measured.

Every rank builds the whole model and runs only its own stages. With schedules that update weights before all backward passes have ended
(PipeDream, 2BW), each stage keeps several versions of its weights, as in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from moe.bench.timing import CPU
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Degrees, Mesh
from parallel.numerics.weight_gradient import PendingGradients, gradient_or_later
from parallel.pipeline.links import Links
from parallel.pipeline.runtime import Runtime, StageReplicas
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.schedules import SCHEDULES, make_schedule
from parallel.pipeline.weights import Versions
from parallel.process import process


@dataclass
class Stages:
    """Forward, backward and update functions that one rank's pipeline runtime calls. stages: stage number -> module. inputs: the first
    stage's input for each micro-batch. crossing: shape of the tensors sent between stages. loss(output of the last stage, index of the
    micro-batch): returns the loss. change(module): updates a stage's weights; None: weights are never updated.
    """

    stages: Mapping[int, nn.Module]
    schedule: Schedule
    rank: int
    inputs: Sequence[Tensor]
    crossing: tuple[int, ...]
    loss: Callable[[Tensor, int], Tensor]
    change: Callable[[nn.Module], None] | None = None
    dtype, device = torch.float32, CPU

    def __post_init__(self) -> None:
        order, stages = self.schedule.orders[self.rank], {} if self.change is None else self.stages
        self.versions = {stage: Versions(list(module.parameters()), order, stage) for stage, module in stages.items()}
        self.losses: dict[int, Tensor] = {}

    def shape(self, microbatch: int) -> tuple[int, ...]:
        return self.crossing

    def forward(self, stage: int, microbatch: int, x: Tensor | None) -> Tensor:
        output: Tensor = self.stages[stage](self.inputs[microbatch] if x is None else x)
        if stage < self.schedule.num_stages - 1:
            return output
        loss = self.loss(output, microbatch)
        self.losses[microbatch] = loss.detach()
        return loss

    def backward(self, output: GradientEdge, gradient: Tensor | None) -> None:
        torch.autograd.backward(output, gradient)

    def deferred(self, pending: PendingGradients) -> None:
        pending.compute()

    def reading(self, stage: int, version: int) -> AbstractContextManager[None]:
        return self.versions[stage].reading(version) if stage in self.versions else nullcontext()

    def update(self, stage: int, version: int) -> None:
        if self.change is not None:
            change, module = self.change, self.stages[stage]
            self.versions[stage].update(version, lambda: change(module))


def descend(module: nn.Module) -> None:
    """Update the weights by gradient descent with learning rate 1e-6, which hardly changes the losses, and set gradients to zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=1e-6)
                parameter.grad.zero_()


# --- the stages' modules ------------------------------------------------------------------------------------------------


class Asleep(nn.Module):
    """Linear layer x W. The forward pass and the gradients of x and of W each sleep for `seconds`, as if a device were computing."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.eye(width)), seconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Asleep.apply(x, self.weight, self.seconds)
        return y


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.seconds = weight, seconds
        time.sleep(seconds)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (x,), seconds = ctx.saved_tensors, ctx.seconds

        def of_weight() -> Tensor:
            time.sleep(seconds)
            product: Tensor = x.t() @ grad
            return product

        time.sleep(seconds)
        return grad @ ctx.weight.t(), gradient_or_later(ctx.weight, of_weight), None


# --- the runtime ------------------------------------------------------------------------------------------------------


def schedule_for(name: str, ranks: int, microbatches: int) -> Schedule:
    """Return the schedule `name` for `microbatches` micro-batches. If the pipeline does not drain between updates, there are twice as many,
    because the first batch of 2BW alone would be 1F1B."""
    kind = SCHEDULES[name]
    if not kind.continuous:
        return make_schedule(name, ranks=ranks, microbatches=microbatches)
    each = kind.update_every or microbatches
    return make_schedule(name, ranks=ranks, microbatches=each, batches=2 * microbatches // each)


def connect(rank: int, ranks: int) -> Mesh:
    """Return a mesh with one axis, pp, over all `ranks` ranks. Collective: connects the processes."""
    return process.connect(Degrees(pp=ranks), process.World(rank, ranks))


def runtime_for(schedule: Schedule, mesh: Mesh, stages: Mapping[int, nn.Module]) -> Runtime:
    """Return this rank's pipeline runtime. stages: stage number -> module, for the stages of all ranks. Collective: makes process
    groups."""
    axis = mesh.axis("pp")
    for homes in sorted({homes for homes in schedule.homes if len(homes) > 1}):
        mesh.part("pp", homes, label="replicas")
    down = mesh.part("pp", tuple(range(axis.size)), label="down")
    assert down is not None
    return Runtime(schedule, axis, Links(axis, down), _replicas(schedule, mesh, stages))


def _replicas(schedule: Schedule, mesh: Mesh, stages: Mapping[int, nn.Module]) -> StageReplicas:
    parameters: dict[str, nn.Parameter] = {}
    layouts: dict[str, Layout] = {}
    of_stage: dict[int, list[str]] = {}
    for stage in schedule.stages_of(mesh.axis("pp").index):
        held, homes = {f"{stage}.{name}": p for name, p in stages[stage].named_parameters()}, schedule.homes[stage]
        layouts |= {name: Layout(tuple(p.shape), holders=homes if len(homes) > 1 else ()) for name, p in held.items()}
        of_stage[stage] = list(held)
        parameters |= held
    return StageReplicas(parameters, layouts, mesh, of_stage=of_stage)
