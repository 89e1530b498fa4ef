"""Saves checkpoints asynchronously: a step waits only for a copy into CPU memory, which a thread writes while training continues.

    main thread     copy this rank's tensors | step | step | step | ...    settle (wait for writers) before the next save and at the end
    writer                                   | write its files ...... | rank 0: waits for all parts, then commits

Writers of different ranks communicate only through the folder: a rank's part is complete when its record, `rank-00003.json`, exists. So
writers run no collectives, which could mix with training's. If a writer fails, all ranks raise BadInput in `settle`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel.errors import BadInput
from parallel.mesh.mesh import Axis
from parallel.store import checkpoint
from parallel.store.checkpoint import Piece

_LOOK_S = 0.02  # seconds between two checks for the other ranks' parts
_LEAVE_S = 30.0  # longest wait of a failed run for the save in progress


class Saver:
    """Saves one rank's part of each checkpoint in `folder`, one checkpoint at a time. keep: number of newest checkpoints to keep."""

    def __init__(self, folder: Path, world: Axis, *, keep: int) -> None:
        self.folder, self.world, self.keep = folder, world, keep
        self._writer: _Writer | None = None
        self._copies: dict[tuple[str, str, tuple[int, ...]], Tensor] = {}  # (kind, name, start) -> copy, whose memory the next save reuses
        self.known: int | None = None  # step of the newest checkpoint whose commit `save` or `settle` has confirmed on all ranks
        self._told: int | None = None  # step of the newest checkpoint that `news` has returned

    def save(self, step: int, held: Iterable[tuple[str, Piece]], *, state: dict[str, Any], prune: bool = True) -> None:
        """Write a checkpoint in the calling thread, without a copy in memory. Collective. held: ("weight" or an optimizer state, piece)
        for all tensors that this rank owns. state: the trainer's state. prune: remove all but the `keep` newest checkpoints. Raises
        BadInput on all ranks if one cannot write."""
        self.settle()
        checkpoint.save(self.folder, step, held, state=state, world=self.world, keep=self.keep, prune=prune)
        self.known = step

    def begin(self, step: int, held: Iterable[tuple[str, Piece]], *, state: dict[str, Any]) -> None:
        """Copy the tensors of a checkpoint and start writing it. held, state: as in `save`. Collective. Raises BadInput on all ranks if the
        previous save failed."""
        self.settle()
        checkpoint.begin(self.folder, step, self.world)
        copies = [(kind, replace(piece, tensor=self._copied(kind, piece))) for kind, piece in held]
        now = {(kind, piece.name, piece.start) for kind, piece in copies}  # other copies are freed: this rank may hold other experts now
        self._copies = {key: copy for key, copy in self._copies.items() if key in now}
        self._writer = _Writer(self.folder, step, copies, deepcopy(state), self.world, self.keep)  # training will change `state`

    def settle(self) -> None:
        """Wait until the save in progress is committed. Collective. Raises BadInput on all ranks if it fails."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            checkpoint.agreed(self.folder, writer.step, self.world, writer.written)
        except BadInput:
            writer.abandon()
            raise
        checkpoint.agreed(self.folder, writer.step, self.world, writer.committed)
        self.known = writer.step

    def news(self) -> int | None:
        """Return the step of a checkpoint that was committed since the last call, or None. Does not wait for other ranks: rank 0 returns
        the step first, the others after their next `settle`."""
        newest = self._writer.step if self._writer is not None and self._writer.done else self.known
        found, self._told = None if newest == self._told else newest, newest
        return found

    @property
    def under_way(self) -> int | None:
        """Return the step of the save in progress; None if there is none."""
        return None if self._writer is None else self._writer.step

    def leave(self) -> None:
        """Wait up to _LEAVE_S for the save in progress, without the other ranks: for a run that has failed."""
        if self._writer is not None:
            self._writer.join(_LEAVE_S)

    def _copied(self, kind: str, piece: Piece) -> Tensor:
        key, tensor = (kind, piece.name, piece.start), piece.tensor.detach()
        copy = self._copies.get(key)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = self._copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return copy.copy_(tensor)


class _Writer(threading.Thread):
    """Thread that writes one rank's part. On rank 0 it also commits when all parts exist."""

    def __init__(self, folder: Path, step: int, held: list[tuple[str, Piece]], state: dict[str, Any], world: Axis, keep: int) -> None:
        super().__init__(name=f"save-{step}", daemon=True)
        self.folder, self.step, self.held, self.state, self.world, self.keep = folder, step, held, state, world, keep
        self.wrote, self.given_up, self.done = threading.Event(), threading.Event(), False
        self.problem: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            checkpoint.write_part(checkpoint.temporary(self.folder, self.step), self.world.index, self.held)
            self.wrote.set()
            if self.world.index == 0 and self._all_wrote():
                checkpoint.commit(self.folder, self.step, self.state, self.world, self.keep)
                self.done = True
        except BaseException as error:  # raised again by the main thread, because only that can end the run
            self.problem = error
            with suppress(OSError):
                _failed(self.folder, self.step, self.world.index).touch()
        finally:
            self.wrote.set()

    def _all_wrote(self) -> bool:
        """Wait for the parts of all ranks. Return False if a rank failed, or after `abandon`. Raise OSError if the folder is gone."""
        missing, folder = list(range(self.world.size)), checkpoint.temporary(self.folder, self.step)
        while not self.given_up.is_set():
            missing = [rank for rank in missing if not checkpoint.record_of(folder, rank).exists()]
            if not missing:
                return True
            if any(_failed(self.folder, self.step, rank).exists() for rank in missing):
                return False
            folder.stat()
            time.sleep(_LOOK_S)
        return False

    def written(self) -> None:
        """Wait until this rank's part is written; raise the error if writing failed."""
        self.wrote.wait()
        if self.problem is not None and not self.done:
            raise self.problem

    def committed(self) -> None:
        """Wait until this writer has ended; raise its error if it failed. Rank 0's writer ends after it has committed the checkpoint."""
        self.join()
        if self.problem is not None:
            raise self.problem

    def abandon(self) -> None:
        """Make this writer give up, because a rank failed: on rank 0 it no longer waits for the other ranks' parts. Wait until it has
        ended."""
        self.given_up.set()
        self.join()


def _failed(folder: Path, step: int, rank: int) -> Path:
    """Return the path of an empty file by which a rank tells rank 0 that it failed to write its part of this step's checkpoint."""
    return checkpoint.temporary(folder, step) / f"rank-{rank:05d}.failed"
