"""`python -m tapcheck` and the `tapcheck` command."""

from __future__ import annotations

import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command line and exit with its code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    from tapcheck.cli import run

    sys.exit(run(sys.argv[1:]))


def _end(number: int, _frame: FrameType | None) -> None:
    """Unwind, so that engines and their processes are ended.

    Not by KeyboardInterrupt: vLLM swallows that one while its engine core starts.
    """
    sys.exit(128 + number)


# vLLM's subprocesses import this module again.
if __name__ == "__main__":
    main()
