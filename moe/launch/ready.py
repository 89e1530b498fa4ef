"""Quick restarts: a warm process imports the ranks' modules in advance, and forks ranks for a restart.

    moe train --restarts N -> launcher -> ranks                    the first attempt
                           -> warm process                         after the first checkpoint; imports torch and the trainer, once
                           -> warm process -> leader -> ranks      later attempts start in a tenth of a second, instead of ten seconds

A fork gets its parent's memory but not its threads, so the warm process must not have threads, process groups or an open GPU. If one of its
imports has opened a GPU, no ranks are forked, and the launcher starts the next attempt instead. The leader, a fork of the warm process, has
the launcher's role: ranks are in its session and die with it, and it ends when all ranks have ended. Messages between the warm process or
leader and `moe train` are lines of JSON: a request to start, then the process ids, later the exit codes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from moe.launch.arguments import parse
from moe.launch.environment import child_environment, has_gpu
from moe.launch.exit_codes import DONE, FAILED
from moe.launch.processes import PARENT, TOKEN, Rank, kill_all, name_rank
from moe.recipe.load import load
from parallel.process.libc import die_with

# longest waits, in seconds: for the process ids of forked ranks; for the leader's exit code; for a message, between two calls of no_more()
_FORK_S, _LEAVE_S, _LOOK_S = 10.0, 10.0, 0.1
# modules that a rank imports only when training begins (torch's optimizers import the compiler, and rank 0 imports TensorBoard)
_LATER = ("torch._dynamo", "torch.utils.tensorboard")


class Forked:
    """The leader of an attempt (see the top of this file), with the interface of `subprocess.Popen` (pid, returncode, poll, wait), and its
    ranks. pids: process ids of the leader, then of the ranks. receive: returns the next message of the warm process or leader
    (`Ready._receive`)."""

    def __init__(self, pids: Sequence[int], receive: Callable[[float], dict[str, Any] | None]) -> None:
        self.pid, self.ranks = pids[0], [Rank(number, pid) for number, pid in enumerate(pids[1:])]
        self.returncode: int | None = None
        self._receive = receive

    def poll(self, wait_s: float = 0.0) -> int | None:
        while self.returncode is None and (message := self._receive(wait_s)) is not None:
            for rank, code in zip(self.ranks, message.get("codes", ()), strict=False):
                rank.code = code  # the leader, as their parent, has all exit codes, even those that `Rank.look` missed
            if "codes" not in message:
                self.returncode = int(message.get("ended", FAILED))
        return self.returncode

    def wait(self) -> int:
        code = self.poll(_LEAVE_S)
        return FAILED if code is None else code


class Ready:
    """Controls the warm process from `moe train`: starts it once `wanted()` returns True, and sends it requests until `close`. words,
    environment, nproc: arguments, variables and number of the ranks."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], nproc: int, *, wanted: Callable[[], bool]) -> None:
        self._words, self._environment, self._nproc, self._wanted = list(words), environment, nproc, wanted
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._token, self._loaded, self._unread = secrets.token_hex(8), False, b""

    def look(self) -> None:
        """Start the warm process if `wanted()` returns True and it was not started before. Called repeatedly during an attempt."""
        if self._process is not None or not self._wanted():
            return
        self._channel, theirs = socket.socketpair()
        env = child_environment(self._environment, self._nproc) | {TOKEN: self._token}
        command = [sys.executable, "-u", "-m", "moe.launch.ready", str(theirs.fileno()), *self._words]
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()

    def begin(self, words: Sequence[str], environment: Mapping[str, str], world: int, *, no_more: Callable[[], bool]) -> Forked | None:
        """Make the warm process fork `world` ranks with these arguments and variables. Return None if the launcher must start them instead.
        If the warm process is still importing modules, wait for it (the launcher would take longer), at most until no_more() returns
        True."""
        while self._channel is not None and not self._loaded and not no_more():
            self._loaded = self._receive(_LOOK_S) == {"loaded": True}
            if not self._loaded and self._process is not None and self._process.poll() is not None:
                self.close()
        if self._channel is None or not self._loaded:
            return None
        with contextlib.suppress(OSError):
            self._channel.sendall(json.dumps({"words": list(words), "environment": dict(environment), "world": world}).encode() + b"\n")
            pids = (self._receive(_FORK_S) or {}).get("pids")
            if pids:
                return Forked(pids, self._receive)
        self.close()
        return None

    def end(self, leader: Forked, token: str) -> list[int]:
        """Kill all processes of an attempt, except the warm process. Return the ids of processes that are still alive. token: value
        of the variable TOKEN in the attempt's processes."""
        assert self._process is not None
        return kill_all(leader.pid, token, self._token, spared=self._process.pid)

    def close(self) -> None:
        if self._process is not None and self._channel is not None:
            self._channel.close()
            kill_all(self._process.pid, self._token)
            self._process.wait()
        self._channel = None  # _process stays set, so that `look` does not start the warm process again

    def _receive(self, wait_s: float) -> dict[str, Any] | None:
        """Return the next message from the warm process or its leader; {} if both have ended; None if none came within `wait_s` seconds."""
        assert self._channel is not None
        until = time.monotonic() + wait_s
        while b"\n" not in self._unread:
            if not select.select([self._channel], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            with contextlib.suppress(ConnectionResetError):
                if some := self._channel.recv(4096):
                    self._unread += some
                    continue
            return {}
        line, _, self._unread = self._unread.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found


def main() -> int:
    """Run the warm process: import modules, then fork a leader for each request. Return the exit code of the process in which this call
    returns: the warm process, a leader, or a rank."""
    die_with(int(os.environ[PARENT]))
    channel = socket.socket(fileno=int(sys.argv[1]))
    with _silent():
        _load(sys.argv[2:])
    _say(channel, loaded=True)
    for line in channel.makefile():
        this = os.getpid()
        leader = os.fork()
        if not leader:
            os.setsid()
            die_with(this)
            return _lead(channel, **json.loads(line))
        _say(channel, ended=os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1]))
    return DONE


