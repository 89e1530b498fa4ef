"""`python -m tests.mutations`: every fault put into the running code, and whether `moe verify` finds it."""

import sys

import tyro

from tests.mutations.run import main

sys.exit(tyro.cli(main, prog="python -m tests.mutations"))
