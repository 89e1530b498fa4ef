"""`python -m tests.planner PART`: the planner against measurements; `python -m tests.planner steps`: against this machine's trainer."""

import sys

from tests.planner import planner, steps
from tests.support.command import carry_out

first, *rest = sys.argv[1:] or ["runs"]
if first == "steps":
    sys.exit(carry_out(steps.main, "python -m tests.planner steps", rest))
sys.exit(carry_out(planner.main, "python -m tests.planner", [first, *rest]))
