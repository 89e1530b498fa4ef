"""Counts the bytes of all fake tensors, and splits the peak by purpose (parameters, gradients, ...).

A storage counts from the operator that makes it until it is freed. Its purpose is known only later (a gradient after the backward pass), so
all allocations are recorded, and the peak is computed at the end.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

OTHER = "activations"  # purpose of all storages that are given no other; includes buffers of collectives and temporary tensors


class Ledger:
    """Bytes of tensors over time. device: tensors on other devices do not count. now: bytes of the live storages. most: peak bytes since
    `begin`. Storages are numbered in the order in which they are made. kinds: number of a storage -> its purpose."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.now = self.most = 0
        self.kinds: dict[int, str] = {}
        self._events: list[tuple[int, int]] = []  # (number of a storage, bytes by which it grew; negative: shrank)
        self._numbers: dict[int, int] = {}  # address of a live storage -> its number
        self._sizes: dict[int, int] = {}  # number of a live storage on `device` -> its bytes
        self._unknown: set[int] = set()  # numbers of live storages with unknown values
        self._made = self._first = 0  # number of storages made; number of events before `begin`

    def record(self, tensor: Any, *, counts: bool = True) -> None:
        """Record a new tensor, the result of an operator. counts: False if a real device would not allocate it, as inside a fused
        kernel."""
        storage = tensor.untyped_storage()
        where = storage._cdata
        if where not in self._numbers:
            number, self._made = self._made, self._made + 1
            self._numbers[where] = number
            weakref.finalize(storage, self._gone, where, number).atexit = False
        if counts and self._numbers[where] not in self._sizes and tensor.fake_device.type == self.device.type:
            self._change(self._numbers[where], storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage was resized (UntypedStorage.resize_)."""
        number = self._numbers.get(storage._cdata)
        if number in self._sizes:
            self._change(number, storage.nbytes() - self._sizes[number])

    def _change(self, number: int, more: int) -> None:
        self._sizes[number] = self._sizes.get(number, 0) + more
        self._events.append((number, more))
        self.now += more
        self.most = max(self.most, self.now)

    def _gone(self, where: int, number: int) -> None:
        self._numbers.pop(where, None)
        self._unknown.discard(number)
        if number in self._sizes:
            self._change(number, -self._sizes.pop(number))

    def mark_unknown(self, tensor: Tensor) -> None:
        """Mark the values in the tensor's storage as unknown, for this tensor and all of its views."""
        self._unknown.add(self._numbers.get(tensor.untyped_storage()._cdata, -1))

    def is_unknown(self, tensor: Tensor) -> bool:
        return bool(self._unknown) and self._numbers.get(tensor.untyped_storage()._cdata) in self._unknown

    def name(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Set the purpose of these tensors' storages to `kind`. A storage that already has a purpose keeps it."""
        for tensor in tensors:
            number = self._numbers.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self.kinds.setdefault(number, kind)

    def mark(self) -> int:
        """Return the number of storages made so far, as a point in time for `name_alive`."""
        return self._made

    def name_alive(self, kind: str, *, since: int = 0, before: int | None = None) -> None:
        """Set the purpose of all live storages that were made between the marks `since` and `before` (None: now) to `kind`, if they have no
        purpose yet."""
        for number in self._sizes:
            if since <= number < (self._made if before is None else before):
                self.kinds.setdefault(number, kind)

    def begin(self) -> None:
        """Start to measure the peak: `most` and `at_peak` ignore earlier peaks."""
        self.most, self._first = self.now, len(self._events)

    def at_peak(self) -> dict[str, int]:
        """Return purpose -> bytes at the time of the peak since `begin`."""
        totals = list(accumulate(more for _, more in self._events))
        last = max(range(self._first, len(totals)), key=totals.__getitem__, default=len(totals) - 1)
        found: Counter[str] = Counter()
        for number, more in self._events[: last + 1]:
            found[self.kinds.get(number, OTHER)] += more
        return {kind: size for kind, size in found.items() if size}
