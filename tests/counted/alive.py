"""Counts the bytes of live tensor storages, regardless of the owner: Python, an autograd graph or a process group.

The results of every operator are counted when they are made, in the forward and backward pass and in calls from C++. Each storage counts
once until it is freed. A storage that is resized, as FSDP does with gathered weights, counts with its current size.
A DTensor has no bytes of its own although it states its full size; the operators on its local shards are counted instead. Tensors on the
meta device have no bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """A mode that counts live bytes. `now`, `most`: current and peak bytes made within it. `there`: older tensors, which operators may
    return.
    """

    def __init__(self, there: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.most = 0
        self.storages = {storage._cdata: storage for storage in (t.untyped_storage() for t in there)}
        self.made: dict[int, int] = {}  # address -> bytes of each storage made within the mode
        self._inside = ExitStack()

    def __enter__(self) -> Alive:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:  # storages are resized without an operator
            out = resize(storage, size)
            if storage._cdata in self.made:
                self._count(storage)
            return out

        self._inside.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._inside.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # dispatched again for its local shards
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._see(value.untyped_storage())
        return out

    def new(self, tensors: Iterable[Tensor]) -> int:
        """The bytes of these tensors that count in `now`. No two of them may share a storage."""
        storages = (t.untyped_storage() for t in tensors)
        return sum(storage.nbytes() for storage in storages if storage._cdata not in self.storages)

    def _see(self, storage: torch.UntypedStorage) -> None:
        where = storage._cdata
        if where not in self.made and where not in self.storages and storage.device.type != "meta":
            self._count(storage)
            weakref.finalize(storage, self._gone, where).atexit = False

    def _count(self, storage: torch.UntypedStorage) -> None:
        before, self.made[storage._cdata] = self.made.get(storage._cdata, 0), storage.nbytes()
        self.now += storage.nbytes() - before
        self.most = max(self.most, self.now)

    def _gone(self, where: int) -> None:
        self.now -= self.made.pop(where)
