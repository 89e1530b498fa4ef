"""`python -m moe.launch.torchrun CODES.json [torchrun's arguments]` runs torchrun, and writes the failed ranks' exit codes to CODES.json
instead of printing torchrun's traceback. torchrun's log files go into the folder CODES next to it. `moe train` removes both at the end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from pathlib import Path

from moe.launch import exit_codes
from parallel.errors import BadInput


def main() -> int:
    """Run torchrun. Return DONE if no rank failed; BAD_INPUT if a rank ended with that code or the log folder cannot be made; otherwise
    FAILED. If ranks failed, CODES.json gets {"rank": exit code} for each of them (negative: number of a signal)."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    codes = Path(sys.argv[1])
    logging.disable(logging.CRITICAL)  # hides torchrun's messages only: the ranks are other processes, and still log
    try:
        torchrun(["--log_dir", str(codes.with_suffix("")), *sys.argv[2:]])
    except ChildFailedError as failed:
        ended = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        with contextlib.suppress(OSError):
            codes.write_text(json.dumps(ended))
        return exit_codes.BAD_INPUT if exit_codes.BAD_INPUT in ended.values() else exit_codes.FAILED
    except OSError as error:
        folder = codes.parent.parent
        fix = "choose another --out"
        bad = BadInput("--out", got=f"{folder}: {error.strerror or error}", needed="a folder that can be written", fix=fix)
        print(f"error: {bad}", file=sys.stderr, flush=True)
        return exit_codes.BAD_INPUT
    return exit_codes.DONE


if __name__ == "__main__":
    sys.exit(main())
