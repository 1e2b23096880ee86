"""The ledger: the rows that a run must contain, against those it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from tapcheck.capture import Capture, Columns, IntArray
from tapcheck.errors import SelectorError
from tapcheck.request import Request
from tapcheck.selectors import Selector, parse_selectors, resolve
from tapcheck.sites import Site, parse_site

Kind = Literal["missing", "duplicated", "unexpected", "out of order"]
KINDS: tuple[Kind, ...] = ("missing", "duplicated", "unexpected", "out of order")

# A row's key is request * _STRIDE + position: positions may be negative in a broken capture.
_STRIDE = 1 << 40


@dataclass(frozen=True)
class LedgerEntry:
    """One row that is missing, duplicated, unexpected or out of order, and why it matters."""

    request_id: str
    site: Site
    position: int
    kind: Kind
    reason: str


@dataclass(frozen=True)
class CachedPositions:
    """Positions [start, stop) of a request that no forward pass computed: a prefix cache had them.

    The capture says so itself, of a request that was allowed to read the cache.
    """

    request_id: str
    start: int
    stop: int


@dataclass(frozen=True)
class Ledger:
    """Rows due against rows delivered (copies and unexpected rows counted).

    Entries are in execution order of their sites, then by kind, request and position. Rows at
    `cached` positions are not due.
    """

    due: int
    delivered: int
    entries: tuple[LedgerEntry, ...] = ()
    cached: tuple[CachedPositions, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every row due was delivered once, in order, and no other; never when none is."""
        return self.due > 0 and not self.entries

    def of_kind(self, kind: Kind) -> tuple[LedgerEntry, ...]:
        """The entries of one kind."""
        return tuple(entry for entry in self.entries if entry.kind == kind)


def compare_ledger(
    capture: Capture,
    *,
    requests: Sequence[Request],
    sites: Iterable[str | Site],
    select: Iterable[int | str],
) -> Ledger:
    """Judge a capture against what was asked for: these requests, sites and selectors.

    A request asked for without generated token ids is resolved with those that the capture
    recorded for it. Raises SelectorError and SiteError for what can't be read or resolved.
    """
    selectors = parse_selectors(select)
    captured = {request.id: request for request in capture.requests}
    asked = [_with_generated(request, captured) for request in requests]
    book = RowBook.open(asked, capture.requests, cached_positions(capture))
    positions = [
        np.array(_due_positions(selectors, request, request.id in captured), np.int64)
        for request in asked
    ]
    due = book.computed(
        book.keys_of(
            np.repeat(np.arange(len(asked)), [len(part) for part in positions]),
            np.concatenate([*positions, np.empty(0, np.int64)]),
        )
    )
    wanted = {parse_site(site) for site in sites}
    entries: list[LedgerEntry] = []
    delivered = 0
    for site in sorted(wanted | set(capture.rows)):
        columns = capture.rows[site].columns if site in capture.rows else None
        delivered += 0 if columns is None else len(columns)
        entries += book.entries(site, due if site in wanted else due[:0], columns)
    return Ledger(len(due) * len(wanted), delivered, tuple(entries), book.cached)


def cached_positions(capture: Capture) -> tuple[CachedPositions, ...]:
    """The positions that the capture lists as read from a prefix cache."""
    listed = capture.metadata.get("cached", {})
    return tuple(
        CachedPositions(request_id, start, stop)
        for request_id, ranges in listed.items()
        for start, stop in ranges
    )


def _with_generated(asked: Request, captured: dict[str, Request]) -> Request:
    if asked.generated_token_ids or asked.id not in captured:
        return asked
    return replace(asked, generated_token_ids=captured[asked.id].generated_token_ids)


def _due_positions(
    selectors: Sequence[Selector], request: Request, captured: bool
) -> Sequence[int]:
    if captured or request.generated_token_ids:
        return resolve(selectors, request)
    # How long it would have become is unknown. It owes a row all the same, or nobody would miss it.
    positions: set[int] = set()
    for selector in selectors:
        with contextlib.suppress(SelectorError):
            positions.update(resolve([selector], request))
    return sorted(positions) or [request.prompt_length]


