"""The rows of one site that two captures share, side by side, and their numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tapcheck.capture import IntArray, SiteRows
from tapcheck.checks.comparison import Outliers, RowDifference, RowErrors, SiteSummary
from tapcheck.checks.ledger import RowBook
from tapcheck.checks.noise_floor import (
    SUSPECT_LIMIT,
    SiteFloor,
    allowances,
    row_floors,
    site_floor,
    suspects,
)
from tapcheck.checks.numerics import (
    TINY_NORM,
    BoolArray,
    FloatArray,
    RowMetrics,
    row_metrics,
)
from tapcheck.checks.tolerances import ToleranceError, default_rtol, dtype_name
from tapcheck.sites import Site


@dataclass(frozen=True, eq=False)
class Witnessed:
    """A further capture's rows at a site, with their keys in the book."""

    called: str
    rows: SiteRows
    keys: IntArray

    def places(self, site: Site, keys: IntArray, book: RowBook) -> IntArray:
        """Where its rows of these keys are; raises ToleranceError when it lacks one."""
        order = np.argsort(self.keys, kind="stable")
        found = np.searchsorted(self.keys, keys, sorter=order)
        places = order[found.clip(max=max(len(order) - 1, 0))] if len(order) else order
        lacking = self.keys[places] != keys if len(order) else np.ones(len(keys), bool)
        if lacking.any():
            request, position = book.owner(int(keys[lacking.argmax()]))
            raise ToleranceError(
                f"{self.called} lacks request {request.id!r}, site {site}, position {position}: "
                "capture it on the same tokens, at the same sites and positions"
            )
        return places


