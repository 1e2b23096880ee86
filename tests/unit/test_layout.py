"""Step layouts that can't be, and what a request's passes are counted as."""

from __future__ import annotations

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from schedules import CPU, Schedule, schedules

from tapcheck.errors import CaptureError
from tapcheck.layout import SITUATIONS, Account, PassKind, Progress, Segment, StepLayout
from tapcheck.rowstore import RowStore


def accounts(schedule: Schedule, *, extra: bool = True) -> dict[str, Account]:
    """The account of every request that finishes, drained at once or, as `extra`, at the end."""
    store = RowStore((), ())
    announced = schedule.announced
    done = {}
    for ran in range(len(schedule.layouts) + 1):
        for owner, seen in schedule.seen_lengths.items():
            if ran == (len(schedule.layouts) if extra else schedule.ends[owner]):
                done[owner] = store.drain({owner: seen}).accounts[0]
        if ran < len(schedule.layouts):
            store.begin_step(announced[ran], CPU)
            store.end_step()
    return done


Pass = tuple[StepLayout, Segment]


def passes_of(schedule: Schedule, owner: str, extra: bool) -> list[Pass]:
    last = len(schedule.layouts) if extra else schedule.ends[owner]
    pairs = [(layout, segment) for layout in schedule.layouts for segment in layout.segments]
    return [(at, segment) for at, segment in pairs if segment.owner == owner and at.step < last]


def is_mixed(layout: StepLayout) -> bool:
    kinds = {segment.start < segment.prompt_length + segment.forced for segment in layout.segments}
    return len(kinds) == 2


def accepted(schedule: Schedule, passes: list[Pass], number: int) -> list[int]:
    """The positions of a pass's drafts that were accepted and not lost to a preemption."""
    layout, segment = passes[number]
    assert segment.owner is not None
    end = segment.start + segment.rows
    drafts = range(end - segment.drafts, end)
    if number + 1 < len(passes):
        following = passes[number + 1][1]
        if following.resumed or following.start < drafts.start:
            return []
    else:  # whether the sampler accepted what comes after the stop, nobody asks
        drafts = range(drafts.start, min(drafts.stop, schedule.seen_lengths[segment.owner]))
    return [at for at in drafts if (layout.step, segment.owner, at) not in schedule.rejected]


def expected(schedule: Schedule, owner: str, extra: bool) -> dict[str, int]:
    """Every situation counted row by row."""
    passes = passes_of(schedule, owner, extra)
    seen = schedule.seen_lengths[owner]
    counts = dict.fromkeys(SITUATIONS, 0)
    computed: set[int] = set()
    for number, (layout, segment) in enumerate(passes):
        end = segment.start + segment.rows
        plain = range(segment.start, end - segment.drafts)
        kept = accepted(schedule, passes, number)
        counts["forward_passes"] += 1
        counts["shared_passes"] += len(layout.segments) > 1
        counts["mixed_passes"] += is_mixed(layout)
        counts["padded_passes"] += sum(s.rows for s in layout.segments) < layout.total_rows
        counts["unfinished_prefills"] += end < segment.prompt_length + segment.forced
        counts["preemptions"] += segment.resumed
        counts["recomputed_rows"] += len(computed & set(range(segment.start, end)))
        counts["accepted_drafts"] += len(kept)
        counts["rejected_drafts"] += segment.drafts - len(kept)
        counts["unseen_rows"] += sum(at >= seen for at in [*plain, *kept])
        computed |= {*plain, *kept}
    counts["cached_positions"] = seen - len(schedule.steps[owner])
    return counts


@given(schedules(), st.booleans())
def test_every_situation_is_counted_as_a_count_row_by_row_does(
    schedule: Schedule, extra: bool
) -> None:
    counted = accounts(schedule, extra=extra)
    assert counted.keys() == schedule.requests.keys()
    for owner, account in counted.items():
        assert account.situations._asdict() == expected(schedule, owner, extra)


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_schedules_reach_every_situation(name: str) -> None:
    def arises(schedule: Schedule) -> bool:
        return any(getattr(each.situations, name) for each in accounts(schedule).values())

    looking = settings(derandomize=True, database=None, phases=[Phase.generate], max_examples=500)
    assert arises(find(schedules(), arises, settings=looking))


def account(seen: int, *segments: Segment) -> Account:
    """Of a request with these segments, alone in each pass."""
    progress = Progress()
    for segment in segments:
        progress.advance(segment, PassKind(shared=False, mixed=False, padded=False))
    return progress.close(seen)


def test_a_cached_position_counts_as_recomputed_only_once_a_pass_has_computed_it() -> None:
    cached = Segment("1", 4, 2, 8)
    anew = Segment("1", 0, 6, 8, resumed=True)
    assert account(8, cached).cached == ((0, 4),)
    assert account(8, cached, anew).cached == ()
    for times, recomputed in ((1, 2), (2, 8), (3, 14)):
        assert account(8, cached, *[anew] * times).situations.recomputed_rows == recomputed


def test_an_engine_that_goes_back_by_itself_is_no_preemption() -> None:
    counted = account(4, Segment("1", 0, 4, 4), Segment("1", 2, 2, 4)).situations
    assert (counted.preemptions, counted.recomputed_rows) == (0, 2)


def test_what_is_cached_beyond_the_end_is_not_the_request_s() -> None:
    beyond = Segment("1", 6, 1, 2, resumed=True)
    assert account(4, Segment("1", 0, 3, 2), beyond).cached == ((3, 4),)
    assert account(3, Segment("1", 0, 3, 2), beyond).cached == ()


def test_a_request_that_no_pass_ran_has_an_empty_account() -> None:
    assert RowStore((), ()).drain({"1": 4}).accounts == (Account(),)


def test_a_layout_with_more_rows_than_its_forward_pass_is_refused() -> None:
    with pytest.raises(CaptureError, match="5 rows are scheduled, but the forward pass has 4"):
        StepLayout(0, (Segment("1", 0, 5, 5),), 4)


def test_a_layout_with_two_segments_of_one_request_is_refused() -> None:
    with pytest.raises(CaptureError, match="two segments"):
        StepLayout(0, (Segment("1", 0, 1, 2), Segment("1", 1, 1, 2)), 2)


@pytest.mark.parametrize(
    "segment",
    [Segment("1", -1, 2, 2), Segment("1", 0, 1, 2, drafts=2), Segment("1", 0, 1, 2, drafts=-1)],
)
def test_a_layout_with_rows_that_can_t_be_is_refused(segment: Segment) -> None:
    with pytest.raises(CaptureError, match="has no such rows"):
        StepLayout(3, (segment,), 4)


def test_segments_of_requests_that_nobody_captures_may_be_many() -> None:
    layout = StepLayout(0, (Segment(None, 0, 1, 2), Segment(None, 0, 2, 2)), 5)
    assert layout.kind.padded
