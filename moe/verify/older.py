"""Gradients at older weights on one process, by the trainer's own step. They equal those of PipeDream's and 2BW's stages, without
stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moe.model.transformer import extra_state
from moe.verify.cases import Case
from moe.verify.twin import ages, version_read


class OlderWeights:
    """A history of one model's weights. Within `at(step)`, the model has the weights at which the stages of `delayed_as` compute that
    step.
    """

    def __init__(self, model: nn.Module, delayed_as: Case) -> None:
        self.tensors: dict[str, Tensor] = dict(model.named_parameters()) | extra_state(model)
        self.ages = ages(delayed_as, list(self.tensors))
        self.history: list[dict[str, Tensor]] = []

    @contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Set the older weights, and restore the newest ones afterwards. Steps must follow each other, beginning with 0."""
        if not self.ages:
            yield
            return
        self.history.append({name: tensor.detach().clone() for name, tensor in self.tensors.items()})
        self._put({name: self.history[version_read(step, age)][name] for name, age in self.ages.items()})
        yield
        self._put(self.history[-1])

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self.tensors[name].copy_(value)
