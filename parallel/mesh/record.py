"""Records this rank's progress in memory: its phase, and every collective and message before it starts. It sends no message of its own.

    main thread      announce(all_reduce over dp, number 340, layers.3) ... enter(the backward pass) ...     a few microseconds each
    watchdog         reads the record if the rank makes no progress for too long (parallel/watch/watchdog.py)

A collective is announced (recorded) before it starts. For each group of ranks, a Lane has the number of announced collectives, the last 512
of them, and a hash chain of all. Ranks that ran the same collectives have equal chains. Each rank also adds a number, its token, to the
all-reduce of the gradient norm. The total shows whether any two ranks differ, even if nothing hangs (gloo gives wrong numbers if shapes or
splits differ). This token is a hash and has nothing to do with the model's tokens:

    token of a rank = sum over its lanes of  (w_i - w_(i-1)) * chain + splits                      i: index of the rank in the group
    splits = sum over collectives n and ranks j of  r_n * (h_ij * rows sent to rank j - h_ji * rows received from rank j)

The coefficients w, r and h are hashes that all ranks of a group compute alike. In the sum over a group, each w_i appears once with a plus
and once with a minus (w is 0 before the first and after the last rank), so equal chains cancel to 0. Splits cancel if each receiver expects
what its sender sends. Numbers are modulo 2**40, so that sums of 8,192 ranks are exact in float64. A difference between ranks goes unnoticed
with probability 2**-40.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from operator import mul
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_MODULUS, MOST_RANKS = 1 << 40, 1 << 13  # float64 adds the tokens (Record.token) of MOST_RANKS ranks exactly
_KEPT = 512  # number of collectives that a Lane keeps: the last ones of a group, to find the first in which ranks differ
_BACKWARD = os.path.join("torch", "autograd", "graph.py")  # on a thread's stack in a backward pass; DDP may wait in it for other ranks

# files with functions that wait for other ranks
_WAITS = (f"torch{os.sep}distributed{os.sep}", f"deepspeed{os.sep}comm{os.sep}") + tuple(
    os.sep + name for name in (f"pipeline{os.sep}links.py", "collectives.py", "exchange.py", "gradients.py")
)

Splits = list[int] | None  # number of rows (indices of dim 0) to, or from, each rank of a group; None: equal numbers


class Lane:
    """The collectives that this rank has announced in one group of ranks.

    name: the group's axis. ranks: the group's ranks. index: this rank's index among them. number: count of announced collectives. chain:
    hash of all of them, in order. last: the last 512 of them, newest last. splits: checksum of the rows sent and received so far, as at
    the top of this file. weight, out, back: coefficients of the formulas there, with i = index. weight: w_i - w_(i-1). out: h_ij for each
    rank j of the group. back: h_ji for each rank j."""

    def __init__(self, name: str, ranks: tuple[int, ...], index: int) -> None:
        self.name, self.ranks, self.number, self.chain, self.splits = name, ranks, 0, 0, 0
        self.last: deque[tuple[Any, ...]] = deque(maxlen=_KEPT)
        salt, size = zlib.crc32(name.encode()) ^ hash(ranks), len(ranks)
        after = hash((salt, index)) if index < size - 1 else 0
        self.weight = after - (hash((salt, index - 1)) if index else 0)
        self.out = [hash((salt, index, j)) for j in range(size)]
        self.back = [hash((salt, j, index)) for j in range(size)]


class Record:
    """Progress of this rank.

    phase, step: current phase and step. at: time (time.monotonic) of the last progress. patience: factor of the watchdog's time limit.
    messages: (sender, receiver) -> (number of messages that this rank has sent or waited for, label of the last one). awaited: (sender,
    receiver) of the message that this rank waits for; None if it has recorded something else since. failed: the error that ended this
    rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.phase, self.step, self.at, self.patience = "starting", 0, time.monotonic(), 1.0
        self.lanes: dict[tuple[str, tuple[int, ...]], Lane] = {}
        self._lane_of: dict[tuple[str, int], Lane] = {}  # key: axis, id of the tuple of ranks (hashing a thousand ranks is slow)
        self._alive: list[tuple[int, ...]] = []
        self.latest: Lane | None = None
        self.messages: dict[tuple[int, int], tuple[int, str]] = {}
        self.awaited: tuple[int, int] | None = None
        self.failed: str | None = None
        self._words: dict[Any, int] = {}  # name, label or dtype of a collective -> its hash

    def enter(self, phase: str, *, step: int | None = None, patience: float | None = None) -> None:
        """Record that the rank enters a phase. step: number from 1. patience: factor of the watchdog's time limit. None: unchanged."""
        self.phase, self.awaited, self.at = phase, None, time.monotonic()
        self.step = self.step if step is None else step
        self.patience = self.patience if patience is None else patience

    def announce(
        self, axis_name: str, ranks: tuple[int, ...], index: int, *, name: str, label: str, tensor: Tensor, send: Splits, receive: Splits
    ) -> None:
        """Record a collective before it starts. ranks: the group's ranks. index: this rank's index among them. send, receive: numbers of
        rows to and from each rank, if they may differ between ranks; else None. A rank must send as many rows as the receiver expects."""
        lane = self._lane_of.get((axis_name, id(ranks))) or self._lane(axis_name, ranks, index)
        shape, words = tensor.shape, self._words
        same = shape if send is None else shape[1:]
        known = words.get(name), words.get(label), words.get(tensor.dtype)
        if None in known:
            for word in (name, label, tensor.dtype):
                words.setdefault(word, zlib.crc32(str(word).encode()))
            known = words[name], words[label], words[tensor.dtype]
        lane.number = number = lane.number + 1
        lane.chain = chain = hash((lane.chain, known, same, send is None))
        if send is not None and receive is not None:
            lane.splits += (sum(map(mul, send, lane.out)) - sum(map(mul, receive, lane.back))) * (hash((number, 7)) | 1)
            lane.splits %= _MODULUS
        lane.last.append((number, name, label, shape, tensor.dtype, send, receive, chain))
        self.latest, self.awaited, self.at = lane, None, time.monotonic()

    def _lane(self, axis_name: str, ranks: tuple[int, ...], index: int) -> Lane:
        self._alive.append(ranks)  # keep the tuple alive, so that no other object gets its id
        lane = self._lane_of[axis_name, id(ranks)] = self.lanes.setdefault((axis_name, ranks), Lane(axis_name, ranks, index))
        return lane

    def message(self, source: int, target: int, label: str) -> None:
        """Record a pipeline message from rank `source` to rank `target`, before this rank sends it or waits for it."""
        self.messages[source, target] = self.messages.get((source, target), (0, ""))[0] + 1, label
        self.awaited = (source, target) if target == self.rank else None
        self.at = time.monotonic()

    def token(self) -> float:
        """Return this rank's token, a hash of its collectives (top of this file). The sum of all ranks' tokens is 0 modulo 2**40 if the
        ranks of every group ran the same collectives."""
        return float(sum(lane.weight * lane.chain + lane.splits for lane in self.lanes.values()) % _MODULUS)

    def answer(self) -> dict[str, Any]:
        """Return this rank's progress as plain values, for JSON. The watchdog's thread calls this, even while the main thread hangs.

        phase, step, patience, failed, awaited, messages: as in Record. idle: seconds since Record.at. place, waits: see `place_and_waits`.
        latest: name of the lane with the latest collective. lanes: name -> the lane's axis, ranks, number and last collectives."""
        place, waits = place_and_waits(threading.main_thread().ident)
        latest, awaited = self.latest, self.awaited
        return {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "phase": self.phase,
            "step": self.step,
            "idle": time.monotonic() - self.at,
            "patience": self.patience,
            "place": place,
            "waits": waits,
            "failed": self.failed,
            "latest": None if latest is None else _name(latest),
            "lanes": {_name(lane): _described(lane) for lane in list(self.lanes.values())},
            "awaited": None if awaited is None else f"{awaited[0]}>{awaited[1]}",
            "messages": {f"{a}>{b}": list(found) for (a, b), found in list(self.messages.items())},
        }

    def text(self) -> str:
        """Return this rank's phase, step and last collective in words."""
        latest = self.latest
        last = f", after {latest.last[-1][1]} {latest.number} over {latest.name}" if latest is not None and latest.last else ""
        return f"{self.phase}{f' of step {self.step}' if self.step else ''}{last}"


