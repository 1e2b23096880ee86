"""Faults of a running engine's taps: rows are taken wrongly while the engine generates.

They break every tap of this process, of any backend that runs in it: an engine whose core is in
another process is not reached. What each does to the rows is what the fault of `FAULTS` that it is
`named` after does to a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tapcheck.errors import CaptureError
from tapcheck.rowstore import RowStore
from tapcheck.sites import Site

Terms = Sequence[torch.Tensor]
Put = Callable[[RowStore, Site, Terms], None]

_put = RowStore.put


@dataclass(frozen=True)
class LiveFault:
    """A mistake that a tap makes while the engine runs.

    `put(store, site, terms)` takes the rows of one step in the place of `RowStore.put`: the site's
    value is the sum of the terms, each [rows, width], the update first and then the stream that it
    is added to. `named` is the fault as which a diagnosis should name it, and `points` are those
    to capture for that.
    """

    name: str
    description: str
    named: str
    points: tuple[str, ...]
    put: Put


LIVE_FAULTS: dict[str, LiveFault] = {}


@contextmanager
def broken_taps(name: str) -> Iterator[LiveFault]:
    """While it is open, captures of this process have the fault `name` of LIVE_FAULTS.

    Rows that were taken before keep their values. Raises CaptureError for an unknown name, and
    where taps are broken already.
    """
    if name not in LIVE_FAULTS:
        raise CaptureError(f"no live fault {name!r}: there are {', '.join(LIVE_FAULTS)}")
    if RowStore.put is not _put:
        raise CaptureError("the taps of this process are broken already: one live fault at a time")
    fault = LIVE_FAULTS[name]
    RowStore.put = fault.put  # type: ignore[assignment, method-assign]
    try:
        yield fault
    finally:
        RowStore.put = _put  # type: ignore[method-assign]


def _fault(named: str, *points: str) -> Callable[[Put], Put]:
    """Register a fault under the function's name, described by its docstring."""

    def register(put: Put) -> Put:
        description = " ".join((put.__doc__ or "").split())
        LIVE_FAULTS[put.__name__] = LiveFault(put.__name__, description, named, points, put)
        return put

    return register


_SUMS = ("resid_mid", "mlp_out", "resid_post")


@_fault("missing_residual", *_SUMS)
def residual_left_out(store: RowStore, site: Site, terms: Terms) -> None:
    """Where a layer returns an update and the stream, only the update is taken."""
    _put(store, site, terms[:1])


@_fault("doubled_residual", *_SUMS)
def summed_once_more(store: RowStore, site: Site, terms: Terms) -> None:
    """The stream is added to what holds it already, as to a layer that returns it finished."""
    _put(store, site, [*terms, *terms[1:]])


@_fault("shifted_rows", "resid_post")
def wrong_row_offset(store: RowStore, site: Site, terms: Terms) -> None:
    """Each row of a step is that of the row before it, and its first the step's last."""
    _put(store, site, [term.roll(1, dims=0) for term in terms])


@_fault("one_shard", "resid_post")
def one_rank_s_shard(store: RowStore, site: Site, terms: Terms) -> None:
    """Only the first half of the features is there, as before two ranks' parts are gathered."""
    shard = torch.arange(terms[0].shape[-1], device=terms[0].device) < terms[0].shape[-1] // 2
    _put(store, site, [term * shard for term in terms])


@_fault("scaled", "resid_post")
def twice_as_large(store: RowStore, site: Site, terms: Terms) -> None:
    """A factor of two is applied, as an embedding or residual multiplier once too often."""
    _put(store, site, [2 * term for term in terms])


@_fault("constant_tap", "resid_post")
def not_copied(store: RowStore, site: Site, terms: Terms) -> None:
    """Rows are handed out in one buffer, which each step fills anew, as a replayed graph does."""
    if not store.open:
        return
    rows = store.selected(sum(terms[1:], terms[0]))
    buffers = vars(store).setdefault("_live_fault_buffers", {})
    held = buffers.get(site)
    if held is None or len(held) < len(rows):
        held = buffers[site] = torch.empty_like(rows)
    store.put_selected(site, held[: len(rows)].copy_(rows))


@_fault("constant_tap", "resid_post")
def first_row_only(store: RowStore, site: Site, terms: Terms) -> None:
    """Every row of a step holds its first."""
    _put(store, site, [term[:1].expand_as(term) for term in terms])


@_fault("dead_tap", "resid_post")
def never_written(store: RowStore, site: Site, terms: Terms) -> None:
    """The rows are zeros: a buffer that no step writes."""
    _put(store, site, [torch.zeros_like(term) for term in terms])