@dataclass(frozen=True, eq=False)
class Pairs:
    """The rows of one site that both captures have, by request and position.

    Pair i is row `left[i]` of `actual` and row `right[i]` of `expected`, with key `keys[i]` in
    the book; of a row that was delivered twice it is the first copy. With a reference, row
    `wide[i]` of it is what both are held against, and so is row `places[i]` of each of `narrow`.
    """

    site: Site
    actual: SiteRows
    expected: SiteRows
    book: RowBook
    keys: IntArray
    left: IntArray
    right: IntArray
    reference: SiteRows | None = None
    wide: IntArray | None = None
    narrow: Sequence[tuple[SiteRows, IntArray]] = ()

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

    def against(self, reference: Witnessed, repeats: Sequence[Witnessed]) -> Pairs:
        """The pairs with the reference's rows, and those of repeats of the expected run.

        Raises ToleranceError when a row is missing there, or a dtype isn't what it has to be.
        """
        mine = self.expected.values.dtype
        for each in (reference, *repeats):
            dtype = each.rows.values.dtype
            wider = torch.finfo(dtype).eps < torch.finfo(mine).eps
            if not wider if each is reference else dtype != mine:
                needed = "a wider dtype" if each is reference else "that dtype"
                raise ToleranceError(
                    f"site {self.site}: {each.called} is {dtype_name(dtype)} and the expected "
                    f"capture {dtype_name(mine)}: a noise floor needs it in {needed}"
                )
        return replace(
            self,
            reference=reference.rows,
            wide=reference.places(self.site, self.keys, self.book),
            narrow=[(each.rows, each.places(self.site, self.keys, self.book)) for each in repeats],
        )

    def judge(self, rtol: float | None) -> SiteSummary:
        """The site's numbers and which of its rows fail; none where the widths differ."""
        mine, theirs = self.actual.values, self.expected.values
        comparable = mine.shape[1] == theirs.shape[1] > 0
        metrics, errors, floor, limit = RowMetrics.concatenate([]), None, None, rtol
        if comparable:
            metrics = row_metrics(mine, theirs, actual_index=self.left, expected_index=self.right)
            if self.reference is not None:
                errors, floor = self._against_the_floor()
            else:
                # Not the coarser of the two: a capture that lost precision must not loosen its
                # own judge.
                limit = default_rtol(theirs.dtype) if rtol is None else rtol
                allowed = np.full(len(metrics), limit)
                errors = self._errors(metrics, allowed, np.where(_apart(metrics), limit, 0.0))
        failing = errors.failing if errors is not None else self.keys
        first = worst = None
        if errors is not None and len(errors):
            # argmax takes a NaN for the largest, which is what `worst` is to name.
            worst = self._difference(int(errors.ratio.argmax()), errors, metrics)
            first = self._difference(int(failing[0]), errors, metrics) if len(failing) else None
        return SiteSummary(
            site=self.site,
            actual_dtype=dtype_name(mine.dtype),
            expected_dtype=dtype_name(theirs.dtype),
            actual_width=mine.shape[1],
            expected_width=theirs.shape[1],
            rtol=limit,
            rows=len(metrics),
            failing=len(failing),
            errors=errors,
            floor=floor,
            first=first,
            worst=worst,
            outliers=self._outliers(errors),
            **_extremes(metrics),
        )

    def _against_the_floor(self) -> tuple[RowErrors, SiteFloor | None]:
        assert self.reference is not None
        truth, dtype = self.reference.values, self.expected.values.dtype
        candidate = row_metrics(
            self.actual.values, truth, actual_index=self.left, expected_index=self.wide
        )
        own, *others = (
            row_metrics(rows.values, truth, actual_index=index, expected_index=self.wide)
            for rows, index in ((self.expected, self.right), *self.narrow)
        )
        floor = row_floors([run.relative_error for run in (own, *others)], dtype)
        allowed = allowances(floor, dtype)
        error = candidate.relative_error
        misplaced = self._neighbours_rows(suspects(error, floor, allowed), error, floor)
        allowed[misplaced] = SUSPECT_LIMIT * floor[misplaced]
        apart, outlier_allowed = _apart(candidate), np.zeros(len(candidate))
        outlier_floor = row_floors([run.outlier_error[apart] for run in (own, *others)], dtype)
        outlier_allowed[apart] = allowances(outlier_floor, dtype)
        errors = self._errors(candidate, allowed, outlier_allowed, floor)
        return errors, site_floor(candidate, own, dtype)

    def _neighbours_rows(self, pairs: IntArray, error: FloatArray, floor: FloatArray) -> IntArray:
        """Those of the pairs whose actual row is that of the position before or after it.

        `error` is how far each row is from its own.
        """
        assert self.reference is not None
        assert self.wide is not None
        found = np.zeros(len(pairs), bool)
        for shift in (-1, 1):  # a key's neighbour is its position's neighbour
            place = np.searchsorted(self.keys, self.keys[pairs] + shift)
            there = np.flatnonzero(place < len(self.keys))
            there = there[self.keys[place[there]] == self.keys[pairs[there]] + shift]
            neighbour = place[there]
            errors = row_metrics(
                self.actual.values,
                self.reference.values,
                actual_index=self.left[pairs[there]],
                expected_index=self.wide[neighbour],
            ).relative_error
            nearer = np.minimum(SUSPECT_LIMIT * floor[neighbour], error[pairs[there]])
            found[there] |= errors <= nearer
        misplaced: IntArray = pairs[found]
        return misplaced

    def _errors(
        self,
        metrics: RowMetrics,
        allowed: FloatArray,
        outlier_allowed: FloatArray,
        floor: FloatArray | None = None,
    ) -> RowErrors:
        request, position = self.book.owners(self.keys)
        return RowErrors(
            request=request,
            position=position,
            relative_error=metrics.relative_error,
            cosine=metrics.cosine,
            norm_ratio=metrics.norm_ratio,
            allowed=allowed,
            outlier_error=metrics.outlier_error,
            outlier_allowed=outlier_allowed,
            outlier_feature=metrics.outlier_feature,
            floor=floor,
        )

    def _outliers(self, errors: RowErrors | None) -> Outliers | None:
        """What was judged apart, if any feature was."""
        apart = np.empty(0, np.int64) if errors is None else np.flatnonzero(_apart(errors))
        if errors is None or not len(apart):
            return None
        features, error = errors.outlier_feature[apart], errors.outlier_error[apart]
        rows = torch.from_numpy(self.right[apart])
        largest = self.expected.values[rows, torch.from_numpy(features)].double().abs().max()
        allowed = errors.outlier_allowed[apart]
        return Outliers(
            rows=len(apart),
            failing=int((~(error <= allowed)).sum()),
            features=tuple(np.unique(features).tolist()),
            largest=float(largest),
            worst_relative_error=float(error.max()),
            worst_ratio=float((error / allowed.clip(min=TINY_NORM)).max()),
        )

    def _difference(self, pair: int, errors: RowErrors, metrics: RowMetrics) -> RowDifference:
        """All that is known of one pair."""
        request, position = self.book.owner(int(self.keys[pair]))
        feature, outlier = int(metrics.max_abs_feature[pair]), int(errors.outlier_feature[pair])
        return RowDifference(
            request_id=request.id,
            site=self.site,
            position=position,
            relative_error=float(errors.relative_error[pair]),
            allowed=float(errors.allowed[pair]),
            cosine=float(errors.cosine[pair]),
            norm_ratio=float(errors.norm_ratio[pair]),
            max_abs_diff=float(metrics.max_abs_diff[pair]),
            feature=feature,
            actual_value=float(self.actual.values[int(self.left[pair]), feature]),
            expected_value=float(self.expected.values[int(self.right[pair]), feature]),
            nan_count=int(metrics.nan_count[pair]),
            inf_count=int(metrics.inf_count[pair]),
            outlier_feature=None if outlier < 0 else outlier,
            outlier_error=float(errors.outlier_error[pair]),
            outlier_allowed=float(errors.outlier_allowed[pair]),
        )


def _apart(rows: RowMetrics | RowErrors) -> BoolArray:
    """Which rows have features that were judged apart, [rows]."""
    return rows.outlier_feature >= 0


def widened(values: torch.Tensor) -> torch.Tensor:
    """The values in float32, or in float64 if they are already."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _extremes(metrics: RowMetrics) -> dict[str, Any]:
    """The fields of a SiteSummary that leave out rows that aren't finite, and count those."""
    finite = np.flatnonzero(~np.isnan(metrics.relative_error))
    largest = int(finite[metrics.max_abs_diff[finite].argmax()]) if len(finite) else None
    ratios = metrics.norm_ratio[finite]
    return {
        "min_cosine": _smallest(metrics.cosine[finite]),
        "min_norm_ratio": _smallest(ratios),
        "max_norm_ratio": -_smallest(-ratios),
        "max_abs_diff": math.nan if largest is None else float(metrics.max_abs_diff[largest]),
        "max_abs_feature": None if largest is None else int(metrics.max_abs_feature[largest]),
        "nan_count": int(metrics.nan_count.sum()),
        "inf_count": int(metrics.inf_count.sum()),
    }


def _smallest(values: FloatArray) -> float:
    return float(values.min()) if len(values) else math.nan
