"""What a diagnosis is tried on: sampled rows of a failing site, and healthy rows to hold them to.

A hypothesis predicts what the sampled rows would be if it were true. It is accepted when the rows,
held against that, would pass the judge that condemned them: the tolerance or, with a reference,
the noise floor of the predicted rows, row by row and in the median.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from tapcheck.capture import Capture, IntArray, SiteRows
from tapcheck.checks.comparison import Comparison, SiteSummary
from tapcheck.checks.ledger import RowBook
from tapcheck.checks.noise_floor import allowances, always_allowed, row_floors
from tapcheck.checks.numerics import TINY_NORM, FloatArray, row_metrics
from tapcheck.checks.pairing import widened
from tapcheck.checks.tolerances import RTOL
from tapcheck.request import Request
from tapcheck.sites import Site

SAMPLE = 48
# The part of the typical error that a hypothesis must take away, or it explains nothing.
GAIN = 0.15


@dataclass(frozen=True)
class Diagnosis:
    """One hypothesis that explains what differs, likelier than those after it.

    `fault` is its name in `tapcheck.checks.faults.FAULTS` or `faults.models.MODEL_FAULTS`. `error`
    is the largest relative error that it leaves, None where it predicts no values.
    """

    fault: str
    claim: str
    evidence: str
    way_out: str
    error: float | None = None

    def __str__(self) -> str:
        return f"{self.claim} ({self.evidence}): {self.way_out}"


@dataclass(frozen=True, eq=False)
class Rows:
    """Values to hold against the sampled rows, [n, width]; `found` [n] is False for lack of one."""

    values: torch.Tensor
    found: torch.Tensor

    def plus(self, other: Rows, sign: int = 1) -> Rows:
        """These rows plus `sign` times the others."""
        return Rows(self.values + sign * other.values, self.found & other.found)


class Lookup:
    """The rows of one healthy capture, by number of request and position."""

    def __init__(self, capture: Capture, requests: tuple[Request, ...]) -> None:
        self.capture = capture
        self.book = RowBook.open(requests, capture.requests)
        self._keys: dict[Site, tuple[IntArray, IntArray]] = {}

    def width(self, site: Site) -> int:
        """The width of the rows of a site; 0 where it has none."""
        rows = self.capture.rows.get(site)
        return 0 if rows is None or not len(rows) else rows.values.shape[1]

    def at(self, site: Site, request: IntArray, position: IntArray) -> Rows | None:
        """The rows (request[i], position[i]) of a site; None when it has no rows at all."""
        if not self.width(site):
            return None
        keys, order = self.indexed(site)
        wanted = self.book.keys_of(request, position)
        place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
        values = self.capture.rows[site].values[torch.from_numpy(order[place])]
        return Rows(widened(values), torch.from_numpy(keys[place] == wanted))

    def rows_of(self, site: Site, request: IntArray, position: IntArray) -> IntArray:
        """Which of a site's rows each (request[i], position[i]) is; it must have them all."""
        keys, order = self.indexed(site)
        return order[np.searchsorted(keys, self.book.keys_of(request, position))]

    def owners(self, site: Site) -> tuple[IntArray, IntArray]:
        """The request number and position of each of a site's rows, in their order."""
        columns = self.capture.rows[site].columns
        return np.array(self.book.number, np.int64)[columns.request], columns.position

    def indexed(self, site: Site) -> tuple[IntArray, IntArray]:
        """The key of each of a site's rows, ascending, and which row has it."""
        if site not in self._keys:
            keys = self.book.delivered_keys(self.capture.rows[site].columns)
            order = np.argsort(keys, kind="stable")
            self._keys[site] = (keys[order], order)
        return self._keys[site]


@dataclass(frozen=True, eq=False)
class Sample:
    """Some rows of one site that fail: of a site that fails as a whole, some of all its rows.

    request: number among the expected capture's requests; row: index into the actual rows; with
    position, relative_error and allowed, of shape [n]. `given` are the actual rows as they were
    captured, `values` widened, both [n, width].
    """

    summary: SiteSummary
    delivered: SiteRows
    request: IntArray
    position: IntArray
    row: IntArray
    relative_error: FloatArray
    allowed: FloatArray
    given: torch.Tensor
    values: torch.Tensor

    @property
    def site(self) -> Site:
        """The site that the rows are of."""
        return self.summary.site

    def __len__(self) -> int:
        return len(self.position)


Predict = Callable[[Lookup], "Rows | None"]


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """A fault, what it would mean here, and the rows that it predicts, from a healthy capture.

    `detail` tells apart hypotheses of one fault. `least` is the part of the sample about which it
    must say something: a claim about one row among many would be a guess. `gain` is the part of
    the typical error that it must take away.
    """

    fault: str
    claim: str
    way_out: str
    predict: Predict
    detail: object = None
    least: float = 0.5
    gain: float = GAIN


@dataclass(frozen=True)
class Verdict:
    """An accepted hypothesis: rows it was tried on, their largest error, and the typical one.

    `typical` is the median of the errors over what the judge allows a healthy row typically: rows
    of equal standing differ by less than a factor of two.
    """

    tried: int
    worst: float
    typical: float


