"""The step layout: which rows of one forward pass belong to which request and position.

Pure Python: a runner adapter fills it from its engine's scheduler, and everything above trusts it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tapcheck.errors import CaptureError


class Segment(NamedTuple):
    """The rows of one request in one forward pass.

    owner: the key under which the caller captures this request, None for a request that nobody
    captures. start: the position of its first row, which is the number of tokens computed before
    this step. rows: how many rows it has. prompt_length: tokens in its prompt. drafts: how many of
    the last rows are draft tokens, which the sampler accepts or rejects after the pass. resumed:
    whether the request was preempted before this step, so that what it had computed is void from
    `start` on. forced: tokens after the prompt that were given and not generated.
    """

    owner: str | None
    start: int
    rows: int
    prompt_length: int
    drafts: int = 0
    resumed: bool = False
    forced: int = 0


class PassKind(NamedTuple):
    """Whether requests share the pass, prefill beside decoding ones, and leave padding."""

    shared: bool
    mixed: bool
    padded: bool


@dataclass(frozen=True)
class StepLayout:
    """One forward pass: segments in row order from row 0; rows beyond them are padding.

    step: the engine's forward passes counted from 0. total_rows: rows in the pass's tensors,
    padding included. Raises CaptureError when these don't fit together.
    """

    step: int
    segments: tuple[Segment, ...]
    total_rows: int
    kind: PassKind = field(init=False)

    @property
    def decodes(self) -> bool:
        """Whether every request in it is decoding, one row each and no draft.

        If none joins, leaves or is preempted the next pass is the same, one position further.
        """
        return all(
            rows == 1 and not drafts and not resumed and start >= prompt_length + forced
            for _, start, rows, prompt_length, drafts, resumed, forced in self.segments
        )

    def __post_init__(self) -> None:
        scheduled = running = prefilling = owned = 0
        owners = set()
        for segment in self.segments:  # one pass: this is every step's work
            owner, start, rows, prompt_length, drafts, _, forced = segment
            if start < 0 or not 0 <= drafts <= rows:
                raise CaptureError(f"step {self.step}: {segment} has no such rows")
            scheduled += rows
            if rows:
                running += 1
                prefilling += start < prompt_length + forced
            if owner is not None:
                owned += 1
                owners.add(owner)
        if len(owners) != owned:
            raise CaptureError(f"step {self.step}: one request has two segments: {self.segments}")
        if scheduled > self.total_rows:
            raise CaptureError(
                f"step {self.step}: {scheduled} rows are scheduled, but the forward "
                f"pass has {self.total_rows}: their owners can't be known"
            )
        kind = PassKind(running > 1, 0 < prefilling < running, scheduled < self.total_rows)
        object.__setattr__(self, "kind", kind)


class Repeat(NamedTuple):
    """A pass like an earlier one that decodes, each request `ahead` positions further.

    step: its number. first: the earlier one. Between the two there were only such passes.
    """

    step: int
    first: StepLayout
    ahead: int

    @property
    def total_rows(self) -> int:
        """Rows in the pass's tensors."""
        return self.first.total_rows

    @property
    def layout(self) -> StepLayout:
        """The pass in full."""
        first = self.first
        moved = [segment._replace(start=segment.start + self.ahead) for segment in first.segments]
        return StepLayout(self.step, tuple(moved), first.total_rows)


class Situations(NamedTuple):
    """How often what makes row ownership hard arose, for one request.

    forward_passes: passes with rows of the request. shared_passes: those with rows of another
    request too. mixed_passes: those in which one request prefills and another decodes.
    padded_passes: those with padding rows. unfinished_prefills: passes that left the prompt
    unfinished, as chunked prefill does. cached_positions: positions that were read from the prefix
    cache instead of computed. preemptions: times the request was preempted and resumed.
    recomputed_rows: rows at positions that an earlier pass had computed. accepted_drafts,
    rejected_drafts: draft rows by their fate; those that a preemption left undecided count as
    rejected. unseen_rows: rows that belong to no token of the request, as after its stop.
    """

    forward_passes: int = 0
    shared_passes: int = 0
    mixed_passes: int = 0
    padded_passes: int = 0
    unfinished_prefills: int = 0
    cached_positions: int = 0
    preemptions: int = 0
    recomputed_rows: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    unseen_rows: int = 0


SITUATIONS = Situations._fields


