"""Two machines simulated on one, for `python -m tests.campaigns`: network namespaces and a cable that can be pulled (Linux, root).

one namespace   10.77.0.1 ---- veth ---- 10.77.0.2   the other        a process enters one before it opens a socket

The namespaces have no names. Open files hold them, so they vanish with the last process in them, however this process ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_NEW_NET = 0x40000000  # CLONE_NEWNET


@dataclass(frozen=True)
class Machines:
    """Open files of the two namespaces, and the names and addresses of the cable's ends in them."""

    spaces: tuple[int, int]
    ends: tuple[str, str] = ("moe0", "moe1")
    addresses: tuple[str, str] = ("10.77.0.1", "10.77.0.2")

    def enter(self, machine: int) -> None:
        """Move this process into that machine: new sockets belong to it."""
        _call("setns", self.spaces[machine], _NEW_NET)

    def plug(self) -> None:
        """Reconnect the cable."""
        self.ip(0, "link", "set", self.ends[0], "up")

    def pull(self) -> None:
        """Disconnect the cable."""
        self.ip(0, "link", "set", self.ends[0], "down")

    def ip(self, machine: int, *words: str) -> None:
        """Run the command `ip` in that machine. Raises CalledProcessError."""
        subprocess.run(["ip", *words], check=True, capture_output=True, preexec_fn=lambda: self.enter(machine))


def why_not() -> str:
    """Return the reason why this machine cannot simulate two machines; "" if it can."""
    if not sys.platform.startswith("linux") or os.geteuid():
        return "it needs root on Linux"
    if shutil.which("ip") is None:
        return "it needs the command ip (iproute2)"
    try:
        with two_machines():
            return ""
    except (OSError, subprocess.SubprocessError) as error:
        return f"this system gives no network namespaces ({error})"


@contextmanager
def two_machines() -> Iterator[Machines]:
    """Yield two machines that exist until the context exits. Raises OSError or CalledProcessError if the system does not allow them."""
    spaces: list[int] = []
    try:
        spaces = [_namespace(), _namespace()]
        machines = Machines((spaces[0], spaces[1]))
        there = f"/proc/{os.getpid()}/fd/{spaces[1]}"
        machines.ip(0, "link", "add", machines.ends[0], "type", "veth", "peer", "name", machines.ends[1], "netns", there)
        for machine in range(2):
            machines.ip(machine, "addr", "add", f"{machines.addresses[machine]}/24", "dev", machines.ends[machine])
            for end in (machines.ends[machine], "lo"):
                machines.ip(machine, "link", "set", end, "up")
        yield machines
    finally:
        for space in spaces:
            os.close(space)


def _namespace() -> int:
    """Return a file descriptor of a new network namespace, which this thread enters for a moment."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _call("unshare", _NEW_NET)
        try:
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        finally:
            _call("setns", own, _NEW_NET)
    finally:
        os.close(own)


def _call(name: str, *words: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*words):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
