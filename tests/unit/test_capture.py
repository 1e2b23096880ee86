from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import captures

from tapcheck.capture import (
    COLUMN_NAMES,
    Capture,
    Columns,
    IntArray,
    Row,
    SiteRows,
    concatenate,
    join,
)
from tapcheck.errors import CaptureError, SelectorError, SiteError
from tapcheck.request import Request
from tapcheck.sites import Site

PRE, POST, NORM = Site("resid_pre", 0), Site("resid_post", 0), Site("final_norm")
A, B = Request("a", (1, 2), (3, 4, 5)), Request("b", (6,))


def columns(*pairs: tuple[int, int]) -> Columns:
    request, position = np.array(pairs, np.int64).reshape(-1, 2).T
    number = np.arange(len(pairs))
    return Columns(request, position, number, number + 100, number + 200)


def rows(*pairs: tuple[int, int], scale: float = 1.0) -> SiteRows:
    tensor = torch.tensor(pairs, dtype=torch.float32).reshape(-1, 2) * scale
    return SiteRows(columns(*pairs), tensor)


def small() -> Capture:
    delivered = {
        NORM: rows((0, 3), (0, 0)),
        POST: rows((1, 0), (0, 3), (0, 1)),
        PRE: rows((0, 1), (0, 3)),
    }
    return Capture((A, B), delivered, {"backend": "hf"})


def shuffled(capture: Capture, site: Site, order: list[int]) -> Capture:
    moved = capture.rows[site].take(np.array(order, np.int64))
    return replace(capture, rows={**capture.rows, site: moved})


def test_rows_come_by_request_then_position_then_layer() -> None:
    assert [(row.request_id, row.position, str(row.site)) for row in small()] == [
        ("a", 0, "final_norm"),
        ("a", 1, "resid_pre.0"),
        ("a", 1, "resid_post.0"),
        ("a", 3, "resid_pre.0"),
        ("a", 3, "resid_post.0"),
        ("a", 3, "final_norm"),
        ("b", 0, "resid_post.0"),
    ]


def test_a_row_carries_its_columns_and_values() -> None:
    row = list(small())[4]
    assert (row.step, row.monotonic_ns, row.unix_ns) == (1, 101, 201)
    assert row.generated
    assert row.values.tolist() == [0, 3]
    assert not next(iter(small())).generated


@given(captures())
def test_iteration_gives_every_row_once_in_order(capture: Capture) -> None:
    order = {request.id: index for index, request in enumerate(capture.requests)}
    keys = [(order[row.request_id], row.position, row.site.order) for row in capture]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys) == len(capture)
    assert len(capture) == sum(len(capture[site].values) for site in capture.sites)
    for row in capture:
        same = capture.row(row.request_id, row.site, row.position)
        assert torch.equal(same.view(torch.uint8), row.values.view(torch.uint8))


@given(captures(), st.data())
def test_equality_ignores_the_order_of_delivery(capture: Capture, data: st.DataObject) -> None:
    other = capture
    for site in capture.sites:
        other = shuffled(other, site, data.draw(st.permutations(range(len(capture[site])))))
    other = replace(other, metadata={"backend": "vllm"})
    assert other == capture


@given(captures(), st.data())
def test_equality_sees_a_changed_bit_a_lost_row_and_a_moved_row(
    capture: Capture, data: st.DataObject
) -> None:
    site = data.draw(st.sampled_from(capture.sites or [None]))
    assume(site is not None and capture[site].values.numel())
    assert site is not None
    old = capture[site]
    row = data.draw(st.integers(0, len(old) - 1))
    flipped = old.values.clone()
    flipped[row].view(torch.uint8)[0] ^= 1
    moved = old.columns.position.copy()
    moved[row] += 100
    for new in (
        SiteRows(old.columns, flipped),
        old.take(np.delete(np.arange(len(old)), row)),
        SiteRows(replace(old.columns, position=moved), old.values),
    ):
        assert capture != replace(capture, rows={**capture.rows, site: new})


def test_equality_sees_dtype_width_sites_and_requests() -> None:
    capture = small()
    half = SiteRows(capture[POST].columns, capture[POST].values.half())
    wide = SiteRows(capture[POST].columns, torch.cat([capture[POST].values] * 2, dim=1))
    for other in (
        replace(capture, rows={**capture.rows, POST: half}),
        replace(capture, rows={**capture.rows, POST: wide}),
        capture.select(sites=[POST]),
        replace(capture, requests=(A, replace(B, generated_token_ids=(9,)))),
        "a capture",
    ):
        assert capture != other


@given(captures())
def test_joining_what_was_split_gives_the_capture_back(capture: Capture) -> None:
    parts = capture.split()
    assert list(parts) == [request.id for request in capture.requests]
    assert sum(map(len, parts.values())) == len(capture)
    if parts:
        assert join(list(parts.values())) == capture


@given(captures())
def test_joining_the_sites_of_a_capture_gives_it_back(capture: Capture) -> None:
    assume(capture.sites)
    joined = join([capture.select(sites=[site]) for site in reversed(capture.sites)])
    assert joined == capture
    assert joined.metadata == capture.metadata


@given(captures())
def test_joining_the_positions_of_a_capture_gives_it_back(capture: Capture) -> None:
    prompt = capture.select(select=["prompt[*]"])
    generated = capture.select(select=["generated[*]"])
    assert join([generated, prompt]) == capture


