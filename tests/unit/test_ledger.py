from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import synthetic_capture, synthetic_requests

from tapcheck.capture import Capture
from tapcheck.checks.ledger import Ledger, LedgerEntry, compare_ledger
from tapcheck.errors import SelectorError
from tapcheck.request import Request
from tapcheck.sites import Site, parse_site

SITES = ("resid_post.0", "resid_post.1")
# a has 5 prompt and 4 generated tokens (8 rows), b 3 and 6 (8 rows), c 7 and none (7 rows).
HEALTHY = synthetic_capture(sites=SITES)
ROWS = 23


def ledger_of(
    capture: Capture,
    *,
    requests: Sequence[Request] = HEALTHY.requests,
    sites: Sequence[str] = SITES,
    select: Sequence[int | str] = ("all",),
) -> Ledger:
    return compare_ledger(capture, requests=requests, sites=sites, select=select)


def with_index(capture: Capture, site: str, index: Sequence[int]) -> Capture:
    """The capture with other rows at one site: those at `index`, in that order."""
    rows = capture[site].take(np.array(index, np.int64))
    return replace(capture, rows={**capture.rows, parse_site(site): rows})


def row_index(request_id: str, position: int) -> int:
    columns = HEALTHY["resid_post.1"].columns
    request = [request.id for request in HEALTHY.requests].index(request_id)
    (found,) = np.flatnonzero((columns.request == request) & (columns.position == position))
    return int(found)


def only_entry(ledger: Ledger) -> LedgerEntry:
    (entry,) = ledger.entries
    assert not ledger.complete
    return entry


def test_a_healthy_capture_is_complete() -> None:
    ledger = ledger_of(HEALTHY)
    assert ledger.complete
    assert (ledger.due, ledger.delivered, ledger.entries) == (2 * ROWS, 2 * ROWS, ())


def test_rows_due_follow_the_selectors() -> None:
    capture = HEALTHY.select(select=["prompt[-1]", "generated[*]"])
    ledger = ledger_of(capture, select=["prompt[-1]", "generated[*]"])
    assert ledger.complete
    assert ledger.due == 2 * ((1 + 3) + (1 + 5) + 1)


def test_a_request_that_generates_owes_the_rows_that_it_generated() -> None:
    asked = [replace(request, generated_token_ids=()) for request in HEALTHY.requests]
    assert ledger_of(HEALTHY, requests=asked).due == 2 * ROWS


@pytest.mark.parametrize(
    ("request_id", "position", "reason"),
    [
        ("a", 0, "the first row of the prompt"),
        ("a", 2, "a row of the prompt"),
        ("a", 4, "the last row of the prompt"),
        ("a", 5, "the first generated row"),
        ("a", 6, "a generated row"),
        ("a", 7, "the last row of the sequence"),
    ],
)
def test_a_missing_row_is_named_with_its_place(request_id: str, position: int, reason: str) -> None:
    lost = row_index(request_id, position)
    kept = [at for at in range(ROWS) if at != lost]
    entry = only_entry(ledger_of(with_index(HEALTHY, "resid_post.1", kept)))
    assert entry == LedgerEntry(request_id, Site("resid_post", 1), position, "missing", reason)


def test_a_request_without_rows_at_a_site_is_named() -> None:
    kept = np.flatnonzero(HEALTHY["resid_post.1"].columns.request != 1)
    ledger = ledger_of(with_index(HEALTHY, "resid_post.1", kept.tolist()))
    assert len(ledger.of_kind("missing")) == len(ledger.entries) == 8
    assert {entry.request_id for entry in ledger.entries} == {"b"}
    assert {entry.reason for entry in ledger.entries} == {
        "none of the request's rows was delivered at this site"
    }


def test_a_site_that_was_not_captured_is_named() -> None:
    ledger = ledger_of(HEALTHY, sites=[*SITES, "resid_post.2"])
    assert len(ledger.of_kind("missing")) == ROWS
    assert {entry.reason for entry in ledger.entries} == {"the site was not captured at all"}


@pytest.mark.parametrize("select", ["all", "prompt[-1]", "generated[*]", "generated[0]"])
def test_a_request_that_is_not_in_the_capture_is_missed_whatever_was_selected(select: str) -> None:
    lost = Request("lost", (1, 2, 3))
    two = [request for request in HEALTHY.requests if request.id != "c"]
    capture = HEALTHY.select(requests=["a", "b"], select=[select])
    ledger = ledger_of(capture, requests=[*two, lost], select=[select])
    assert {entry.request_id for entry in ledger.entries} == {"lost"}
    assert {entry.reason for entry in ledger.entries} == {"the request is not in the capture"}


