"""Asynchronous saving: a step waits for a copy in host memory, and the copy is written beside the steps that follow.

    main thread     copy what this rank owns | step | step | step | ...           settle: before the next save, and at the end
    writer                                   | write its files ...... | rank 0: all parts are there? commit

Ranks meet in the folder alone: the part of a rank is there when its record, `rank-00003.json`, is. So no collective runs beside those of
training, and what a writer could not write is told to all ranks when they settle. The files are those of parallel/store/checkpoint.py, bit
for bit, and are committed as they are there: a process that dies at any instant leaves the checkpoint before this one, or both.
Cost: once more what the rank owns, in host memory that is kept for the next save. Saves that come faster than they are written wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
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

_LOOK_S = 0.02  # between two looks for the other ranks' parts
_LEAVE_S = 30.0


class Saver:
    """One rank's checkpoints in `folder`, of which the newest `keep` stay. One is on its way at a time."""

    def __init__(self, folder: Path, world: Axis, *, keep: int) -> None:
        self.folder, self.world, self.keep = folder, world, keep
        self._writer: _Writer | None = None
        self._copies: dict[tuple[str, str, tuple[int, ...]], Tensor] = {}
        self._newest: int | None = None
        self._told: int | None = None

    def save(self, step: int, held: Iterable[tuple[str, Piece]], *, state: dict[str, Any], prune: bool = True) -> None:
        """Write `held` as it is, without a copy, and wait. Without `prune` all older ones stay. Collective. Raises BadInput, on every rank,
        where that cannot be."""
        self.settle()
        checkpoint.save(self.folder, step, held, state=state, world=self.world, keep=self.keep, prune=prune)
        self._newest = step

    def begin(self, step: int, held: Iterable[tuple[str, Piece]], *, state: dict[str, Any]) -> None:
        """Copy `held` and begin to write it. Collective. Raises BadInput, on every rank, where this save or the one before cannot be."""
        self.settle()
        checkpoint.begin(self.folder, step, self.world)
        copies = [(kind, replace(piece, tensor=self._copied(kind, piece))) for kind, piece in held]
        now = {(kind, piece.name, piece.start) for kind, piece in copies}  # experts may have moved to other ranks
        self._copies = {key: copy for key, copy in self._copies.items() if key in now}
        self._writer = _Writer(self.folder, step, copies, deepcopy(state), self.world, self.keep)  # the caller goes on counting

    def settle(self) -> None:
        """Wait until what is on its way is committed. Collective. Raises BadInput, on every rank, where it cannot be."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            checkpoint.agreed(self.folder, writer.step, self.world, writer.written)
        except BadInput:
            writer.abandon()
            raise
        checkpoint.agreed(self.folder, writer.step, self.world, writer.committed)
        self._newest = writer.step

    def news(self) -> int | None:
        """The step of a checkpoint that was committed since this was last asked. Waits for nothing; ranks but the first learn it late."""
        newest = self._writer.step if self._writer is not None and self._writer.done else self._newest
        found, self._told = None if newest == self._told else newest, newest
        return found

    @property
    def known(self) -> int | None:
        """The step of the newest checkpoint of this run that every rank knows to be there."""
        return self._newest

    @property
    def under_way(self) -> int | None:
        """The step of a save that has begun and that not every rank knows to be committed; None if there is none."""
        return None if self._writer is None else self._writer.step

    def leave(self) -> None:
        """Where the run fails: give what is on its way a while to be committed, without the other ranks."""
        if self._writer is not None:
            self._writer.join(_LEAVE_S)

    def _copied(self, kind: str, piece: Piece) -> Tensor:
        key, tensor = (kind, piece.name, piece.start), piece.tensor.detach()
        copy = self._copies.get(key)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = self._copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return copy.copy_(tensor)


class _Writer(threading.Thread):
    """Writes one rank's part; on rank 0 it also commits when all parts are there."""

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
        except BaseException as error:  # told by the main thread, which alone can end the run
            self.problem = error
        finally:
            self.wrote.set()

    def _all_wrote(self) -> bool:
        """Look for the records of all parts; False if they will not come. Raises OSError if their folder is gone."""
        missing, folder = list(range(self.world.size)), checkpoint.temporary(self.folder, self.step)
        while not self.given_up.is_set():
            missing = [rank for rank in missing if not checkpoint.record_of(folder, rank).exists()]
            if not missing:
                return True
            folder.stat()
            time.sleep(_LOOK_S)
        return False

    def written(self) -> None:
        """Wait for this rank's part. Raises what writing it raised."""
        self.wrote.wait()
        if self.problem is not None and not self.done:
            raise self.problem

    def committed(self) -> None:
        """Wait for the end: on rank 0 that is the commit. Raises what it raised."""
        self.join()
        if self.problem is not None:
            raise self.problem

    def abandon(self) -> None:
        """Another rank's part will not come."""
        self.given_up.set()
        self.join()
