"""What tests of the command line share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str
