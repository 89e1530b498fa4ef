"""Debug mode: before a collective runs, its ranks exchange descriptions of it and compare them.

    rank 0   all_to_all, layers.3, number 12, [9, 64] float32, sends 5 4        rank 1   all_to_all, layers.3, number 12, ... sends 3 2
             \\______ each rank writes its own line to the group's store and reads the others' ______/
    equal: continue        different: every rank raises, naming ranks, collective and layer        missing: all raise after timeout_s

Without debug mode, ranks wait for ever if one calls a different collective, and gloo gives wrong numbers if splits differ. Debug mode
costs some round trips to the store for each collective, so it is off by default, and then none of this code runs.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from parallel.errors import Ended

DEBUG = "MOE_DEBUG_COLLECTIVES"  # environment variable: seconds to wait for a missing rank; turns debug mode on
TIMEOUT_S = 60.0  # more than the time by which saving a checkpoint or compiling the first step can delay a healthy rank
_LOOK_S = 0.25  # seconds after which a waiting rank checks again whether another rank has failed


class Disagreement(Ended):
    """Raised on all ranks of an axis if the next collective is not the same on all of them. The message is one line."""


@dataclass(frozen=True)
class Call:
    """A collective that a rank is about to run. `label`: its caller, such as "layers.3". `shape`, `dtype`: of this rank's tensor.
    `send`, `receive`: number of rows to and from each rank of the axis; None if all ranks must pass tensors of the same shape.
    `number`: the collective is the `number`-th (from 1) that the ranks of the axis run together; 0: not numbered yet."""

    name: str
    axis: str
    label: str
    shape: list[int]
    dtype: str
    send: list[int] | None = None
    receive: list[int] | None = None
    number: int = 0

    def text(self) -> str:
        splits = "" if self.send is None else f" sending {self.send} receiving {self.receive}"
        return f"{self.name} over {self.axis}{f' in {self.label}' if self.label else ''} of {self.shape} {self.dtype}{splits}"


class Agreement:
    """Compares the collectives of one mesh's ranks through the process group's store. All ranks must create their Agreements in the same
    order, because the n-th Agreement of a rank is compared with the n-th of the others."""

    def __init__(self, store: Any, *, rank: int, timeout_s: float) -> None:
        self.store, self.rank, self.timeout_s = store, rank, timeout_s
        self.number = store.add(f"agree/made/{rank}", 1)
        self._numbers: Counter[tuple[int, ...]] = Counter()

    def check(self, ranks: tuple[int, ...], call: Call) -> None:
        """Return when all of these ranks are about to run this collective. Raise Disagreement if a rank is about to run a different one, or
        reaches no collective of these ranks within `timeout_s`."""
        self._numbers[ranks] += 1
        mine = replace(call, number=self._numbers[ranks])
        key = f"agree/{self.number}/{'-'.join(map(str, ranks))}/{{}}/{{}}"
        self.store.set(key.format(mine.number, self.rank), json.dumps(asdict(mine)))
        self.store.set(f"agree/at/{self.rank}", f"collective {mine.number} of its axis, {mine.text()}")
        calls = {self.rank: mine}
        deadline = time.monotonic() + self.timeout_s
        for rank in ranks:
            if rank != self.rank:
                calls[rank] = self._read(key.format(mine.number, rank), rank, mine, ranks, deadline)
        problem = compare([calls[rank] for rank in ranks], ranks)
        if problem:
            self._fail(problem)
        if mine.number > 2:  # all ranks have compared collective `number - 2`: this rank's line about it is not read again
            with suppress(RuntimeError):
                self.store.delete_key(key.format(mine.number - 2, self.rank))

    def _read(self, key: str, rank: int, mine: Call, ranks: tuple[int, ...], deadline: float) -> Call:
        while True:
            with suppress(RuntimeError):  # raised if the key does not arrive within _LOOK_S
                self.store.wait([key], timedelta(seconds=_LOOK_S))
                return Call(**json.loads(self.store.get(key)))
            if self.store.check(["agree/failed"]):
                raise Disagreement(self.store.get("agree/failed").decode())
            if time.monotonic() > deadline:
                at = f"agree/at/{rank}"
                last = f"was last seen at {self.store.get(at).decode()}" if self.store.check([at]) else "has not made any"
                waited = f"within {self.timeout_s:g} s to collective {mine.number} of ranks {list(ranks)}"
                self._fail(f"rank {rank} did not come {waited}, where rank {self.rank} is at {mine.text()}; rank {rank} {last}")

    def _fail(self, problem: str) -> None:
        self.store.set("agree/failed", problem)
        raise Disagreement(problem)


def compare(calls: list[Call], ranks: tuple[int, ...]) -> str | None:
    """Return a line that names the first two ranks that differ, with their collectives; None if all agree. `calls`: one for each rank."""
    first = calls[0]
    for rank, call in zip(ranks[1:], calls[1:], strict=True):
        if _same_for_all(call) != _same_for_all(first):
            return f"collective {first.number} differs: rank {ranks[0]} is at {first.text()}, but rank {rank} at {call.text()}"
    for sender, receiver, sent, expected in other_splits(dict(zip(ranks, calls, strict=True)), ranks):
        head = f"collective {first.number} differs, {first.name} over {first.axis}{f' in {first.label}' if first.label else ''}"
        return f"{head}: rank {sender} sends {sent} rows to rank {receiver}, which expects {expected}"
    return None


def other_splits(calls: Mapping[int, Call], ranks: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (sender, receiver, rows that the sender sends, rows that the receiver expects) for each pair of ranks for which these two
    numbers differ. calls: rank -> its call; ranks of the group may be missing."""
    for i, sender in enumerate(ranks):
        for j, receiver in enumerate(ranks):
            sent, expected = calls[sender].send if sender in calls else None, calls[receiver].receive if receiver in calls else None
            if sent is not None and expected is not None and sent[j] != expected[i]:
                yield sender, receiver, sent[j], expected[i]


def _same_for_all(call: Call) -> tuple[Any, ...]:
    """Return the fields that must be equal on all ranks. If ranks may send different numbers of rows, only a row's shape is compared."""
    return call.name, call.axis, call.label, call.dtype, call.shape if call.send is None else call.shape[1:], call.send is None
