"""What failing rows equal instead: one hypothesis, tested on the numbers, or none.

A hypothesis is named only when it brings every sampled row that it says something about within
the tolerance, and at least halves its error. At most SAMPLE rows are tried against the expected
capture's rows at neighbouring positions, at neighbouring layers, at the other points of their
layer, and of at most MAX_REQUESTS other requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tapcheck.capture import Capture, IntArray, SiteRows
from tapcheck.checks.ledger import RowBook
from tapcheck.checks.numerics import FloatArray, row_metrics
from tapcheck.checks.pairing import FailingRows, widened
from tapcheck.sites import LAYER_POINTS, Site

SAMPLE = 16
MAX_REQUESTS = 64


@dataclass(frozen=True, eq=False)
class _Rows:
    """Values to hold against the sampled rows, [n, width]; `found` [n] is False for lack of one."""

    values: torch.Tensor
    found: torch.Tensor

    def combined(self, other: _Rows, sign: int) -> _Rows:
        """These rows plus `sign` times the others."""
        return _Rows(self.values + sign * other.values, self.found & other.found)


@dataclass(frozen=True, eq=False)
class _Hypothesis:
    claim: str
    way_out: str
    rows: _Rows | None


def explain(failing: FailingRows, expected: Capture) -> str | None:
    """The hypothesis with the smallest error that explains the failing rows, with its evidence."""
    if not bool(failing.values.isfinite().all()):
        return None
    best: tuple[float, str] | None = None
    for hypothesis in _hypotheses(failing, _Source(failing, expected)):
        verdict = _judge(failing, hypothesis)
        if verdict is not None and (best is None or verdict[0] < best[0]):
            best = verdict
    return best[1] if best else None


def _judge(failing: FailingRows, hypothesis: _Hypothesis) -> tuple[float, str] | None:
    """The hypothesis' worst error and its text; None when it explains nothing."""
    rows = hypothesis.rows
    if rows is None or not bool(rows.found.any()):
        return None
    index = np.flatnonzero(rows.found.numpy())
    errors = row_metrics(
        failing.values, rows.values, actual_index=index, expected_index=index
    ).relative_error
    limit = np.minimum(failing.rtol, failing.relative_error[index] / 2)
    # Half the sample at least: a claim about one row among many would be a guess.
    if 2 * len(index) < len(failing.positions) or not bool((errors <= limit).all()):
        return None
    worst = float(errors.max())
    agreement = f"to a relative error of {worst:.1e}" if worst else "exactly"
    evidence = f"{len(index)} of {len(failing.positions)} failing rows tried, {agreement}"
    return worst, f"{hypothesis.claim} ({evidence}): {hypothesis.way_out}"


class _Source:
    """Looks up rows of the expected capture for the sampled (request, position)s."""

    def __init__(self, failing: FailingRows, expected: Capture) -> None:
        self.expected = expected
        self.book = RowBook.open(expected.requests, expected.requests)
        numbers = {request.id: at for at, request in enumerate(expected.requests)}
        self.request = np.array([numbers[name] for name in failing.request_ids], np.int64)
        self.position = failing.positions
        self.width = failing.values.shape[1]
        self._sites: dict[Site, tuple[SiteRows, IntArray, IntArray]] = {}

    def at(self, site: Site, *, shift: int = 0, request: IntArray | None = None) -> _Rows | None:
        """The rows at a site, `shift` positions away, of other requests if given; None if none."""
        if site not in self.expected.rows:
            return None
        rows, keys, order = self._indexed(site)
        if rows.values.shape[1] != self.width or not len(keys):
            return None
        owner = self.request if request is None else request
        wanted = self.book.keys_of(owner, self.position + shift)
        place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
        values = widened(rows.values[torch.from_numpy(order[place])])
        return _Rows(values, torch.from_numpy(keys[place] == wanted))

    def residual(self, layer: int) -> _Rows | None:
        """The stream that enters a layer: resid_pre, or what comes out before it."""
        before = Site("resid_post", layer - 1) if layer else Site("embed")
        return self.at(Site("resid_pre", layer)) or self.at(before)

    def _indexed(self, site: Site) -> tuple[SiteRows, IntArray, IntArray]:
        if site not in self._sites:
            rows = self.expected.rows[site]
            keys = self.book.delivered_keys(rows.columns)
            order = np.argsort(keys, kind="stable")
            self._sites[site] = (rows, keys[order], order)
        return self._sites[site]


