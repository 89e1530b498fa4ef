"""Two machines on one, for `python -m tests.campaigns`: network namespaces with a cable between them that can be pulled (Linux, root).

one namespace   10.77.0.1 ---- veth ---- 10.77.0.2   the other        a process enters one before it opens a socket

They have no names: open files hold them, and they are gone with the last process in them, however this one ends.
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
        """This process goes on in that machine: its sockets are there from now on."""
        _call("setns", self.spaces[machine], _NEW_NET)

    def plug(self) -> None:
        """The cable carries again."""
        self.ip(0, "link", "set", self.ends[0], "up")

    def pull(self) -> None:
        """The cable carries nothing any more."""
        self.ip(0, "link", "set", self.ends[0], "down")

    def ip(self, machine: int, *words: str) -> None:
        """The command `ip` in that machine. Raises CalledProcessError."""
        subprocess.run(["ip", *words], check=True, capture_output=True, preexec_fn=lambda: self.enter(machine))


def why_not() -> str:
    """What this machine lacks for it; nothing where it has all."""
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
    """Made here and gone afterwards. Raises OSError or CalledProcessError where the system does not allow it."""
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
    """A file that holds a new namespace of networks. This thread is in it for a moment."""
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
