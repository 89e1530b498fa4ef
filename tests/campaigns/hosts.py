"""Two hosts with names and sshd on one machine, for `python -m tests.campaigns machines`: namespaces on the cable of two_machines.py.

    worker-0   10.77.x.1   own network, name, processes, mounts: sshd      worker-1   10.77.x.2   the same

All processes of a host end with the first process of its process namespace. The disk is shared.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from parallel.process.libc import die_with
from tests.campaigns.two_machines import Machines, two_machines

NAMES = ("worker-0", "worker-1")
PROGRAMS = {"sshd": "openssh-server", "ssh": "openssh-client", "pdsh": "pdsh", "unshare": "util-linux", "nsenter": "util-linux"}
_APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--uts")
_DAEMONS = ("sshd", "munged", "slurmctld", "slurmd", "slurmscriptd")
_START_S = 20.0


@dataclass(frozen=True)
class Hosts:
    """Two hosts. `first`: process ids of the hosts' first processes, which started all others on their host."""

    machines: Machines
    first: tuple[int, ...]

    def start(self, host: int, command: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> subprocess.Popen[str]:
        """Start a command on host number `host`. stdout and stderr are one stream of text."""
        there = ["nsenter", "--target", str(self.first[host]), "--net", "--uts", "--mount", "--pid"]
        # cd runs inside the host: a folder entered before nsenter would be on this process's mounts
        words = [*there, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *command]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(words, env=dict(env), text=True, **streams)  # type: ignore[call-overload, no-any-return]

    def signal(self, process: subprocess.Popen[str], number: signal.Signals) -> None:
        """Send a signal to a command that `start` began. It is the child of `process`, which is nsenter."""
        os.kill(_child(process.pid), number)

    def left(self) -> list[str]:
        """Return the commands that still run on the hosts, without their daemons."""
        here, found = {os.readlink(f"/proc/{first}/ns/pid") for first in self.first}, []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                mine = os.readlink(f"/proc/{process.pid}/ns/pid") in here and process.status() != psutil.STATUS_ZOMBIE
                if mine and not process.name().startswith(_DAEMONS):
                    found.append(" ".join(process.cmdline())[:200])
        return found


def path(env: Mapping[str, str]) -> str:
    """Return PATH of the environment `env`, with the folders of daemons at its end."""
    return f"{env.get('PATH', '')}:/usr/sbin:/sbin"


def missing(programs: Mapping[str, str] = PROGRAMS) -> str:
    """Return the reason why this machine cannot run two hosts: no network namespaces, or missing programs; "" if it can."""
    absent = sorted({package for program, package in programs.items() if shutil.which(program, path=path(os.environ)) is None})
    if absent:
        return f"it needs {' '.join(absent)} (apt-get install {' '.join(absent)})"
    tried = subprocess.run([*_APART, "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"this system gives no space of processes ({tried.stderr.strip()})"


@contextlib.contextmanager
def two_hosts(home: Path, variables: Mapping[str, str]) -> Iterator[Hosts]:
    """Yield two hosts that reach each other by ssh without a password. `home`: folder for keys; `variables`: environment of sessions."""
    with two_machines() as machines, contextlib.ExitStack() as stack:
        _ssh_files(home, machines, variables)
        first = [stack.enter_context(_host(home, machines, number)) for number in range(2)]
        yield Hosts(machines, tuple(first))


def _ssh_files(home: Path, machines: Machines, variables: Mapping[str, str]) -> None:
    for key in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / key)], check=True, capture_output=True)
    shutil.copy(home / "key.pub", home / "authorized")
    named = [f"{address} {name}\n" for address, name in zip(machines.addresses, NAMES, strict=True)]
    (home / "hosts").write_text("127.0.0.1 localhost\n" + "".join(named))
    public = (home / "host_key.pub").read_text().rpartition(" ")[0]
    (home / "known").write_text("".join(f"{name},{address} {public}\n" for name, address in zip(NAMES, machines.addresses, strict=True)))
    (home / "ssh_config").write_text(
        f"IdentityFile {home}/key\nIdentitiesOnly yes\nUserKnownHostsFile {home}/known\nStrictHostKeyChecking yes\nBatchMode yes\n"
        "LogLevel ERROR\n"
    )
    (home / "shadow").write_text("root:*:20000:0:99999:7:::\n")  # no password, but not locked ("!"), which sshd refuses
    (home / "shadow").chmod(0o600)
    given = " ".join(f'"{name}={value}"' for name, value in variables.items())
    (home / "sshd_config").write_text(
        f"HostKey {home}/host_key\nAuthorizedKeysFile {home}/authorized\nPasswordAuthentication no\nPermitRootLogin yes\nStrictModes no\n"
        f"UsePAM no\nPidFile none\n" + (f"SetEnv {given}\n" if given else "")
    )


@contextlib.contextmanager
def _host(home: Path, machines: Machines, number: int) -> Iterator[int]:
    """Start a host; yield the id of its first process once sshd listens. number: 0 or 1."""
    sshd = shutil.which("sshd", path=path(os.environ))
    own = {"hosts": "/etc/hosts", "ssh_config": "/etc/ssh/ssh_config", "shadow": "/etc/shadow"}
    script = (
        f"hostname {NAMES[number]} && {' && '.join(f'mount --bind {home}/{name} {there}' for name, there in own.items())} "
        "&& if [ -d ~root/.ssh ]; then mount -t tmpfs none ~root/.ssh; fi "  # hides the user's own keys and configuration
        f"&& mount -t tmpfs none /run && mkdir /run/sshd && exec {sshd} -D -e -f {home}/sshd_config"
    )
    parent = os.getpid()

    def enter() -> None:
        die_with(parent)
        machines.enter(number)

    words = [*_APART, "sh", "-c", script]
    with open(home / f"sshd-{number}.log", "wb") as log:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=enter)
    try:
        until = time.monotonic() + _START_S
        while b"listening" not in (home / f"sshd-{number}.log").read_bytes():
            if process.poll() is not None or time.monotonic() > until:
                raise OSError(0, f"sshd did not start: {(home / f'sshd-{number}.log').read_text()[-300:]}")
            time.sleep(0.02)
        yield _child(process.pid)
    finally:
        process.kill()
        process.wait()


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
