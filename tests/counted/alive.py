"""Counts the bytes of live tensor storages, whether Python, an autograd graph or a process group keeps them alive.

Each storage counts from the operator that makes it until it is freed. A storage that is resized (gathered weights of FSDP) counts with its
current size. Of a DTensor, only the local shard counts. Tensors on the meta device do not count.
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
    """Mode that counts the bytes of tensors made within it. now, most: current and peak bytes. there: tensors made before, which do not
    count even if an operator returns them."""

    def __init__(self, there: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.most = 0
        self.storages = {storage._cdata: storage for storage in (t.untyped_storage() for t in there)}
        self.made: dict[int, int] = {}  # address of a storage made within the mode -> its bytes
        self._inside = ExitStack()

    def __enter__(self) -> Alive:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:  # not an operator, so __torch_dispatch__ does not see it
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
            return NotImplemented  # torch then calls the operator on the local shards
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._see(value.untyped_storage())
        return out

    def new(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of those of these tensors that count in `now`. No two tensors may share a storage."""
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
