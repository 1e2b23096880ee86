"""Faults to inject into a healthy capture: a check that doesn't catch one of them is no check.

Every fault is deterministic, leaves the capture it is given untouched, and changes at least one
row; where the capture lacks what the fault needs, it raises CaptureError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from tapcheck.capture import Capture, IntArray, SiteRows
from tapcheck.checks.ledger import RowBook
from tapcheck.errors import CaptureError
from tapcheck.sites import Site

Inject = Callable[[Capture], Capture]


@dataclass(frozen=True)
class Fault:
    """A mistake that capture code makes, and the function that makes it on purpose."""

    name: str
    description: str
    inject: Inject


FAULTS: dict[str, Fault] = {}


def _fault(inject: Inject) -> Inject:
    """Register a fault under the function's name, described by its docstring."""
    name, description = inject.__name__, (inject.__doc__ or "").strip()

    def checked(capture: Capture) -> Capture:
        faulty = inject(capture)
        if faulty == capture:
            raise _lacks(name, "rows that the fault would change: those it touches are the same")
        return faulty

    FAULTS[name] = Fault(name, description, checked)
    return inject


@_fault
def lost_row(capture: Capture) -> Capture:
    """One row in the middle of one site was never delivered."""
    site, at = _some_row(capture, "lost_row")
    rows = capture.rows[site]
    return _with(capture, {site: rows.take(np.delete(np.arange(len(rows)), at))})


@_fault
def duplicated_row(capture: Capture) -> Capture:
    """One row in the middle of one site was delivered twice."""
    site, at = _some_row(capture, "duplicated_row")
    rows = capture.rows[site]
    return _with(capture, {site: rows.take(np.insert(np.arange(len(rows)), at, at))})


@_fault
def swapped_requests(capture: Capture) -> Capture:
    """Two requests hold each other's values, at every position that both have."""
    requests = len(capture.requests)
    pairs = ((one, other) for one in range(requests) for other in range(one + 1, requests))
    for one, other in pairs:
        changed = dict(_swap(capture, one, other))
        if changed:
            return _with(capture, changed)
    raise _lacks("swapped_requests", "two requests with different values at one position")


@_fault
def layer_off_by_one(capture: Capture) -> Capture:
    """Every site holds the values of the same point one layer later, where that was captured."""
    changed = {}
    for site in capture.sites:
        later = Site(site.point, site.layer + 1) if site.layer is not None else site
        if later != site and later in capture.rows:
            changed[site] = _overlay(capture, site, _lookup(capture, site, later))
    if not changed:
        raise _lacks("layer_off_by_one", "one point at two consecutive layers")
    return _with(capture, changed)


@_fault
def missing_residual(capture: Capture) -> Capture:
    """One resid_post lacks the residual add: it holds what the MLP, or the layer, adds to it."""
    site, stream = _residual_site(capture, "missing_residual")
    update = Site("mlp_out", site.layer)
    if update in capture.rows:
        return _with(capture, {site: _overlay(capture, site, _lookup(capture, site, update))})
    index, residual = _lookup(capture, site, stream)
    right = capture.rows[site].values[torch.from_numpy(index)]
    return _with(capture, {site: _overlay(capture, site, (index, right - residual))})


@_fault
def doubled_residual(capture: Capture) -> Capture:
    """One resid_post has the residual added twice."""
    site, stream = _residual_site(capture, "doubled_residual")
    index, residual = _lookup(capture, site, stream)
    right = capture.rows[site].values[torch.from_numpy(index)]
    return _with(capture, {site: _overlay(capture, site, (index, right + residual))})


@_fault
def shifted_rows(capture: Capture) -> Capture:
    """At every site, each row holds the values of the position before it in its request."""
    changed = {}
    for site in capture.sites:
        index, values = _lookup(capture, site, site, shift=-1)
        if len(index):
            changed[site] = _overlay(capture, site, (index, values))
    if not changed:
        raise _lacks("shifted_rows", "two neighbouring positions of one request")
    return _with(capture, changed)


@_fault
def dead_tap(capture: Capture) -> Capture:
    """One site was never written: all zeros."""
    site, _ = _some_row(capture, "dead_tap")
    rows = capture.rows[site]
    return _with(capture, {site: SiteRows(rows.columns, torch.zeros_like(rows.values))})


