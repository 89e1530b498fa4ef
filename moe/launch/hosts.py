"""The machines of a hostfile beside DeepSpeed's launcher: whether they can be reached, and signals to their ranks, by pdsh and ssh.

    moe train -> pdsh -> ssh worker-1 -> python -m moe.launch.hosts send TOKEN 15      on all machines at once

DeepSpeed's launcher ends what runs there by the name of its program, which every other run of the same user has too, one rank after
another, and kills those that save for longer than half a minute. So it is never asked to: ranks are found by the token of their launch.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe.launch.environment import import_path
from moe.launch.exit_codes import BAD_INPUT, DONE
from moe.launch.processes import kill_all, ranks_of, send
from parallel.errors import BadInput

_LIMIT_S = 60  # of a command there, with the start of Python


@dataclass(frozen=True)
class Hosts:
    """The machines by their names, and the token of the launch on them."""

    names: tuple[str, ...]
    token: str

    def check(self, folder: Path) -> None:
        """Refuse machines that ssh does not reach, that lack this program, or that do not see this run's `folder`. Raises BadInput."""
        for program in ("pdsh", "ssh"):
            if shutil.which(program) is None:
                fix = f"install it (Debian, Ubuntu: apt install {'openssh-client' if program == 'ssh' else program})"
                raise BadInput("--hostfile", got=f"no {program} here", needed="it, to start ranks on other machines", fix=fix)
        word = (folder / "started").read_text().strip()
        answers, errors = self._all("check", str(folder.resolve()), word)
        for name in self.names:
            if answers.get(name) != "here":
                got = f"{name}: {answers.get(name) or errors[name]}"
                needed = "machines that ssh reaches without a password, with this program and the run's folder where they are here"
                raise BadInput("--hostfile", got=got, needed=needed, fix=f"try: ssh {name} ls {folder.resolve()}")

    def send(self, number: int) -> tuple[set[int], list[str]]:
        """Send a signal to all ranks of the launch, at once. Returns those that got it, and the machines that did not answer."""
        answers, _ = self._all("send", self.token, str(number))
        got = {int(rank) for answer in answers.values() for rank in answer.split() if rank.isdecimal()}
        return got, [name for name in self.names if name not in answers]

    def end(self) -> list[str]:
        """SIGKILL every process of the launch. Returns a line for each machine on which that is not certain."""
        answers, errors = self._all("end", self.token)
        wrong = {name: answers.get(name) or errors[name] for name in self.names if answers.get(name) != "none"}
        return [f"whether all processes on {name} have ended is not known: {why}" for name, why in wrong.items()]

    def _all(self, *words: str) -> tuple[dict[str, str], dict[str, str]]:
        """What each machine answered to `python -m moe.launch.hosts WORDS`, and what went wrong on those that did not."""
        paths = [f"{name}={quoted(value)}" for name, value in import_path(os.environ).items()]
        command = ["pdsh", "-R", "ssh", "-f", "1024", "-u", str(_LIMIT_S), "-w", ",".join(self.names), "env", *paths]
        command += [quoted(sys.executable), "-m", "moe.launch.hosts", "%n", *map(quoted, words)]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=2 * _LIMIT_S,
                start_new_session=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return {}, dict.fromkeys(self.names, str(error))
        return answered(self.names, done.stdout), {name: _error(name, done.stderr) for name in self.names}


def quoted(word: str) -> str:
    """A word for pdsh, which replaces %h and %n, and for the shell behind it."""
    return shlex.quote(word).replace("%", "%%")


def answered(names: Sequence[str], text: str) -> dict[str, str]:
    """{machine: its answer} from pdsh's lines `worker-1: 1 here`: the number counts, since pdsh cuts names at the first dot."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        number, _, said = line.partition(": ")[2].partition(" ")
        if number.isdecimal() and int(number) < len(names):
            found[names[int(number)]] = said.strip()
    return found


def _error(name: str, text: str) -> str:
    """The last line that is about a machine."""
    host = name.rpartition("@")[2]
    lines = [line.partition(": ") for line in text.splitlines()]
    said = [rest.strip() for label, _, rest in lines if rest and (host == label or host.startswith(f"{label}."))]
    return said[-1] if said else "no answer"


def main(words: Sequence[str]) -> int:
    """Carried out on each machine, whose number is the first word."""
    match words[1:]:
        case ["check", folder, word]:
            try:
                same = (Path(folder) / "started").read_text().strip() == word
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