def balanced(total: float) -> bool:
    """Return whether all ranks ran the same collectives. total: sum of the ranks' tokens (Record.token)."""
    return total % _MODULUS == 0


def place_and_waits(main: int | None) -> tuple[str, str]:
    """Return (place, waits). place: "file:line function" of the innermost frame outside of torch in the thread with id `main`. waits:
    whether any thread of this process waits for other ranks: "yes", "no" or "maybe"."""
    frames = sys._current_frames()
    frame: Any = frames.get(main or 0)
    torch = sys.modules.get("torch")
    # with CUDA, any Python line can wait for a kernel that itself waits for other ranks
    waits = "maybe" if torch is not None and torch.cuda.is_initialized() else "no"
    for top in frames.values():  # all threads, because autograd runs a GPU's backward pass in a thread of its own
        name = top.f_code.co_filename
        if any(part in name for part in _WAITS):
            waits = "yes"
        elif waits == "no" and name.endswith(_BACKWARD):
            waits = "maybe"
    while frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename and frame.f_back is not None:
        frame = frame.f_back
    return "" if frame is None else _place(frame), waits


def _place(frame: Any) -> str:
    return f"{os.sep.join(frame.f_code.co_filename.split(os.sep)[-3:])}:{frame.f_lineno} {frame.f_code.co_name}"


def _name(lane: Lane) -> str:
    return f"{lane.name} {hash(lane.ranks)}"


def _described(lane: Lane) -> dict[str, Any]:
    last: Sequence[tuple[Any, ...]] = ()
    for _ in range(5):
        try:
            last = list(lane.last)
            break
        except RuntimeError:  # the main thread appended to `last` during the copy
            continue
    calls = [[n, name, label, list(shape), str(dtype).removeprefix("torch."), send, receive, chain] for
             n, name, label, shape, dtype, send, receive, chain in last]  # fmt: skip
    return {"axis": lane.name, "ranks": list(lane.ranks), "number": lane.number, "calls": calls}
