"""`python -m tests.counted NAME`: runs the measurement tests/counted/NAME.py."""

import sys
from pathlib import Path

from tests.support.command import run

sys.exit(run(Path(__file__).parent, sys.argv[1:]))
