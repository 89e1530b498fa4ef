"""Ends a run that hangs: if a rank waits longer than the time limit, all ranks end with one line that names the missing ranks.

    ranks 0 1 3      all_reduce 340 over dp ............... limit_s     rank 0: question "ask/1" -> each watchdog writes its rank's progress
    rank 2           (stopped)                                          rank 0: reads all progress -> writes the line -> all ranks end

A watchdog is two threads, which run even if the rank's main thread is stuck inside a library. A rank that does not answer, because its
process is stopped, counts as missing. Watchdogs communicate by keys of the process group's store (N: number of a question, R: a rank):

    ask/N     question: a watchdog writes it if its rank waits too long or fails; all watchdogs look for it
    at/N/R    answer: the rank's progress (Record.answer in parallel/mesh/record.py)
    line/N    verdict of the rank that asked: its diagnosis of the answers (parallel/watch/diagnosis.py), and whether the run ends
    seen/R    the rank's phase, written every few seconds, in case the rank cannot answer later
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from parallel.errors import Ended
from parallel.mesh.debug_collectives import Disagreement
from parallel.mesh.record import Record, balanced
from parallel.watch.diagnosis import ABORTED, Finding, diagnose

FIRST = 5.0  # factor of the time limit until the end of the first step, in callbacks, while saving, and at the end of a run
ANSWER_S = 3.0, 10.0  # a rank has a twentieth of the time limit to answer, but at least 3 s and at most 10 s
_AGAIN_S = 0.3  # wait before the answers are read again
_LOOK_S = 0.02  # wait between two reads of a key
_LEAVE_S = 2.0  # longest wait for a thread, the store or the other ranks when the watchdog stops
_STORE = "a store operation that did not end"
# texts in errors that occur because another rank has ended
_ECHOES = ("gloo", "connection closed", "connection reset", "broken pipe", "timed out waiting", "nccl", "socket", "connection refused")

# why a rank asks all ranks for their progress: it has waited for more than half of the limit (slow) or for more than the limit (hang); it
# lost the connection to another rank; it failed; or ranks ran different collectives (differ)
Why = Literal["slow", "hang", "lost", "failed", "differ"]
T = TypeVar("T")
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
End = Callable[[str, bool], None]  # (line, prints), as in Watchdog


class Watchdog:
    """The watchdog of one rank.
    limit_s: seconds without progress after which the run ends. holder: name of the process that holds the store, for messages.
    end: called as end(line, prints) just before this process ends. line: message that says why the run ends. prints: True if this rank is
    to print the message; others stay silent."""

    def __init__(
        self, record: Record, store: Any, *, world_size: int, limit_s: float, holder: str = "rank 0", end: End | None = None
    ) -> None:
        self.record, self.world_size, self.limit_s, self.holder = record, world_size, limit_s, holder
        self.end = end or _print_if
        self._answer_s = min(ANSWER_S[1], max(ANSWER_S[0], limit_s / 20))
        self.line: str | None = None
        self.prints, self.kind = False, ""
        self._store, self._listener_store = (dist.PrefixStore("watch", store.clone()) for _ in range(2))
        # _round: number of the next question. _leaving: whether the main thread is ending, and prints the line itself. _readers: number of
        # ranks that answered the last question, and so will read its verdict
        self._round, self._leaving, self._readers = 1, False, world_size
        self._stopped, self._decided = threading.Event(), threading.Event()
        self._noted_at = -1.0
        self._on_abort = _HANDLER(lambda _: self._aborted())  # kept in memory: C has only its address
        self._threads = [threading.Thread(target=work, daemon=True, name="watchdog") for work in (self._watch, self._listen)]
        self._asking = threading.RLock()
        self._pending: threading.Thread | None = None

    def start(self) -> Watchdog:
        for thread in self._threads:
            thread.start()
        ctypes.CDLL(None).signal(signal.SIGABRT, self._on_abort)  # Python's own handlers run too late for SIGABRT
        return self

    def stop(self) -> None:
        """End this rank's watchdog and join its threads, which would otherwise crash in C++ later. Rank 0, which may hold the store,
        first waits until the other ranks have left."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        ctypes.CDLL(None).signal(signal.SIGABRT, None)
        for thread in self._threads:
            thread.join(_LEAVE_S)
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._within(_LEAVE_S, lambda: self._store.set(f"left/{self.record.rank}", self.record.failed or "finished"))
            left = self._within(_LEAVE_S, lambda: self._store.add("left", 1))
            until = time.monotonic() + _LEAVE_S
            while self.record.rank == 0 and not self._leaving and left < self.world_size and time.monotonic() < until:
                time.sleep(_LOOK_S)
                left = self._within(_LEAVE_S, lambda: self._store.add("left", 0))

    def _watch(self) -> None:
        tick = min(1.0, max(0.05, self.limit_s / 40))
        every = max(min(10.0, max(0.5, self.limit_s / 8)), self.world_size / 1000)  # at most 1,000 writes a second to the store
        beat_at, asked_at, before = 0.0, 0.0, time.monotonic()
        while not self._stopped.wait(tick):
            now = time.monotonic()
            if now - before > max(10 * tick, self.limit_s / 2):  # this process was stopped, or the machine slept: do not count that time
                self.record.at += now - before
            before = now
            if now - beat_at > every:
                beat_at = now
                self._beat()
            since, limit = self.record.at, self.limit_s * self.record.patience
            idle = now - since
            if self._leaving or idle < limit / 2 or now - asked_at < self.limit_s / 4:
                continue
            if idle > limit or since != self._noted_at:
                asked_at, self._noted_at = now, since
                self._ask("hang" if idle > limit else "slow")
                before = time.monotonic()

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError, TimeoutError):
            seen = json.dumps([time.time(), self.record.text()])
            self._within(_AGAIN_S, lambda: self._store.set(f"seen/{self.record.rank}", seen))

    def _listen(self) -> None:
        """Answer questions until a verdict ends the run. Look for a question at least twice a second (more rarely with many ranks), because
        a blocking wait could not be interrupted when the run ends."""
        rank, tick = self.record.rank, min(1.0, max(0.05, min(0.5, self.limit_s / 40)) * max(1.0, self.world_size / 512))
        while not self._stopped.wait(tick):
            n = self._round
            try:
                if not self._listener_store.check([f"ask/{n}"]):
                    continue
                verdict, until = None, time.monotonic() + 4 * self._answer_s
                while verdict is None and time.monotonic() < until:
                    self._listener_store.set(f"at/{n}/{rank}", json.dumps(self.record.answer()))
                    verdict = _read_json(self._listener_store, f"line/{n}", _AGAIN_S)
            except RuntimeError:  # the store is gone; ranks that wait for others will notice it
                return
            self._round = n + 1
            if verdict is not None and verdict["end"]:
                self._readers = verdict["readers"]
                self._finish(verdict["line"], prints=verdict["prints"] == rank, heard=n, kind=verdict["kind"])
                return
            if self._leaving:  # nothing was found, so this rank ends with its own error
                self._decided.set()
            if verdict is not None and verdict["line"] and verdict["prints"] == rank:
                _print(verdict["line"])

    def _ask(self, why: Why) -> None:
        """Ask all ranks for their progress, diagnose it, and write the verdict, which may end the run on all ranks."""
        n, rank = self._round, self.record.rank
        mine, patience = f"{why} {rank}", min(self._answer_s, self.limit_s / 4) if why == "slow" else self._answer_s
        try:
            first = self._within(patience, lambda: self._store.compare_set(f"ask/{n}", "", mine).decode())
            if first != mine:  # another rank asks already
                return
            finding = self._within(4 * self._answer_s, lambda: self._find(n, why, patience))
            said = None if finding is None else self._text_of(finding, why)
            end = said is not None and why != "slow"
            verdict = {"end": end, "line": said, "prints": rank, "kind": finding.kind if finding else "", "readers": self._readers}
            self._within(self._answer_s, lambda: self._store.set(f"line/{n}", json.dumps(verdict)))
        except (RuntimeError, TimeoutError):  # the store does not answer, so no rank can be asked; all ranks notice the same
            if not self._stopped.is_set() and (why != "hang" or self.record.answer()["waits"] != "no"):
                self._store_missing(why)

    def _within(self, seconds: float, work: Callable[[], T]) -> T:
        """Run `work`, which calls the store, in a thread, and return its result. Raise TimeoutError after `seconds`. The thread is needed
        if the store's process is stopped: then a call ignores its own time limit, never returns, and blocks all later calls."""
        with self._asking:
            before = self._pending
            if before is not None:
                before.join(seconds)
                if before.is_alive():
                    raise TimeoutError(_STORE)
            found: list[T] = []
            problem: list[RuntimeError] = []

            def run() -> None:
                try:
                    found.append(work())
                except RuntimeError as error:
                    problem.append(error)

            self._pending = threading.Thread(target=run, daemon=True, name="watchdog")
            self._pending.start()
            self._pending.join(seconds)
        if problem:
            raise problem[0]
        if not found:
            raise TimeoutError(_STORE)
        return found[0]

    def _store_missing(self, why: Why) -> None:
        at, idle = self.record.text(), time.monotonic() - self.record.at
        waited = f"rank {self.record.rank} has waited {idle:.0f} s for it, in {at}"
        line = f"{self.holder} is missing: it holds the store through which ranks communicate, and does not answer; {waited}"
        if why == "slow":
            _print(f"slow: {line}")
        else:
            self._finish(line, prints=True)

    def _find(self, n: int, why: Why, patience: float) -> Finding | None:
        """Collect the ranks' answers to question `n`, and diagnose them. If `why` is not "slow" or "hang", repeat this until there is a
        finding, for `patience` seconds at most, because a rank may answer late."""
        until = time.monotonic() + patience
        share = {"slow": 0.5, "hang": 1.0}.get(why, 0.0)
        while True:
            answers = {}
            for rank in range(self.world_size):
                found = _read_json(self._store, f"at/{n}/{rank}", max(0.01, until - time.monotonic()))
                if found is not None:
                    answers[rank] = found
            self._readers = len(answers)
            silent = {rank: self._last_sign(rank) for rank in range(self.world_size) if rank not in answers}
            finding = diagnose(answers, silent, limit_s=self.limit_s, share=share, settled=why == "differ")
            again = finding is None or (finding.kind == "failed" and ABORTED in finding.line)  # wait for the cause of an abort
            if not again or why in ("slow", "hang") or time.monotonic() > until:
                return finding
            time.sleep(_AGAIN_S)

    def _last_sign(self, rank: int) -> str:
        """Return in words why a rank that does not answer has left, or its last known progress."""
        if (left := _read_text(self._store, f"left/{rank}")) is not None:
            return f"it has left: {left}"
        seen = _read_text(self._store, f"seen/{rank}")
        if seen is None:
            return "it was never seen"
        at, said = json.loads(seen)
        return f"last seen {max(0.0, time.time() - at):.0f} s ago in {said}"

    def _text_of(self, finding: Finding, why: Why) -> str:
        if why == "slow":
            late = finding.line.replace(" missing", " late", 1)
            return f"slow: {late} (after {self.limit_s:g} s, train.timeout_s, the run ends)"
        return f"{finding.line}; the run ended after train.timeout_s, {self.limit_s:g} s" if why == "hang" else finding.line

    def _finish(self, line: str, *, prints: bool, heard: int = 0, kind: str = "") -> None:
        """End this process with `line`, unless the main thread is ending and will print it. heard: N if `line` is the verdict line/N;
        rank 0 waits until heard/N counts all readers. 0: `line` is no verdict."""
        if self._decided.is_set():
            return
        self.line, self.prints, self.kind = line, prints, kind
        self._decided.set()
        if heard:
            with contextlib.suppress(RuntimeError, TimeoutError):
                self._within(1.0, lambda: self._store.add(f"heard/{heard}", 1))
        if self._leaving:
            return
        self.end(line, prints)
        if self.record.rank == 0:  # rank 0 may hold the store, which the others are still reading
            time.sleep(2 * _AGAIN_S)
        os._exit(1)

    def _aborted(self) -> None:
        """Handle SIGABRT, by which a library ends this process (gloo, if a rank receives too many bytes): tell the other ranks first."""
        if not self._stopped.is_set() and not self._leaving:
            self._leaving = True
            self.record.failed = f"{ABORTED}, with its message in the output above"
            self._settle("failed")
            if self.line is not None:
                self.end(self.line, self.prints)
                os._exit(1)

    def explain(self, error: BaseException) -> str | None:
        """Tell the other ranks that this rank ends with `error`, so that they do not wait for this rank. If `error` has another cause
        (another rank ended first, see `is_echo`, or a collective differed between ranks), return the line that states this cause. Return
        None if `error` itself is the cause, or if no cause was found."""
        if self.line is not None:
            return self.line
        self._leaving = True
        own = not is_echo(error)
        if own:
            first = (str(error).splitlines() or [""])[0]
            self.record.failed = f"{type(error).__name__}: {first}"[:400]
        self._settle("failed" if own else "lost")
        return None if own and self.kind != "differ" else self.line

    def disagree(self) -> str:
        """Return the line about ranks that ran different collectives. All ranks call this if `check_tokens` finds a difference."""
        self._leaving = True
        self._settle("differ")
        return self.line or "ranks did not make the same collectives in this step, and no rank knows which ones differ"

    def _settle(self, why: Why) -> None:
        """Ask all ranks for their progress, unless another rank has asked. Wait for the verdict; on rank 0, also until all have read it."""
        asked = self._round
        self._ask(why)
        self._decided.wait(4 * self._answer_s)
        self._wait_for_readers(asked)

    def _wait_for_readers(self, asked: int) -> None:
        """On rank 0, which may hold the store: wait until all ranks that answered question number `asked` have read its verdict, at most
        about 1.5 s."""
        if self.record.rank:
            return
        until = time.monotonic() + 1.5
        with contextlib.suppress(RuntimeError, TimeoutError):
            while time.monotonic() < until and self._within(1.0, lambda: self._store.add(f"heard/{asked}", 0)) < self._readers:
                time.sleep(0.05)


