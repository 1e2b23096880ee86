"""The capture container: rows of hidden states and the request, site and position of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tapcheck.errors import CaptureError
from tapcheck.interleave import by_request, round_robin
from tapcheck.request import Request
from tapcheck.sites import Site, parse_site

IntArray = npt.NDArray[np.int64]

# The dtypes in which rows are kept, moved and stored, by the names that files and headers use.
VALUE_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, eq=False)
class Columns:
    """What is known of each row beside its values; every array has shape [rows].

    request: index into the capture's requests. position: index from 0 in prompt + generated.
    step: the engine's forward pass, counted from 0 in one run. monotonic_ns, unix_ns: when the
    row was taken, on the worker's monotonic clock and in UTC, in nanoseconds.
    """

    request: IntArray
    position: IntArray
    step: IntArray
    monotonic_ns: IntArray
    unix_ns: IntArray

    def __post_init__(self) -> None:
        shapes = {name: np.shape(getattr(self, name)) for name in COLUMN_NAMES}
        if len(set(shapes.values())) > 1 or len(self.position.shape) != 1:
            raise CaptureError(f"columns must all have the same shape [rows], not {shapes}")

    def __len__(self) -> int:
        return len(self.position)

    def take(self, index: IntArray) -> Columns:
        """The rows at `index`, in that order."""
        return Columns(**{name: getattr(self, name)[index] for name in COLUMN_NAMES})


COLUMN_NAMES = ("request", "position", "step", "monotonic_ns", "unix_ns")


def concatenate(parts: Sequence[Columns]) -> Columns:
    """All rows of `parts`, one part after the other."""
    return Columns(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMN_NAMES}
    )


@dataclass(frozen=True, eq=False)
class SiteRows:
    """The rows of one site: columns beside `values`, shape [rows, width], in the captured dtype."""

    columns: Columns
    values: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or len(self.values) != len(self.columns):
            raise CaptureError(
                f"a site's values have shape {tuple(self.values.shape)} but its columns have "
                f"{len(self.columns)} rows: values must be [rows, width]"
            )
        if self.values.dtype not in VALUE_DTYPES.values():
            raise CaptureError(
                f"a site's values are {self.values.dtype}: rows are kept as "
                f"{', '.join(VALUE_DTYPES)}"
            )

    def __len__(self) -> int:
        return len(self.columns)

    def take(self, index: IntArray) -> SiteRows:
        """The rows at `index`, in that order."""
        return SiteRows(self.columns.take(index), self.values[torch.from_numpy(index)])


@dataclass(frozen=True, eq=False)
class Row:
    """One token's vector at one site, for one request; `values` has shape [width]."""

    request_id: str
    site: Site
    position: int
    generated: bool
    step: int
    monotonic_ns: int
    unix_ns: int
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class Capture:
    """All the rows of a run.

    `rows` keeps each site's rows in the order in which they were delivered. Two captures are
    equal when their requests, sites, positions and values are the same, bit for bit; times,
    steps and metadata are not compared.
    """

    requests: tuple[Request, ...]
    rows: Mapping[Site, SiteRows]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids = [request.id for request in self.requests]
        if len(set(ids)) < len(ids):
            twice = next(name for name in ids if ids.count(name) > 1)
            raise CaptureError(f"request id {twice!r} stands for two requests: ids must be unique")
        for site, rows in self.rows.items():
            owner = rows.columns.request
            if len(owner) and not 0 <= owner.min() <= owner.max() < len(ids):
                raise CaptureError(
                    f"site {site}: a row's request index is outside the {len(ids)} requests"
                )

    @property
    def sites(self) -> tuple[Site, ...]:
        """The captured sites, in execution order."""
        return tuple(sorted(self.rows))

    @property
    def situations(self) -> dict[str, int]:
        """How often what makes row ownership hard arose: see `tapcheck.layout.Situations`.

        Sums over the requests; empty when the backend didn't count.
        """
        counts: dict[str, int] = {}
        for mine in self.metadata.get("situations", {}).values():
            for name, count in mine.items():
                counts[name] = counts.get(name, 0) + count
        return counts

    def __len__(self) -> int:
        return sum(len(rows) for rows in self.rows.values())

    def __getitem__(self, site: str | Site) -> SiteRows:
        """The rows of one site; raises KeyError that lists what was captured."""
        wanted = parse_site(site)
        if wanted not in self.rows:
            captured = ", ".join(map(str, self.sites)) or "nothing"
            raise KeyError(f"site {str(wanted)!r} is not in this capture, which has {captured}")
        return self.rows[wanted]

    def __contains__(self, site: object) -> bool:
        """Whether a site was captured: `"resid_post.0" in capture`."""
        return isinstance(site, str | Site) and parse_site(site) in self.rows

    def request(self, request_id: str) -> Request:
        """The request of that id; raises KeyError that lists the ids."""
        for request in self.requests:
            if request.id == request_id:
                return request
        known = ", ".join(repr(request.id) for request in self.requests)
        raise KeyError(f"request {request_id!r} is not in this capture, which has {known}")

    def row(self, request_id: str, site: str | Site, position: int) -> torch.Tensor:
        """One row's values, shape [width]; raises KeyError when it isn't there exactly once."""
        rows = self[site]
        index = self.requests.index(self.request(request_id))
        found = np.flatnonzero(
            (rows.columns.request == index) & (rows.columns.position == position)
        )
        if len(found) != 1:
            raise KeyError(
                f"request {request_id!r}, site {site}, position {position}: {len(found)} rows"
            )
        return rows.values[int(found[0])]

    def __iter__(self) -> Iterator[Row]:
        """Rows in forward-pass order within each request: position, then layer."""
        return self._rows_at(by_request)

    def in_turns(self) -> Iterator[Row]:
        """Rows as requests take turns: the first position of each, then the second of each, ...

        At a position rows come by layer; each request's own order is that of iteration.
        """
        return self._rows_at(round_robin)

    def _rows_at(self, order: Callable[[Columns], IntArray]) -> Iterator[Row]:
        """All rows, by the order of their (request, position) pairs, then by site."""
        at: dict[tuple[int, int], list[tuple[Site, int]]] = {}
        for site in self.sites:
            columns = self.rows[site].columns
            mine = zip(columns.request.tolist(), columns.position.tolist(), strict=True)
            for index, pair in enumerate(mine):
                at.setdefault(pair, []).append((site, index))
        pairs = sorted(at)
        request, position = np.array(pairs, np.int64).reshape(-1, 2).T
        unknown = np.zeros(len(pairs), np.int64)
        for place in order(Columns(request, position, unknown, unknown, unknown)).tolist():
            for site, index in at[pairs[place]]:
                yield self._row(site, index)

    def _row(self, site: Site, index: int) -> Row:
        columns, values = self.rows[site].columns, self.rows[site].values
        request, position = self.requests[columns.request[index]], int(columns.position[index])
        return Row(
            request_id=request.id,
            site=site,
            position=position,
            generated=position >= request.prompt_length,
            step=int(columns.step[index]),
            monotonic_ns=int(columns.monotonic_ns[index]),
            unix_ns=int(columns.unix_ns[index]),
            values=values[index],
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Capture):
            return NotImplemented
        return (
            self.requests == other.requests
            and set(self.rows) == set(other.rows)
            and all(_same_rows(rows, other.rows[site]) for site, rows in self.rows.items())
        )

    __hash__ = None  # type: ignore[assignment]

    def select(
        self,
        *,
        requests: Iterable[str] | None = None,
        sites: Iterable[str | Site] | None = None,
        select: Iterable[int | str] | None = None,
    ) -> Capture:
        """The capture of these request ids, sites and selectors only; None keeps all.

        Raises KeyError for an id or a site that isn't captured, SelectorError for a bad selector.
        """
        from tapcheck.selectors import parse_selectors, resolve

        chosen = (
            self.requests if requests is None else tuple(self.request(name) for name in requests)
        )
        wanted = self.sites if sites is None else tuple(parse_site(site) for site in sites)
        new_index = {self.requests.index(request): new for new, request in enumerate(chosen)}
        selectors = None if select is None else parse_selectors(select)
        positions = {
            old: None
            if selectors is None
            else np.array(resolve(selectors, self.requests[old]), np.int64)
            for old in new_index
        }
        picked: dict[Site, SiteRows] = {}
        for site in wanted:
            columns = self[site].columns
            keep = np.zeros(len(columns), dtype=bool)
            for old, wanted_positions in positions.items():
                mine = columns.request == old
                if wanted_positions is not None:
                    mine &= np.isin(columns.position, wanted_positions)
                keep |= mine
            rows = self[site].take(np.flatnonzero(keep))
            renumbered = np.array([new_index[int(old)] for old in rows.columns.request], np.int64)
            picked[site] = SiteRows(replace(rows.columns, request=renumbered), rows.values)
        ids = {request.id for request in chosen}
        kept = {
            key: {name: value for name, value in self.metadata[key].items() if name in ids}
            for key in _OF_REQUESTS
            if key in self.metadata
        }
        return Capture(chosen, picked, {**self.metadata, **kept})

    def split(self) -> dict[str, Capture]:
        """One capture for each request, by id; `join` puts them back together."""
        return {request.id: self.select(requests=[request.id]) for request in self.requests}


