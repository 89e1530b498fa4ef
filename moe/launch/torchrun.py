"""torchrun, but with each failed rank's exit code written to a file instead of the launcher's own traceback.

python -m moe.launch.torchrun CODES.json [torchrun's arguments]
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path


def main() -> int:
    """Exit code 0; or 1, with {"rank": exit code} in CODES.json (negative: a signal)."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    codes = Path(sys.argv[1])
    logging.disable(logging.CRITICAL)  # in this process only: the ranks are separate processes
    try:
        torchrun(sys.argv[2:])
    except ChildFailedError as failed:
        codes.write_text(json.dumps({rank: failure.exitcode for rank, failure in failed.failures.items()}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
