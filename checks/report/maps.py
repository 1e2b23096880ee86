"""The errors of a comparison as maps, sites by token positions, reduced to a bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapcheck.capture import Capture, IntArray
from tapcheck.checks.comparison import Comparison, SiteSummary
from tapcheck.checks.numerics import FloatArray
from tapcheck.sites import Site

MOST_COLUMNS = 360
MOST_REQUESTS = 40
# log10(error / allowed) is kept within these: an error of zero has no logarithm.
LARGEST = 6.0

# A cell's state as one letter, from the least to the most telling: of the rows that share a cell,
# the most telling decides.
NOT_DUE, PASSES, MISSING, FAILS, NO_NUMBER = range(5)
STATES = " .MFX"


@dataclass(frozen=True, eq=False)
class _SiteRows:
    """The rows of one site, each array of shape [rows]: request number, position, state, error."""

    site: Site
    request: IntArray
    position: IntArray
    state: IntArray
    log_ratio: FloatArray


@dataclass(frozen=True, eq=False)
class _Axis:
    """The columns of every map: the requests shown, and where each one's tokens go.

    `tokens` holds the (request, position) keys, sorted, `column` the column of each; -1 where the
    request is not shown. `width` is the number of tokens that share a column, at most.
    """

    tokens: IntArray
    column: IntArray
    shown: IntArray
    width: int


_STRIDE = 1 << 40


def error_maps(comparison: Comparison, expected: Capture) -> dict[str, Any]:
    """Every site's errors by token: see `maps` in report.schema.json.

    A column is one token of one request or, where there are more than MOST_COLUMNS, several
    neighbouring tokens of one request, of which the worst shows. Of more than MOST_REQUESTS
    requests the worst are shown.
    """
    requests = _request_ids(comparison)
    parts = list(_site_rows(comparison, expected, requests))
    axis = _axis(parts, len(requests))
    return {
        "tokens_per_column": axis.width,
        "requests_in_all": len(requests),
        "requests": [_request(requests[number], expected) for number in axis.shown.tolist()],
        "columns": list(_columns(axis)),
        "sites": [_row_of_cells(part, axis) for part in parts],
    }


def _request_ids(comparison: Comparison) -> list[str]:
    """All request ids; those that only the ledger knows come last."""
    missing = (entry.request_id for entry in comparison.ledger.entries)
    return list(dict.fromkeys([*comparison.request_ids, *missing]))


def _site_rows(
    comparison: Comparison, expected: Capture, requests: Sequence[str]
) -> Iterator[_SiteRows]:
    number = {name: at for at, name in enumerate(requests)}
    missing: dict[Site, list[tuple[int, int]]] = {}
    for entry in comparison.ledger.of_kind("missing"):
        missing.setdefault(entry.site, []).append((number[entry.request_id], entry.position))
    summaries = {summary.site: summary for summary in comparison.sites}
    for site in sorted({*summaries, *missing}):
        request, position, state, ratio = _compared(summaries.get(site), expected, number)
        lost = np.array(missing.get(site, []), np.int64).reshape(-1, 2)
        yield _SiteRows(
            site,
            np.concatenate([request, lost[:, 0]]),
            np.concatenate([position, lost[:, 1]]),
            np.concatenate([state, np.full(len(lost), MISSING)]),
            np.concatenate([ratio, np.full(len(lost), -np.inf)]),
        )


def _compared(
    summary: SiteSummary | None, expected: Capture, number: dict[str, int]
) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
    """Request numbers, positions, states and errors of the rows that both captures have."""
    if summary is None:
        none = np.empty(0, np.int64)
        return none, none, none, np.empty(0)
    errors = summary.errors
    if errors is None:  # of different widths: the rows are known, but no error is
        columns = expected.rows[summary.site].columns
        numbers = np.array([number[request.id] for request in expected.requests], np.int64)
        state = np.full(len(columns), NO_NUMBER)
        return numbers[columns.request], columns.position, state, np.full(len(columns), -np.inf)
    state = np.full(len(errors), PASSES)
    state[errors.failing] = FAILS
    state[~np.isfinite(errors.cosine)] = NO_NUMBER
    with np.errstate(divide="ignore"):
        ratio = np.nan_to_num(np.log10(errors.ratio), nan=-np.inf, posinf=LARGEST, neginf=-LARGEST)
    return errors.request, errors.position, state, np.clip(ratio, -LARGEST, LARGEST)


def _axis(parts: Sequence[_SiteRows], requests: int) -> _Axis:
    worst = np.full(requests, -np.inf)
    keys = []
    for part in parts:
        keys.append(part.request * _STRIDE + part.position + _STRIDE // 2)
        # Whatever is no pass comes before every pass.
        badness = part.log_ratio + np.where(part.state > PASSES, 3 * LARGEST, 0.0)
        badness[part.state == MISSING] = 3 * LARGEST
        np.maximum.at(worst, part.request, badness)
    tokens = np.unique(np.concatenate([*keys, np.empty(0, np.int64)]))
    owner = tokens // _STRIDE
    present = np.unique(owner)
    shown = np.sort(present[np.argsort(-worst[present], kind="stable")][:MOST_REQUESTS])
    counts = {int(number): int((owner == number).sum()) for number in shown}
    width = max(1, -(-sum(counts.values()) // MOST_COLUMNS))
    column = np.full(len(tokens), -1, np.int64)
    start = 0
    for number, count in counts.items():
        column[owner == number] = start + np.arange(count) // width
        start += -(-count // width)
    return _Axis(tokens, column, shown, width)


def _columns(axis: _Axis) -> Iterator[dict[str, int]]:
    """What each column holds: the place of its request among those shown, and its positions."""
    place = {int(number): at for at, number in enumerate(axis.shown)}
    position = axis.tokens % _STRIDE - _STRIDE // 2
    for column in range(int(axis.column.max(initial=-1)) + 1):
        mine = np.flatnonzero(axis.column == column)
        first, last = int(mine[0]), int(mine[-1])
        yield {
            "request": place[int(axis.tokens[first] // _STRIDE)],
            "first": int(position[first]),
            "last": int(position[last]),
        }


def _row_of_cells(part: _SiteRows, axis: _Axis) -> dict[str, Any]:
    key = part.request * _STRIDE + part.position + _STRIDE // 2
    column = axis.column[np.searchsorted(axis.tokens, key)]
    kept = column >= 0
    columns = int(axis.column.max(initial=-1)) + 1
    state = np.full(columns, NOT_DUE)
    np.maximum.at(state, column[kept], part.state[kept])
    worst = np.full(columns, -np.inf)
    np.maximum.at(worst, column[kept], part.log_ratio[kept])
    known = (state == PASSES) | (state == FAILS)
    return {
        "site": str(part.site),
        "states": "".join(STATES[each] for each in state),
        "log10_ratio": [
            round(float(value), 2) if there else None
            for value, there in zip(worst, known, strict=True)
        ],
    }


def _request(name: str, expected: Capture) -> dict[str, Any]:
    mine = next((request for request in expected.requests if request.id == name), None)
    return {
        "id": name,
        "prompt_length": mine.prompt_length if mine else None,
        "length": len(mine.token_ids) if mine else None,
    }
