"""What the trainer asks of every kind of data parallelism.

    loss of a micro-batch  --backward-->  gradients accumulate; after the last micro-batch they are summed over all copies
    owned_gradients()      --clip----->   scale_gradients(factor)  -->  step(lr)      or      drop_gradients()

The loss a rank hands in is its share of the global mean, so gradients are summed, never averaged: an expert that has
seen the tokens of its whole ep group needs no correction, and ep never changes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from parallel.audit import Held
from parallel.data.whole import Whole
from parallel.layout import Box, Layout

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's
Load = Callable[[str, str, Box], Tensor]  # (parameter, "weight" or a moment, box of what its layout gives this rank) -> that box
Kept = Mapping[str, int | None]  # what an optimizer keeps of a parameter, by name: None, a tensor of its shape; a dim: a mean over that dim


class Rule(ABC):
    """An optimizer as data: what it does with each parameter, and what it keeps of it. `decays(name, parameter)`: who has weight decay."""

    weight_decay: float
    decays: Callable[[str, Tensor], bool]

    def kept(self, name: str, num_dims: int) -> Kept:
        """The tensors beside a parameter with so many dims, as checkpoints have them."""
        return dict.fromkeys(MOMENTS)

    @abstractmethod
    def build(self, groups: list[dict[str, Any]], wholes: Mapping[int, Whole] | None = None) -> torch.optim.Optimizer:
        """torch's optimizer. `wholes`: by a parameter's id, how its matrices lie, where ranks hold copies or parts of them."""

    def groups(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        """torch's parameter groups, with and without decay; an empty one is left out, and so is what is frozen."""
        parts: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in (pair for pair in parameters if pair[1].requires_grad):
            parts[self.decays(name, parameter)].append(parameter)
        return [{"params": held, "weight_decay": self.weight_decay if decays else 0.0} for decays, held in parts.items() if held]


@dataclass(frozen=True)
class AdamW(Rule):
    """Decoupled weight decay (arXiv 1711.05101). `make`: torch's class, or one of its kind."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decays: Callable[[str, Tensor], bool]
    make: Callable[..., torch.optim.AdamW] = torch.optim.AdamW

    def build(self, groups: list[dict[str, Any]], wholes: Mapping[int, Whole] | None = None) -> torch.optim.AdamW:
        return self.make(groups, lr=0.0, betas=self.betas, eps=self.eps, fused=True)


class Engine(Protocol):
    """Where the model is cut into stages, `backward_from` for each stage and micro-batch and then `reduce` take the place of `backward`.

    `start_sums` may come between, once for each stage whose gradients are whole.
    """

    module: nn.Module
    layouts: dict[str, Layout]
    rule: Rule

    def forward(self, *args: Any, last: bool) -> Any:
        """The model's forward pass in training; `last`: its backward ends the step. Evaluation calls `module` itself."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None: ...

    def backward_from(self, output: GradientEdge, gradient: Tensor | None) -> None:
        """Backward of one stage and micro-batch; `gradient`: of the stage's output, None where that is the loss."""
        ...

    def start_sums(self, names: Sequence[str]) -> None:
        """Begin what `reduce` would do for these parameters, which get no more gradients in this batch, and put in place what has arrived
        of sums begun before. An engine that cannot leaves it all to `reduce`. Collective."""
        ...

    def reduce(self) -> None:
        """Sum over all copies what `backward_from` has added up; once a batch."""
        ...

    def owned_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(family, summed gradient) of every element this rank owns, once over the whole world."""
        ...

    def tensors(self) -> Iterator[Held]:
        """Every tensor in memory that this rank keeps from step to step: weights, and what the optimizer keeps; with who holds the same
        bits. In the same order on all ranks that hold copies."""
        ...

    def summed_gradients(self) -> Iterator[Held]:
        """The same of the summed gradients, before a step."""
        ...

    def copy_again(self) -> bool:
        """Make the weights that the model reads again from those that the optimizer keeps; False where they are the same. Collective."""
        ...

    def scale_gradients(self, factor: float) -> None: ...

    def step(self, lr: float) -> None:
        """One optimizer step; the gradients are gone after it."""
        ...

    def drop_gradients(self) -> None: ...

    def gradient(self, name: str) -> Tensor:
        """This rank's part of one parameter's summed gradient, by module name; every rank must call it."""
        ...

    def state(self, name: str) -> dict[str, Tensor]:
        """This rank's part of a parameter's master weight ("weight") and of what the optimizer keeps; every rank must call it."""
        ...

    def load_state(self, names: Iterable[str], load: Load, *, steps: int) -> None:
        """Replace the state of these parameters by what `state` gave, and the optimizer's step counter; every rank must call it.

        `load` is asked for what this rank keeps of each, one box after another (parallel/data/load.py).
        """
        ...