class Account(NamedTuple):
    """What forward passes did for one request, up to its end.

    cached: the ranges of positions, [start, stop), that no pass computed because the engine read
    them from its prefix cache.
    """

    situations: Situations = Situations()
    cached: tuple[tuple[int, int], ...] = ()


class Progress:
    """Follows one request over the steps: what is computed, what is void, what is undecided.

    `end` is the first position that no pass has computed; the last `drafts` positions before it
    are draft rows that the sampler has not decided on, as far as the layouts tell.
    """

    def __init__(self) -> None:
        self.end = 0
        self.drafts = 0
        self._highest = 0
        self._skipped: list[tuple[int, int]] = []  # below it, what no pass has ever computed
        self._cached: list[tuple[int, int]] = []
        self._counts = dict.fromkeys(SITUATIONS, 0)
        self._passes: dict[PassKind, int] = {}

    def advance(self, segment: Segment, kind: PassKind) -> int:
        """Take in the segment; returns the position from which earlier rows are void.

        What lies at or beyond the segment's start is computed anew. After a preemption the drafts
        that were undecided stay so: their rows are void, whatever the start.
        """
        _, start, rows, prompt_length, drafts, resumed, forced = segment
        end = start + rows
        self._passes[kind] = self._passes.get(kind, 0) + 1
        if end < prompt_length + forced:
            self._counts["unfinished_prefills"] += 1
        if start == self.end >= self._highest and not self.drafts and not resumed:
            self.end, self.drafts = end, drafts  # as nearly always: it goes on
            return start
        return self._go_on_elsewhere(segment, end)

    @property
    def steady(self) -> bool:
        """Whether a pass over the next position only adds it."""
        return not self.drafts and self.end >= self._highest

    def decode(self, passes: int, kind: PassKind) -> None:
        """Take in that many passes of this kind, one row each; it has to be `steady`."""
        self.end += passes
        self._passes[kind] = self._passes.get(kind, 0) + passes

    def _go_on_elsewhere(self, segment: Segment, end: int) -> int:
        """Advance when drafts were undecided, or the segment isn't where the last one ended."""
        counts, start = self._counts, segment.start
        decided = self.end - self.drafts
        if segment.resumed or start < decided:
            counts["preemptions"] += segment.resumed
            counts["rejected_drafts"] += self.drafts
            self.end = decided
        elif self.drafts:
            accepted = min(start - decided, self.drafts)
            counts["accepted_drafts"] += accepted
            counts["rejected_drafts"] += self.drafts - accepted
            self.end = decided + accepted
        self._highest = max(self._highest, self.end)
        if start != self.end:
            self._jump(start)
        if start < self._highest:
            counts["recomputed_rows"] += self._recompute(start, min(end, self._highest))
        self.end, self.drafts = end, segment.drafts
        return min(start, decided) if segment.resumed else start

    def _jump(self, start: int) -> None:
        """The engine goes on elsewhere than it stopped: it rewound, or read its prefix cache."""
        self._cached = [(a, min(b, start)) for a, b in self._cached if a < start]
        if start > self.end:
            self._cached.append((self.end, start))
        if start > self._highest:
            self._skipped.append((self._highest, start))

    def _recompute(self, start: int, stop: int) -> int:
        """How many positions in [start, stop) an earlier pass had computed; this one does now."""
        skipped = sum(max(min(b, stop) - max(a, start), 0) for a, b in self._skipped)
        left = [part for a, b in self._skipped for part in ((a, min(b, start)), (max(a, stop), b))]
        self._skipped = [(a, b) for a, b in left if a < b]
        return stop - start - skipped

    def close(self, seen_length: int) -> Account:
        """The account of a request of which forward passes saw `seen_length` positions."""
        counts, decided = dict(self._counts), self.end - self.drafts
        accepted = min(max(seen_length - decided, 0), self.drafts)
        counts["accepted_drafts"] += accepted
        counts["rejected_drafts"] += self.drafts - accepted
        counts["unseen_rows"] += max(decided - seen_length, 0)
        counts["forward_passes"] = sum(self._passes.values())
        for name in PassKind._fields:
            passes = sum(n for kind, n in self._passes.items() if getattr(kind, name))
            counts[f"{name}_passes"] = passes
        cached = tuple((a, min(b, seen_length)) for a, b in self._cached if a < seen_length)
        counts["cached_positions"] = sum(b - a for a, b in cached)
        return Account(Situations(**counts), cached)
