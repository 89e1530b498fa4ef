"""DeepSpeed's launcher for the machines of a hostfile, with what it says and passes on mended.

    moe train -> this, on DeepSpeed's runner -> pdsh -> ssh -> deepspeed.launcher.launch on each machine -> ranks

python -m moe.launch.pdsh FOLDER [the runner's arguments]

DeepSpeed puts what it was given into a command line for a shell on the other machines: here every word arrives as it was. It puts the
working folder before all modules, and its log before those of the run: here it does not. The environment that ranks need goes along. And
each machine leaves word in FOLDER of how its launcher ended (moe/launch/status.py): pdsh waits for all of them before it says anything.
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

PASSED = ("MOE_", "PYTHON", "OMP_", "GLOO_", "NCCL_", "UCX_", "TORCH_", "DS_ACCELERATOR")  # variables whose names begin so


def passed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that ranks on other machines get; a process of this one would mean nothing there."""
    return {name: value for name, value in environment.items() if name.startswith(PASSED) and name != PARENT}


def of_file(path: Path) -> dict[str, str]:
    """{name: its value as the command line has it} of a file of NAME=VALUE lines, as DeepSpeed's: `$HOME` is read on the other machine.

    A value may stand in quotes, which mean what they mean to a shell. Raises BadInput.
    """
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
_OBEYED = re.compile(r"""\\[$`"\\]|["`\\]|\$(?=\()""")  # in double quotes: what is escaped already, and what is to be


def _worded(value: str) -> str:
    if value[:1] in ("'", '"'):
        try:
            if value[-1] == value[0] and len(shlex.split(value)) == 1:
                return value
        except ValueError:  # a quote that is not closed
            pass
    escaped = _OBEYED.sub(lambda found: found[0] if len(found[0]) > 1 else f"\\{found[0]}", value)
    return f'"{escaped}"'


def main() -> int:
    """DeepSpeed's runner, with its way to the machines replaced by one whose command line is made here."""
    from deepspeed.launcher import runner

    folder, given = Path(sys.argv[1]), sys.argv[2:]
    own = passed(os.environ)
    files = [Path(place) / runner.DEEPSPEED_ENVIRONMENT_NAME for place in runner.DEEPSPEED_ENVIRONMENT_PATHS]
    runner.DEEPSPEED_ENVIRONMENT_PATHS = []  # read here
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
            if key != "PYTHONPATH":  # the runner puts the working folder before it; the user's is in `own`
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
    if STDIN in os.environ:  # pdsh does not see that its input has ended; those that it started see that it has
        die_with_input(lambda: os.killpg(os.getpgrp(), signal.SIGKILL))
    runner.main(given)
    return DONE


if __name__ == "__main__":
    sys.exit(main())