def _load(words: list[str]) -> None:
    given = parse(words)
    run, _ = load(given.recipe, given.overrides)
    for name in ("moe.launch.launch", "moe.train.loop.trainer", *_LATER):
        importlib.import_module(name)
    run.carrier.load()
    gc.collect()
    gc.freeze()  # otherwise garbage collection in a forked rank would write to all objects, so that their shared pages are copied


def _lead(channel: socket.socket, *, words: list[str], environment: dict[str, str], world: int) -> int:
    """Run a leader: fork `world` ranks, and wait until all have ended. Return the exit code of the lowest failed rank; in a rank's process,
    return that rank's exit code. channel: socket to `moe train`. words, environment: arguments and variables of the ranks."""
    import torch

    if torch.cuda._is_in_bad_fork() and has_gpu(environment):  # imports have opened a GPU, which a forked process cannot use
        _say(channel, pids=[])
        return FAILED
    os.environ.clear()
    os.environ.update(environment)
    pids = []
    for rank in range(world):
        pid = os.fork()
        if not pid:
            channel.close()
            return _live(rank, words)
        pids.append(pid)
    _say(channel, pids=[os.getpid(), *pids])
    for pid in pids:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # rank stays a zombie until all have ended, so `moe train` can read its exit code
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    _say(channel, codes=codes)
    return next((code if code > 0 else 128 - code for code in codes if code), DONE)


def _live(rank: int, words: list[str]) -> int:
    from moe.launch import launch

    name_rank(rank)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    return launch.main(words)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Within the context, discard all output of this process, such as messages of libraries during their import."""
    nowhere, before = os.open(os.devnull, os.O_WRONLY), [os.dup(1), os.dup(2)]
    try:
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        yield
    finally:
        for stream, kept in zip((1, 2), before, strict=True):
            os.dup2(kept, stream)
            os.close(kept)
        os.close(nowhere)


def _say(channel: socket.socket, **word: Any) -> None:
    with contextlib.suppress(OSError):  # `moe train` has closed its end, and is about to kill this process
        channel.sendall(json.dumps(word).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
