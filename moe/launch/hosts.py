"""Checks the machines of a hostfile, and sends signals to the ranks on them, by pdsh and ssh, without DeepSpeed's launcher.

    moe train -> pdsh -> ssh worker-1 -> python -m moe.launch.hosts send TOKEN 15      on all machines in parallel

DeepSpeed's launcher would kill remote processes by the name of their program, and so also those of the user's other runs. It would also
kill ranks that need more than half a minute to save. So this module sends the signals. It finds the ranks by TOKEN, the value of an
environment variable that all processes of the launch have.
"""

from __future__ import annotations

import os
import re
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
from parallel.store.files import read_text

_LIMIT_S = 60  # limit of a remote command, including the start of Python
_POLL_S = 0.05
_SLOTS = re.compile(r"[1-9][0-9]{0,4}")
# a host's name, without characters that mean a command, an option, a list of hosts or another protocol to a shell, ssh or pdsh
_HOST = re.compile(r"\w[\w.@-]*", re.ASCII)


def read_hostfile(path: Path) -> dict[str, int]:
    """Read a hostfile of DeepSpeed: lines `HOST slots=N`, and comments after #. Return {host: slots}. Raises BadInput."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        got, fix = f"{path}: {getattr(error, 'strerror', None) or error}", "write one line for each host: worker-0 slots=8"
        raise BadInput("--hostfile", got=got, needed="a text file", fix=fix) from None
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = words[1].removeprefix("slots=") if len(words) == 2 and words[1].startswith("slots=") else ""
        if ":" in words[0]:
            got, needed = words[0], "a name, or an IPv4 address: pdsh takes the text before a colon as the way to reach a host"
            fix = "give an IPv6 address a name in ~/.ssh/config (Host worker-0, and below it HostName ADDRESS), and write: worker-0 slots=8"
            raise BadInput(f"{path}, line {number}", got=got, needed=needed, fix=fix)
        if not _SLOTS.fullmatch(slots) or not _HOST.fullmatch(words[0]) or words[0] in hosts:
            got = f"{words[0]} twice" if words[0] in hosts else line.strip()
            needed = "NAME slots=N (NAME: a name or an IPv4 address), each host once"
            raise BadInput(f"{path}, line {number}", got=got, needed=needed, fix="for example: worker-0 slots=8")
        hosts[words[0]] = int(slots)
    if not hosts:
        raise BadInput("--hostfile", got=f"{path} without a host", needed="a line HOST slots=N", fix="for example: worker-0 slots=8")
    return hosts


@dataclass(frozen=True)
class Hosts:
    """The machines of a launch: their names, the number of ranks (slots) on each, and the token of the launch. Methods with an argument
    `no_more` give up when no_more() returns True: the user has sent a signal."""

    names: tuple[str, ...]
    token: str
    slots: tuple[int, ...]

    def ranks_on(self, number: int) -> range:
        """Return the ranks on machine `number`. Ranks are numbered from the first machine to the last."""
        before = sum(self.slots[:number])
        return range(before, before + self.slots[number])

    def check(self, folder: Path, *, no_more: Callable[[], bool]) -> bool:
        """Raise BadInput unless pdsh and ssh are installed here, ssh reaches every machine, moe-parallel runs there, and the machine sees
        `folder`, this run's status folder. Return False if no_more() returned True before the end of the check, otherwise True."""
        for program in ("pdsh", "ssh"):
            if shutil.which(program) is None:
                fix = f"install it (Debian, Ubuntu: apt install {'openssh-client' if program == 'ssh' else program})"
                raise BadInput("--hostfile", got=f"no {program} here", needed=f"{program}, to start ranks on other machines", fix=fix)
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

    def send(self, signum: int, *, no_more: Callable[[], bool]) -> tuple[set[int], list[str]]:
        """Send the signal `signum` to all ranks of the launch. Return (numbers of the ranks that got it, names of machines that did not
        answer). no_more: the wait for answers ends once no_more() returns True."""
        answers, _ = self._all("send", self.token, str(signum), no_more=no_more)
        got = {int(rank) for answer in answers.values() for rank in answer.split() if rank.isdecimal()}
        return got, [name for name in self.names if name not in answers]

    def end(self) -> list[str]:
        """Kill all processes of the launch on all machines. Return a line of text for each machine that did not confirm that none is
        left."""
        answers, errors = self._all("end", self.token)
        wrong = {name: answers.get(name) or errors[name] for name in self.names if answers.get(name) != "none"}
        return [f"whether all processes on {name} have ended is not known: {why}" for name, why in wrong.items()]

    def _all(self, *words: str, no_more: Callable[[], bool] = lambda: False) -> tuple[dict[str, str], dict[str, str]]:
        """Run `python -m moe.launch.hosts WORDS` on all machines. Return two dicts: machine -> answer, for machines that answered; machine
        -> last line of its error output ("no answer" if there is none), for all machines. no_more: the wait for answers ends once no_more()
        returns True."""
        paths = [f"{name}={quoted(value)}" for name, value in import_path(os.environ).items()]
        command = ["pdsh", "-R", "ssh", "-f", "1024", "-u", str(_LIMIT_S), "-w", ",".join(self.names), "env", *paths]
        command += [quoted(sys.executable), "-m", "moe.launch.hosts", "%n", *map(quoted, words)]
        said: list[str] = []
        # output goes to files: a pipe would stay open while an ssh process survives pdsh, so reading it would not end
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as problems:
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
    """Quote a word for the remote shell, and for pdsh, which would replace %h by the host and %n by its number."""
    return shlex.quote(word).replace("%", "%%")


def answered(names: Sequence[str], text: str) -> dict[str, str]:
    """Parse lines `LABEL: INDEX ANSWER` of pdsh's output, such as `worker-1: 1 here`. Return {machine: answer}. INDEX, an index into
    `names`, identifies the machine; the label does not, because pdsh cuts it at the first dot."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        number, _, said = line.partition(": ")[2].partition(" ")
        if number.isdecimal() and int(number) < len(names):
            found[names[int(number)]] = said.strip()
    return found


def _error(name: str, text: str) -> str:
    host = name.rpartition("@")[2]
    lines = [line.partition(": ") for line in text.splitlines()]
    said = [rest.strip() for label, _, rest in lines if rest and (host == label or host.startswith(f"{label}."))]
    return said[-1] if said else "no answer"


def main(words: Sequence[str]) -> int:
    """Carry out `Hosts.check`, `send` or `end` on this machine, and print the answer. words: this machine's number, command, arguments."""
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
