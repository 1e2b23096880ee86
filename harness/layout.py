"""The step layout: which rows of one forward pass belong to which request and position.

Pure Python: a runner adapter fills it from its engine's scheduler, and everything above trusts it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tapcheck.errors import CaptureError


@dataclass(frozen=True)
class Segment:
    """The rows of one request in one forward pass.

    owner: the key under which the caller captures this request, None for a request that nobody
    captures. start: the position of its first row, which is the number of tokens computed before
    this step. rows: how many rows it has. prompt_length: tokens in its prompt.
    """

    owner: str | None
    start: int
    rows: int
    prompt_length: int


@dataclass(frozen=True)
class StepLayout:
    """One forward pass: segments in row order from row 0; rows beyond them are padding.

    step: the engine's forward passes counted from 0. total_rows: rows in the pass's tensors,
    padding included.
    """

    step: int
    segments: tuple[Segment, ...]
    total_rows: int

    def __post_init__(self) -> None:
        owned = [segment.owner for segment in self.segments if segment.owner is not None]
        if len(set(owned)) != len(owned):
            raise CaptureError(f"step {self.step}: one request has two segments: {sorted(owned)}")
        if any(segment.start < 0 or segment.rows < 0 for segment in self.segments):
            raise CaptureError(f"step {self.step}: a segment has a negative start or row count")
        if self.scheduled_rows > self.total_rows:
            raise CaptureError(
                f"step {self.step}: {self.scheduled_rows} rows are scheduled, but the forward "
                f"pass has {self.total_rows}: their owners can't be known"
            )

    @property
    def scheduled_rows(self) -> int:
        """Rows that belong to a request; the rest are padding."""
        return sum(segment.rows for segment in self.segments)
