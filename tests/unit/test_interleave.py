"""Requests that take turns, row by row."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from schedules import SITES, Schedule, schedules
from strategies import columns_at
from test_rowstore import ALL, drained

from tapcheck.capture import COLUMN_NAMES, Columns
from tapcheck.interleave import by_request, round_robin
from tapcheck.rowstore import RowStore

any_columns = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), unique=True).flatmap(
    columns_at
)


def content(columns: Columns) -> list[list[int]]:
    return [getattr(columns, name).tolist() for name in COLUMN_NAMES]


@given(schedules())
def test_drained_rows_interleaved_and_put_back_are_as_they_were(schedule: Schedule) -> None:
    for batch in drained(RowStore(SITES, ALL), schedule):
        mixed = batch.columns.take(round_robin(batch.columns))
        assert content(mixed.take(by_request(mixed))) == content(batch.columns)


@given(any_columns)
def test_every_row_has_its_turn_once_and_each_request_keeps_its_order(columns: Columns) -> None:
    order = round_robin(columns)
    assert sorted(order.tolist()) == list(range(len(columns)))
    for request in set(columns.request.tolist()):
        mine = order[columns.request[order] == request]
        assert mine.tolist() == sorted(mine.tolist())


@given(any_columns)
def test_no_request_waits_for_more_than_one_row_of_each_other(columns: Columns) -> None:
    turns = columns.request[round_robin(columns)].tolist()
    for request in set(turns):
        waited: list[int] = []
        for turn in turns[: len(turns) - turns[::-1].index(request)]:
            if turn == request:
                waited = []
            else:
                assert turn not in waited
                waited.append(turn)


@given(any_columns)
def test_rounds_come_in_turn_and_requests_by_index_within_one(columns: Columns) -> None:
    turns = columns.request[round_robin(columns)].tolist()
    rounds = [turns[:at].count(turn) for at, turn in enumerate(turns)]
    pairs = list(zip(rounds, turns, strict=True))
    assert pairs == sorted(pairs)


@given(any_columns)
def test_by_request_is_the_order_of_request_and_position(columns: Columns) -> None:
    ordered = columns.take(by_request(columns))
    pairs = list(zip(ordered.request.tolist(), ordered.position.tolist(), strict=True))
    assert pairs == sorted(zip(columns.request.tolist(), columns.position.tolist(), strict=True))


def test_requests_of_different_lengths_take_turns_until_each_is_done() -> None:
    request = np.array([0, 0, 0, 2, 5, 5])
    columns = Columns(request, *[np.arange(6)] * 4)
    assert request[round_robin(columns)].tolist() == [0, 2, 5, 0, 5, 0]
