"""A small model of vLLM's scheduler: step layouts, and the truth about each of their rows.

Whatever the model does it tells the layouts as the engine does, and writes down what a layout
doesn't say: which draft tokens were accepted, and which row is the last valid one of a position.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from tapcheck.layout import Repeat, Segment, StepLayout
from tapcheck.request import Request
from tapcheck.sites import Site

CPU = torch.device("cpu")
# One site of each item size, on one pipeline stage each.
SITES = (Site("resid_post", 0), Site("resid_post", 1))
_BITS = {SITES[0]: (torch.float32, torch.int32), SITES[1]: (torch.bfloat16, torch.int16)}
WIDTH = 2
ROW_BYTES = WIDTH * 6
_A_NAN = 0x7FC00000


@dataclass(frozen=True)
class Schedule:
    """Forward passes, and what is true of them.

    layouts: the passes in order. requests: those that finish, by owner, as they end. ends: for
    each owner, also one that is aborted, after how many passes it ended; one more may follow.
    steps: for each owner that finishes, the pass that computed the last valid row of each
    position that has one. rejected: (step, owner, position) of each draft row that was rejected.
    """

    layouts: tuple[StepLayout, ...]
    requests: Mapping[str, Request]
    ends: Mapping[str, int]
    steps: Mapping[str, Mapping[int, int]]
    rejected: frozenset[tuple[int, str, int]]

    @functools.cached_property
    def announced(self) -> dict[int, StepLayout | Repeat]:
        """Each pass, by its number, as a runner adapter tells of it."""
        told: dict[int, StepLayout | Repeat] = {}
        repeat: Repeat | None = None
        for before, layout in zip([None, *self.layouts], self.layouts, strict=False):
            if before is not None and before.decodes and layout == _next(before):
                first, ahead = (repeat.first, repeat.ahead) if repeat else (before, 0)
                repeat = Repeat(layout.step, first, ahead + 1)
            else:
                repeat = None
            told[layout.step] = repeat or layout
        return told

    @property
    def seen_lengths(self) -> dict[str, int]:
        """What a drain of every request that finishes is told."""
        return {owner: request.seen_length for owner, request in self.requests.items()}


def _next(layout: StepLayout) -> StepLayout:
    """The pass in which each of the same requests has one row, after those of this one."""
    moved = [segment._replace(start=segment.start + 1) for segment in layout.segments]
    return StepLayout(layout.step + 1, tuple(moved), layout.total_rows)


class _Sequence:
    """A captured request on its way through the scheduler.

    known: how many tokens exist, given and sampled. computed: how many of them the engine has
    computed or cached. decided: the end of the last pass's rows, its drafts left out.
    """

    ended: int | None

    def __init__(self, draw: st.DrawFn, owner: str, calm: bool) -> None:
        self.owner = owner
        self.calm = calm  # neither waits nor speculates nor is preempted, so that passes repeat
        self.prompt = draw(st.integers(1, 7))
        self.forced = draw(st.just(0) | st.integers(1, 3))
        self.to_sample = 1 if self.forced else draw(st.integers(1, 7))
        self.joins = draw(st.integers(0, 3))
        self.aborts = draw(st.none() | st.integers(0, 6))
        self.overruns = draw(st.booleans())  # one more pass is under way when it ends
        self.given = self.known = self.prompt + self.forced
        self.started, self.ended = False, None
        self.computed = self.decided = 0
        self.steps: dict[int, int] = {}
        self.rejected: list[tuple[int, str, int]] = []

    @property
    def gone(self) -> bool:
        return self.ended is not None and not self.overruns

    def next_segment(self, draw: st.DrawFn, step: int, block: int) -> Segment | None:
        """Its rows in this pass, None when it has none; the sampler decides at once."""
        if self.ended is None and step == self.aborts:
            self.ended = step
        if self.gone or step < self.joins or (not self.calm and draw(st.integers(0, 5)) == 5):
            return None
        resumed = self._resume(draw, block)
        left = self.known - self.computed
        decodes = left == 1 and self.computed >= self.given and not resumed
        drafts = draw(st.integers(0, 3)) if decodes and not self.calm else 0
        rows = left - draw(st.integers(0, left - 1)) + drafts
        segment = Segment(
            self.owner, self.computed, rows, self.prompt, drafts, resumed, self.forced
        )
        self._run(segment, draw(st.integers(0, drafts)), step)
        return segment

    def _resume(self, draw: st.DrawFn, block: int) -> bool:
        """Where to go on: at the first pass and after a preemption, from what the cache holds."""
        stays = self.started and (self.calm or draw(st.integers(0, 3)) < 3)
        if self.ended is not None or stays:
            return False
        most = (self.known - 1) // block
        cached = draw(st.integers(0, most) | st.just(most)) * block
        # An engine that only goes back, as after a failed load of cached blocks, doesn't say so.
        resumed = self.started and (cached >= self.decided or draw(st.integers(0, 2)) < 2)
        self.steps = {at: s for at, s in self.steps.items() if at < min(cached, self.decided)}
        self.computed, self.started = cached, True
        return resumed

    def _run(self, segment: Segment, accepted: int, step: int) -> None:
        end = segment.start + segment.rows
        self.decided = end - segment.drafts
        valid = self.decided + accepted
        self.steps.update(dict.fromkeys(range(segment.start, valid), step))
        self.rejected += [(step, self.owner, at) for at in range(valid, end)]
        self.computed = valid
        if self.ended is not None:
            self.overruns = False
        elif self.decided == self.known:
            self.known += accepted + 1
            if self.known >= self.given + self.to_sample:
                self.ended = step + 1

    def finished(self) -> Request:
        """The request as it ended; what was sampled after a given continuation is dropped."""
        generated = self.forced + 1 if self.forced else self.to_sample
        return Request(self.owner, tuple(range(self.prompt)), tuple(range(generated)))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Up to four captured requests among others that nobody captures."""
    calm = draw(st.booleans())
    sequences = [_Sequence(draw, f"c/{number}", calm) for number in range(draw(st.integers(1, 4)))]
    block = draw(st.integers(1, 4))
    layouts: list[StepLayout] = []
    while not all(sequence.gone for sequence in sequences):
        segments: list[Segment] = []
        for sequence in sequences if calm else draw(st.permutations(sequences)):
            segment = sequence.next_segment(draw, len(layouts), block)
            segments += [segment] if segment else []
            segments += [] if calm else draw(_of_others)
        padding = 1 if calm else draw(st.integers(0, 2))
        rows = sum(segment.rows for segment in segments) + padding
        layouts.append(StepLayout(len(layouts), tuple(segments), rows))
    completed = [s for s in sequences if s.known >= s.given + s.to_sample]
    requests = {sequence.owner: sequence.finished() for sequence in completed}
    steps = {
        s.owner: {at: s.steps[at] for at in range(requests[s.owner].seen_length) if at in s.steps}
        for s in completed
    }
    ends = {sequence.owner: sequence.ended or 0 for sequence in sequences}
    rejected = [row for sequence in sequences for row in sequence.rejected]
    return Schedule(tuple(layouts), requests, ends, steps, frozenset(rejected))


