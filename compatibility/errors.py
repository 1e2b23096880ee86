"""The base of every error that tapcheck raises on purpose, and those of the matrix."""

from __future__ import annotations


class TapcheckError(Exception):
    """A problem that its message explains in full: what happened, where, why, and the way out.

    The command line prints the message without a traceback and exits with 2.
    """


class DeviceError(TapcheckError, ValueError):
    """A device that isn't there, or that has another name."""


class KnownIssueError(TapcheckError, RuntimeError):
    """A combination that is known to crash or to give wrong captures."""


class RowError(TapcheckError, ValueError):
    """A matrix row that is damaged, interrupted, edited, contradictory, or there already."""


class UnsupportedVersionError(TapcheckError, RuntimeError):
    """No vLLM, or a version of it that tapcheck wasn't tested with."""
