"""`python -m tests.planner PART`: the planner against measurements; `python -m tests.planner steps`: against this machine's trainer."""

import sys

import tyro

from moe.launch import exit_codes
from parallel.errors import BadInput
from tests.planner import planner, steps

words = sys.argv[1:]
try:
    if words[:1] == ["steps"]:
        code = tyro.cli(steps.main, prog="python -m tests.planner steps", args=words[1:])
    else:
        code = tyro.cli(planner.main, prog="python -m tests.planner")
except BadInput as bad:
    print(bad, file=sys.stderr)
    code = exit_codes.BAD_INPUT
sys.exit(code)