@dataclass(frozen=True)
class RowBook:
    """Gives each row one integer key, and says what is wrong with a site's keys.

    `requests` are those whose rows are due, then those that were only delivered; `number` holds
    the place in it of each of the capture's requests. Rows at `cached` positions are not due.
    """

    requests: tuple[Request, ...]
    due_requests: int
    number: tuple[int, ...]
    cached: tuple[CachedPositions, ...] = ()

    @classmethod
    def open(
        cls,
        due: Sequence[Request],
        captured: Sequence[Request],
        cached: tuple[CachedPositions, ...] = (),
    ) -> RowBook:
        """A book for rows of the `due` requests, delivered by a capture of `captured`."""
        ids = {request.id: place for place, request in enumerate(due)}
        extra = [request for request in captured if request.id not in ids]
        ids |= {request.id: len(due) + place for place, request in enumerate(extra)}
        number = tuple(ids[request.id] for request in captured)
        return cls((*due, *extra), len(due), number, cached)

    @cached_property
    def delivered_requests(self) -> frozenset[int]:
        """The numbers of the requests that the capture has."""
        return frozenset(self.number)

    def keys_of(self, request: IntArray, position: IntArray) -> IntArray:
        """The keys of rows of the requests numbered `request`: they sort as (request, position)."""
        return request * _STRIDE + position + _STRIDE // 2

    def computed(self, keys: IntArray) -> IntArray:
        """Those of the keys whose position a forward pass computed."""
        place = {request.id: number for number, request in enumerate(self.requests)}
        keep = np.ones(len(keys), dtype=bool)
        for cached in self.cached:
            if cached.request_id not in place:
                continue
            first = place[cached.request_id] * _STRIDE + _STRIDE // 2
            keep &= (keys < first + cached.start) | (keys >= first + cached.stop)
        computed: IntArray = keys[keep]
        return computed

    def owner(self, key: int) -> tuple[Request, int]:
        """The request and position of a key."""
        number, position = divmod(int(key), _STRIDE)
        return self.requests[number], position - _STRIDE // 2

    def owners(self, keys: IntArray) -> tuple[IntArray, IntArray]:
        """The numbers of the requests, and the positions, of keys."""
        number, position = np.divmod(keys, _STRIDE)
        return number, position - _STRIDE // 2

    def delivered_keys(self, columns: Columns) -> IntArray:
        """The keys of a site's rows in the capture."""
        number = np.array(self.number, np.int64)
        return self.keys_of(number[columns.request], columns.position)

    def entries(self, site: Site, due: IntArray, columns: Columns | None) -> Iterator[LedgerEntry]:
        """What is wrong with the rows delivered at one site, where the keys `due` must be.

        `columns` is None where the site was not captured.
        """
        keys = np.empty(0, np.int64) if columns is None else self.delivered_keys(columns)
        order = np.argsort(keys, kind="stable")
        distinct, first, counts = np.unique(keys[order], return_index=True, return_counts=True)
        owners = frozenset((distinct // _STRIDE).tolist())
        for key in np.setdiff1d(due, distinct).tolist():
            reason = self._why_missing(key, owners, columns is not None)
            yield self._entry(key, site, "missing", reason)
        if columns is None:
            return
        for at in np.flatnonzero(counts > 1).tolist():
            copies = order[first[at] : first[at] + counts[at]]
            steps = ", ".join(map(str, columns.step[copies[:4]]))
            reason = f"delivered {counts[at]} times, in steps {steps}"
            yield self._entry(int(distinct[at]), site, "duplicated", reason)
        for key in np.setdiff1d(distinct, due).tolist():
            yield self._entry(key, site, "unexpected", self._why_unexpected(key, len(due) > 0))
        for key, before in _out_of_order(keys):
            reason = f"delivered after position {self.owner(before)[1]} of the same request"
            yield self._entry(key, site, "out of order", reason)

    def _entry(self, key: int, site: Site, kind: Kind, reason: str) -> LedgerEntry:
        request, position = self.owner(key)
        return LedgerEntry(request.id, site, position, kind, reason)

    def _why_missing(self, key: int, owners: frozenset[int], site_captured: bool) -> str:
        request, position = self.owner(key)
        if key // _STRIDE not in self.delivered_requests:
            return "the request is not in the capture"
        if not site_captured:
            return "the site was not captured at all"
        if key // _STRIDE not in owners:
            return "none of the request's rows was delivered at this site"
        named = {
            request.seen_length - 1: "the last row of the sequence",
            request.prompt_length: "the first generated row",
            request.prompt_length - 1: "the last row of the prompt",
            0: "the first row of the prompt",
        }
        inside = "a row of the prompt" if position < request.prompt_length else "a generated row"
        return named.get(position, inside)

    def _why_unexpected(self, key: int, site_due: bool) -> str:
        request, position = self.owner(key)
        length = len(request.token_ids)
        if not site_due or key // _STRIDE >= self.due_requests:
            return f"no row is due {'for this request' if site_due else 'at this site'}"
        if position < 0:
            return "the position is negative"
        if position >= length:
            return f"the position is beyond the sequence (length {length})"
        if position >= request.seen_length:
            return "the last generated token, which no forward pass sees"
        if not len(self.computed(np.array([key]))):
            return "the capture itself lists the position as read from the prefix cache"
        return "not among the positions due"


def _out_of_order(keys: IntArray) -> Iterator[tuple[int, int]]:
    """Each key that was delivered after a larger one of its request, with that larger one."""
    by_request = keys[np.argsort(keys // _STRIDE, kind="stable")]
    # Keys of later requests are larger, so that the running maximum starts anew with each.
    highest = np.maximum.accumulate(by_request)
    for at in np.flatnonzero(by_request < highest):
        yield int(by_request[at]), int(highest[at])