_of_others: st.SearchStrategy[list[Segment]] = st.just([]) | st.lists(
    st.builds(
        Segment,
        owner=st.none(),
        start=st.integers(0, 9),
        rows=st.integers(1, 3),
        prompt_length=st.integers(1, 9),
        drafts=st.integers(0, 1),
        resumed=st.booleans(),
    ),
    max_size=1,
)


def bits(owner: str, position: int, wrong: bool = False) -> int:
    """A number that no other row has, the bits of its values."""
    return 1 + int(owner.rpartition("/")[2]) + 4 * position + 1024 * wrong


def read_bits(site: Site, values: torch.Tensor) -> list[int]:
    """The numbers of rows, [rows, width]; -1 for a row that isn't one number throughout."""
    dtype, integer = _BITS[site]
    assert values.dtype == dtype
    rows = values.contiguous().view(integer).tolist()
    known = _A_NAN if site == SITES[0] else 0
    return [row[0] - known if len(set(row)) == 1 and len(row) == WIDTH else -1 for row in rows]


def forward(schedule: Schedule, layout: StepLayout, site: Site) -> torch.Tensor:
    """What the pass computes at the site, [total rows, width], by the bits; all NaN in float32.

    Rows of rejected drafts, of requests that nobody captures and of padding are wrong ones.
    """
    dtype, integer = _BITS[site]
    numbers = []
    for segment in layout.segments:
        for at in range(segment.start, segment.start + segment.rows):
            owner = segment.owner or "others/0"
            wrong = segment.owner is None or (layout.step, owner, at) in schedule.rejected
            numbers.append(bits(owner, at, wrong))
    numbers += [bits("padding/0", 0, True)] * (layout.total_rows - len(numbers))
    known = _A_NAN if site == SITES[0] else 0
    column = torch.tensor([known + number for number in numbers], dtype=integer).reshape(-1, 1)
    return column.expand(-1, WIDTH).contiguous().view(dtype)
