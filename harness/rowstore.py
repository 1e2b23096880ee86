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
    """The rows of one request in one chunk."""

    chunk: _Chunk
    index: IntArray
    position: IntArray


class RowStore:
    """Keeps a copy of every selected row until its request is drained or discarded.

    Rows on an accelerator are gathered there and copied to pinned memory without blocking; a
    drain waits once for each step.
    """

    def __init__(self, sites: Sequence[Site], selectors: Sequence[Selector]) -> None:
        self.sites = tuple(sites)
        self.selectors = tuple(selectors)
        self._held: dict[str, list[_Held]] = {}
        self._chunk: _Chunk | None = None
        self._index: torch.Tensor | None = None
        self._takes_all = False

    @property
    def open(self) -> bool:
        """Whether a step is open that has selected rows."""
        return self._chunk is not None

    def begin_step(self, layout: StepLayout, device: torch.device) -> None:
        """Select this step's rows; without any, the step stays closed and nothing is kept."""
        picked: list[IntArray] = []
        first_row, count = 0, 0
        held: list[tuple[str, IntArray, IntArray]] = []
        for segment in layout.segments:
            if segment.owner is not None:
                mask = candidates(
                    self.selectors, segment.start, segment.rows, segment.prompt_length
                )
                offsets = np.flatnonzero(mask)
                if len(offsets):
                    picked.append(first_row + offsets)
                    in_chunk = np.arange(count, count + len(offsets), dtype=np.int64)
                    held.append((segment.owner, in_chunk, segment.start + offsets))
                    count += len(offsets)
            first_row += segment.rows
        self._chunk = None
        if not count:
            return
        chunk = _Chunk(layout.step, count, time.monotonic_ns(), time.time_ns())
        for owner, in_chunk, position in held:
            self._held.setdefault(owner, []).append(_Held(chunk, in_chunk, position))
        self._takes_all = count == layout.total_rows
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
        by_chunk: dict[int, list[tuple[int, _Held]]] = {}
        chunks: dict[int, _Chunk] = {}
        for number, owner in enumerate(owners):
            for held in self._held.pop(owner, []):
                chunks[id(held.chunk)] = held.chunk
                by_chunk.setdefault(id(held.chunk), []).append((number, held))
        if not chunks:
            return RowBatch(owners, _columns([], [], []), {})
        parts = []
        for name, entries in by_chunk.items():
            request = np.concatenate([np.full(len(h.index), n, np.int64) for n, h in entries])
            position = np.concatenate([held.position for _, held in entries])
            index = np.concatenate([held.index for _, held in entries])
            parts.append((chunks[name], request, position, index))
        columns = _columns(
            [chunk for chunk, *_ in parts],
            [request for _, request, _, _ in parts],
            [position for _, _, position, _ in parts],
        )
        order = _last_of_each(columns, np.array([seen_lengths[owner] for owner in owners]))
        for chunk, *_ in parts:
            if chunk.copied is not None:
                chunk.copied.synchronize()
        take = torch.from_numpy(order)
        in_order = len(order) == len(columns) and bool((order == np.arange(len(order))).all())
        values = {}
        for site in self.sites:
            rows = torch.cat(
                [
                    chunk.values[site]
                    if len(index) == chunk.rows and bool((np.diff(index) == 1).all())
                    else chunk.values[site][torch.from_numpy(index)]
                    for chunk, _, _, index in parts
                ]
            )
            values[site] = rows if in_order else rows.index_select(0, take)
        return RowBatch(owners, columns.take(order), values)

    def discard(self, owners: Sequence[str]) -> None:
        """Forget the rows of these owners."""
        for owner in owners:
            self._held.pop(owner, None)

    def __len__(self) -> int:
        """How many owners have rows that were not drained."""
        return len(self._held)


def _columns(
    chunks: Sequence[_Chunk], requests: Sequence[IntArray], positions: Sequence[IntArray]
) -> Columns:
    counts = [len(position) for position in positions]

    def spread(name: str) -> IntArray:
        return np.repeat(np.array([getattr(c, name) for c in chunks], np.int64), counts)

    empty = np.zeros(0, np.int64)
    return Columns(
        request=np.concatenate([empty, *requests]),
        position=np.concatenate([empty, *positions]),
        step=spread("step"),
        monotonic_ns=spread("monotonic_ns"),
        unix_ns=spread("unix_ns"),
    )


def _last_of_each(columns: Columns, seen_lengths: IntArray) -> IntArray:
    """Indexes of the rows to deliver: seen, the last of each position, by request and position."""
    order = np.lexsort((columns.step, columns.position, columns.request))
    request, position = columns.request[order], columns.position[order]
    is_last = np.ones(len(order), dtype=bool)
    is_last[:-1] = (np.diff(request) != 0) | (np.diff(position) != 0)
    kept: IntArray = order[is_last & (position < seen_lengths[request])]
    return kept
