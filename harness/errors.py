"""Errors of the capture library, one class for each kind of thing that can be wrong."""

from __future__ import annotations

from tapcheck.compatibility.errors import TapcheckError

__all__ = [
    "CaptureError",
    "CaptureFileError",
    "EngineError",
    "ModelError",
    "SelectorError",
    "SiteError",
    "TapcheckError",
]


class SelectorError(TapcheckError, ValueError):
    """A selector that can't be read, or that selects a position no forward pass sees."""


class SiteError(TapcheckError, ValueError):
    """A site that doesn't exist, or that this model or backend can't tap."""


class ModelError(TapcheckError, ValueError):
    """A model that can't be found or loaded."""


class EngineError(TapcheckError, RuntimeError):
    """An engine that is absent, of an untested version, or in a mode that can't be tapped."""


class CaptureError(TapcheckError, RuntimeError):
    """A capture that went wrong while it ran: rows without owner, rows lost, a tap that broke."""


class CaptureFileError(TapcheckError, ValueError):
    """A capture file that is damaged, truncated or not a capture at all."""


def first_line(error: Exception) -> str:
    """Another library's message, cut to one line (two, when a colon ends it), or else its class.

    Without a full stop. Of settings that pydantic refuses, what is wrong with each: its first line
    only counts them.
    """
    wrong = getattr(error, "errors", None)
    if type(error).__name__ == "ValidationError" and callable(wrong):
        return "; ".join(str(one["msg"]).rstrip(".") for one in wrong())
    first, _, rest = str(error).strip().partition("\n")
    if first.endswith(":"):
        first = f"{first} {rest.strip().partition(chr(10))[0]}".strip()
    return first.rstrip(".") or type(error).__name__
