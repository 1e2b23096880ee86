"""Row accounting over generated schedules: every selected row once, under its owner, in order."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from tapcheck.errors import CaptureError
from tapcheck.layout import Segment, StepLayout
from tapcheck.request import Request
from tapcheck.rowstore import RowStore
from tapcheck.selectors import parse_selectors, resolve
from tapcheck.sites import Site

CPU = torch.device("cpu")
SITES = (Site("resid_post", 0), Site("resid_post", 1))
ALL = parse_selectors(["all"])


def value(owner: str, position: int, site: Site) -> float:
    """A number that no other row has; exact in float32."""
    assert site.layer is not None
    return float(int(owner) * 1000 + position * 2 + site.layer)


def run_step(store: RowStore, layout: StepLayout, lengths: dict[str, int] | None = None) -> None:
    """Play a forward pass whose rows hold `value`; rows of nobody and padding hold NaN."""
    store.begin_step(layout, CPU)
    for site in SITES:
        rows = torch.full((layout.total_rows, 3), torch.nan)
        at = 0
        for segment in layout.segments:
            if segment.owner is not None:
                for row in range(segment.rows):
                    rows[at + row] = value(segment.owner, segment.start + row, site)
            at += segment.rows
        store.put(site, [rows])
        rows.fill_(-1.0)  # as a fused kernel does to its inputs
    store.end_step()


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[StepLayout], dict[str, Request]]:
    """A run of a scheduler that chunks, preempts, reorders, pads and serves requests not ours."""
    count = draw(st.integers(1, 4))
    requests = {
        str(owner): Request(
            str(owner),
            tuple(range(1, draw(st.integers(1, 6)) + 1)),
            tuple(range(draw(st.integers(0, 4)))),
        )
        for owner in range(count)
    }
    computed = dict.fromkeys(requests, 0)
    layouts = []
    while any(computed[owner] < requests[owner].seen_length for owner in requests):
        segments = []
        for owner in draw(st.permutations(sorted(requests))):
            left = requests[owner].seen_length - computed[owner]
            if draw(st.integers(0, 9)) == 9:
                computed[owner] = 0  # preempted: recomputed from the start
                continue
            if left == 0 or draw(st.booleans()):
                continue
            prompt_left = requests[owner].prompt_length - computed[owner]
            rows = prompt_left - draw(st.integers(0, prompt_left - 1)) if prompt_left > 0 else 1
            segments.append(Segment(owner, computed[owner], rows, requests[owner].prompt_length))
            computed[owner] += rows
            if draw(st.booleans()):
                segments.append(Segment(None, draw(st.integers(0, 5)), 1, 2))
        rows = sum(segment.rows for segment in segments)
        padding = draw(st.integers(0, 3))
        layouts.append(StepLayout(len(layouts), tuple(segments), rows + padding))
    return layouts, requests


SELECTORS = st.lists(
    st.sampled_from(
        ["all", "prompt[*]", "prompt[0]", "prompt[-1]", "generated[*]", "prompt[1:]",
         "generated[*]/2", "prompt[-1]+1", "generated[1:3]", "generated[-2:]"]
    ),
    min_size=1,
)  # fmt: skip


@given(schedules(), SELECTORS)
def test_every_selected_row_is_held_once_under_its_owner_and_in_order(
    schedule: tuple[list[StepLayout], dict[str, Request]], select: list[str]
) -> None:
    layouts, requests = schedule
    selectors = parse_selectors(select)
    store = RowStore(SITES, selectors)
    for layout in layouts:
        run_step(store, layout)
    batch = store.drain({owner: r.seen_length for owner, r in requests.items()})
    keys = list(zip(batch.columns.request.tolist(), batch.columns.position.tolist(), strict=True))
    assert keys == sorted(set(keys))
    for index, owner in enumerate(batch.request):
        request = requests[owner]
        held = {position for owned, position in keys if owned == index}
        try:
            due = set(resolve(selectors, request))
        except ValueError:  # a single position that this request hasn't
            continue
        assert due <= held <= set(range(request.seen_length))
    for site in SITES:
        for (index, position), row in zip(keys, batch.values.get(site, ()), strict=True):
            assert row.tolist() == [value(batch.request[index], position, site)] * 3
    assert len(store) == 0


@given(schedules(), st.randoms())
def test_drains_in_any_grouping_deliver_the_same_rows(
    schedule: tuple[list[StepLayout], dict[str, Request]], random: object
) -> None:
    layouts, requests = schedule
    whole, parts = RowStore(SITES, ALL), RowStore(SITES, ALL)
    for layout in layouts:
        run_step(whole, layout)
        run_step(parts, layout)
    expected = whole.drain({owner: r.seen_length for owner, r in requests.items()})
    owners = list(requests)
    random.shuffle(owners)  # type: ignore[attr-defined]
    for owner in owners:
        batch = parts.drain({owner: requests[owner].seen_length})
        index = expected.request.index(owner)
        mine = np.flatnonzero(expected.columns.request == index)
        assert batch.columns.position.tolist() == expected.columns.position[mine].tolist()
        for site in batch.values:
            assert torch.equal(batch.values[site], expected.values[site][torch.from_numpy(mine)])
    assert len(parts) == 0


def test_a_position_computed_twice_is_delivered_once_from_its_last_step() -> None:
    store = RowStore(SITES, ALL)
    for step in (0, 1):
        run_step(store, StepLayout(step, (Segment("1", 0, 3, 3),), 3))
    batch = store.drain({"1": 3})
    assert batch.columns.position.tolist() == [0, 1, 2]
    assert batch.columns.step.tolist() == [1, 1, 1]


def test_rows_beyond_the_last_position_that_a_forward_saw_are_dropped() -> None:
    store = RowStore(SITES, ALL)
    run_step(store, StepLayout(0, (Segment("1", 0, 2, 2),), 2))
    for step in (1, 2):  # the second is the extra forward after the stop
        run_step(store, StepLayout(step, (Segment("1", 1 + step, 1, 2),), 1))
    assert store.drain({"1": 3}).columns.position.tolist() == [0, 1, 2]


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
    run_step(store, StepLayout(0, (Segment(None, 0, 4, 4),), 4))
    assert len(store) == 0
    assert len(store.drain({"1": 4}).columns) == 0


def test_discarded_owners_leave_nothing_behind() -> None:
    store = RowStore(SITES, ALL)
    run_step(store, StepLayout(0, (Segment("1", 0, 2, 2), Segment("2", 0, 1, 1)), 3))
    store.discard(["1"])
    assert len(store) == 1
    assert store.drain({"2": 1}).columns.position.tolist() == [0]


def test_a_layout_with_more_rows_than_its_forward_pass_is_refused() -> None:
    with pytest.raises(CaptureError, match="5 rows are scheduled, but the forward pass has 4"):
        StepLayout(0, (Segment("1", 0, 5, 5),), 4)


def test_a_layout_with_two_segments_of_one_request_is_refused() -> None:
    with pytest.raises(CaptureError, match="two segments"):
        StepLayout(0, (Segment("1", 0, 1, 2), Segment("1", 1, 1, 2)), 2)


@pytest.mark.parametrize("end", ["drain", "discard"])
def test_a_forward_still_in_flight_when_its_request_ended_leaves_no_rows(end: str) -> None:
    store = RowStore(SITES, ALL)
    run_step(store, StepLayout(0, (Segment("1", 0, 2, 2),), 2))
    if end == "drain":
        store.drain({"1": 2})
    else:
        store.discard(["1"])
    run_step(store, StepLayout(1, (Segment("1", 2, 1, 2), Segment("2", 0, 1, 1)), 2))
    assert len(store) == 1
    assert store.drain({"2": 1}).columns.position.tolist() == [0]