def _hypotheses(failing: FailingRows, source: _Source) -> Iterator[_Hypothesis]:
    site = failing.site
    everywhere = torch.ones(len(failing.values), dtype=torch.bool)
    if not bool(failing.values.any()):
        zeros = _Rows(failing.values, everywhere)
        yield _Hypothesis("the rows are all zeros", "the tap never wrote them", zeros)
        return
    if len(failing.values) > 1 and bool((failing.values == failing.values[0]).all()):
        same = _Rows(failing.values[:1].expand_as(failing.values), everywhere)
        way_out = "one buffer was delivered over and over, copy rows when they are taken"
        yield _Hypothesis("the rows are all the same", way_out, same)
    for shift, side in ((-1, "previous"), (1, "next")):
        yield _Hypothesis(
            f"the rows equal the expected rows of the {side} position",
            "look for an offset in the step layout, or rows of another step",
            source.at(site, shift=shift),
        )
    yield _other_requests(failing, source)
    for other, way_out in _other_sites(site, source.expected):
        yield _Hypothesis(f"the rows equal the expected {other}", way_out, source.at(other))
    if site.layer is not None:
        yield from _residual_hypotheses(site, site.layer, source)
    yield _scale(failing, source)


def _other_sites(site: Site, expected: Capture) -> Iterator[tuple[Site, str]]:
    """Sites that a broken tap may have read instead, each with the way out."""
    if site.layer is None:
        for other in expected.sites:
            if other.layer is None and other != site:
                yield other, f"the tap reads {other} instead of {site}"
        if site.point == "final_norm":
            last = max(other.layer or 0 for other in expected.sites)
            yield Site("resid_post", last), "the tap reads what goes into the final norm"
        return
    for layer in (site.layer + 1, site.layer - 1):
        yield Site(site.point, layer), "look for a layer index that is off by one"
    for point in LAYER_POINTS:
        if point == site.point:
            continue
        addend = site.point.startswith("resid_") and point.endswith("_out")
        way_out = "leaves out the residual add" if addend else f"reads {point} for {site.point}"
        yield Site(point, site.layer), f"the tap {way_out}"
    yield Site("final_norm"), "the tap reads the stream after the final norm"


def _residual_hypotheses(site: Site, layer: int, source: _Source) -> Iterator[_Hypothesis]:
    """Sums with the stream that runs past the layer, or past its MLP."""
    right, middle = source.at(site), Site("resid_mid", layer)
    entering = source.residual(layer) if site.point != "resid_pre" else None
    streams = [("the stream that enters the layer", entering)]
    if site.point == "resid_post":
        streams.append((str(middle), source.at(middle)))
    for name, stream in streams:
        if right is None or stream is None:
            continue
        yield _Hypothesis(
            f"the rows equal the expected {site} minus {name}",
            "the tap leaves out the residual add",
            right.combined(stream, -1),
        )
        yield _Hypothesis(
            f"the rows equal the expected {site} plus {name}",
            "the tap adds the residual twice",
            right.combined(stream, 1),
        )


def _other_requests(failing: FailingRows, source: _Source) -> _Hypothesis:
    """For each row, the request whose expected row at that position is nearest."""
    best = np.full(len(failing.positions), np.inf)
    values, owner = failing.values.clone(), source.request.copy()
    for number in range(min(len(source.expected.requests), MAX_REQUESTS)):
        others = np.full(len(owner), number, np.int64)
        rows = source.at(failing.site, request=others)
        if rows is None:
            break
        errors: FloatArray = row_metrics(failing.values, rows.values).relative_error
        nearer = rows.found.numpy() & (source.request != number) & (errors < best)
        best[nearer], owner[nearer] = errors[nearer], number
        values[torch.from_numpy(nearer)] = rows.values[torch.from_numpy(nearer)]
    found = torch.from_numpy(np.isfinite(best))
    first = int(found.int().argmax())
    mine, theirs = failing.request_ids[first], source.expected.requests[owner[first]].id
    return _Hypothesis(
        f"the rows equal the expected rows of other requests ({mine!r} holds those of {theirs!r})",
        "look at which rows of a batch are given to which request",
        _Rows(values, found),
    )


def _scale(failing: FailingRows, source: _Source) -> _Hypothesis:
    """One factor for all rows: the median of the factors that fit each best."""
    right = source.at(failing.site)
    if right is None:
        return _Hypothesis("", "", None)
    square = right.values.square().sum(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    factor = float(((failing.values * right.values).sum(dim=1) / square).median())
    return _Hypothesis(
        f"the rows are the expected rows times {factor:.4g}",
        "look for a scale (of the embedding, the attention or the residual) applied once too "
        "often, or not at all",
        _Rows(factor * right.values, right.found),
    )
