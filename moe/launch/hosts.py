"""The machines of a hostfile, reached without DeepSpeed's launcher: checks them and signals their ranks, by pdsh and ssh.

    moe train -> pdsh -> ssh worker-1 -> python -m moe.launch.hosts send TOKEN 15      on all machines in parallel

DeepSpeed's launcher ends remote processes by program name, which all runs of a user share. It ends ranks one after another, and kills ranks
that save for longer than half a minute. So it is never asked to: ranks are found by the token of their launch.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe.launch.environment import import_path
from moe.launch.exit_codes import BAD_INPUT, DONE
from moe.launch.processes import kill_all, ranks_of, send
from moe.launch.status import STARTED
from parallel.errors import BadInput

_LIMIT_S = 60  # limit of a remote command, including the start of Python
_POLL_S = 0.05


@dataclass(frozen=True)
class Hosts:
    """Names of the machines, the token of the launch, and the number of ranks (slots) on each."""

    names: tuple[str, ...]
    token: str
    slots: tuple[int, ...]

    def ranks_on(self, number: int) -> range:
        """Return the ranks of one machine. Ranks are numbered through the machines in order."""
        before = sum(self.slots[:number])
        return range(before, before + self.slots[number])

    def check(self, folder: Path, *, no_more: Callable[[], bool]) -> bool:
        """Refuse machines that ssh does not reach, that lack this program, or that do not see this run's `folder`. Raises BadInput.

        Returns False if `no_more` returned True, which aborts the check.
        """
        for program in ("pdsh", "ssh"):
            if shutil.which(program) is None:
                fix = f"install it (Debian, Ubuntu: apt install {'openssh-client' if program == 'ssh' else program})"
                raise BadInput("--hostfile", got=f"no {program} here", needed="it, to start ranks on other machines", fix=fix)
        answers, errors = self._all("check", str(folder.resolve()), self.token, no_more=no_more)
        if no_more():
            return False
        for name in self.names:
            if name not in answers:
                needed = "machines that ssh reaches without a password, with this program in the same folder"
                paths = [f"{key}={shlex.quote(value)}" for key, value in import_path(os.environ).items()]
                fix = f"make this work: ssh {name} env {' '.join(paths)} {shlex.quote(sys.executable)} -m moe --help"
                raise BadInput("--hostfile", got=f"{name}: {errors[name]}", needed=needed, fix=fix)
            if answers[name] != "here":
                fix = "--out DIR on a disk that all of them share"
                raise BadInput("--hostfile", got=f"{name}: {answers[name]}", needed="a run's folder that every machine sees", fix=fix)
        return True

    def send(self, number: int, *, no_more: Callable[[], bool]) -> tuple[set[int], list[str]]:
        """Send a signal to all ranks of the launch in parallel. Returns the ranks that got it, and the machines that did not answer."""
        answers, _ = self._all("send", self.token, str(number), no_more=no_more)
        got = {int(rank) for answer in answers.values() for rank in answer.split() if rank.isdecimal()}
        return got, [name for name in self.names if name not in answers]

    def end(self) -> list[str]:
        """SIGKILL every process of the launch. Returns a line for each machine that did not confirm it."""
        answers, errors = self._all("end", self.token)
        wrong = {name: answers.get(name) or errors[name] for name in self.names if answers.get(name) != "none"}
        return [f"whether all processes on {name} have ended is not known: {why}" for name, why in wrong.items()]

    def _all(self, *words: str, no_more: Callable[[], bool] = lambda: False) -> tuple[dict[str, str], dict[str, str]]:
        """Return each machine's answer to `python -m moe.launch.hosts WORDS`, and each machine's error.

        `no_more` is polled, and aborts the command when it returns True.
        """
        paths = [f"{name}={quoted(value)}" for name, value in import_path(os.environ).items()]
        command = ["pdsh", "-R", "ssh", "-f", "1024", "-u", str(_LIMIT_S), "-w", ",".join(self.names), "env", *paths]
        command += [quoted(sys.executable), "-m", "moe.launch.hosts", "%n", *map(quoted, words)]
        said: list[str] = []
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as problems:  # a surviving ssh would hold a pipe open
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=problems, start_new_session=True)
            except OSError as error:
                return {}, dict.fromkeys(self.names, str(error))
            until = time.monotonic() + 2 * _LIMIT_S
            while process.poll() is None and time.monotonic() < until and not no_more():
                time.sleep(_POLL_S)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for file in (output, problems):
                file.seek(0)
                said.append(file.read().decode(errors="replace"))
        return answered(self.names, said[0]), {name: _error(name, said[1]) for name in self.names}


def quoted(word: str) -> str:
    """Quote a word for pdsh, which replaces %h and %n, and for the remote shell."""
    return shlex.quote(word).replace("%", "%%")


def answered(names: Sequence[str], text: str) -> dict[str, str]:
    """Parse pdsh's lines `worker-1: 1 here` as {machine: answer}. The number identifies a machine, since pdsh cuts names at the first
    dot."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        number, _, said = line.partition(": ")[2].partition(" ")
        if number.isdecimal() and int(number) < len(names):
            found[names[int(number)]] = said.strip()
    return found


def _error(name: str, text: str) -> str:
    """Return the last line about a machine."""
    host = name.rpartition("@")[2]
    lines = [line.partition(": ") for line in text.splitlines()]
    said = [rest.strip() for label, _, rest in lines if rest and (host == label or host.startswith(f"{label}."))]
    return said[-1] if said else "no answer"


def main(words: Sequence[str]) -> int:
    """Run a command on each machine. The first word is the machine's number."""
    match words[1:]:
        case ["check", folder, word]:
            try:
                same = (Path(folder) / STARTED).read_text().strip() == word
                answer = "here" if same else f"{folder} is another folder there"
            except OSError as error:
                answer = f"{folder}: {error.strerror}"
        case ["send", token, number]:
            ranks = ranks_of(token)
            send(ranks, signal.Signals(int(number)))
            answer = " ".join(str(rank.rank) for rank in ranks)
        case ["end", token]:
            left = kill_all(None, token)
            answer = f"processes {' '.join(map(str, left))} are left" if left else "none"
        case _:
            return BAD_INPUT
    print(words[0], answer)
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