@dataclass(frozen=True, eq=False)
class Case:
    """A failed comparison, with the captures that it compared."""

    actual: Capture
    expected: Capture
    comparison: Comparison
    reference: Capture | None = None
    _lookups: dict[str, Lookup] = field(default_factory=dict)

    @property
    def healthy(self) -> Lookup:
        """Transformers' rows at the candidate's dtype."""
        return self._lookup("healthy", self.expected)

    @property
    def truth(self) -> Lookup:
        """The rows to hold others against: the reference's, if there is one."""
        return self._lookup("truth", self.expected if self.reference is None else self.reference)

    @property
    def delivered(self) -> Lookup:
        """The actual rows."""
        return self._lookup("delivered", self.actual)

    def steps(self, site: Site, request: IntArray, position: IntArray) -> IntArray:
        """The step that computed each actual row (request[i], position[i]); -1 where none did."""
        keys, order = self.delivered.indexed(site)
        wanted = self.delivered.book.keys_of(request, position)
        place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
        step = self.actual.rows[site].columns.step[order[place]]
        return np.where(keys[place] == wanted, step, -1)

    def _lookup(self, name: str, capture: Capture) -> Lookup:
        if name not in self._lookups:
            self._lookups[name] = Lookup(capture, self.expected.requests)
        return self._lookups[name]

    def sample(self, summary: SiteSummary, *, every: bool = False) -> Sample | None:
        """Finite failing rows of a site, evenly spread; None when there is none to compare.

        Of all its rows where it fails as a whole only, or `every` says so.
        """
        errors = summary.errors
        if errors is None or not len(errors):
            return None
        some = len(errors.failing) and not every
        chosen = errors.failing if some else np.arange(len(errors))
        chosen = chosen[np.isfinite(errors.relative_error[chosen])]
        if not len(chosen):
            return None
        chosen = chosen[spread(len(chosen), SAMPLE)]
        return self._sampled(
            summary,
            errors.request[chosen],
            errors.position[chosen],
            errors.largest_error[chosen],
            errors.allowed[chosen],
        )

    def sample_any(self, summary: SiteSummary) -> Sample | None:
        """Rows of a site of which none could be compared, evenly spread."""
        if not self.delivered.width(summary.site):
            return None
        request, position = self.delivered.owners(summary.site)
        chosen = np.flatnonzero(request < len(self.expected.requests))
        chosen = chosen[spread(len(chosen), SAMPLE)]
        dtype = self.expected.rows[summary.site].values.dtype
        allowed = np.full(len(chosen), summary.rtol or RTOL.get(dtype, 0.0))
        unknown = np.full(len(chosen), np.inf)
        return self._sampled(summary, request[chosen], position[chosen], unknown, allowed)

    def _sampled(
        self,
        summary: SiteSummary,
        request: IntArray,
        position: IntArray,
        relative_error: FloatArray,
        allowed: FloatArray,
    ) -> Sample:
        row = self.delivered.rows_of(summary.site, request, position)
        delivered = self.actual.rows[summary.site]
        given = delivered.values[torch.from_numpy(row)]
        return Sample(
            summary=summary,
            delivered=delivered,
            request=request,
            position=position,
            row=row,
            relative_error=relative_error,
            allowed=allowed,
            given=given,
            values=widened(given),
        )

    def judge(self, sample: Sample, hypothesis: Hypothesis) -> Verdict | None:
        """What the hypothesis leaves of the sample's errors; None when it explains nothing."""
        rows = hypothesis.predict(self.truth)
        if rows is None or rows.values.shape != sample.values.shape:
            return None
        index = np.flatnonzero(rows.found.numpy())
        if not len(index) or len(index) < hypothesis.least * len(sample):
            return None
        errors = _errors(sample.values, rows.values, index)
        before = sample.relative_error[index]
        allowed, typical = np.minimum(sample.allowed[index], before / 2), sample.allowed[index] / 8
        if self.reference is not None:
            own = hypothesis.predict(self.healthy)
            if own is None:
                return None
            dtype = self.expected.rows[sample.site].values.dtype
            typical = row_floors([_errors(own.values, rows.values, index)], dtype)
            allowed = allowances(typical, dtype)
            always = always_allowed(dtype) / float(np.median(typical))
            most = 1 + max(0.5, 3 / np.sqrt(len(index)), always)
            if np.median(errors / typical) > most:
                return None
        left = (1 - hypothesis.gain) * np.median(before)
        if not bool((errors <= allowed).all()) or np.median(errors) > left:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            standing = np.where(errors == 0, 0.0, errors / typical)
        return Verdict(len(index), float(errors.max()), float(np.median(standing)))


def _errors(actual: torch.Tensor, predicted: torch.Tensor, index: IntArray) -> FloatArray:
    """The relative errors of rows, of outlier features or the others, whichever is larger.

    NaN where a row isn't finite, which satisfies no tolerance.
    """
    metrics = row_metrics(
        actual.double(), predicted.double(), actual_index=index, expected_index=index
    )
    return metrics.largest_error


def spread(count: int, most: int) -> IntArray:
    """At most `most` indices below `count`, evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def norms(values: torch.Tensor) -> torch.Tensor:
    """The length of each row, [n, 1], never zero."""
    lengths: torch.Tensor = torch.linalg.vector_norm(values, dim=1, keepdim=True)
    return lengths.clamp_min(TINY_NORM)
