"""Row accounting over generated schedules: every selected row once, under its owner, in order."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from schedules import CPU, ROW_BYTES, SITES, Schedule, bits, forward, read_bits, schedules
from strategies import candidates, selectors

from tapcheck.errors import CaptureError, SelectorError
from tapcheck.layout import Repeat, Segment, StepLayout
from tapcheck.rowstore import RowStore
from tapcheck.selectors import Selector, parse_selectors, resolve
from tapcheck.transport import RowBatch

ALL = parse_selectors(["all"])
some_selectors = st.just(ALL) | st.lists(selectors, min_size=1, max_size=3).map(tuple)


def run_step(store: RowStore, schedule: Schedule, layout: StepLayout) -> None:
    """Play a forward pass of the schedule."""
    store.begin_step(schedule.announced[layout.step], CPU)
    for site in store.sites:
        rows = forward(schedule, layout, site)
        store.put(site, [rows])
        rows.fill_(-1.0)  # as a fused kernel does to its inputs
    store.end_step()


def run_one(store: RowStore, layout: StepLayout) -> None:
    """Play a pass in which no draft is rejected."""
    run_step(store, Schedule((layout,), {}, {}, {}, frozenset()), layout)


def drained(
    store: RowStore, schedule: Schedule, leaves: Mapping[str, int] | None = None
) -> list[RowBatch]:
    """Play the schedule; each owner is drained, or discarded, when `leaves` passes were run.

    Without it, all leave together after the last pass.
    """
    leaves = dict.fromkeys(schedule.ends, len(schedule.layouts)) if leaves is None else leaves
    batches = []
    for ran in range(len(schedule.layouts) + 1):
        now = [owner for owner in leaves if leaves[owner] == ran]
        lengths = {at: n for at, n in schedule.seen_lengths.items() if at in now}
        if lengths:
            batches.append(store.drain(lengths))
        store.discard([owner for owner in now if owner not in lengths])
        if ran < len(schedule.layouts):
            run_step(store, schedule, schedule.layouts[ran])
    return batches


@st.composite
def leaving_times(draw: st.DrawFn, schedule: Schedule) -> dict[str, int]:
    """When each owner is drained or discarded: once it has ended, in any order and grouping."""
    order = draw(st.permutations(list(schedule.ends)))
    last = len(schedule.layouts)
    return {owner: draw(st.integers(schedule.ends[owner], last)) for owner in order}


Rows = dict[tuple[str, int], tuple[int, dict[str, int]]]


def rows_of(batch: RowBatch) -> Rows:
    """Step and bits at each site of every row, by owner and position."""
    read = {str(site): read_bits(site, values) for site, values in batch.values.items()}
    rows: Rows = {}
    pairs = zip(batch.columns.request.tolist(), batch.columns.position.tolist(), strict=True)
    for at, (request, position) in enumerate(pairs):
        step = int(batch.columns.step[at])
        rows[batch.request[request], position] = step, {s: read[s][at] for s in read}
    assert len(rows) == len(batch)  # none twice
    return rows


def true_rows(schedule: Schedule, chosen: tuple[Selector, ...]) -> Rows:
    """The rows that are to be delivered, ordered by owner and position."""
    return {
        (owner, at): (steps[at], {str(site): bits(owner, at) for site in SITES})
        for owner, steps in schedule.steps.items()
        for at in sorted(steps)
        if candidates(chosen, at, 1, schedule.requests[owner].prompt_length)
    }


@given(schedules(), some_selectors)
def test_every_selected_row_is_delivered_once_with_its_last_valid_value_and_in_order(
    schedule: Schedule, chosen: tuple[Selector, ...]
) -> None:
    delivered: Rows = {}
    for batch in drained(RowStore(SITES, chosen), schedule):
        delivered |= rows_of(batch)
    assert delivered == true_rows(schedule, chosen)
    assert list(delivered) == sorted(delivered)
    for owner, request in schedule.requests.items():
        try:
            due = resolve(chosen, request)
        except SelectorError:  # a single position that this request hasn't
            continue
        assert {(owner, at) for at in due if at in schedule.steps[owner]} <= set(delivered)


@given(schedules(), some_selectors, st.data())
def test_drains_at_any_time_and_in_any_grouping_deliver_the_same_rows(
    schedule: Schedule, chosen: tuple[Selector, ...], data: st.DataObject
) -> None:
    delivered: Rows = {}
    store = RowStore(SITES, chosen)
    leaves = data.draw(leaving_times(schedule))
    for batch in drained(store, schedule, leaves):
        rows = rows_of(batch)
        assert list(rows) == sorted(rows, key=lambda row: (batch.request.index(row[0]), row[1]))
        assert not rows.keys() & delivered
        delivered |= rows
    assert delivered == true_rows(schedule, chosen)
    assert len(store) == 0
    assert store.held_bytes == 0


@given(schedules(), st.data())
def test_an_account_lists_as_cached_exactly_the_positions_without_rows(
    schedule: Schedule, data: st.DataObject
) -> None:
    for batch in drained(RowStore(SITES, ALL), schedule, data.draw(leaving_times(schedule))):
        for owner, account in zip(batch.request, batch.accounts, strict=True):
            cached = [at for start, stop in account.cached for at in range(start, stop)]
            seen = range(schedule.requests[owner].seen_length)
            assert cached == [at for at in seen if at not in schedule.steps[owner]]
            assert account.situations.cached_positions == len(cached)


# --- what is held --------------------------------------------------------------------------------


def bytes_held(
    schedule: Schedule, chosen: tuple[Selector, ...], leaves: Mapping[str, int]
) -> list[int]:
    """What a store holds at the end of each pass, by the layouts alone.

    A pass's rows stay, all of them, while an owner that hasn't left holds one of them.
    """
    held: dict[tuple[str, int], int] = {}
    last: dict[str, Segment] = {}
    sizes: list[int] = []
    sums = []
    for step, layout in enumerate(schedule.layouts):
        sizes.append(0)
        for segment in layout.segments:
            owner, start = segment.owner, segment.start
            if owner is None or leaves[owner] <= step:
                continue
            if segment.resumed:  # the drafts of its last pass stay undecided
                start = min(start, last[owner].start + last[owner].rows - last[owner].drafts)
            last[owner] = segment
            held = {row: s for row, s in held.items() if row[0] != owner or row[1] < start}
            picked = candidates(chosen, segment.start, segment.rows, segment.prompt_length)
            held |= {(owner, at): step for at in picked}
            sizes[step] += ROW_BYTES * len(picked)
        held = {row: s for row, s in held.items() if leaves[row[0]] > step}
        sums.append(sum(sizes[step] for step in set(held.values())))
    return sums


@given(schedules(), some_selectors, st.data())
def test_the_bytes_held_are_those_of_passes_with_a_row_that_someone_holds(
    schedule: Schedule, chosen: tuple[Selector, ...], data: st.DataObject
) -> None:
    leaves = data.draw(leaving_times(schedule))
    store = RowStore(SITES, chosen)
    held = []
    for layout in schedule.layouts:
        store.discard([owner for owner in leaves if leaves[owner] <= layout.step])
        run_step(store, schedule, layout)
        held.append(store.held_bytes)
    assert held == bytes_held(schedule, chosen, leaves)
    store.discard(list(leaves))
    assert store.held_bytes == len(store) == 0


@given(schedules(), st.data())
def test_more_bytes_than_the_limit_are_an_error_and_as_many_are_none(
    schedule: Schedule, data: st.DataObject
) -> None:
    leaves = data.draw(leaving_times(schedule))
    most = max(bytes_held(schedule, ALL, leaves), default=0)
    drained(RowStore(SITES, ALL, most), schedule, leaves)
    if most:
        with pytest.raises(CaptureError, match="raise max_buffer_bytes"):
            drained(RowStore(SITES, ALL, most - 1), schedule, leaves)


def test_a_position_computed_twice_is_delivered_once_from_its_last_step() -> None:
    store = RowStore(SITES, ALL)
    for step in (0, 1):
        run_one(store, StepLayout(step, (Segment("1", 0, 3, 3),), 3))
    batch = store.drain({"1": 3})
    assert batch.columns.position.tolist() == [0, 1, 2]
    assert batch.columns.step.tolist() == [1, 1, 1]


def test_rows_beyond_the_last_position_that_a_forward_saw_are_dropped() -> None:
    store = RowStore(SITES, ALL)
    run_one(store, StepLayout(0, (Segment("1", 0, 2, 2),), 2))
    for step in (1, 2):  # the second is the extra forward after the stop
        run_one(store, StepLayout(step, (Segment("1", 1 + step, 1, 2),), 1))
    assert store.drain({"1": 3}).columns.position.tolist() == [0, 1, 2]


def test_the_only_row_of_a_request_that_ends_in_its_step_is_delivered() -> None:
    store = RowStore(SITES, parse_selectors(["generated[0]"]))
    run_one(store, StepLayout(0, (Segment("1", 0, 2, 2),), 2))
    run_one(store, StepLayout(1, (Segment(None, 0, 3, 3), Segment("1", 2, 1, 2)), 5))
    batch = store.drain({"1": 3})
    assert batch.columns.position.tolist() == [2]
    assert [read_bits(site, batch.values[site]) for site in SITES] == [[bits("1", 2)]] * 2


def test_drafts_that_a_preemption_left_undecided_are_cached_where_the_cache_covers_them() -> None:
    store = RowStore(SITES, ALL)
    run_one(store, StepLayout(0, (Segment("1", 0, 2, 2),), 2))
    run_one(store, StepLayout(1, (Segment("1", 2, 4, 2, drafts=3),), 4))
    run_one(store, StepLayout(2, (Segment("1", 5, 1, 2, resumed=True),), 1))
    batch = store.drain({"1": 6})
    assert batch.columns.position.tolist() == [0, 1, 2, 5]
    assert batch.accounts[0].cached == ((3, 5),)


def test_rows_beyond_the_end_of_a_request_inside_its_accepted_drafts_are_dropped() -> None:
    store = RowStore(SITES, ALL)
    run_one(store, StepLayout(0, (Segment("1", 0, 2, 2),), 2))
    run_one(store, StepLayout(1, (Segment("1", 2, 4, 2, drafts=3),), 4))
    assert store.drain({"1": 4}).columns.position.tolist() == [0, 1, 2, 3]


def test_terms_are_summed_and_copied_when_they_are_put() -> None:
    store = RowStore(SITES[:1], ALL)
    one, other = torch.ones(3, 2), torch.full((3, 2), 2.0)
    store.begin_step(StepLayout(0, (Segment("1", 0, 2, 2),), 3), CPU)
    store.put(SITES[0], [one, other])
    one.zero_()
    store.end_step()
    assert store.drain({"1": 2}).values[SITES[0]].tolist() == [[3.0, 3.0], [3.0, 3.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_put_is_the_dtype_drained(dtype: torch.dtype) -> None:
    store = RowStore(SITES[:1], ALL)
    store.begin_step(StepLayout(0, (Segment("1", 0, 2, 2),), 2), CPU)
    store.put(SITES[0], [torch.ones(2, 4, dtype=dtype)])
    store.end_step()
    assert store.drain({"1": 2}).values[SITES[0]].dtype == dtype


def test_a_site_that_does_not_fire_is_an_error_that_names_it() -> None:
    store = RowStore(SITES, ALL)
    store.begin_step(StepLayout(7, (Segment("1", 0, 1, 1),), 1), CPU)
    store.put(SITES[0], [torch.zeros(1, 2)])
    with pytest.raises(CaptureError, match=r"step 7 ran without resid_post\.1"):
        store.end_step()


def test_a_site_that_fires_twice_in_a_step_is_an_error_that_names_it() -> None:
    store = RowStore(SITES, ALL)
    store.begin_step(StepLayout(0, (Segment("1", 0, 1, 1),), 1), CPU)
    store.put(SITES[0], [torch.zeros(1, 2)])
    with pytest.raises(CaptureError, match=r"resid_post\.0 fired twice"):
        store.put(SITES[0], [torch.zeros(1, 2)])


def test_a_step_without_rows_of_ours_keeps_nothing() -> None:
    store = RowStore(SITES, ALL)
    run_one(store, StepLayout(0, (Segment(None, 0, 4, 4),), 4))
    assert len(store) == 0
    assert len(store.drain({"1": 4}).columns) == 0


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_request_that_leaves_while_its_step_is_open_leaves_nothing_behind(after: int) -> None:
    store = RowStore(SITES, ALL)
    layout = StepLayout(0, (Segment("1", 0, 2, 2),), 2)
    store.begin_step(layout, CPU)
    for puts, site in enumerate(SITES):
        if puts == after:
            store.discard(["1"])
        store.put(site, [torch.zeros(2, 2)])
    store.discard(["1"])
    store.end_step()
    assert store.held_bytes == len(store) == 0


def test_clearing_forgets_every_row() -> None:
    store = RowStore(SITES, ALL)
    run_one(store, StepLayout(0, (Segment("1", 0, 2, 2),), 2))
    assert store.held_bytes == 2 * ROW_BYTES
    store.clear()
    assert store.held_bytes == len(store) == 0
    assert len(store.drain({"1": 2})) == 0


def test_discarded_owners_leave_nothing_behind() -> None:
    store = RowStore(SITES, ALL)
    run_one(store, StepLayout(0, (Segment("1", 0, 2, 2), Segment("2", 0, 1, 1)), 3))
    store.discard(["1"])
    assert len(store) == 1
    assert store.drain({"2": 1}).columns.position.tolist() == [0]


@pytest.mark.parametrize("end", ["drain", "discard"])
def test_a_forward_still_in_flight_when_its_request_ended_leaves_no_rows(end: str) -> None:
    store = RowStore(SITES, ALL)
    run_one(store, StepLayout(0, (Segment("1", 0, 2, 2),), 2))
    if end == "drain":
        store.drain({"1": 2})
    else:
        store.discard(["1"])
    run_one(store, StepLayout(1, (Segment("1", 2, 1, 2), Segment("2", 0, 1, 1)), 2))
    assert len(store) == 1
    assert store.drain({"2": 1}).columns.position.tolist() == [0]


def test_a_repeat_of_a_pass_that_this_store_did_not_see_is_taken_by_itself() -> None:
    store = RowStore(SITES, ALL)
    first = StepLayout(3, (Segment("1", 4, 1, 4),), 1)
    repeat = Repeat(8, first, 5)
    store.begin_step(repeat, CPU)
    for site in SITES:
        store.put(site, [forward(Schedule((), {}, {}, {}, frozenset()), repeat.layout, site)])
    store.end_step()
    assert store.drain({"1": 10}).columns.position.tolist() == [9]


def test_the_schedules_repeat_passes_and_end_such_runs_in_every_way() -> None:
    looking = settings(derandomize=True, database=None, phases=[Phase.generate], max_examples=500)

    def repeats(schedule: Schedule) -> list[int]:
        return [at.ahead for at in schedule.announced.values() if isinstance(at, Repeat)]

    def again(schedule: Schedule) -> bool:
        return repeats(schedule).count(1) > 1 and max(repeats(schedule)) > 2

    assert again(find(schedules(), again, settings=looking))
