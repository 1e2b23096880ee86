"""What comparing two captures found: plain data, from which every verdict is derived."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from tapcheck.checks.ledger import Ledger
from tapcheck.checks.noise_floor import SiteFloor
from tapcheck.checks.numerics import FloatArray, IntArray
from tapcheck.sites import Site

if TYPE_CHECKING:
    from tapcheck.checks.diagnosis import Diagnosis

TokenKind = Literal["missing request", "unexpected request", "prompt length", "token ids"]


@dataclass(frozen=True)
class TokenProblem:
    """A request that only one capture has, or whose token ids differ; `position` is the first."""

    request_id: str
    kind: TokenKind
    position: int | None
    reason: str


@dataclass(frozen=True, eq=False)
class RowErrors:
    """The compared rows of one site, ordered by request and position; arrays of shape [rows].

    request: index into `Comparison.request_ids`. relative_error, cosine, norm_ratio: as in
    `tapcheck.checks.numerics`, against the expected row or, with a reference, against its row.
    allowed: the largest relative error that passes. floor: see `tapcheck.checks.noise_floor`;
    None under a fixed tolerance. outlier_error, outlier_allowed, outlier_feature: the same of the
    features that dwarf their row, which the others leave out; 0, 0 and -1 where there are none.
    """

    request: IntArray
    position: IntArray
    relative_error: FloatArray
    cosine: FloatArray
    norm_ratio: FloatArray
    allowed: FloatArray
    outlier_error: FloatArray
    outlier_allowed: FloatArray
    outlier_feature: IntArray
    floor: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.position)

    @property
    def ratio(self) -> FloatArray:
        """Each relative error over what is allowed, shape [rows]; above 1, or NaN, fails.

        That of the outlier features where it is larger.
        """
        return np.maximum(
            _over(self.relative_error, self.allowed),
            _over(self.outlier_error, self.outlier_allowed),
        )

    @property
    def largest_error(self) -> FloatArray:
        """The relative error of the outlier features or the others, the larger, shape [rows]."""
        return np.maximum(self.relative_error, self.outlier_error)

    @property
    def failing(self) -> IntArray:
        """The indices of the rows beyond what they may be off; one that isn't finite is."""
        passes = self.relative_error <= self.allowed
        return np.flatnonzero(~(passes & (self.outlier_error <= self.outlier_allowed)))


def _over(error: FloatArray, allowed: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error == 0, 0.0, error / allowed)


@dataclass(frozen=True)
class RowDifference:
    """One pair of rows, in the metrics of `tapcheck.checks.numerics`, and what was allowed.

    With a reference the relative error, cosine and norm ratio are against its row; the largest
    difference is against the expected row in either case. `feature` is where that is (or the first
    value that isn't finite), `actual_value` and `expected_value` are the two values there. Where
    features dwarf the row, `outlier_feature` is the largest of them, and they have a relative error
    of their own; else it is None.
    """

    request_id: str
    site: Site
    position: int
    relative_error: float
    allowed: float
    cosine: float
    norm_ratio: float
    max_abs_diff: float
    feature: int
    actual_value: float
    expected_value: float
    nan_count: int
    inf_count: int
    outlier_feature: int | None
    outlier_error: float
    outlier_allowed: float


@dataclass(frozen=True)
class Outliers:
    """The features of a site that dwarf their rows, judged apart from the others.

    `rows` have some, `failing` of them more than these features may be off. `features` are the
    largest in any row, ascending; `largest` is the largest magnitude among them. The worst relative
    error, and over what is allowed.
    """

    rows: int
    failing: int
    features: tuple[int, ...]
    largest: float
    worst_relative_error: float
    worst_ratio: float