@given(captures(), st.data())
def test_selecting_keeps_just_the_rows_asked_for(capture: Capture, data: st.DataObject) -> None:
    ids = [request.id for request in capture.requests]
    wanted = data.draw(st.lists(st.sampled_from(ids), unique=True)) if ids else []
    where = (
        data.draw(st.lists(st.sampled_from(capture.sites), unique=True)) if capture.sites else []
    )
    picked = capture.select(requests=wanted, sites=where, select=["prompt[-1]", "prompt[0]"])
    lengths = {request.id: request.prompt_length for request in capture.requests}
    assert [request.id for request in picked.requests] == wanted
    assert set(picked.sites) == set(where)
    kept = {(row.request_id, row.site, row.position): row.values for row in picked}
    expected = {
        (row.request_id, row.site, row.position): row.values
        for row in capture
        if row.request_id in wanted
        and row.site in where
        and row.position in (0, lengths[row.request_id] - 1)
    }
    assert kept.keys() == expected.keys()
    for key, values in kept.items():
        assert torch.equal(values.view(torch.uint8), expected[key].view(torch.uint8))


@given(captures())
def test_selecting_everything_changes_nothing(capture: Capture) -> None:
    assert capture.select() == capture
    assert capture.select(select=["all"]) == capture
    assert len(capture.select(requests=[])) == len(capture.select(sites=[])) == 0


def test_looking_up_a_site_an_id_or_a_row_that_is_not_there_lists_what_is() -> None:
    capture = small()
    assert "resid_post.0" in capture
    assert POST in capture
    assert "resid_post.1" not in capture
    assert 5 not in capture
    with pytest.raises(KeyError, match=r"'resid_mid.0' .* has resid_pre.0, resid_post.0, final_n"):
        capture["resid_mid.0"]
    with pytest.raises(KeyError, match="has nothing"):
        Capture((), {})["logits"]
    with pytest.raises(KeyError, match=r"'c' .* has 'a', 'b'"):
        capture.request("c")
    with pytest.raises(KeyError, match=r"request 'b', site resid_post.0, position 1: 0 rows"):
        capture.row("b", "resid_post.0", 1)
    with pytest.raises(KeyError, match="'c'"):
        capture.select(requests=["c"])
    with pytest.raises(SiteError, match="unknown point"):
        capture.select(sites=["resid_psot.0"])
    with pytest.raises(SelectorError, match=r"request 'b' \(1 prompt and 0 generated"):
        capture.select(select=["prompt[1]"])


def test_a_row_that_is_there_twice_is_not_guessed_at() -> None:
    twice = Capture((A,), {POST: rows((0, 1), (0, 1))})
    with pytest.raises(KeyError, match="position 1: 2 rows"):
        twice.row("a", POST, 1)


def test_two_requests_of_one_id_are_refused() -> None:
    with pytest.raises(CaptureError, match="'a' stands for two requests"):
        Capture((A, B, A), {})


@pytest.mark.parametrize("index", [-1, 2])
def test_a_row_of_no_request_is_refused(index: int) -> None:
    with pytest.raises(CaptureError, match=r"site resid_post.0: .* outside the 2 requests"):
        Capture((A, B), {POST: rows((index, 0))})


def test_columns_and_values_must_fit_together() -> None:
    three, two = np.arange(3), np.arange(2)
    with pytest.raises(CaptureError, match="same shape"):
        Columns(three, two, three, three, three)
    table: IntArray = np.zeros((2, 2), np.int64)
    with pytest.raises(CaptureError, match="same shape"):
        Columns(table, table, table, table, table)
    with pytest.raises(CaptureError, match=r"\(2, 4\) but its columns have 1 rows"):
        SiteRows(columns((0, 0)), torch.zeros(2, 4))
    with pytest.raises(CaptureError, match=r"\[rows, width\]"):
        SiteRows(columns((0, 0)), torch.zeros(1))
    with pytest.raises(CaptureError, match=r"torch\.int32: rows are kept as float64"):
        SiteRows(columns((0, 0)), torch.zeros(1, 2, dtype=torch.int32))


def test_joining_the_same_row_twice_is_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"request 'b', site resid_post.0, position 0: two parts"
    ):
        join([small(), Capture((B,), {POST: rows((0, 0))})])


def test_joining_parts_that_disagree_is_refused() -> None:
    with pytest.raises(CaptureError, match="request 'a' has other token ids"):
        join([small(), Capture((replace(A, prompt_token_ids=(9,)),), {})])
    wide = SiteRows(columns((0, 0)), torch.zeros(1, 3))
    with pytest.raises(CaptureError, match=r"float32 x 2 and torch.float32 x 3"):
        join([small().select(requests=["a"]), Capture((B,), {POST: wide})])


def test_joining_nothing_gives_an_empty_capture() -> None:
    assert join([]) == Capture((), {})
    assert len(join([])) == 0


@given(captures())
def test_concatenated_columns_keep_every_part_in_order(capture: Capture) -> None:
    assume(capture.sites)
    parts = [capture[site].columns for site in capture.sites]
    whole = concatenate(parts)
    for name in COLUMN_NAMES:
        together = [number for part in parts for number in getattr(part, name).tolist()]
        assert getattr(whole, name).tolist() == together


@given(captures())
def test_rows_in_turns_are_the_same_rows_with_every_request_advancing_evenly(
    capture: Capture,
) -> None:
    plain, turns = list(capture), list(capture.in_turns())

    def key(row: Row) -> tuple[str, int, Site]:
        return row.request_id, row.position, row.site

    for request in capture.requests:  # each request's own order is kept
        assert [key(r) for r in turns if r.request_id == request.id] == [
            key(r) for r in plain if r.request_id == request.id
        ]
    done: dict[str, list[int]] = {request.id: [] for request in capture.requests}
    total = {name: len({r.position for r in plain if r.request_id == name}) for name in done}
    for row in turns:
        if row.position not in done[row.request_id]:
            done[row.request_id].append(row.position)
        turn = len(done[row.request_id])
        assert all(len(done[name]) >= min(turn - 1, total[name]) for name in done)
