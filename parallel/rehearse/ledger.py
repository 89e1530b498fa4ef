"""Bytes of the pretended tensors that are alive, whoever holds them, and what they were for when they were most.

Each storage counts once, from the operator that makes it until it is freed or resized to nothing. What a storage is for is said later:
parameters once they are built, gradients and moments once they are there. So the peak is found by going through the events again.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

OTHER = "activations"  # and whatever else nobody named: buffers of collectives, scratch


class Ledger:
    """`device`: what counts lies there; the rest is the host's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.now = self.most = 0
        self.kinds: dict[int, str] = {}  # by number of a storage
        self._events: list[tuple[int, int]] = []  # (number of a storage, bytes more or fewer)
        self._numbers: dict[int, int] = {}  # of the storages that are alive, by address
        self._sizes: dict[int, int] = {}  # by number
        self._spoiled: set[int] = set()
        self._made = self._first = 0

    def see(self, tensor: Any, *, counts: bool = True) -> None:
        """A tensor that an operator gave; one that no device would hold does not count."""
        storage = tensor.untyped_storage()
        where = storage._cdata
        if where not in self._numbers:
            number, self._made = self._made, self._made + 1
            self._numbers[where] = number
            weakref.finalize(storage, self._gone, where, number).atexit = False
        if counts and self._numbers[where] not in self._sizes and tensor.fake_device.type == self.device.type:
            self._change(self._numbers[where], storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """It has another size than it had."""
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
        """Its values, and those of every view of its storage, are unknown from now on."""
        self._spoiled.add(self._numbers.get(tensor.untyped_storage()._cdata, -1))

    def is_spoiled(self, tensor: Tensor) -> bool:
        return bool(self._spoiled) and self._numbers.get(tensor.untyped_storage()._cdata) in self._spoiled

    def name(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """What these tensors' storages are for; a storage that has a name keeps it."""
        for tensor in tensors:
            number = self._numbers.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self.kinds.setdefault(number, kind)

    def mark(self) -> int:
        """A point in time, for `name_alive`."""
        return self._made

    def name_alive(self, kind: str, *, since: int = 0, before: int | None = None) -> None:
        """What storages are for that were made between two marks and are still alive, where nothing was said of them."""
        for number in self._sizes:
            if since <= number < (self._made if before is None else before):
                self.kinds.setdefault(number, kind)

    def begin(self) -> None:
        """From here on the peak is looked for."""
        self.most, self._first = self.now, len(self._events)

    def at_peak(self) -> dict[str, int]:
        """Bytes by kind at the moment since `begin` when they were most."""
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
