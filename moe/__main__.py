"""`python -m moe` is the `moe` command."""

import sys

from moe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
