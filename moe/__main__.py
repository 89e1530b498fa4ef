"""Entry point of the command `moe` and of `python -m moe`. Sets signal handlers first, because a signal may arrive during the imports."""

import contextlib
import signal
import sys

from moe.launch.early import early_signals, number_of_rank


def main() -> int:
    """Run the command of `sys.argv`, and return its exit code."""
    with early_signals(prints=number_of_rank() == 0) if sys.argv[1:2] == ["train"] else contextlib.nullcontext():
        raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if raises:  # a KeyboardInterrupt during an import would print a traceback, or be lost
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from moe.cli.main import main as command

        if raises:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return command()


if __name__ == "__main__":
    sys.exit(main())
