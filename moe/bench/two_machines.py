"""Two machines on one, for `moe bench faults`: network namespaces with a cable between them that can be pulled (Linux, root).

namespace a   10.77.x.1 ---- veth ---- 10.77.x.2   namespace b        a process enters one before it opens a socket
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NEW_NET = 0x40000000  # CLONE_NEWNET


@dataclass(frozen=True)
class Machines:
    """Names of the two namespaces, of the ends of the cable in them, and the addresses there."""

    spaces: tuple[str, str]
    ends: tuple[str, str]
    addresses: tuple[str, str]

    def enter(self, machine: int) -> None:
        """This process goes on in that machine: its sockets are there from now on."""
        handle = os.open(f"/run/netns/{self.spaces[machine]}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(handle, _NEW_NET):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(handle)

    def plug(self) -> None:
        """The cable carries again."""
        _ip("-n", self.spaces[0], "link", "set", self.ends[0], "up")

    def pull(self) -> None:
        """The cable carries nothing any more."""
        _ip("-n", self.spaces[0], "link", "set", self.ends[0], "down")


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


@contextlib.contextmanager
def two_machines() -> Iterator[Machines]:
    """Made here and gone afterwards. Raises CalledProcessError where the system does not allow it."""
    _remove_left()
    number, this = os.getpid() % 250, os.getpid()
    spaces, ends = (f"moe-{this}-a", f"moe-{this}-b"), (f"mv{this}a", f"mv{this}b")
    machines = Machines(spaces, ends, (f"10.77.{number}.1", f"10.77.{number}.2"))
    try:
        for space in spaces:
            _ip("netns", "add", space)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for space, end, address in zip(spaces, ends, machines.addresses, strict=True):
            _ip("link", "set", end, "netns", space)
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", space, "link", "set", end, "up")
            _ip("-n", space, "link", "set", "lo", "up")
        yield machines
    finally:
        for space in spaces:
            if Path("/run/netns", space).exists():
                subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def _remove_left() -> None:
    """Namespaces whose process was killed before it could remove them."""
    for path in Path("/run/netns").glob("moe-*-[ab]"):
        if not Path("/proc", path.name.split("-")[1]).exists():
            subprocess.run(["ip", "netns", "del", path.name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