@dataclass(frozen=True)
class SiteSummary:
    """The numbers of one site, over the rows that both captures have.

    `rows` were compared and `failing` of them are further off than they may be: `rtol` or, where
    that is None, what the noise floor allows each. `floor` is the site as a whole against its
    noise floor, None under a fixed tolerance or where a row isn't finite. `first` is the first
    failing row in order of request and position, `worst` the row with the largest relative error,
    by what it is allowed (one with NaN or Inf before any other). Cosine, norm ratios and the
    largest absolute difference, with its feature, leave out rows that aren't finite; they are NaN,
    and None, where no row is left. `outliers` are the features that were judged apart, None where
    no feature dwarfs its row. Where `actual_width` and `expected_width` differ nothing is
    compared: every row fails, `rows` is 0, `first`, `worst` and `errors` are None.
    """

    site: Site
    actual_dtype: str
    expected_dtype: str
    actual_width: int
    expected_width: int
    rtol: float | None
    rows: int
    failing: int
    errors: RowErrors | None = field(compare=False)
    floor: SiteFloor | None
    first: RowDifference | None
    worst: RowDifference | None
    min_cosine: float
    min_norm_ratio: float
    max_norm_ratio: float
    max_abs_diff: float
    max_abs_feature: int | None
    nan_count: int
    inf_count: int
    outliers: Outliers | None

    @property
    def passed(self) -> bool:
        """Whether every row is within what it may be off, and the site as a whole too."""
        return not self.failing and (self.floor is None or self.floor.passed)

    @property
    def worst_relative_error(self) -> float:
        """The largest relative error of any row; NaN when there is none, or a row isn't finite."""
        errors = self.errors
        return float(errors.largest_error.max()) if errors and len(errors) else math.nan

    @property
    def worst_ratio(self) -> float:
        """The largest relative error of any row over what it is allowed; NaN as above."""
        return float(self.errors.ratio.max()) if self.errors and len(self.errors) else math.nan

    @property
    def excess(self) -> float:
        """The largest of a row's error, and the site's two medians, over what is allowed."""
        if self.floor is None:
            return self.worst_ratio
        of_medians = self.floor.median_ratio / self.floor.median_limit
        of_bias = abs(self.floor.bias) / self.floor.bias_limit
        return max(self.worst_ratio, of_medians, of_bias)


@dataclass(frozen=True)
class Comparison:
    """Two captures, compared: tokens, then the ledger, then numbers.

    The ledger holds the expected capture's rows against the actual capture's. `sites` are in
    execution order. `request_ids` are what the rows' request numbers stand for. `diagnoses` are the
    hypotheses that explain what differs, the likeliest first; empty where nothing known does.
    """

    token_problems: tuple[TokenProblem, ...]
    ledger: Ledger
    sites: tuple[SiteSummary, ...]
    request_ids: tuple[str, ...]
    diagnoses: tuple[Diagnosis, ...] = ()

    @property
    def passed(self) -> bool:
        """Same tokens, a complete ledger, and every row due compared and within its tolerance.

        No rows, or none at one of the sites, never pass.
        """
        return (
            not self.token_problems
            and self.ledger.complete
            and self.rows_compared == self.rows_due
            and not self.empty_sites
            and not self.failing_sites
        )

    @property
    def rows_due(self) -> int:
        """Rows of the expected capture."""
        return self.ledger.due

    @property
    def rows_compared(self) -> int:
        """Rows whose values were compared."""
        return sum(site.rows for site in self.sites)

    @property
    def empty_sites(self) -> tuple[Site, ...]:
        """The sites at which neither capture has a row: nothing was compared there."""
        return tuple(site.site for site in self.sites if not site.rows and not site.failing)

    @property
    def failing_sites(self) -> tuple[SiteSummary, ...]:
        """The sites with a row, or as a whole, beyond tolerance, in execution order."""
        return tuple(site for site in self.sites if not site.passed)

    @property
    def first_divergence(self) -> RowDifference | None:
        """The first failing row: of the first site in execution order, by request and position.

        The worst row of a site that fails as a whole only. None also when that site's rows have
        different widths.
        """
        if not self.failing_sites:
            return None
        return self.failing_sites[0].first or self.failing_sites[0].worst

    @property
    def worst_relative_error(self) -> float:
        """The largest relative error of any row; NaN for NaN or Inf, or when none was compared."""
        errors = [site.worst_relative_error for site in self.sites if site.rows or site.failing]
        return max(errors) if errors and not any(map(math.isnan, errors)) else math.nan

    @property
    def worst_ratio(self) -> float:
        """The largest error of any row over what it is allowed; NaN as above. Above 1 fails."""
        ratios = [site.worst_ratio for site in self.sites if site.rows or site.failing]
        return max(ratios) if ratios and not any(map(math.isnan, ratios)) else math.nan

    @property
    def excess(self) -> float:
        """The largest number of any site over its limit; NaN as above. Above 1 fails."""
        found = [site.excess for site in self.sites if site.rows or site.failing]
        return max(found) if found and not any(map(math.isnan, found)) else math.nan

    @property
    def smallest_passing_rtol(self) -> float | None:
        """The smallest rtol with which the comparison passes; None when none below 1 does.

        With a reference, the fixed tolerance of errors against it.
        """
        worst = self.worst_relative_error
        possible = not self.token_problems and self.ledger.complete and not self.empty_sites
        return worst if possible and worst < 1 else None
