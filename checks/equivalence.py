"""Whether two captures hold the same activations: token ids, then the ledger, then numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tapcheck.capture import Capture, IntArray
from tapcheck.checks import comparison_listeners
from tapcheck.checks.comparison import Comparison, SiteSummary
from tapcheck.checks.diagnosis import diagnose
from tapcheck.checks.ledger import Ledger, LedgerEntry, RowBook, cached_positions
from tapcheck.checks.message import explain
from tapcheck.checks.pairing import Pairs, Witnessed
from tapcheck.checks.tokens import compare_tokens
from tapcheck.checks.tolerances import ToleranceError, check_rtol
from tapcheck.sites import Site

__all__ = ["Comparison", "assert_captures_match", "compare_captures"]


def assert_captures_match(
    actual: Capture,
    expected: Capture,
    *,
    rtol: float | None = None,
    reference: Capture | None = None,
    repeats: Sequence[Capture] = (),
) -> Comparison:
    """Raise AssertionError, with everything that differs, unless `actual` matches `expected`.

    `rtol` is the largest relative error a row may have; None takes the fixed tolerance of each
    site's dtype. With a `reference`, the same tokens in a wider dtype, each row may be as far from
    it as the expected capture's own error there allows, or that of one of its `repeats`: see
    `tapcheck.checks.noise_floor`. Returns the comparison. Raises ToleranceError for an rtol outside
    [0, 1), or a reference or repeats that can't serve.
    """
    __tracebackhide__ = True
    comparison = compare_captures(actual, expected, rtol=rtol, reference=reference, repeats=repeats)
    for listener in comparison_listeners:
        listener(comparison)
    if not comparison.passed:
        raise AssertionError(explain(comparison))
    return comparison


def compare_captures(
    actual: Capture,
    expected: Capture,
    *,
    rtol: float | None = None,
    reference: Capture | None = None,
    repeats: Sequence[Capture] = (),
) -> Comparison:
    """Compare every (request, site, position) of two captures, one site in memory at a time.

    Tokens, rows and values are all judged, whatever was found before. Positions that `actual`
    lists as read from a prefix cache are not due. `rtol`, `reference` and `repeats` as in
    `assert_captures_match`. Raises ToleranceError for an rtol outside [0, 1), for a reference that
    has other tokens, lacks a row or is in no wider dtype, for both of them, for repeats without a
    reference, or in another dtype than `expected`, or for a dtype without a fixed tolerance when
    there is neither.
    """
    if rtol is not None:
        check_rtol(rtol)
    book = RowBook.open(expected.requests, actual.requests, cached_positions(actual))
    own_book = RowBook.open(expected.requests, expected.requests)
    witnesses = _witnesses(expected, reference, repeats, rtol)
    entries: list[LedgerEntry] = []
    summaries: list[SiteSummary] = []
    due = delivered = 0
    for site in sorted(set(actual.rows) | set(expected.rows)):
        mine, theirs = actual.rows.get(site), expected.rows.get(site)
        expected_keys = np.empty(0, np.int64)
        if theirs is not None:
            expected_keys = own_book.delivered_keys(theirs.columns)
            entries += _duplicated_in_expected(site, expected_keys, own_book)
        distinct = book.computed(np.unique(expected_keys))
        due += len(distinct)
        delivered += 0 if mine is None else len(mine)
        entries += book.entries(site, distinct, None if mine is None else mine.columns)
        if mine is None or theirs is None:
            continue
        pairs = Pairs.match(site, mine, theirs, book, expected_keys)
        if witnesses:
            wide, *narrow = (each.rows_at(site) for each in witnesses)
            pairs = pairs.against(wide, narrow)
        summaries.append(pairs.judge(rtol))
    comparison = Comparison(
        token_problems=tuple(compare_tokens(actual.requests, expected.requests)),
        ledger=Ledger(due, delivered, tuple(entries), book.cached),
        sites=tuple(summaries),
        request_ids=tuple(request.id for request in book.requests),
    )
    diagnoses = diagnose(actual, expected, comparison, reference=reference)
    return replace(comparison, diagnoses=diagnoses)


@dataclass(frozen=True, eq=False)
class _Witness:
    """A further capture of the expected tokens, by what it is called in errors."""

    called: str
    capture: Capture
    book: RowBook

    def rows_at(self, site: Site) -> Witnessed:
        """Its rows at a site; raises ToleranceError when it has none."""
        if site not in self.capture.rows:
            raise ToleranceError(
                f"{self.called} lacks site {site}: capture it at every site that is compared"
            )
        rows = self.capture.rows[site]
        return Witnessed(self.called, rows, self.book.delivered_keys(rows.columns))


def _witnesses(
    expected: Capture, reference: Capture | None, repeats: Sequence[Capture], rtol: float | None
) -> list[_Witness]:
    """The reference and the repeats, in this order; raises ToleranceError when they can't serve."""
    if reference is None:
        if repeats:
            raise ToleranceError("repeats were given without the reference that they are held to")
        return []
    if rtol is not None:
        raise ToleranceError(
            f"rtol={rtol!r} and a reference were given: the reference sets what each row may be "
            "off, so give one of the two"
        )
    named = {"the reference": reference}
    named |= {f"repeat {number}": repeat for number, repeat in enumerate(repeats, 1)}
    for called, capture in named.items():
        problems = list(compare_tokens(capture.requests, expected.requests))
        if problems:
            raise ToleranceError(
                f"{called} is of other tokens than the expected capture: request "
                f"{problems[0].request_id!r}: {problems[0].reason}. Capture it on the same requests"
            )
    return [
        _Witness(called, capture, RowBook.open(expected.requests, capture.requests))
        for called, capture in named.items()
    ]


def _duplicated_in_expected(site: Site, keys: IntArray, book: RowBook) -> list[LedgerEntry]:
    distinct, counts = np.unique(keys, return_counts=True)
    entries = []
    for key, count in zip(distinct[counts > 1], counts[counts > 1], strict=True):
        request, position = book.owner(key)
        reason = f"the expected capture itself holds the row {count} times"
        entries.append(LedgerEntry(request.id, site, position, "duplicated", reason))
    return entries
