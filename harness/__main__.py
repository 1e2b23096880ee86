"""`python -m tapcheck` and the `tapcheck` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    from tapcheck.cli import run

    sys.exit(run(sys.argv[1:]))


# vLLM's subprocesses import this module again.
if __name__ == "__main__":
    main()
