"""The interface between the trainer and every kind of data parallelism (an engine).

    loss of a micro-batch  --backward-->  gradients accumulate; after the last micro-batch they are summed over ranks with copies
    owned_gradients()      --clip----->   step(lr, factor=...), or drop_gradients() if the step is skipped

Each rank's loss is its share of the global mean, so gradients are summed, never averaged. An expert gets tokens of its whole ep group. Its
gradient needs no correction factor, because summed gradients do not depend on ep.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from parallel.data.whole import Whole
from parallel.mesh.layout import Box, Layouts
from parallel.numerics.weight_gradient import PendingGradients
from parallel.watch.audit import Held

MOMENTS = ("exp_avg", "exp_avg_sq")  # optimizer states of AdamW
# (parameter, "weight" or name of an optimizer state, box: a slice for each dim of this rank's tensor- or expert-parallel shard) -> values
Load = Callable[[str, str, Box], Tensor]
Working = Callable[[str], torch.dtype]  # parameter name -> the dtype in which the model reads it
StateDims = Mapping[str, int | None]  # optimizer state -> dim of the parameter that it is averaged over (Adafactor); None: not averaged


class Rule(ABC):
    """An optimizer's settings. `build` makes torch's optimizer from them. `decays(name, parameter)`: whether the parameter has weight
    decay."""

    weight_decay: float
    decays: Callable[[str, Tensor], bool]

    def kept(self, name: str, num_dims: int) -> StateDims:
        """Return the optimizer states that checkpoints store for parameter `name`, which has num_dims dims: state's name -> the parameter's
        dim over which the state is averaged, as in Adafactor; None: the state has the parameter's shape."""
        return dict.fromkeys(MOMENTS)

    @abstractmethod
    def build(self, groups: list[dict[str, Any]], wholes: Mapping[int, Whole] | None = None) -> torch.optim.Optimizer:
        """Make torch's optimizer. `wholes`: id(parameter) -> how to gather its matrices, for parameters of which other ranks hold copies or
        shards."""

    def groups(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        """Return torch's parameter groups: one with weight decay, one without. Frozen parameters and empty groups are left out. A pipeline
        stage without trained weights gets one empty group, because torch needs a group."""
        parts: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in (pair for pair in parameters if pair[1].requires_grad):
            parts[self.decays(name, parameter)].append(parameter)
        if not any(parts.values()):
            return [{"params": [], "weight_decay": 0.0}]
        return [{"params": held, "weight_decay": self.weight_decay if decays else 0.0} for decays, held in parts.items() if held]


@dataclass(frozen=True)
class AdamW(Rule):
    """AdamW: decoupled weight decay (arXiv 1711.05101). `make`: torch's class or a class with the same interface."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decays: Callable[[str, Tensor], bool]
    make: Callable[..., torch.optim.AdamW] = torch.optim.AdamW

    def build(self, groups: list[dict[str, Any]], wholes: Mapping[int, Whole] | None = None) -> torch.optim.AdamW:
        return self.make(groups, lr=0.0, betas=self.betas, eps=self.eps, fused=True)


class Engine(Protocol):
    """The interface of all data-parallel engines: DDP, DP, FSDP, ZeRO. module: the model. layouts: parameter name -> its layout. rule: the
    optimizer's settings.

    Without pipeline stages, the trainer calls `backward` for each micro-batch. With pipeline stages, it calls `backward_from` for each
    stage and micro-batch (and `deferred`, if the schedule splits the backward pass), may call `expect_sums` before and `start_sums` after a
    stage's last micro-batch, and calls `reduce` after the batch."""

    module: nn.Module
    layouts: Layouts
    rule: Rule

    def forward(self, *args: Any, last: bool) -> Any:
        """Run the model's forward pass in training. last: this is the batch's last micro-batch. Evaluation calls `module` directly."""

    def backward(self, loss: Tensor, *, last: bool) -> None: ...

    def backward_from(self, output: GradientEdge, gradient: Tensor | None) -> None:
        """Run the backward pass of one stage and micro-batch. `gradient`: the gradient of `output`; None if `output` is the loss."""

    def deferred(self, pending: PendingGradients) -> None:
        """Compute the weight gradients that a `backward_from` inside `defer_gradients` deferred."""

    def expect_sums(self, names: Sequence[str]) -> None:
        """Declare that the next backward pass completes these parameters' gradients, so that their sums may start during it."""

    def start_sums(self, names: Sequence[str]) -> None:
        """Start the sums of these parameters' complete gradients now instead of in `reduce`. Does nothing in some engines. Collective."""

    def reduce(self) -> None:
        """Sum each parameter's accumulated gradient over the ranks that hold copies of it. Call this once a batch, after the last backward
        pass."""

    def owned_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (family, such as "expert"; summed gradient) for the gradients that this rank owns, to compute norms. Exactly one rank owns
        each element."""

    def tensors(self) -> Iterator[Held]:
        """Yield this rank's weights and optimizer states that are not on a disk. Ranks with equal copies yield them in the same order."""

    def summed_gradients(self) -> Iterator[Held]:
        """Yield this rank's summed gradients, which exist until `step`. Ranks with equal copies yield them in the same order."""

    def copy_again(self) -> bool:
        """Copy the optimizer's master weights to the model's weights. Return False if nothing is copied, as when both are the same tensors.
        Collective."""

    def step(self, lr: float, *, factor: float = 1.0) -> None:
        """Make one optimizer step with the gradients times `factor`, and drop the gradients."""

    def drop_gradients(self) -> None: ...

    def gradient(self, name: str) -> Tensor:
        """Return the summed gradient of this rank's tensor- or expert-parallel shard of a parameter, gathered from its FSDP or ZeRO shards.
        Collective."""

    def state(self, name: str) -> dict[str, Tensor]:
        """Return the master weight (key "weight") and the optimizer states (by name) of this rank's tensor- or expert-parallel shard of a
        parameter, gathered from its FSDP or ZeRO shards. Collective."""

    def load_state(self, names: Iterable[str], load: Load, *, steps: int) -> None:
        """Load weights and optimizer states of these parameters, and set the optimizer's step counter to `steps`. Collective.

        `load` is called for one box after another, only for elements that this rank keeps (load.py)."""


class OfStages(ABC):
    """Base class of engines. Its methods for pipeline stages start no sum of gradients before `reduce`. Engines that start sums earlier
    override them."""

    def backward_from(self, output: GradientEdge, gradient: Tensor | None) -> None:
        torch.autograd.backward(output, gradient)

    def deferred(self, pending: PendingGradients) -> None:
        pending.compute()

    def expect_sums(self, names: Sequence[str]) -> None:
        return

    def start_sums(self, names: Sequence[str]) -> None:
        return

    @abstractmethod
    def reduce(self) -> None: ...
