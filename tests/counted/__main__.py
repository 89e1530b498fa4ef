"""`python -m tests.counted NAME`: one of this folder's measurements."""

import sys
from pathlib import Path

from tests.support.command import run

sys.exit(run(Path(__file__).parent, sys.argv[1:]))
