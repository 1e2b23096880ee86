"""What comparing two captures found: plain data, from which every verdict is derived."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tapcheck.checks.ledger import Ledger
from tapcheck.sites import Site

TokenKind = Literal["missing request", "unexpected request", "prompt length", "token ids"]


@dataclass(frozen=True)
class TokenProblem:
    """A request that only one capture has, or whose token ids differ; `position` is the first."""

    request_id: str
    kind: TokenKind
    position: int | None
    reason: str


@dataclass(frozen=True)
class RowDifference:
    """One pair of rows, in the metrics of `tapcheck.checks.numerics`.

    `feature` is where the largest absolute difference is (or the first value that isn't finite),
    `actual_value` and `expected_value` are the two values there.
    """

    request_id: str
    site: Site
    position: int
    relative_error: float
    cosine: float
    norm_ratio: float
    max_abs_diff: float
    feature: int
    actual_value: float
    expected_value: float
    nan_count: int
    inf_count: int


@dataclass(frozen=True)
class SiteSummary:
    """The numbers of one site, over the rows that both captures have.

    `rows` were compared and `failing` of them exceed `rtol`. `first` is the first failing row in
    order of request and position, `worst` the row with the largest relative error (one with NaN
    or Inf before any other). Cosine, norm ratios and the largest absolute difference, with its
    feature, leave out rows that aren't finite; they are NaN, and None, where no row is left.
    Where `actual_width` and `expected_width` differ nothing is compared: every row fails, `rows`
    is 0, `first` and `worst` are None.
    """

    site: Site
    actual_dtype: str
    expected_dtype: str
    actual_width: int
    expected_width: int
    rtol: float
    rows: int
    failing: int
    first: RowDifference | None
    worst: RowDifference | None
    min_cosine: float
    min_norm_ratio: float
    max_norm_ratio: float
    max_abs_diff: float
    max_abs_feature: int | None
    nan_count: int
    inf_count: int

    @property
    def worst_relative_error(self) -> float:
        """The largest relative error of any row; NaN when there is none, or a row isn't finite."""
        return self.worst.relative_error if self.worst else math.nan


@dataclass(frozen=True)
class Comparison:
    """Two captures, compared: tokens, then the ledger, then numbers.

    The ledger holds the expected capture's rows against the actual capture's. `sites` are in
    execution order. `explanation` says which rows the failing ones equal, where one was found.
    """

    token_problems: tuple[TokenProblem, ...]
    ledger: Ledger
    sites: tuple[SiteSummary, ...]
    explanation: str | None = None

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
        """The sites with a row beyond its tolerance, in execution order."""
        return tuple(site for site in self.sites if site.failing)

    @property
    def first_divergence(self) -> RowDifference | None:
        """The first failing row: of the first site in execution order, by request and position.

        None also when that site's rows have different widths.
        """
        return self.failing_sites[0].first if self.failing_sites else None

    @property
    def worst_relative_error(self) -> float:
        """The largest relative error of any row; NaN for NaN or Inf, or when none was compared."""
        errors = [site.worst_relative_error for site in self.sites if site.rows or site.failing]
        return max(errors) if errors and not any(map(math.isnan, errors)) else math.nan

    @property
    def smallest_passing_rtol(self) -> float | None:
        """The smallest rtol with which the comparison passes; None when none below 1 does."""
        worst = self.worst_relative_error
        possible = not self.token_problems and self.ledger.complete and not self.empty_sites
        return worst if possible and worst < 1 else None
