"""Whether two captures hold the same activations: token ids, then the ledger, then numbers."""

from __future__ import annotations

import numpy as np

from tapcheck.capture import Capture, IntArray
from tapcheck.checks import comparison_listeners, hints
from tapcheck.checks.comparison import Comparison, SiteSummary
from tapcheck.checks.ledger import Ledger, LedgerEntry, RowBook, cached_positions
from tapcheck.checks.message import explain
from tapcheck.checks.pairing import FailingRows, Pairs
from tapcheck.checks.tokens import compare_tokens
from tapcheck.checks.tolerances import check_rtol
from tapcheck.sites import Site

__all__ = ["Comparison", "assert_captures_match", "compare_captures"]


def assert_captures_match(
    actual: Capture, expected: Capture, *, rtol: float | None = None
) -> Comparison:
    """Raise AssertionError, with everything that differs, unless `actual` matches `expected`.

    `rtol` is the largest relative error a row may have; None takes the fixed tolerance of each
    site's dtype. Returns the comparison. Raises ToleranceError for an rtol outside [0, 1).
    """
    __tracebackhide__ = True
    comparison = compare_captures(actual, expected, rtol=rtol)
    for listener in comparison_listeners:
        listener(comparison)
    if not comparison.passed:
        raise AssertionError(explain(comparison))
    return comparison


def compare_captures(
    actual: Capture, expected: Capture, *, rtol: float | None = None
) -> Comparison:
    """Compare every (request, site, position) of two captures, one site in memory at a time.

    Tokens, rows and values are all judged, whatever was found before. Positions that `actual`
    lists as read from a prefix cache are not due. `rtol` as in `assert_captures_match`. Raises
    ToleranceError for an rtol outside [0, 1), or for a dtype without a fixed tolerance when rtol
    is None.
    """
    if rtol is not None:
        check_rtol(rtol)
    book = RowBook.open(expected.requests, actual.requests, cached_positions(actual))
    reference = RowBook.open(expected.requests, expected.requests)
    entries: list[LedgerEntry] = []
    summaries: list[SiteSummary] = []
    due = delivered = 0
    failing: FailingRows | None = None
    for site in sorted(set(actual.rows) | set(expected.rows)):
        mine, theirs = actual.rows.get(site), expected.rows.get(site)
        expected_keys = np.empty(0, np.int64)
        if theirs is not None:
            expected_keys = reference.delivered_keys(theirs.columns)
            entries += _duplicated_in_expected(site, expected_keys, reference)
        distinct = book.computed(np.unique(expected_keys))
        due += len(distinct)
        delivered += 0 if mine is None else len(mine)
        entries += book.entries(site, distinct, None if mine is None else mine.columns)
        if mine is None or theirs is None:
            continue
        pairs = Pairs.match(site, mine, theirs, book, expected_keys)
        summary, metrics = pairs.judge(rtol)
        summaries.append(summary)
        if failing is None and summary.failing:
            failing = pairs.sample_failing(metrics, summary.rtol, hints.SAMPLE)
    explanation = hints.explain(failing, expected) if failing else None
    return Comparison(
        token_problems=tuple(compare_tokens(actual.requests, expected.requests)),
        ledger=Ledger(due, delivered, tuple(entries), book.cached),
        sites=tuple(summaries),
        explanation=explanation,
    )


def _duplicated_in_expected(site: Site, keys: IntArray, book: RowBook) -> list[LedgerEntry]:
    distinct, counts = np.unique(keys, return_counts=True)
    entries = []
    for key, count in zip(distinct[counts > 1], counts[counts > 1], strict=True):
        request, position = book.owner(key)
        reason = f"the expected capture itself holds the row {count} times"
        entries.append(LedgerEntry(request.id, site, position, "duplicated", reason))
    return entries