def _same_rows(one: SiteRows, other: SiteRows) -> bool:
    if len(one) != len(other) or one.values.dtype != other.values.dtype:
        return False
    if one.values.shape != other.values.shape:
        return False
    a, b = one.take(by_request(one.columns)), other.take(by_request(other.columns))
    return (
        np.array_equal(a.columns.request, b.columns.request)
        and np.array_equal(a.columns.position, b.columns.position)
        and torch.equal(a.values.view(torch.uint8), b.values.view(torch.uint8))
    )


def join(captures: Sequence[Capture]) -> Capture:
    """One capture of all the requests and sites of `captures`: the inverse of `Capture.split`.

    The parts may share requests (then they must agree on the token ids and bring different rows)
    and needn't have the same sites. Raises CaptureError when two parts hold the same row or
    disagree on a request, a width or a dtype.
    """
    requests: dict[str, Request] = {}
    for capture in captures:
        for request in capture.requests:
            if requests.setdefault(request.id, request) != request:
                raise CaptureError(f"request {request.id!r} has other token ids in another part")
    index_of = {name: index for index, name in enumerate(requests)}
    parts: dict[Site, list[SiteRows]] = {}
    for capture in captures:
        new_index = np.array([index_of[request.id] for request in capture.requests], np.int64)
        for site, rows in capture.rows.items():
            renumbered = new_index[rows.columns.request] if len(rows) else rows.columns.request
            columns = replace(rows.columns, request=renumbered)
            parts.setdefault(site, []).append(SiteRows(columns, rows.values))
    joined = {site: _join_rows(site, parts[site], tuple(requests)) for site in sorted(parts)}
    return Capture(tuple(requests.values()), joined, _joined_metadata(captures))


