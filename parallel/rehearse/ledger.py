"""Counts the bytes of all pretended tensors, and their purpose (parameters, gradients, ...) at the moment of the peak.

Each storage counts once, from the operator that makes it until it is freed or resized to nothing. Its purpose is named later: parameters
after the model is built, gradients and optimizer states after they exist. So the peak is found by replaying the events.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

OTHER = "activations"  # and all storages without a named purpose: buffers of collectives, scratch


class Ledger:
    """Bytes of tensors over time. device: tensors on other devices do not count."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.now = self.most = 0
        self.kinds: dict[int, str] = {}  # by number of a storage
        self._events: list[tuple[int, int]] = []  # (number of a storage, bytes more or fewer)
        self._numbers: dict[int, int] = {}  # address of a live storage -> its number
        self._sizes: dict[int, int] = {}  # by number
        self._spoiled: set[int] = set()
        self._made = self._first = 0

    def see(self, tensor: Any, *, counts: bool = True) -> None:
        """Record an operator's result. counts: False if no real device would allocate it."""
        storage = tensor.untyped_storage()
        where = storage._cdata
        if where not in self._numbers:
            number, self._made = self._made, self._made + 1
            self._numbers[where] = number
            weakref.finalize(storage, self._gone, where, number).atexit = False
        if counts and self._numbers[where] not in self._sizes and tensor.fake_device.type == self.device.type:
            self._change(self._numbers[where], storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage has changed its size."""
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
        self._spoiled.discard(number)
        if number in self._sizes:
            self._change(number, -self._sizes.pop(number))

    def spoil(self, tensor: Tensor) -> None:
        """Mark the values of the tensor's storage, with all of its views, as unknown."""
        self._spoiled.add(self._numbers.get(tensor.untyped_storage()._cdata, -1))

    def is_spoiled(self, tensor: Tensor) -> bool:
        return bool(self._spoiled) and self._numbers.get(tensor.untyped_storage()._cdata) in self._spoiled

    def name(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Name the purpose of these tensors' storages. A storage that has a name keeps it."""
        for tensor in tensors:
            number = self._numbers.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self.kinds.setdefault(number, kind)

    def mark(self) -> int:
        """Current point in time, for `name_alive`."""
        return self._made

    def name_alive(self, kind: str, *, since: int = 0, before: int | None = None) -> None:
        """Name the purpose of all live storages that were made between two marks and have no name yet."""
        for number in self._sizes:
            if since <= number < (self._made if before is None else before):
                self.kinds.setdefault(number, kind)

    def begin(self) -> None:
        """Start the time in which `at_peak` looks for the peak."""
        self.most, self._first = self.now, len(self._events)

    def at_peak(self) -> dict[str, int]:
        """Bytes by purpose at the moment of most bytes since `begin`."""
        held: Counter[int] = Counter()
        peak: Counter[int] = Counter()
        now = most = 0
        for place, (_, more) in enumerate(self._events):
            now += more
            if place >= self._first:
                most = max(most, now)
        now = 0
        for place, (number, more) in enumerate(self._events):
            held[number] += more
            now += more
            if place >= self._first and now == most:
                peak = held
                break
        found: Counter[str] = Counter()
        for number, size in (peak or held).items():
            found[self.kinds.get(number, OTHER)] += size
        return {kind: size for kind, size in found.items() if size}