def is_echo(error: BaseException) -> bool:
    """Return whether an error is a consequence of another rank's end, such as a lost connection."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error).lower() for part in _ECHOES)


def _read_json(store: Any, key: str, wait_s: float) -> Any:
    """Return the JSON value of a key; None if it does not exist after `wait_s`. Raise RuntimeError if the store is gone."""
    until = time.monotonic() + wait_s
    while not store.check([key]):  # store.wait with a time limit would fill the output with torch's warnings
        if time.monotonic() > until:
            return None
        time.sleep(_LOOK_S)
    return json.loads(store.get(key))


def _read_text(store: Any, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _print_if(line: str, prints: bool) -> None:
    if prints:
        _print(line)


def _print(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), f"{line}\n".encode())


_of_process: Watchdog | None = None


def watch(watchdog: Watchdog) -> None:
    """Start a watchdog and make it the watchdog of this process, which `current` returns."""
    global _of_process
    _of_process = watchdog.start()


def current() -> Watchdog | None:
    return _of_process


def enter(phase: str, *, step: int | None = None, patience: float | None = None) -> None:
    """Record that this rank enters another phase of its work. step: number of the step, from 1. patience: factor of the watchdog's time
    limit. For either, None means unchanged."""
    if _of_process is not None:
        _of_process.record.enter(phase, step=step, patience=patience)


def check_tokens(total: float) -> None:
    """Raise Disagreement, on all ranks, if two ranks ran different collectives. total: sum over ranks of Record.token(), a hash of the
    rank's collectives."""
    if not balanced(total) and _of_process is not None:
        raise Disagreement(_of_process.disagree(), prints=_of_process.prints)


def ended_by(error: BaseException) -> Ended | None:
    """Tell the other ranks not to wait for this rank, which ends with `error`. If `error` has another cause (Watchdog.explain), return an
    exception with the line that names this cause; otherwise None."""
    if isinstance(error, Ended) or _of_process is None:
        return None
    line = _of_process.explain(error)
    return None if line is None else Ended(line, prints=_of_process.prints)


def prints_line() -> bool | None:
    """Return whether this rank prints the watchdog's diagnosis. None without a diagnosis: the watchdog did not end the run, or this process
    has no watchdog, as in a run on one rank."""
    return None if _of_process is None or _of_process.line is None else _of_process.prints


def release() -> None:
    """Stop the watchdog of this process."""
    global _of_process
    if _of_process is not None:
        _of_process.stop()
        _of_process = None
