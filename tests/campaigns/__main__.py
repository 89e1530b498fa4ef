"""`python -m tests.campaigns KIND`: faults put into runs that train."""

import sys

import tyro

from parallel.errors import BadInput
from tests.campaigns.faults import main

try:
    sys.exit(tyro.cli(main, prog="python -m tests.campaigns"))
except BadInput as bad:
    sys.exit(f"{bad}")
