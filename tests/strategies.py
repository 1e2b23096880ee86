"""Hypothesis strategies for requests, selectors, sites, rows and captures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from hypothesis import strategies as st

from tapcheck.capture import COLUMN_NAMES, VALUE_DTYPES, Capture, Columns, SiteRows
from tapcheck.layout import SITUATIONS, Account, Situations
from tapcheck.request import Request
from tapcheck.selectors import Selector, reaches, within
from tapcheck.sites import Site, all_sites
from tapcheck.transport import RowBatch

token_ids = st.integers(0, 200_000)
request_ids = st.text(min_size=1, max_size=6)
dtypes = st.sampled_from(list(VALUE_DTYPES.values()))
sites = st.sampled_from(all_sites(3))

_bounds = st.none() | st.integers(-9, 9)
_offsets = st.just(0) | st.integers(-9, 9)


@st.composite
def requests(draw: st.DrawFn, ids: st.SearchStrategy[str] = request_ids) -> Request:
    prompt = draw(st.lists(token_ids, min_size=1, max_size=8))
    return Request(draw(ids), tuple(prompt), tuple(draw(st.lists(token_ids, max_size=8))))


selectors = st.one_of(
    st.builds(Selector, part=st.just("position"), index=st.integers(0, 17)),
    st.builds(
        Selector,
        part=st.sampled_from(["prompt", "generated"]),
        index=st.integers(-9, 9),
        offset=_offsets,
    ),
    st.builds(
        Selector,
        part=st.sampled_from(["prompt", "generated"]),
        start=_bounds,
        stop=_bounds,
        offset=_offsets,
        stride=st.integers(1, 4),
    ),
    st.builds(Selector, part=st.just("all"), offset=_offsets, stride=st.integers(1, 4)),
)


@st.composite
def values(draw: st.DrawFn, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of any bit patterns, NaN and infinities included."""
    size = rows * width * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    return torch.tensor(list(raw), dtype=torch.uint8).view(dtype).reshape(rows, width)


@st.composite
def columns_at(draw: st.DrawFn, pairs: list[tuple[int, int]]) -> Columns:
    """Columns of the given (request, position) pairs, with any step and times."""
    named = dict(zip(COLUMN_NAMES, np.array(pairs, np.int64).reshape(-1, 2).T, strict=False))
    for name in COLUMN_NAMES[2:]:
        numbers = st.lists(st.integers(0, 2**62), min_size=len(pairs), max_size=len(pairs))
        named[name] = np.array(draw(numbers), np.int64)
    return Columns(**named)


@st.composite
def site_rows(draw: st.DrawFn, lengths: list[int]) -> SiteRows:
    """Distinct rows, in any order, of requests whose seen lengths are `lengths`."""
    every = [(request, at) for request, length in enumerate(lengths) for at in range(length)]
    pairs = draw(st.lists(st.sampled_from(every), unique=True, max_size=8)) if every else []
    tensor = draw(values(len(pairs), draw(st.integers(0, 3)), draw(dtypes)))
    return SiteRows(draw(columns_at(pairs)), tensor)


@st.composite
def captures(draw: st.DrawFn, ids: st.SearchStrategy[str] = request_ids) -> Capture:
    """A capture of up to three requests and four sites; each site has rows of its own."""
    of_whom = draw(st.lists(requests(ids), max_size=3, unique_by=lambda request: request.id))
    where: list[Site] = draw(st.lists(sites, max_size=4, unique=True))
    lengths = [request.seen_length for request in of_whom]
    rows = {site: draw(site_rows(lengths)) for site in where}
    return Capture(tuple(of_whom), rows, {"backend": "hf", "dtype": "float32"})


_counts = st.integers(0, 2**40)
accounts = st.builds(
    Account,
    situations=st.builds(Situations, **dict.fromkeys(SITUATIONS, _counts)),
    cached=st.lists(st.tuples(_counts, _counts), max_size=3).map(tuple),
)


@st.composite
def row_batches(draw: st.DrawFn) -> RowBatch:
    """What one worker hands over: the same distinct rows, in any order, at up to four sites."""
    keys = draw(st.lists(request_ids, max_size=3, unique=True))
    every = st.tuples(st.integers(0, len(keys) - 1), st.integers(0, 2**40))
    pairs = draw(st.lists(every, unique=True, max_size=6)) if keys else []
    where: list[Site] = draw(st.lists(sites, max_size=4, unique=True))
    tensors = {
        site: draw(values(len(pairs), draw(st.integers(0, 3)), draw(dtypes))) for site in where
    }
    of_whom = tuple(draw(accounts) for _ in keys)
    return RowBatch(tuple(keys), draw(columns_at(pairs)), tensors, of_whom)


def candidates(
    chosen: Iterable[Selector], start: int, count: int, prompt_length: int
) -> Sequence[int]:
    """Which of the `count` positions from `start` on a row store keeps under these selectors."""
    return within(reaches(chosen, prompt_length), start, count)