def test_a_duplicated_row_is_named_with_its_steps() -> None:
    twice = row_index("b", 4)
    index = [*range(twice + 1), *range(twice, ROWS)]
    entry = only_entry(ledger_of(with_index(HEALTHY, "resid_post.1", index)))
    assert (entry.request_id, entry.position, entry.kind) == ("b", 4, "duplicated")
    assert entry.reason == "delivered 2 times, in steps 2, 2"


def test_as_many_rows_as_are_due_do_not_hide_a_missing_one() -> None:
    index = list(range(ROWS))
    index[row_index("a", 1)] = row_index("a", 0)
    ledger = ledger_of(with_index(HEALTHY, "resid_post.1", index))
    assert ledger.delivered == ledger.due
    assert [entry.kind for entry in ledger.entries] == ["missing", "duplicated"]


@pytest.mark.parametrize(
    ("position", "reason"),
    [
        (8, "the last generated token, which no forward pass sees"),
        (9, "the position is beyond the sequence (length 9)"),
        (-1, "the position is negative"),
        (1, "not among the positions due"),
    ],
)
def test_an_unexpected_row_is_named_with_the_reason(position: int, reason: str) -> None:
    capture = HEALTHY.select(sites=["resid_post.1"], select=["prompt[0]"])
    rows = capture["resid_post.1"].take(np.array([0, 0, 1, 2]))
    columns = replace(rows.columns, position=np.array([0, position, 0, 0]))
    capture = replace(capture, rows={Site("resid_post", 1): replace(rows, columns=columns)})
    ledger = ledger_of(capture, sites=["resid_post.1"], select=["prompt[0]"])
    (entry,) = ledger.of_kind("unexpected")
    assert (entry.request_id, entry.position, entry.reason) == ("a", position, reason)


def test_rows_of_a_site_or_request_that_nobody_asked_for_are_unexpected() -> None:
    ledger = ledger_of(HEALTHY, sites=["resid_post.0"])
    assert {entry.reason for entry in ledger.entries} == {"no row is due at this site"}
    ledger = ledger_of(HEALTHY, requests=HEALTHY.requests[:2])
    assert {(entry.request_id, entry.reason) for entry in ledger.entries} == {
        ("c", "no row is due for this request")
    }


def test_rows_of_one_request_must_ascend() -> None:
    one, other = row_index("a", 2), row_index("a", 3)
    index = list(range(ROWS))
    index[one], index[other] = other, one
    entry = only_entry(ledger_of(with_index(HEALTHY, "resid_post.1", index)))
    assert (entry.request_id, entry.position, entry.kind) == ("a", 2, "out of order")
    assert "after position 3" in entry.reason


@given(st.randoms(use_true_random=False))
def test_rows_of_different_requests_may_interleave_in_any_way(random: Random) -> None:
    owners = HEALTHY["resid_post.1"].columns.request.tolist()
    rows_of = {number: iter(np.flatnonzero(np.equal(owners, number))) for number in set(owners)}
    random.shuffle(owners)
    index = [int(next(rows_of[owner])) for owner in owners]
    assert ledger_of(with_index(HEALTHY, "resid_post.1", index)).complete


@given(st.lists(st.integers(0, ROWS - 1), max_size=40))
def test_entries_account_for_every_row(index: list[int]) -> None:
    ledger = ledger_of(
        with_index(HEALTHY, "resid_post.1", index).select(sites=["resid_post.1"]),
        sites=["resid_post.1"],
    )
    assert len(ledger.of_kind("missing")) == ROWS - len(set(index))
    repeated = {at for at in index if index.count(at) > 1}
    assert len(ledger.of_kind("duplicated")) == len(repeated)
    assert not ledger.of_kind("unexpected")
    assert ledger.delivered == len(index)


def test_nothing_due_is_not_complete() -> None:
    capture = HEALTHY.select(requests=["c"], select=["generated[*]"])
    ledger = ledger_of(capture, requests=[capture.requests[0]], select=["generated[*]"])
    assert (ledger.due, ledger.entries) == (0, ())
    assert not ledger.complete


def test_selecting_the_token_that_no_forward_pass_sees_is_an_error() -> None:
    with pytest.raises(SelectorError, match="'a'"):
        ledger_of(HEALTHY, select=["generated[3]"])


def test_sixty_four_thousand_missing_rows_are_all_named() -> None:
    requests = synthetic_requests([(2_000, 0)] * 8)
    capture = Capture(requests, {})
    sites = [f"resid_post.{layer}" for layer in range(4)]
    ledger = ledger_of(capture, requests=requests, sites=sites)
    assert len(ledger.entries) == ledger.due == 64_000
