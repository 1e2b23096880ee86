"""Rows of a capture taken from elsewhere in it: what faults are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from tapcheck.capture import Capture, IntArray, SiteRows
from tapcheck.checks.ledger import RowBook
from tapcheck.errors import CaptureError
from tapcheck.sites import Site


def lacks(name: str, what: str) -> CaptureError:
    """The error of a fault that can't be injected into this capture."""
    return CaptureError(f"fault {name!r} can't be injected: the capture lacks {what}")


def with_rows(capture: Capture, changed: dict[Site, SiteRows]) -> Capture:
    """The capture with the rows of some sites replaced."""
    return replace(capture, rows={**capture.rows, **changed})


def mapped(
    capture: Capture,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    site: Site | None = None,
) -> Capture:
    """The capture with the values of one site changed: of the one in the middle, or `site`."""
    some, _ = some_row(capture, name)
    rows = capture.rows[site or some]
    return with_rows(capture, {site or some: SiteRows(rows.columns, change(rows.values))})


def some_row(capture: Capture, name: str) -> tuple[Site, int]:
    """The row in the middle of the site in the middle, of those that have rows."""
    sites = [site for site in capture.sites if len(capture.rows[site])]
    if not sites:
        raise lacks(name, "rows")
    site = sites[len(sites) // 2]
    return site, len(capture.rows[site]) // 2


def sites_of(capture: Capture, point: str) -> list[Site]:
    """The captured sites of a point that have rows, by layer."""
    return [site for site in capture.sites if site.point == point and len(capture.rows[site])]


def middle_pair(
    capture: Capture, pairs: list[tuple[Site, Site]], name: str, what: str
) -> tuple[Site, Site]:
    """The pair in the middle, of those of which both sites were captured, equally wide."""
    widths = {site: rows.values.shape[1] for site, rows in capture.rows.items()}
    found = [(one, other) for one, other in pairs if widths.get(one) == widths.get(other)]
    if not found:
        raise lacks(name, what)
    return found[len(found) // 2]


def request_pairs(capture: Capture) -> Iterator[tuple[int, int]]:
    """Every two of the capture's requests, by number, the earlier first."""
    count = len(capture.requests)
    return ((one, other) for one in range(count) for other in range(one + 1, count))


def residual_site(capture: Capture, name: str) -> tuple[Site, Site]:
    """A resid_post in the middle, and the stream that is added to make it."""
    found = []
    for site in sites_of(capture, "resid_post"):
        before = Site("resid_post", site.layer - 1) if site.layer else Site("embed")
        streams = (Site("resid_mid", site.layer), Site("resid_pre", site.layer), before)
        found += [(site, stream) for stream in streams if stream in capture.rows][:1]
    if not found:
        raise lacks(name, "a resid_post with the resid_mid or resid_pre of its layer")
    return found[len(found) // 2]


def lookup(
    capture: Capture, site: Site, source: Site, *, shift: int = 0
) -> tuple[IntArray, torch.Tensor]:
    """The rows of `site` with a counterpart at `source`, `shift` positions away; its values."""
    columns = capture.rows[site].columns
    return rows_at(capture, source, columns.request, columns.position + shift)


def rows_at(
    capture: Capture, source: Site, request: IntArray, position: IntArray
) -> tuple[IntArray, torch.Tensor]:
    """Which of the rows (request[i], position[i]) `source` has, and its values there."""
    book = RowBook.open(capture.requests, capture.requests)
    wanted = book.keys_of(request, position)
    keys = book.delivered_keys(capture.rows[source].columns)
    if not len(keys):
        return np.empty(0, np.int64), capture.rows[source].values[:0]
    order = np.argsort(keys, kind="stable")
    place = order[np.searchsorted(keys, wanted, sorter=order).clip(max=len(keys) - 1)]
    index = np.flatnonzero(keys[place] == wanted)
    return index, capture.rows[source].values[torch.from_numpy(place[index])]


def replaced(capture: Capture, site: Site, source: Site) -> SiteRows:
    """The site's rows with the values of another site."""
    return overlay(capture, site, lookup(capture, site, source))


def overlay(capture: Capture, site: Site, rows: tuple[IntArray, torch.Tensor]) -> SiteRows:
    """The site's rows, with those at an index replaced."""
    index, new = rows
    values = capture.rows[site].values.clone()
    values[torch.from_numpy(index)] = new.to(values.dtype)
    return SiteRows(capture.rows[site].columns, values)


def moved(
    capture: Capture, one: int, other: int, *, both_ways: bool
) -> Iterator[tuple[Site, SiteRows]]:
    """The sites at which two requests differ, where `one` holds the other's values."""
    for site in capture.sites:
        columns = capture.rows[site].columns
        request = columns.request.copy()
        request[columns.request == one] = other
        if both_ways:
            request[columns.request == other] = one
        changed = overlay(capture, site, rows_at(capture, site, request, columns.position))
        if not torch.equal(changed.values, capture.rows[site].values):
            yield site, changed
