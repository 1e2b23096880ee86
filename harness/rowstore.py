"""The rows held between the step that computes them and the drain that delivers them.

Engine-free: it is told a step layout, is handed tensors, and answers drains.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from tapcheck.capture import Columns, IntArray
from tapcheck.errors import CaptureError
from tapcheck.interleave import by_request
from tapcheck.layout import Account, PassKind, Progress, Segment, StepLayout
from tapcheck.selectors import Selector, reaches, within
from tapcheck.sites import Site
from tapcheck.transport import RowBatch


@dataclass(eq=False)
class _Chunk:
    """The selected rows of one step: `values[site]` has shape [rows, width].

    live: rows that some request still holds; the others are void, but share its tensors.
    """

    step: int
    monotonic_ns: int
    unix_ns: int
    rows: int = 0
    live: int = 0
    nbytes: int = 0
    values: dict[Site, torch.Tensor] = field(default_factory=dict)
    copied: torch.cuda.Event | None = None


class _Held(NamedTuple):
    """Rows of one request in one chunk: next to each other from `first` on, positions ascending."""

    chunk: _Chunk
    first: int
    positions: Sequence[int]


class _Owner:
    """What is held of one request: positions ascend from one `_Held` to the next."""

    __slots__ = ("held", "progress", "reaches")

    def __init__(self, reaches: Sequence[range]) -> None:
        self.reaches = reaches
        self.progress = Progress()
        self.held: list[_Held] = []


# How many ended owners are remembered, so that a forward pass still in flight when its request
# ended can't leave rows behind; it is at most a few steps late.
_ENDED_REMEMBERED = 4096


class RowStore:
    """Keeps a copy of every selected row until its request is drained or discarded.

    Rows that turn out void are dropped when the engine computes their positions anew: those of
    rejected drafts, and those of a request that was preempted. Rows on an accelerator are gathered
    there and copied to pinned memory without blocking; a drain waits once for each step. More
    than `max_bytes` of rows that nobody drained are an error.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        selectors: Sequence[Selector],
        max_bytes: int = sys.maxsize,
    ) -> None:
        self.sites = tuple(sites)
        self.selectors = tuple(selectors)
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._owners: dict[str, _Owner] = {}
        self._ended: dict[str, None] = {}
        self._chunk: _Chunk | None = None
        # The selected rows of the open step: all of them, a run of them, or their indexes.
        self._selection: slice | torch.Tensor | None = None

    @property
    def open(self) -> bool:
        """Whether a step is open that has selected rows."""
        return self._chunk is not None

    def begin_step(self, layout: StepLayout, device: torch.device) -> None:
        """Select this step's rows; without any, the step stays closed and nothing is kept."""
        self._chunk = None
        chunk = _Chunk(layout.step, time.monotonic_ns(), time.time_ns())
        kind = layout.kind
        picked: list[tuple[int, Sequence[int]]] = []
        row = 0
        for segment in layout.segments:
            if segment.owner is not None and segment.rows and segment.owner not in self._ended:
                positions = self._advance(segment.owner, segment, kind, chunk)
                if positions:
                    picked.append((row - segment.start, positions))
            row += segment.rows
        if picked:
            self._selection = _selection(picked, chunk.rows, layout.total_rows, device)
            self._chunk = chunk

    def _advance(self, key: str, segment: Segment, kind: PassKind, chunk: _Chunk) -> Sequence[int]:
        """Drop what this segment makes void; returns the positions whose rows are to be kept."""
        owner = self._owners.get(key)
        if owner is None:
            owner = self._owners[key] = _Owner(reaches(self.selectors, segment.prompt_length))
        end = owner.progress.end
        void_from = owner.progress.advance(segment, kind)
        if void_from < end:
            self._void(owner, void_from)
        positions = within(owner.reaches, segment.start, segment.rows)
        if positions:
            owner.held.append(_Held(chunk, chunk.rows, positions))
            chunk.rows += len(positions)
            chunk.live += len(positions)
        return positions

    def put(self, site: Site, terms: Sequence[torch.Tensor]) -> None:
        """Keep the selected rows of the sum of `terms`, each [total rows, width], as a copy.

        The copy is taken now: fused kernels overwrite these tensors later in the same forward.
        """
        if self._chunk is None:
            return
        rows = self.selected(terms[0])
        for term in terms[1:]:
            rows = rows + self.selected(term)
        if len(terms) == 1 and not isinstance(self._selection, torch.Tensor):
            rows = rows.clone()  # a view of what will change; an index or a sum is a copy already
        self.put_selected(site, rows)

    def selected(self, tensor: torch.Tensor) -> torch.Tensor:
        """The selected rows of `tensor`, [total rows, width]: a view where they are adjoining."""
        if self._selection is None:
            return tensor
        if isinstance(self._selection, slice):
            return tensor[self._selection]
        return tensor.index_select(0, self._selection)

    def put_selected(self, site: Site, rows: torch.Tensor) -> None:
        """Keep `rows`, [selected rows, width], which nobody else writes to."""
        chunk = self._chunk
        if chunk is None:
            return
        if site in chunk.values:
            raise CaptureError(
                f"site {site} fired twice in step {chunk.step}: its module runs more than once "
                "in a forward pass, so its rows can't be told apart"
            )
        if rows.device.type != "cpu":
            pinned = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            rows = pinned.copy_(rows, non_blocking=True)
        chunk.values[site] = rows

    def end_step(self) -> None:
        """Close the step; raises CaptureError when a site did not fire, or too much is held."""
        chunk, self._chunk, self._selection = self._chunk, None, None
        if chunk is None:
            return
        silent = [site for site in self.sites if site not in chunk.values]
        if silent:
            raise CaptureError(
                f"step {chunk.step} ran without {', '.join(map(str, silent))}: the hook did not "
                "fire, so the module was bypassed (a compiled or fused path?)"
            )
        if any(rows.is_pinned() for rows in list(chunk.values.values())[:1]):
            chunk.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            chunk.copied.record()
        if chunk.live:
            chunk.nbytes = sum(rows.nbytes for rows in chunk.values.values())
            self.held_bytes += chunk.nbytes
        if self.held_bytes > self.max_bytes:
            raise CaptureError(
                f"step {chunk.step}: the rows of {len(self)} requests that nobody drained take "
                f"{_mib(self.held_bytes)}, over the limit of {_mib(self.max_bytes)} a worker. "
                "Collect them sooner, select fewer rows or sites, or raise max_buffer_bytes"
            )

    def drain(self, seen_lengths: Mapping[str, int]) -> RowBatch:
        """Hand over and forget the rows of these owners, ordered by request and position.

        `seen_lengths` gives for each owner how many positions of it a forward pass saw; rows
        beyond (a rejected draft, an extra forward after the stop) are dropped.
        """
        accounts: list[Account] = []
        parts: dict[_Chunk, list[tuple[int, int, Sequence[int]]]] = {}
        for number, (key, seen) in enumerate(seen_lengths.items()):
            owner = self._end(key)
            accounts.append(owner.progress.close(seen))
            for chunk, first, positions in owner.held:
                due = (
                    positions if positions[-1] < seen else positions[: bisect_left(positions, seen)]
                )
                if due:
                    parts.setdefault(chunk, []).append((number, first, due))
        for entries in parts.values():
            entries.sort(key=lambda entry: entry[1])
        columns = _columns(parts)
        order = by_request(columns)
        for chunk in parts:
            if chunk.copied is not None:
                chunk.copied.synchronize()
        take = torch.from_numpy(order)
        in_order = np.array_equal(order, np.arange(len(columns)))
        rows_of = [(chunk, _rows(chunk, entries)) for chunk, entries in parts.items()]
        values = {}
        for site in self.sites if parts else ():
            rows = torch.cat([chunk.values[site][rows] for chunk, rows in rows_of])
            values[site] = rows if in_order else rows.index_select(0, take)
        return RowBatch(tuple(seen_lengths), columns.take(order), values, tuple(accounts))

    def discard(self, owners: Sequence[str]) -> None:
        """Forget the rows of these owners."""
        for owner in owners:
            self._end(owner)

    def clear(self) -> None:
        """Forget every row."""
        self._owners, self._chunk, self._selection, self.held_bytes = {}, None, None, 0

    def _end(self, key: str) -> _Owner:
        """Take an owner out; rows of a forward pass still in flight won't come in."""
        self._ended[key] = None
        if len(self._ended) > _ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        owner = self._owners.pop(key, None) or _Owner(())
        for chunk, _, positions in owner.held:
            self._release(chunk, len(positions))
        return owner

    def _void(self, owner: _Owner, start: int) -> None:
        """Drop the owner's rows from position `start` on."""
        while owner.held and owner.held[-1].positions[-1] >= start:
            chunk, first, positions = owner.held.pop()
            kept = positions[: bisect_left(positions, start)]
            self._release(chunk, len(positions) - len(kept))
            if kept:
                owner.held.append(_Held(chunk, first, kept))

    def _release(self, chunk: _Chunk, rows: int) -> None:
        chunk.live -= rows
        if not chunk.live:
            self.held_bytes -= chunk.nbytes

    def __len__(self) -> int:
        """How many owners were seen that were neither drained nor discarded."""
        return len(self._owners)


