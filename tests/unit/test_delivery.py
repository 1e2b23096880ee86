"""The way of the rows from several workers' stores to one capture, over generated schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from schedules import SITES, Schedule, bits, read_bits, schedules
from strategies import selectors
from test_rowstore import ALL, drained, rows_of

from tapcheck.capture import COLUMN_NAMES, Capture
from tapcheck.errors import CaptureError
from tapcheck.request import Request
from tapcheck.rowstore import RowStore
from tapcheck.runs import Plan, assemble
from tapcheck.selectors import Selector, resolve
from tapcheck.sites import Site
from tapcheck.transport import RowBatch, merge, pack, unpack

# Which sites each worker taps: alone, two tensor-parallel ranks, two pipeline stages, both.
topologies = st.sampled_from(
    [(SITES,), (SITES, SITES), (SITES[:1], SITES[1:]), (SITES[:1], SITES[1:], SITES[1:], ())]
).flatmap(st.permutations)
# Those that every request can meet.
many = st.lists(selectors.filter(lambda one: one.index is None), min_size=1, max_size=2)
some_selectors = st.just(ALL) | many.map(tuple)
finishing = schedules().filter(lambda schedule: bool(schedule.requests))


def drain(schedule: Schedule, sites: tuple[Site, ...], chosen: tuple[Selector, ...]) -> RowBatch:
    (batch,) = drained(RowStore(sites, chosen), schedule)
    return batch


def due(schedule: Schedule, chosen: tuple[Selector, ...]) -> list[tuple[str, int]]:
    return [(o, at) for o, r in schedule.requests.items() for at in resolve(chosen, r)]


def named(schedule: Schedule) -> dict[str, Request]:
    """The finished requests, by owner, under the ids that the caller gave them."""
    return {o: replace(r, id=f"mine {o}") for o, r in reversed([*schedule.requests.items()])}


def rows_in(capture: Capture) -> list[tuple[str, int, str, int, int]]:
    """Id, position, site, step and bits of every row, in the capture's order."""
    return [
        (row.request_id, row.position, str(row.site), row.step, read_bits(row.site, values)[0])
        for row in capture
        for values in [row.values.unsqueeze(0)]
    ]


@given(finishing, some_selectors)
def test_a_drain_is_the_same_once_packed_and_unpacked(
    schedule: Schedule, chosen: tuple[Selector, ...]
) -> None:
    batch = drain(schedule, SITES, chosen)
    received = unpack(pack(batch))
    assert rows_of(received) == rows_of(batch)
    assert (received.request, received.accounts) == (batch.request, batch.accounts)
    for name in COLUMN_NAMES:
        assert getattr(received.columns, name).tolist() == getattr(batch.columns, name).tolist()


@given(finishing, some_selectors, topologies)
def test_a_capture_has_exactly_the_rows_that_are_due(
    schedule: Schedule, chosen: tuple[Selector, ...], workers: list[tuple[Site, ...]]
) -> None:
    rows = [(o, at) for o, at in due(schedule, chosen) if at in schedule.steps[o]]
    assume(rows)
    batch = merge([unpack(pack(drain(schedule, sites, chosen))) for sites in workers])
    runs = named(schedule)
    capture = assemble(runs, Plan(SITES, chosen), batch, {}, allow_cached=True)
    assert capture.requests == tuple(runs.values())
    assert sorted(rows_in(capture)) == sorted(
        (runs[o].id, at, str(site), schedule.steps[o][at], bits(o, at))
        for o, at in rows
        for site in SITES
    )
    for site in SITES:
        columns = capture[site].columns
        keys = list(zip(columns.request.tolist(), columns.position.tolist(), strict=True))
        assert keys == sorted(keys)
    cached = {
        run.id: [at for at in range(run.seen_length) if at not in schedule.steps[owner]]
        for owner, run in runs.items()
    }
    told = capture.metadata["cached"]
    assert {name: [at for a, b in told[name] for at in range(a, b)] for name in told} == {
        name: positions for name, positions in cached.items() if positions
    }
    accounts = dict(zip(batch.request, batch.accounts, strict=True))
    assert capture.metadata["situations"] == {
        run.id: accounts[owner].situations._asdict() for owner, run in runs.items()
    }


@given(finishing, some_selectors)
def test_a_cached_position_that_is_due_is_an_error_unless_it_is_allowed(
    schedule: Schedule, chosen: tuple[Selector, ...]
) -> None:
    positions = due(schedule, chosen)
    missing = [(o, at) for o, at in positions if at not in schedule.steps[o]]
    assume(positions)
    batch, plan = drain(schedule, SITES, chosen), Plan(SITES, chosen)
    if not missing:
        assert len(assemble(schedule.requests, plan, batch, {})) == len(positions) * len(SITES)
        return
    with pytest.raises(CaptureError) as raised:
        assemble(schedule.requests, plan, batch, {})
    first = f"the first is request {missing[0][0]!r}, position {missing[0][1]} "
    assert f"{len(missing)} of {len(positions)} selected rows were not" in str(raised.value)
    assert first in str(raised.value)


@given(finishing, st.data())
def test_one_bit_that_differs_between_ranks_is_named(
    schedule: Schedule, data: st.DataObject
) -> None:
    one, other = (drain(schedule, SITES, ALL) for _ in range(2))
    assume(len(one))
    site = data.draw(st.sampled_from(SITES))
    row = data.draw(st.integers(0, len(one) - 1))
    other.values[site].view(torch.int16)[row, -1] ^= 1
    owner, position = one.request[one.columns.request[row]], one.columns.position[row]
    with pytest.raises(CaptureError) as raised:
        merge(data.draw(st.permutations([one, other])))
    assert f"site {site}, request {owner!r}, position {position}: " in str(raised.value)
