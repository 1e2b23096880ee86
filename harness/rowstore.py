"""The rows held between the step that computes them and the drain that delivers them.

Engine-free: it is told a step layout, is handed tensors, and answers drains.
"""

from __future__ import annotations

import functools
import sys
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from tapcheck.capture import Columns, IntArray
from tapcheck.errors import CaptureError
from tapcheck.layout import Account, Progress, Repeat, StepLayout
from tapcheck.selectors import Selector, lasts, reaches, within
from tapcheck.sites import Site
from tapcheck.transport import RowBatch


@dataclass(eq=False, slots=True)
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
    pinned: bool = False
    values: dict[Site, torch.Tensor] = field(default_factory=dict)
    copied: torch.cuda.Event | None = None


class _Held(NamedTuple):
    """Rows of one request, positions ascending.

    In one chunk they are next to each other from `first` on; in several, each has the row `first`.
    """

    chunks: Sequence[_Chunk]
    first: int
    positions: Sequence[int]


class _Owner:
    """What is held of one request: positions ascend from one `_Held` to the next."""

    __slots__ = ("held", "progress", "reaches")

    def __init__(self, reaches: Sequence[range]) -> None:
        self.reaches = reaches
        self.progress = Progress()
        self.held: list[_Held] = []


@dataclass(eq=False, slots=True)
class _Run:
    """Passes that decode the same requests, each one position further than the last.

    They are kept as one, and told to the owners when the run is over: see `RowStore._end_run`.
    owners: those captured, and for each the row that it has in every chunk, None if it has none.
    last: the last pass that can be part of it. chunks: of each pass, none where nobody has a row.
    """

    first: StepLayout
    owners: Sequence[tuple[_Owner, int | None]]
    selection: slice | torch.Tensor | None
    begun: int
    ahead: int
    last: int
    chunks: list[_Chunk]


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
        self._run: _Run | None = None

    @property
    def open(self) -> bool:
        """Whether a step is open that has selected rows."""
        return self._chunk is not None

    def begin_step(self, step: StepLayout | Repeat, device: torch.device) -> None:
        """Select this step's rows; without any, the step stays closed and nothing is kept."""
        self._chunk = None
        if isinstance(step, Repeat) and self._goes_on(step):
            return
        self._end_run()
        layout = step.layout if isinstance(step, Repeat) else step
        chunk = _Chunk(layout.step, time.monotonic_ns(), time.time_ns())
        kind, ended = layout.kind, self._ended
        picked: list[tuple[int, Sequence[int]]] = []
        row = kept = 0
        for segment in layout.segments:
            key, start, rows, prompt_length = segment[:4]
            if key is not None and rows and key not in ended:
                owner = self._owners.get(key)
                if owner is None:
                    owner = self._owners[key] = _Owner(reaches(self.selectors, prompt_length))
                end = owner.progress.end
                void_from = owner.progress.advance(segment, kind)
                if void_from < end:
                    self._void(owner, void_from)
                positions = within(owner.reaches, start, rows)
                if positions:
                    owner.held.append(_Held((chunk,), kept, positions))
                    picked.append((row - start, positions))
                    kept += len(positions)
            row += rows
        selection = None
        if picked:
            selection = _selection(picked, kept, layout.total_rows, device)
            chunk.rows = chunk.live = kept
            self._chunk, self._selection = chunk, selection
        if isinstance(step, Repeat):
            self._run = self._new_run(step, layout, chunk, selection)

    def _new_run(
        self,
        step: Repeat,
        layout: StepLayout,
        chunk: _Chunk,
        selection: slice | torch.Tensor | None,
    ) -> _Run:
        """The run that begins with this step, whose rows are selected."""
        owners: list[tuple[_Owner, int | None]] = []
        further = sys.maxsize
        for segment in layout.segments:
            owner = None if segment.owner is None else self._owners.get(segment.owner)
            if owner is not None:
                held = owner.held[-1] if owner.held else None
                mine = held is not None and held.chunks[-1] is chunk
                owners.append((owner, held.first if held is not None and mine else None))
                further = min(further, lasts(owner.reaches, segment.start))
                further = further if owner.progress.steady else 0
        chunks = [chunk] if chunk.rows else []
        return _Run(
            step.first, owners, selection, step.ahead, step.ahead, step.ahead + further, chunks
        )

    def _goes_on(self, step: Repeat) -> bool:
        """Whether this step is the next of the run; then it is begun."""
        run = self._run
        if (
            run is None
            or step.first is not run.first
            or step.ahead != run.ahead + 1
            or step.ahead > run.last
        ):
            return False
        run.ahead = step.ahead
        if run.chunks:
            rows = run.chunks[0].rows
            chunk = _Chunk(step.step, time.monotonic_ns(), time.time_ns(), rows, rows)
            run.chunks.append(chunk)
            self._chunk, self._selection = chunk, run.selection
        return True

    def _end_run(self) -> None:
        """Tell the owners of the run's steps after its first, of which they know."""
        run, self._run = self._run, None
        if run is None or run.ahead == run.begun:
            return
        for owner, row in run.owners:
            owner.progress.decode(run.ahead - run.begun, run.first.kind)
            if row is not None:
                start = owner.held.pop().positions[0]
                positions = range(start, start + len(run.chunks))
                owner.held.append(_Held(run.chunks, row, positions))

    def put(self, site: Site, terms: Sequence[torch.Tensor]) -> None:
        """Keep the selected rows of the sum of `terms`, each [total rows, width], as a copy.

        The copy is taken now: fused kernels overwrite these tensors later in the same forward.
        """
        chunk, selection = self._chunk, self._selection
        if chunk is None:
            return
        if selection is not None:
            terms = [self.selected(term) for term in terms]
        if len(terms) == 2:
            rows = terms[0] + terms[1]
        elif isinstance(selection, torch.Tensor) or len(terms) > 2:
            rows = functools.reduce(torch.add, terms)
        else:
            rows = terms[0].clone()  # a view of what will change; an index or a sum is a copy
        self._keep(chunk, site, rows)

    def selected(self, tensor: torch.Tensor) -> torch.Tensor:
        """The selected rows of `tensor`, [total rows, width]: a view where they are adjoining."""
        if self._selection is None:
            return tensor
        if isinstance(self._selection, slice):
            return tensor[self._selection]
        return tensor.index_select(0, self._selection)

    def put_selected(self, site: Site, rows: torch.Tensor) -> None:
        """Keep `rows`, [selected rows, width], which nobody else writes to."""
        if self._chunk is not None:
            self._keep(self._chunk, site, rows)

    def _keep(self, chunk: _Chunk, site: Site, rows: torch.Tensor) -> None:
        if not rows.is_cpu:
            pinned = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            rows = pinned.copy_(rows, non_blocking=True)
            chunk.pinned = True
        if chunk.values.setdefault(site, rows) is not rows:
            raise CaptureError(
                f"site {site} fired twice in step {chunk.step}: its module runs more than once "
                "in a forward pass, so its rows can't be told apart"
            )

    def end_step(self) -> None:
        """Close the step; raises CaptureError when a site did not fire, or too much is held."""
        chunk, self._chunk, self._selection = self._chunk, None, None
        if chunk is None:
            return
        if len(chunk.values) < len(self.sites):
            silent = [site for site in self.sites if site not in chunk.values]
            raise CaptureError(
                f"step {chunk.step} ran without {', '.join(map(str, silent))}: the hook did not "
                "fire, so the module was bypassed (a compiled or fused path?)"
            )
        if chunk.pinned:
            chunk.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            chunk.copied.record()
        if chunk.live:
            chunk.nbytes = 0 if self._run is None else self._run.chunks[0].nbytes
            if not chunk.nbytes:  # not in a run, or its first
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
        chunks: dict[_Chunk, int] = {}
        counts: list[int] = []  # of each request, and then of each row: chunk, row in it, position
        at: list[int] = []
        row: list[int] = []
        position: list[int] = []
        last: tuple[Sequence[_Chunk], list[int]] = ((), [])  # requests of one run share its chunks
        for key, seen in seen_lengths.items():
            owner = self._end(key)
            accounts.append(owner.progress.close(seen))
            before = len(position)
            for held, first, kept in owner.held:
                positions = kept if kept[-1] < seen else kept[: bisect_left(kept, seen)]
                rows = len(positions)
                if not rows:
                    continue
                if len(held) == 1:
                    at += [chunks.setdefault(held[0], len(chunks))] * rows
                    row += range(first, first + rows)
                else:
                    if held is not last[0] or len(last[1]) < rows:
                        last = held, [chunks.setdefault(c, len(chunks)) for c in held[:rows]]
                    at += last[1][:rows]
                    row += [first] * rows
                position += positions
            counts.append(len(position) - before)
        in_chunk = np.array(at, np.int64)
        stamps = [(chunk.step, chunk.monotonic_ns, chunk.unix_ns) for chunk in chunks]
        step, monotonic_ns, unix_ns = np.array(stamps, np.int64).reshape(-1, 3).T
        columns = Columns(
            np.repeat(np.arange(len(counts)), counts),
            np.array(position, np.int64),
            step[in_chunk],
            monotonic_ns[in_chunk],
            unix_ns[in_chunk],
        )
        values = self._gathered(list(chunks), in_chunk, np.array(row, np.int64)) if chunks else {}
        return RowBatch(tuple(seen_lengths), columns, values, tuple(accounts))

    def _gathered(
        self, chunks: Sequence[_Chunk], at: IntArray, row: IntArray
    ) -> dict[Site, torch.Tensor]:
        """The values of rows, by the chunk that each is in and its row there."""
        for chunk in chunks:
            if chunk.copied is not None:
                chunk.copied.synchronize()
        sizes = np.array([chunk.rows for chunk in chunks])
        if 2 * len(at) < sizes.sum():  # what other requests still hold would be copied too
            breaks = np.flatnonzero((np.diff(at) != 0) | (np.diff(row) != 1)) + 1
            bounds = zip([0, *breaks.tolist()], [*breaks.tolist(), len(at)], strict=True)
            slices = [
                (chunks[int(at[start])], slice(int(row[start]), int(row[stop - 1]) + 1))
                for start, stop in bounds
            ]
            return {
                site: torch.cat([chunk.values[site][rows] for chunk, rows in slices])
                for site in self.sites
            }
        index = (np.cumsum(sizes) - sizes)[at] + row
        in_order = np.arange(sizes.sum())
        if np.array_equal(index, in_order):
            return {s: torch.cat([chunk.values[s] for chunk in chunks]) for s in self.sites}
        alike = bool((sizes == sizes[0]).all())
        if alike and np.array_equal(index, in_order.reshape(len(chunks), -1).T.reshape(-1)):
            return {  # every request has one row of every step
                s: torch.stack([chunk.values[s] for chunk in chunks], dim=1).flatten(0, 1)
                for s in self.sites
            }
        take = torch.from_numpy(index)
        return {  # a slice of each would cost more than a second copy of all
            s: torch.cat([chunk.values[s] for chunk in chunks]).index_select(0, take)
            for s in self.sites
        }

    def discard(self, owners: Sequence[str]) -> None:
        """Forget the rows of these owners."""
        for owner in owners:
            self._end(owner)

    def clear(self) -> None:
        """Forget every row."""
        self._owners, self._chunk, self._selection, self._run = {}, None, None, None
        self.held_bytes = 0

    def _end(self, key: str) -> _Owner:
        """Take an owner out; rows of a forward pass still in flight won't come in."""
        self._end_run()
        self._ended[key] = None
        if len(self._ended) > _ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]
        owner = self._owners.pop(key, None) or _Owner(())
        for held in owner.held:
            self._release(held, 0)
        return owner

    def _void(self, owner: _Owner, start: int) -> None:
        """Drop the owner's rows from position `start` on."""
        while owner.held and owner.held[-1].positions[-1] >= start:
            held = owner.held.pop()
            kept = bisect_left(held.positions, start)
            self._release(held, kept)
            if kept:
                chunks = held.chunks if len(held.chunks) == 1 else held.chunks[:kept]
                owner.held.append(_Held(chunks, held.first, held.positions[:kept]))

    def _release(self, held: _Held, kept: int) -> None:
        """Let go of all but the first `kept` rows."""
        one = len(held.chunks) == 1
        for chunk in held.chunks if one else held.chunks[kept:]:
            chunk.live -= len(held.positions) - kept if one else 1
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


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.3g} MiB"
