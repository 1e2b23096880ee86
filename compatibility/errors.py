"""The base of every error that tapcheck raises on purpose."""

from __future__ import annotations


class TapcheckError(Exception):
    """A problem that its message explains in full: what happened, where, why, and the way out.

    The command line prints the message without a traceback and exits with 2.
    """
