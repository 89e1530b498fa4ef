"""Keeps old versions of a stage's weights, for schedules whose updates do not wait for the pipeline to drain (PipeDream, 2BW).

    0F0 0F1 ... 0B0 0U@1 0F2@1 0B1 ...        0B1 reads version 0, as 0F1 did, though 0U@1 made version 1

An update keeps the old values if a later action still reads them, and changes a copy. Before an action, the parameters are set to the
version that it reads. The order says which version each action reads, so no version is kept longer than needed.
Source: weight stashing, PipeDream (arXiv 1806.03377, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from parallel.pipeline.schedule import Action, Op


class Versions:
    """Weight versions of one stage on this rank.

    parameters: all tensors that updates change; their values are now version 0. order: this rank's actions, which read the versions.
    kept: version -> its values, if it is not the newest and a later action reads it. to_come: version -> number of its later readers.
    """

    def __init__(self, parameters: Sequence[Tensor], order: Sequence[Action], stage: int) -> None:
        self.parameters, self.newest = tuple(parameters), 0
        self.kept: dict[int, list[Tensor]] = {}
        readers = [a.version for a in order if a.stage == stage and a.op in (Op.F, Op.B, Op.I)]
        self.to_come = {version: readers.count(version) for version in set(readers)}

    @contextmanager
    def reading(self, version: int) -> Iterator[None]:
        """Return a context for one F, B or I in which the parameters have the values of this version."""
        if version == self.newest:
            yield
        else:
            newest = self._replace(self.kept[version])
            try:
                yield
            finally:
                self._replace(newest)
        self.to_come[version] -= 1
        if not self.to_come[version]:
            self.kept.pop(version, None)

    def _replace(self, values: Sequence[Tensor]) -> list[Tensor]:
        before = [p.data for p in self.parameters]
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value
        return before

    def update(self, version: int, step: Callable[[], None]) -> None:
        """Make `version` by calling `step`, which changes the parameters in place. Autograd graphs of older versions keep their values."""
        if self.to_come.get(self.newest):
            self.kept[self.newest] = self._replace([p.data.clone() for p in self.parameters])
        # Autograd refuses a backward pass if weights changed in place since the forward pass. In a backward pass, `reading` restores the
        # old values, so this change is hidden from autograd's check.
        with torch.autograd._unsafe_preserve_version_counter(self.parameters):
            step()
        self.newest = version

    @property
    def count(self) -> int:
        """Return the number of versions in memory now."""
        return 1 + len(self.kept)