def _selection(
    picked: Sequence[tuple[int, Sequence[int]]], rows: int, total_rows: int, device: torch.device
) -> slice | torch.Tensor | None:
    """How to take the picked rows: (what to add to a position to get its row, positions) pairs."""
    if rows == total_rows:
        return None
    first = picked[0][0] + picked[0][1][0]
    if picked[-1][0] + picked[-1][1][-1] - first + 1 == rows:
        return slice(first, first + rows)
    index = np.concatenate([np.asarray(positions) + shift for shift, positions in picked])
    return torch.from_numpy(index).to(device, non_blocking=True)


def _columns(parts: Mapping[_Chunk, Sequence[tuple[int, int, Sequence[int]]]]) -> Columns:
    """The columns of the entries of every chunk, one chunk after the other."""
    counts = [len(due) for entries in parts.values() for _, _, due in entries]
    number = [number for entries in parts.values() for number, _, _ in entries]
    stamps = [(chunk.step, chunk.monotonic_ns, chunk.unix_ns) for chunk in parts]
    rows = [sum(len(due) for _, _, due in entries) for entries in parts.values()]
    table = np.repeat(np.array(stamps, np.int64).reshape(-1, 3), rows, axis=0)
    step, monotonic_ns, unix_ns = table.T.copy()
    request = np.repeat(np.array(number, np.int64), counts)
    positions = (due for entries in parts.values() for _, _, due in entries)
    position = np.fromiter(chain.from_iterable(positions), np.int64, sum(counts))
    return Columns(request, position, step, monotonic_ns, unix_ns)


def _rows(chunk: _Chunk, entries: Sequence[tuple[int, int, Sequence[int]]]) -> slice | torch.Tensor:
    """Which rows of the chunk the entries are; they are sorted by where they are in it."""
    if sum(len(due) for _, _, due in entries) == chunk.rows:
        return slice(None)
    ranges: list[IntArray] = [np.arange(first, first + len(due)) for _, first, due in entries]
    return torch.from_numpy(np.concatenate(ranges))


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.3g} MiB"
