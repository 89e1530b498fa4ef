"""Runs the command `moe` for `python -m moe`."""

import sys

from moe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