# The metadata that are kept for each request, by its id.
_OF_REQUESTS = ("cached", "situations")


def _joined_metadata(captures: Sequence[Capture]) -> Mapping[str, Any]:
    """The first part's metadata, with what is kept for each request from all parts."""
    metadata = dict(captures[0].metadata) if captures else {}
    for key in _OF_REQUESTS:
        parts = [capture.metadata[key] for capture in captures if key in capture.metadata]
        if parts:
            metadata[key] = {name: value for part in parts for name, value in part.items()}
    return metadata


def _join_rows(site: Site, parts: Sequence[SiteRows], ids: Sequence[str]) -> SiteRows:
    kinds = {(part.values.dtype, part.values.shape[1]) for part in parts}
    if len(kinds) > 1:
        differ = " and ".join(sorted(f"{dtype} x {width}" for dtype, width in kinds))
        raise CaptureError(f"site {site}: the parts differ in dtype or width: {differ}")
    columns = concatenate([part.columns for part in parts])
    rows = SiteRows(columns, torch.cat([part.values for part in parts])).take(by_request(columns))
    request, position = rows.columns.request, rows.columns.position
    twice = np.flatnonzero((np.diff(request) == 0) & (np.diff(position) == 0))
    if len(twice):
        at = int(twice[0])
        raise CaptureError(
            f"request {ids[request[at]]!r}, site {site}, position {position[at]}: two parts hold "
            "this row"
        )
    return rows
