"""The rows held between the step that computes them and the drain that delivers them.

Engine-free: it is told a step layout, is handed tensors, and answers drains.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tapcheck.capture import Columns, IntArray
from tapcheck.errors import CaptureError
from tapcheck.layout import StepLayout
from tapcheck.selectors import Selector, candidates
from tapcheck.sites import Site
from tapcheck.transport import RowBatch


@dataclass(eq=False)
class _Chunk:
    """The selected rows of one step: `values[site]` has shape [rows, width]."""

    step: int
    rows: int
    monotonic_ns: int
    unix_ns: int
    values: dict[Site, torch.Tensor] = field(default_factory=dict)
    copied: torch.cuda.Event | None = None


@dataclass(frozen=True, eq=False)
class _Held:
    """The rows of one request in one chunk: they are next to each other, from `first` on."""

    chunk: _Chunk
    first: int
    position: IntArray


# How many ended owners are remembered, so that a forward pass still in flight when its request
# ended can't leave rows behind; it is at most a few steps late.
_ENDED_REMEMBERED = 4096


class RowStore:
    """Keeps a copy of every selected row until its request is drained or discarded.

    Rows on an accelerator are gathered there and copied to pinned memory without blocking; a
    drain waits once for each step.
    """

    def __init__(self, sites: Sequence[Site], selectors: Sequence[Selector]) -> None:
        self.sites = tuple(sites)
        self.selectors = tuple(selectors)
        self._held: dict[str, list[_Held]] = {}
        self._ended: dict[str, None] = {}
        self._chunk: _Chunk | None = None
        self._index: torch.Tensor | None = None
        self._takes_all = False

    @property
    def open(self) -> bool:
        """Whether a step is open that has selected rows."""
        return self._chunk is not None

    def begin_step(self, layout: StepLayout, device: torch.device) -> None:
        """Select this step's rows; without any, the step stays closed and nothing is kept."""
        self._chunk = None
        chunk = _Chunk(layout.step, 0, time.monotonic_ns(), time.time_ns())
        picked: list[IntArray] = []
        first_row = 0
        for segment in layout.segments:
            start, owner = segment.start, segment.owner
            if owner is not None and owner not in self._ended:
                mask = candidates(self.selectors, start, segment.rows, segment.prompt_length)
                offsets = mask.nonzero()[0]
                if len(offsets):
                    picked.append(first_row + offsets)
                    held = _Held(chunk, chunk.rows, start + offsets)
                    self._held.setdefault(owner, []).append(held)
                    chunk.rows += len(offsets)
            first_row += segment.rows
        if not picked:
            return
        self._takes_all = chunk.rows == layout.total_rows
        self._index = torch.from_numpy(np.concatenate(picked)).to(device, non_blocking=True)
        self._chunk = chunk

    def put(self, site: Site, terms: Sequence[torch.Tensor]) -> None:
        """Keep the selected rows of the sum of `terms`, each [total rows, width], as a copy.

        The copy is taken now: fused kernels overwrite these tensors later in the same forward.
        """
        if self._chunk is None:
            return
        rows = self.selected(terms[0])
        for term in terms[1:]:
            rows = rows + self.selected(term)
        self.put_selected(site, rows.clone() if rows is terms[0] else rows)

    def selected(self, tensor: torch.Tensor) -> torch.Tensor:
        """The selected rows of `tensor`, [total rows, width]; `tensor` itself when all are."""
        if self._takes_all or self._index is None:
            return tensor
        return tensor.index_select(0, self._index)

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
        """Close the step; raises CaptureError when a site did not fire in it."""
        chunk, self._chunk, self._index = self._chunk, None, None
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

    def drain(self, seen_lengths: Mapping[str, int]) -> RowBatch:
        """Hand over and forget the rows of these owners, ordered by request and position.

        `seen_lengths` gives for each owner how many positions of it a forward pass saw; rows
        beyond (an extra forward after the stop) are dropped. A position that was computed twice
        (preempted, then recomputed) is delivered once, as the last step computed it.
        """
        owners = tuple(seen_lengths)
        parts: dict[_Chunk, list[tuple[int, _Held]]] = {}
        for number, owner in enumerate(owners):
            for held in self._end(owner):
                parts.setdefault(held.chunk, []).append((number, held))
        for entries in parts.values():
            entries.sort(key=lambda entry: entry[1].first)
        columns = _columns(parts)
        order = _last_of_each(columns, np.array([*seen_lengths.values()], np.int64))
        for chunk in parts:
            if chunk.copied is not None:
                chunk.copied.synchronize()
        take = torch.from_numpy(order)
        in_order = np.array_equal(order, np.arange(len(columns)))
        values = {}
        for site in self.sites if parts else ():
            rows = torch.cat([_rows_of(c.values[site], c, held) for c, held in parts.items()])
            values[site] = rows if in_order else rows.index_select(0, take)
        return RowBatch(owners, columns.take(order), values)

    def discard(self, owners: Sequence[str]) -> None:
        """Forget the rows of these owners."""
        for owner in owners:
            self._end(owner)

    def _end(self, owner: str) -> list[_Held]:
        """Take an owner's rows out; rows of a forward pass still in flight won't come in."""
        self._ended[owner] = None
        if len(self._ended) > _ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return self._held.pop(owner, [])

    def __len__(self) -> int:
        """How many owners have rows that were not drained."""
        return len(self._held)


def _columns(parts: Mapping[_Chunk, Sequence[tuple[int, _Held]]]) -> Columns:
    """The columns of the entries of every chunk, one chunk after the other."""
    entries = [entry for chunk_entries in parts.values() for entry in chunk_entries]
    counts = [len(held.position) for _, held in entries]
    chunks = np.array(
        [(h.chunk.step, h.chunk.monotonic_ns, h.chunk.unix_ns) for _, h in entries], np.int64
    ).reshape(-1, 3)
    step, monotonic_ns, unix_ns = np.repeat(chunks, counts, axis=0).T.copy()
    return Columns(
        request=np.repeat(np.array([number for number, _ in entries], np.int64), counts),
        position=np.concatenate([np.zeros(0, np.int64), *(held.position for _, held in entries)]),
        step=step,
        monotonic_ns=monotonic_ns,
        unix_ns=unix_ns,
    )


def _rows_of(
    values: torch.Tensor, chunk: _Chunk, entries: Sequence[tuple[int, _Held]]
) -> torch.Tensor:
    """The rows of the entries, which are sorted by where they are in the chunk."""
    counts = [len(held.position) for _, held in entries]
    if sum(counts) == chunk.rows:
        return values
    ranges = [
        np.arange(held.first, held.first + n) for (_, held), n in zip(entries, counts, strict=True)
    ]
    return values[torch.from_numpy(np.concatenate(ranges))]


def _last_of_each(columns: Columns, seen_lengths: IntArray) -> IntArray:
    """Indexes of the rows to deliver: seen, the last of each position, by request and position."""
    order = np.lexsort((columns.step, columns.position, columns.request))
    request, position = columns.request[order], columns.position[order]
    is_last = np.ones(len(order), dtype=bool)
    is_last[:-1] = (np.diff(request) != 0) | (np.diff(position) != 0)
    kept: IntArray = order[is_last & (position < seen_lengths[request])]
    return kept
