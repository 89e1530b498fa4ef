"""Weight stashing: keeps old versions of a stage's weights, for schedules that update before the pipeline drains (PipeDream, 2BW).

    0F0 0F1 ... 0B0 0U@1 0F2@1 0B1 ...        0F1: forward pass of stage 0 for micro-batch 1; 0U@1: update that makes weight version 1
                                              0B1 reads version 0, like 0F1, although version 1 exists

Source: PipeDream (arXiv 1806.03377, section 3.3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from parallel.pipeline.schedule import Action, Op


class Versions:
    """Weight versions of one stage on this rank.
    parameters: all tensors that updates change; at first they hold version 0. order: this rank's actions, in all batches of the schedule.
    stashed: tensors of each older version that a later action reads. readers: version -> number of later actions that read it."""

    def __init__(self, parameters: Sequence[Tensor], order: Sequence[Action], stage: int) -> None:
        self.parameters, self.newest = tuple(parameters), 0
        self.stashed: dict[int, list[Tensor]] = {}
        self.readers = Counter(a.version for a in order if a.stage == stage and a.op in (Op.F, Op.B, Op.I))

    @contextmanager
    def reading(self, version: int) -> Iterator[None]:
        """Return a context manager for one action that reads weights (F, B or the input gradient I). Inside, the parameters have the values
        of `version`. After the last action that reads this version, its tensors are freed."""
        if version == self.newest:
            yield
        else:
            newest = self._replace(self.stashed[version])
            try:
                yield
            finally:
                self._replace(newest)
        self.readers[version] -= 1
        if not self.readers[version]:
            self.stashed.pop(version, None)

    def _replace(self, values: Sequence[Tensor]) -> list[Tensor]:
        before = [p.data for p in self.parameters]
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value
        return before

    def update(self, version: int, step: Callable[[], None]) -> None:
        """Make `version` by calling `step`, which changes the parameters in place. Stashes the old values if an action still reads them."""
        if self.readers[self.newest]:
            self.stashed[self.newest] = self._replace([p.data.clone() for p in self.parameters])
        # Autograd raises an error in a backward pass if weights changed in place since the forward pass. `reading` restores the old values
        # for the backward pass, so this change is hidden from autograd.
        with torch.autograd._unsafe_preserve_version_counter(self.parameters):
            step()
        self.newest = version

    @property
    def count(self) -> int:
        """Return the number of weight versions in memory now."""
        return 1 + len(self.stashed)
