"""Requests checked before a run, and its rows accounted for after it."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tapcheck.capture import Capture, Columns
from tapcheck.errors import CaptureError, SelectorError, SiteError
from tapcheck.layout import Account
from tapcheck.request import Request
from tapcheck.runs import (
    Plan,
    assemble,
    check_requests,
    finished,
    make_plan,
    owner_keys,
    prompt_to_run,
    tokens_to_generate,
)
from tapcheck.selectors import resolve
from tapcheck.sites import Site
from tapcheck.transport import RowBatch

SITES = (Site("resid_post", 0), Site("resid_post", 1))
RUNS = {
    "x/0": Request("first", (1, 2, 3), (4, 5, 6)),
    "x/1": Request("second", (7,), (8, 9)),
    "x/2": Request("third", (1, 2, 3, 4)),
}


def plan(*select: int | str) -> Plan:
    return make_plan(SITES, select or ("all",), 2)


def batch_of(
    pairs: list[tuple[str, int]],
    owners: tuple[str, ...] = tuple(RUNS),
    sites: tuple[Site, ...] = SITES,
) -> RowBatch:
    """Rows of these (owner, position) pairs in this order; each value says which row it is."""
    request = np.array([owners.index(owner) for owner, _ in pairs], np.int64)
    position = np.array([at for _, at in pairs], np.int64)
    columns = Columns(request, position, position * 3, position + 10, position + 20)
    numbers = [value(owner, at) for owner, at in pairs]
    rows = torch.tensor(numbers, dtype=torch.float64).reshape(-1, 1)
    values = {site: rows + (site.layer or 0) / 2 for site in sites}
    return RowBatch(owners, columns, values, (Account(),) * len(owners))


def value(owner: str, position: int) -> float:
    return 1000.0 * (1 + list(RUNS).index(owner)) + position


EVERY = [(owner, at) for owner, run in RUNS.items() for at in range(run.seen_length)]


def assert_rows_are_right(capture: Capture) -> None:
    owner_of = {request.id: owner for owner, request in RUNS.items()}
    for row in capture:
        expected = value(owner_of[row.request_id], row.position) + (row.site.layer or 0) / 2
        assert row.values.tolist() == [expected]
        assert (row.step, row.monotonic_ns) == (3 * row.position, row.position + 10)


# --- assemble ------------------------------------------------------------------------------------


def test_a_run_s_rows_become_a_capture_under_the_caller_s_ids() -> None:
    capture = assemble(RUNS, plan(), batch_of(EVERY), {"backend": "test"})
    assert [request.id for request in capture.requests] == ["first", "second", "third"]
    assert capture.sites == SITES
    assert len(capture) == len(EVERY) * len(SITES)
    assert capture.metadata["backend"] == "test"
    assert_rows_are_right(capture)


@given(
    st.permutations(EVERY),
    st.permutations(list(RUNS)),
    st.lists(
        st.sampled_from(["all", "prompt[*]", "prompt[-1]", "generated[*]", "all+1/2"]), min_size=1
    ),
)
def test_rows_in_any_order_under_any_numbering_become_the_same_capture(
    pairs: list[tuple[str, int]], owners: list[str], select: list[str]
) -> None:
    wanted = plan(*select)
    capture = assemble(RUNS, wanted, batch_of(pairs, tuple(owners)), {})
    assert capture == assemble(RUNS, wanted, batch_of(EVERY), {})
    assert_rows_are_right(capture)
    for site in SITES:
        columns = capture[site].columns
        for index, request in enumerate(capture.requests):
            mine = columns.position[columns.request == index]
            assert sorted(mine.tolist()) == resolve(wanted.selectors, request)


@given(st.data())
def test_whatever_row_is_missing_is_named(data: st.DataObject) -> None:
    gone = data.draw(st.lists(st.sampled_from(EVERY), min_size=1, unique=True))
    left = [pair for pair in EVERY if pair not in gone]
    with pytest.raises(CaptureError) as raised:
        assemble(RUNS, plan(), batch_of(left), {})
    owner, position = min(gone, key=EVERY.index)
    message = str(raised.value)
    assert f"{len(gone)} of {len(EVERY)} selected rows were not delivered" in message
    assert f"the first is request {RUNS[owner].id!r}, position {position} " in message
    mine = [at for other, at in gone if other == owner]
    assert f"misses positions {min(mine)} to {max(mine)}, {len(mine)} in all" in message
    assert "Nothing was returned" in message


def test_rows_that_were_not_selected_may_be_missing_and_are_dropped() -> None:
    for pairs in (EVERY, [pair for pair in EVERY if pair[1] == 0]):
        capture = assemble(RUNS, plan("prompt[0]"), batch_of(pairs), {})
        assert len(capture) == len(RUNS) * len(SITES)


@given(st.sampled_from(EVERY), st.integers(1, 3))
def test_a_row_delivered_twice_is_named(twice: tuple[str, int], extra: int) -> None:
    with pytest.raises(CaptureError) as raised:
        assemble(RUNS, plan(), batch_of([*EVERY, *[twice] * extra]), {})
    name = RUNS[twice[0]].id
    assert f"request {name!r}, position {twice[1]} was delivered {1 + extra} times" in str(
        raised.value
    )


def test_a_site_that_no_worker_delivered_is_named() -> None:
    with pytest.raises(CaptureError, match=r"no worker delivered site resid_post\.1"):
        assemble(RUNS, plan(), batch_of(EVERY, sites=SITES[:1]), {})


@pytest.mark.parametrize("sites", [(), SITES])
def test_no_row_at_all_is_an_error(sites: tuple[Site, ...]) -> None:
    with pytest.raises(CaptureError, match="11 of 11 selected rows were not delivered"):
        assemble(RUNS, plan(), batch_of([], sites=sites), {})


def test_selectors_that_select_nothing_are_an_error_that_names_them() -> None:
    with pytest.raises(CaptureError, match=r"the selectors prompt\[9:\] select no position"):
        assemble(RUNS, plan("prompt[9:]"), batch_of(EVERY), {})


def test_a_selector_that_a_request_can_t_meet_is_an_error_that_names_the_request() -> None:
    with pytest.raises(SelectorError, match="'second'"):
        assemble(RUNS, plan("prompt[2]"), batch_of(EVERY), {})


# --- before a run --------------------------------------------------------------------------------


def test_a_plan_orders_its_sites_and_prints_its_selectors() -> None:
    made = make_plan(["resid_post.1", "embed", "residual_stream.0"], [5, "prompt[-1]"], 2)
    assert list(map(str, made.sites)) == ["embed", "resid_post.0", "resid_post.1"]
    assert made.select == ["5", "prompt[-1]"]
    assert make_plan(made.sites, made.select, 2) == made


@pytest.mark.parametrize(
    ("sites", "select", "error"),
    [
        (["resid_post.2"], ["all"], SiteError),
        ([], ["all"], SiteError),
        (["embed"], ["prompt["], SelectorError),
    ],
)
def test_a_bad_plan_is_an_error(
    sites: list[str], select: list[int | str], error: type[Exception]
) -> None:
    with pytest.raises(error):
        make_plan(sites, select, 2)


@pytest.mark.parametrize(
    ("requests", "max_new_tokens", "message"),
    [
        ([], 4, "no request was given"),
        ([Request("a", (1,))], 0, "max_new_tokens is 0"),
        ([Request("a", (1,)), Request("a", (2,))], 4, "'a' stands for two requests"),
        (["text"], 4, "'text' is no Request"),
    ],
)
def test_requests_that_can_t_run_are_an_error(
    requests: Any, max_new_tokens: int, message: str
) -> None:
    with pytest.raises(CaptureError, match=message):
        check_requests(requests, [max_new_tokens] * len(requests))


def test_requests_that_can_run_are_none() -> None:
    check_requests([Request("1", (1,)), Request("10", (1,)), Request("a-0", (1,))], [1, 1, 1])


@pytest.mark.parametrize(
    ("request_", "fed", "generates"),
    [
        (Request("a", (1, 2)), (1, 2), 7),
        (Request("a", (1, 2), (3,)), (1, 2), 1),
        (Request("a", (1, 2), (3, 4, 5)), (1, 2, 3, 4), 1),
    ],
)
def test_what_is_fed_is_what_a_forward_pass_sees(
    request_: Request, fed: tuple[int, ...], generates: int
) -> None:
    assert prompt_to_run(request_) == fed
    assert len(fed) == request_.seen_length
    assert tokens_to_generate(request_, 7) == generates


def test_a_generated_request_gets_its_tokens_and_a_forced_one_keeps_its_own() -> None:
    free, forced = Request("a", (1,)), Request("a", (1,), (2, 3))
    assert finished(free, [8, 9], 2) == replace(free, generated_token_ids=(8, 9))
    assert finished(forced, [9], 16) is forced


def test_owner_keys_are_unique_over_clients() -> None:
    keys = [key for _ in range(3) for key in islice(owner_keys(), 20)]
    assert len(set(keys)) == 60


def test_a_request_that_ended_early_is_no_capture() -> None:
    with pytest.raises(CaptureError, match="request 'r' ended after 2 generated tokens, but 64"):
        finished(Request("r", (5,)), [8, 9], 64)


@pytest.mark.parametrize(
    ("request_", "max_new_tokens", "fits"),
    [
        (Request("r", (1,) * 20), 12, True),
        (Request("r", (1,) * 20), 13, False),
        (Request("r", (1,) * 20, (1,) * 12), 99, True),
        (Request("r", (1,) * 20, (1,) * 13), 99, False),
    ],
)
def test_a_request_that_does_not_fit_is_refused_before_it_runs(
    request_: Request, max_new_tokens: int, fits: bool
) -> None:
    if fits:
        check_requests([request_], [max_new_tokens], 32)
    else:
        with pytest.raises(CaptureError, match=r"'r' needs 33 positions.*max_model_len=32"):
            check_requests([request_], [max_new_tokens], 32)
