"""What tapcheck claims about captures, and how each claim is judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapcheck.checks.equivalence import Comparison, assert_captures_match, compare_captures

__all__ = ["assert_captures_match", "compare_captures", "comparison_listeners"]

# Called by assert_captures_match with what it found, passed or not, before it raises.
comparison_listeners: list[Callable[[Comparison], None]] = []


def __getattr__(name: str) -> Any:
    """The public functions, imported when first used, because they bring torch along."""
    if name in __all__:
        from tapcheck.checks import equivalence

        return getattr(equivalence, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
