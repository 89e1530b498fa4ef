"""DeepSpeed's launcher for the machines of a hostfile, with what it says and passes on mended.

    moe train -> this, on DeepSpeed's runner -> pdsh -> ssh -> deepspeed.launcher.launch on each machine -> ranks

python -m moe.launch.pdsh [the runner's arguments]

DeepSpeed puts what it was given into a command line for a shell on the other machines: here every word arrives as it was. It puts the
working folder before all modules, and its log before those of the run: here it does not. The environment that ranks need goes along.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from moe.launch.hosts import quoted
from moe.launch.processes import PARENT, STDIN, die_with_input

PASSED = ("MOE_", "PYTHON", "OMP_", "GLOO_", "NCCL_", "UCX_", "TORCH_", "DS_ACCELERATOR")  # variables whose names begin so


def passed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that ranks on other machines get; a process of this one would mean nothing there."""
    return {name: value for name, value in environment.items() if name.startswith(PASSED) and name != PARENT}


def main() -> None:
    """DeepSpeed's runner, with its way to the machines replaced by one whose command line is made here."""
    from deepspeed.launcher import runner

    own = passed(os.environ)  # the runner puts the working folder into its copy

    class Hosts(runner.PDSHRunner):  # type: ignore[misc]
        exports: dict[str, str]

        def parse_user_args(self) -> list[str]:
            return [quoted(word) for word in self.args.user_args]

        def add_export(self, key: str, var: str) -> None:
            self.exports[key.strip()] = quoted(var.strip().removeprefix(os.path.abspath(".") + ":"))  # it puts that before PYTHONPATH

        def get_cmd(self, environment: dict[str, str], active_resources: Mapping[str, Any]) -> Any:
            self.exports = {name: quoted(value) for name, value in own.items()} | self.exports
            command, kill, environment = super().get_cmd(environment, active_resources)
            python = command.index(sys.executable)
            command[python - 1] = f"cd {quoted(command[python - 1].removeprefix('cd ').removesuffix(';'))};"
            command[python] = quoted(sys.executable)
            command.insert(command.index("--module"), "--log_level=critical")
            return command, kill, environment

    runner.PDSHRunner = Hosts
    if STDIN in os.environ:  # pdsh does not see that its input has ended; those that it started see that it has
        die_with_input(lambda: os.killpg(os.getpgrp(), signal.SIGKILL))
    runner.main()


if __name__ == "__main__":
    main()