@_fault
def nan_row(capture: Capture) -> Capture:
    """One row holds NaN, as from a buffer that was never written."""
    site, at = _some_row(capture, "nan_row")
    values = capture.rows[site].values.clone()
    values[at] = torch.nan
    return _with(capture, {site: SiteRows(capture.rows[site].columns, values)})


@_fault
def scaled(capture: Capture) -> Capture:
    """One site is 2 % too large; the fixed tolerance of bfloat16 is too coarse to see that."""
    site, _ = _some_row(capture, "scaled")
    rows = capture.rows[site]
    return _with(capture, {site: SiteRows(rows.columns, rows.values * 1.02)})


@_fault
def narrowed_dtype(capture: Capture) -> Capture:
    """One float32 site went through bfloat16 on its way."""
    site, _ = _some_row(capture, "narrowed_dtype")
    rows = capture.rows[site]
    if rows.values.dtype != torch.float32:
        raise _lacks("narrowed_dtype", "a float32 site: the others have no narrower dtype to lose")
    return _with(capture, {site: SiteRows(rows.columns, rows.values.bfloat16())})


@_fault
def stale_row(capture: Capture) -> Capture:
    """The last row of one request at one site still holds the position before it."""
    for site in (_some_row(capture, "stale_row")[0], *capture.sites):
        index, values = _lookup(capture, site, site, shift=-1)
        if len(index):
            last = int(capture.rows[site].columns.position[index].argmax())
            row = (index[last : last + 1], values[last : last + 1])
            return _with(capture, {site: _overlay(capture, site, row)})
    raise _lacks("stale_row", "two neighbouring positions of one request")


def _lacks(name: str, what: str) -> CaptureError:
    return CaptureError(f"fault {name!r} can't be injected: the capture lacks {what}")


def _with(capture: Capture, changed: dict[Site, SiteRows]) -> Capture:
    return replace(capture, rows={**capture.rows, **changed})


def _some_row(capture: Capture, name: str) -> tuple[Site, int]:
    """The row in the middle of the site in the middle, of those that have rows."""
    sites = [site for site in capture.sites if len(capture.rows[site])]
    if not sites:
        raise _lacks(name, "rows")
    site = sites[len(sites) // 2]
    return site, len(capture.rows[site]) // 2


def _residual_site(capture: Capture, name: str) -> tuple[Site, Site]:
    """A resid_post in the middle, and the stream that is added to make it."""
    found = []
    for site in capture.sites:
        if site.point != "resid_post" or site.layer is None:
            continue
        before = Site("resid_post", site.layer - 1) if site.layer else Site("embed")
        streams = (Site("resid_mid", site.layer), Site("resid_pre", site.layer), before)
        found += [(site, stream) for stream in streams if stream in capture.rows][:1]
    if not found:
        raise _lacks(name, "a resid_post with the resid_mid or resid_pre of its layer")
    return found[len(found) // 2]


def _lookup(
    capture: Capture, site: Site, source: Site, *, shift: int = 0
) -> tuple[IntArray, torch.Tensor]:
    """The rows of `site` with a counterpart at `source`, `shift` positions away; its values."""
    book = RowBook.open(capture.requests, capture.requests)
    keys = book.delivered_keys(capture.rows[site].columns)
    source_keys = book.delivered_keys(capture.rows[source].columns)
    # A key's neighbour is its position's neighbour.
    _, index, there = np.intersect1d(keys + shift, source_keys, return_indices=True)
    return index, capture.rows[source].values[torch.from_numpy(there)]


def _overlay(capture: Capture, site: Site, rows: tuple[IntArray, torch.Tensor]) -> SiteRows:
    """The site's rows, with those at an index replaced."""
    index, new = rows
    values = capture.rows[site].values.clone()
    values[torch.from_numpy(index)] = new
    return SiteRows(capture.rows[site].columns, values)


def _swap(capture: Capture, one: int, other: int) -> Iterator[tuple[Site, SiteRows]]:
    """The sites at which two requests hold different values, with these exchanged."""
    for site in capture.sites:
        columns = capture.rows[site].columns
        mine, theirs = (np.flatnonzero(columns.request == number) for number in (one, other))
        _, i, j = np.intersect1d(
            columns.position[mine], columns.position[theirs], return_indices=True
        )
        index = np.concatenate([mine[i], theirs[j]])
        values = capture.rows[site].values[torch.from_numpy(np.concatenate([theirs[j], mine[i]]))]
        swapped = _overlay(capture, site, (index, values))
        if not torch.equal(swapped.values, capture.rows[site].values):
            yield site, swapped
