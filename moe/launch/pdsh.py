"""Program that starts the ranks on the machines of a hostfile. It runs DeepSpeed's runner with corrected arguments, output and environment.

    moe train -> python -m moe.launch.pdsh FOLDER [the runner's arguments] -> pdsh -> ssh -> deepspeed.launcher.launch -> ranks

Corrections: each word of the remote shell command is quoted; the working folder is not searched for modules; DeepSpeed's log is not printed
before the run's output; variables that ranks need are passed on. Each machine writes its launcher's exit code to FOLDER
(moe/launch/status.py), because pdsh returns only after all machines have ended.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe.launch.exit_codes import BAD_INPUT, DONE
from moe.launch.hosts import quoted
from moe.launch.processes import PARENT, STDIN, TOKEN, die_with_input
from moe.launch.status import machine
from parallel.errors import BadInput

# prefixes of the variables that are passed on to ranks on other machines
PASSED = ("MOE_", "PYTHON", "OMP_", "GLOO_", "NCCL_", "UCX_", "TORCH_", "DS_ACCELERATOR")


def passed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are passed on to other machines. PARENT is left out, because a process id is valid only on this machine."""
    return {name: value for name, value in environment.items() if name.startswith(PASSED) and name != PARENT}


def of_file(path: Path) -> dict[str, str]:
    """Read a file of NAME=VALUE lines, such as DeepSpeed's .deepspeed_env. Return {name: value, quoted for the remote shell}.
    A value may be in the shell's quotes. `$HOME` and other variables are expanded on the other machine. Empty lines and comments are
    skipped; any other line raises BadInput."""
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text(errors="surrogateescape").splitlines(), 1):
        name, equals, value = (part.strip() for part in line.strip().removeprefix("export ").partition("="))
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not equals or not _NAME.fullmatch(name):
            raise BadInput(f"{path}, line {number}", got=line.strip(), needed="NAME=VALUE", fix="for example: NCCL_DEBUG=INFO")
        found[name] = _worded(value).replace("%", "%%")
    return found


_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SPECIAL = re.compile(r"""\\[$`"\\]|["`\\]|\$(?=\()""")  # in a shell's double quotes: an escaped character, or one that must be escaped


def _worded(value: str) -> str:
    if value[:1] in ("'", '"'):
        try:
            if value[-1] == value[0] and len(shlex.split(value)) == 1:
                return value
        except ValueError:  # a quote is not closed, so the value is quoted below
            pass
    escaped = _SPECIAL.sub(lambda found: found[0] if len(found[0]) > 1 else f"\\{found[0]}", value)
    return f'"{escaped}"'


def main() -> int:
    """Run DeepSpeed's runner with a corrected pdsh command line, and return the exit code."""
    from deepspeed.launcher import runner

    folder, given = Path(sys.argv[1]), sys.argv[2:]
    own = passed(os.environ)
    files = [Path(place) / runner.DEEPSPEED_ENVIRONMENT_NAME for place in runner.DEEPSPEED_ENVIRONMENT_PATHS]
    runner.DEEPSPEED_ENVIRONMENT_PATHS = []  # otherwise the runner would read these files too, without quoting
    try:
        of_files = {name: value for file in files if file.is_file() for name, value in of_file(file).items()}
    except BadInput as bad:
        print(f"error: {bad}", file=sys.stderr, flush=True)
        return BAD_INPUT

    class Hosts(runner.PDSHRunner):  # type: ignore[misc]
        exports: dict[str, str]

        def parse_user_args(self) -> list[str]:
            return [quoted(word) for word in self.args.user_args]

        def add_export(self, key: str, var: str) -> None:
            if key != "PYTHONPATH":  # `var` has the working folder added; get_cmd exports the value without it
                self.exports[key] = quoted(var)

        def get_cmd(self, environment: dict[str, str], active_resources: Mapping[str, Any]) -> Any:
            self.exports |= {name: quoted(value) for name, value in own.items()} | of_files
            command, kill, environment = super().get_cmd(environment, active_resources)
            python = command.index(sys.executable)
            command[python - 1] = f"cd {quoted(command[python - 1].removeprefix('cd ').removesuffix(';'))};"
            command[python] = quoted(sys.executable)
            command.insert(command.index("--module"), "--log_level=critical")
            word = f"{quoted(str(folder.resolve()))}/{machine(own[TOKEN], '%n')}"
            command += [f"; code=$?; [ $code -eq 0 ] || {{ echo $code >{word}; }} 2>/dev/null; (exit $code)"]
            return command, kill, environment

    runner.PDSHRunner = Hosts
    if STDIN in os.environ:  # stdin ends when `moe train` dies; pdsh does not read it, so kill this process group then
        die_with_input(lambda: os.killpg(os.getpgrp(), signal.SIGKILL))
    runner.main(given)
    return DONE


if __name__ == "__main__":
    sys.exit(main())
