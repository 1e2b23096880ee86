"""The rows of one site that two captures share, side by side, and their numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from tapcheck.capture import IntArray, SiteRows
from tapcheck.checks.comparison import RowDifference, SiteSummary
from tapcheck.checks.ledger import RowBook
from tapcheck.checks.numerics import FloatArray, RowMetrics, row_metrics
from tapcheck.checks.tolerances import default_rtol, dtype_name
from tapcheck.sites import Site


@dataclass(frozen=True, eq=False)
class FailingRows:
    """Some of the rows that fail at one site, the first of them included.

    request_ids, positions and relative_error have n entries; values are the actual capture's,
    widened, of shape [n, width].
    """

    site: Site
    request_ids: tuple[str, ...]
    positions: IntArray
    values: torch.Tensor
    relative_error: FloatArray
    rtol: float


@dataclass(frozen=True, eq=False)
class Pairs:
    """The rows of one site that both captures have, by request and position.

    Pair i is row `left[i]` of `actual` and row `right[i]` of `expected`, with key `keys[i]` in
    the book; of a row that was delivered twice it is the first copy.
    """

    site: Site
    actual: SiteRows
    expected: SiteRows
    book: RowBook
    keys: IntArray
    left: IntArray
    right: IntArray

    @classmethod
    def match(
        cls,
        site: Site,
        actual: SiteRows,
        expected: SiteRows,
        book: RowBook,
        expected_keys: IntArray,
    ) -> Pairs:
        """Pair the rows of `actual` with those of `expected`, whose keys in the book are given."""
        actual_keys = book.delivered_keys(actual.columns)
        keys, left, right = np.intersect1d(actual_keys, expected_keys, return_indices=True)
        return cls(site, actual, expected, book, keys, left, right)

    def judge(self, rtol: float | None) -> tuple[SiteSummary, RowMetrics]:
        """The site's summary, and the metrics of its pairs: none where the widths differ."""
        mine, theirs = self.actual.values, self.expected.values
        # Not the coarser of the two: a capture that lost precision must not loosen its own judge.
        limit = default_rtol(theirs.dtype) if rtol is None else rtol
        comparable = mine.shape[1] == theirs.shape[1] > 0
        metrics = RowMetrics.concatenate([])
        if comparable:
            metrics = row_metrics(mine, theirs, actual_index=self.left, expected_index=self.right)
        error = metrics.relative_error
        failing = _failing(metrics, limit)
        finite = np.flatnonzero(~np.isnan(error))
        # argmax takes a NaN for the largest, which is what `worst` is to name.
        worst = self.difference(int(error.argmax()), metrics) if len(error) else None
        largest = int(finite[metrics.max_abs_diff[finite].argmax()]) if len(finite) else None
        ratios = metrics.norm_ratio[finite]
        summary = SiteSummary(
            site=self.site,
            actual_dtype=dtype_name(mine.dtype),
            expected_dtype=dtype_name(theirs.dtype),
            actual_width=mine.shape[1],
            expected_width=theirs.shape[1],
            rtol=limit,
            rows=len(metrics),
            failing=len(failing) if comparable else len(self.keys),
            first=self.difference(int(failing[0]), metrics) if len(failing) else None,
            worst=worst,
            min_cosine=_smallest(metrics.cosine[finite]),
            min_norm_ratio=_smallest(ratios),
            max_norm_ratio=-_smallest(-ratios),
            max_abs_diff=math.nan if largest is None else float(metrics.max_abs_diff[largest]),
            max_abs_feature=None if largest is None else int(metrics.max_abs_feature[largest]),
            nan_count=int(metrics.nan_count.sum()),
            inf_count=int(metrics.inf_count.sum()),
        )
        return summary, metrics

    def difference(self, pair: int, metrics: RowMetrics) -> RowDifference:
        """All that is known of one pair."""
        request, position = self.book.owner(int(self.keys[pair]))
        feature = int(metrics.max_abs_feature[pair])
        return RowDifference(
            request_id=request.id,
            site=self.site,
            position=position,
            relative_error=float(metrics.relative_error[pair]),
            cosine=float(metrics.cosine[pair]),
            norm_ratio=float(metrics.norm_ratio[pair]),
            max_abs_diff=float(metrics.max_abs_diff[pair]),
            feature=feature,
            actual_value=float(self.actual.values[int(self.left[pair]), feature]),
            expected_value=float(self.expected.values[int(self.right[pair]), feature]),
            nan_count=int(metrics.nan_count[pair]),
            inf_count=int(metrics.inf_count[pair]),
        )

    def sample_failing(self, metrics: RowMetrics, rtol: float, count: int) -> FailingRows | None:
        """At most `count` of the failing rows, evenly spread; None where the widths differ."""
        failing = _failing(metrics, rtol)
        if not len(failing):
            return None
        chosen = failing[np.linspace(0, len(failing) - 1, min(count, len(failing))).astype(int)]
        owners = [self.book.owner(int(key)) for key in self.keys[chosen]]
        return FailingRows(
            site=self.site,
            request_ids=tuple(request.id for request, _ in owners),
            positions=np.array([position for _, position in owners], np.int64),
            values=widened(self.actual.values[torch.from_numpy(self.left[chosen])]),
            relative_error=metrics.relative_error[chosen],
            rtol=rtol,
        )


def widened(values: torch.Tensor) -> torch.Tensor:
    """The values in float32, or in float64 if they are already."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _failing(metrics: RowMetrics, rtol: float) -> IntArray:
    # Not `error > rtol`: a NaN must fail.
    return np.flatnonzero(~(metrics.relative_error <= rtol))


def _smallest(values: FloatArray) -> float:
    return float(values.min()) if len(values) else math.nan
