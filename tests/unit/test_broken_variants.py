"""Code broken on purpose, one way at a time: the property test of its subject must notice."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import test_delivery
import test_interleave
import test_layout
import test_rowstore
import test_selectors
import torch

from tapcheck import interleave, rowstore, runs, selectors, transport
from tapcheck.errors import TapcheckError
from tapcheck.layout import Account, PassKind, Progress, Repeat, Segment, StepLayout
from tapcheck.request import Request
from tapcheck.rowstore import RowStore

Test = Callable[..., None]

DELIVERED = (
    test_rowstore.test_every_selected_row_is_delivered_once_with_its_last_valid_value_and_in_order
)
DRAINS = test_rowstore.test_drains_at_any_time_and_in_any_grouping_deliver_the_same_rows
CACHED = test_rowstore.test_an_account_lists_as_cached_exactly_the_positions_without_rows
HELD = test_rowstore.test_the_bytes_held_are_those_of_passes_with_a_row_that_someone_holds
LIMIT = test_rowstore.test_more_bytes_than_the_limit_are_an_error_and_as_many_are_none
COUNTED = test_layout.test_every_situation_is_counted_as_a_count_row_by_row_does
PACKED = test_delivery.test_a_drain_is_the_same_once_packed_and_unpacked
CAPTURE = test_delivery.test_a_capture_has_exactly_the_rows_that_are_due
GAP = test_delivery.test_a_cached_position_that_is_due_is_an_error_unless_it_is_allowed
RANKS = test_delivery.test_one_bit_that_differs_between_ranks_is_named
TURNS = test_interleave.test_no_request_waits_for_more_than_one_row_of_each_other
OWN_ORDER = test_interleave.test_every_row_has_its_turn_once_and_each_request_keeps_its_order
BACK = test_interleave.test_drained_rows_interleaved_and_put_back_are_as_they_were
LASTING = test_selectors.test_a_range_lasts_exactly_as_long_as_it_answers_alike
RESOLVED = test_selectors.test_resolving_agrees_with_brute_force
REACHED = test_selectors.test_a_candidate_is_selected_at_some_length
KEPT = test_selectors.test_what_resolves_was_a_candidate
PRINTED = test_selectors.test_the_parser_reads_what_the_printer_prints


@dataclass(frozen=True)
class Broken:
    """What `owner.name` is replaced by, and the test that has to fail then."""

    title: str
    test: Test
    owner: Any
    name: str
    replacement: Any


def runs_told_to_nobody(store: RowStore) -> None:
    store._run = None


def with_segments(change: Callable[[Segment], Segment]) -> Callable[..., None]:
    """A `begin_step` that is told other segments than the pass has."""
    begin_step = RowStore.begin_step

    def broken(store: RowStore, step: StepLayout | Repeat, device: torch.device) -> None:
        at = spelled_out(step)
        begin_step(store, replace(at, segments=tuple(map(change, at.segments))), device)

    return broken


def spelled_out(step: StepLayout | Repeat) -> StepLayout:
    return step.layout if isinstance(step, Repeat) else step


def swapped_owners(store: RowStore, step: StepLayout | Repeat, device: torch.device) -> None:
    at = spelled_out(step)
    owners = [segment.owner for segment in reversed(at.segments)]
    pairs = zip(at.segments, owners, strict=True)
    BEGIN_STEP(store, replace(at, segments=tuple(s._replace(owner=o) for s, o in pairs)), device)


def voids_nothing(which: Callable[[Segment], bool]) -> Callable[..., int]:
    """An `advance` after which, for such segments, every earlier row stays."""

    def broken(progress: Progress, segment: Segment, kind: PassKind) -> int:
        end = progress.end
        void_from: int = ADVANCE(progress, segment, kind)
        return end if which(segment) else void_from

    return broken


def with_seen_lengths(change: int) -> Callable[..., Any]:
    """A `drain` that is told the requests ended elsewhere."""
    drain = RowStore.drain

    def broken(store: RowStore, lengths: Mapping[str, int]) -> Any:
        return drain(store, {owner: max(seen + change, 0) for owner, seen in lengths.items()})

    return broken


def forgets_the_end(store: RowStore, key: str) -> Any:
    owner = END(store, key)
    del store._ended[key]
    return owner


def put_by_reference(store: RowStore, site: Any, terms: Any) -> None:
    if store.open:
        store.put_selected(site, store.selected(terms[0]))


def last_rows(picked: Any, rows: int, total_rows: int, device: torch.device) -> slice:
    return slice(total_rows - rows, total_rows)


def all_but_the_last(ranges: Any, start: int, count: int) -> Any:
    return WITHIN(ranges, start, max(count - 1, 1))


def reaches_with(**changes: int) -> Callable[..., Any]:
    """A `_reach` that reads each selector otherwise."""
    reach = selectors._reach
    return lambda one, length: reach(replace(one, **changes), length)


def one_token_longer(request: Request) -> Request:
    return replace(request, generated_token_ids=(0, *request.generated_token_ids))


def with_values(function: Callable[..., Any], change: Callable[[torch.Tensor], Any]) -> Any:
    """A `pack` or another function of a batch whose values were changed on the way."""

    def broken(batch: Any) -> Any:
        values = {site: change(tensor) for site, tensor in batch.values.items()}
        return function(replace(batch, values=values))

    return broken


def without_accounts(data: bytes) -> Any:
    batch = UNPACK(data)
    return replace(batch, accounts=(Account(),) * len(batch.request))


def first_of_each_site(batches: list[Any]) -> Any:
    """A `merge` that takes the ranks to be alike."""
    return MERGE(batches[:1])


def swapped_requests(given: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    swapped = dict(zip(given, reversed([*given.values()]), strict=True))
    return ASSEMBLE(swapped, *args, **kwargs)


def due_but_one(*args: Any) -> Any:
    return tuple(column[:-1] for column in DUE(*args))


def backwards(columns: Any) -> Any:
    return ROUND_ROBIN(columns)[::-1].copy()


BEGIN_STEP, END = RowStore.begin_step, RowStore._end
GATHERED, LASTS = RowStore._gathered, selectors._lasts
VOID, INIT = RowStore._void, RowStore.__init__
ADVANCE, WITHIN = Progress.advance, selectors.within
PACK, UNPACK, MERGE = transport.pack, transport.unpack, transport.merge
ASSEMBLE, DUE = runs.assemble, runs._due
ROUND_ROBIN, BY_REQUEST = interleave.round_robin, interleave.by_request
FORMAT, RESOLVE_MANY = selectors.format_selector, selectors._resolve_many

BROKEN = [
    Broken(
        "positions off by one",
        DELIVERED, RowStore, "begin_step", with_segments(lambda s: s._replace(start=s.start + 1)),
    ),
    Broken("owners swapped", DELIVERED, RowStore, "begin_step", swapped_owners),
    Broken(
        "forced tokens counted as prompt",
        DELIVERED, RowStore, "begin_step",
        with_segments(lambda s: s._replace(prompt_length=s.prompt_length + s.forced, forced=0)),
    ),
    Broken(
        "forced tokens not counted as given",
        COUNTED, RowStore, "begin_step", with_segments(lambda s: s._replace(forced=0)),
    ),
    Broken("padding taken", DELIVERED, rowstore, "_selection", last_rows),
    Broken("rows kept by reference", DELIVERED, RowStore, "put", put_by_reference),
    Broken("last row of a segment lost", DELIVERED, rowstore, "within", all_but_the_last),
    Broken(
        "rejected drafts kept",
        DELIVERED, Progress, "advance", voids_nothing(lambda s: not s.resumed),
    ),
    Broken(
        "rows of a resumed request kept twice",
        DELIVERED, Progress, "advance", voids_nothing(lambda s: s.resumed),
    ),
    Broken(
        "undecided drafts kept after a resume",
        DELIVERED, Progress, "advance",
        lambda progress, s, kind: max(ADVANCE(progress, s, kind), s.start),
    ),
    Broken(
        "one void row kept",
        DELIVERED, RowStore, "_void", lambda store, owner, start: VOID(store, owner, start + 1),
    ),
    Broken(
        "one valid row voided",
        DELIVERED, RowStore, "_void", lambda store, owner, start: VOID(store, owner, start - 1),
    ),
    Broken("last row dropped", DELIVERED, RowStore, "drain", with_seen_lengths(-1)),
    Broken("row after the stop kept", DELIVERED, RowStore, "drain", with_seen_lengths(1)),
    Broken(
        "drained rows gathered from the wrong places",
        DELIVERED, RowStore, "_gathered",
        lambda store, chunks, at, row: GATHERED(store, chunks, at, row[::-1].copy()),
    ),
    Broken("selectors forgotten in a run", DELIVERED, rowstore, "lasts", lambda *_: 99),
    Broken("a run's rows lost", DELIVERED, RowStore, "_end_run", runs_told_to_nobody),
    Broken(
        "a run's passes uncounted", COUNTED, Progress, "decode",
        lambda progress, passes, kind: setattr(progress, "end", progress.end + passes),
    ),
    Broken(
        "a range taken to last", LASTING, selectors, "_lasts",
        lambda reach, position: LASTS(reach, position) + 1,
    ),
    Broken("rows of an ended request taken", DRAINS, RowStore, "_end", forgets_the_end),
    Broken(
        "bytes never given back", HELD, RowStore, "_release", lambda store, held, kept: None
    ),
    Broken(
        "limit ignored",
        LIMIT, RowStore, "__init__",
        lambda store, sites, chosen, limit=0: INIT(store, sites, chosen),
    ),
    Broken("cached positions forgotten", CACHED, Progress, "_jump", lambda progress, start: None),
    Broken(
        "cached positions counted as recomputed",
        COUNTED, Progress, "_recompute", lambda progress, start, stop: stop - start,
    ),
    Broken("stride ignored", REACHED, selectors, "_reach", reaches_with(stride=1)),
    Broken("offset ignored", KEPT, selectors, "_reach", reaches_with(offset=0)),
    Broken(
        "last generated token taken for seen",
        RESOLVED, selectors, "_resolve_many",
        lambda one, request: RESOLVE_MANY(one, one_token_longer(request)),
    ),
    Broken(
        "printer without offset",
        PRINTED, selectors, "format_selector", lambda one: FORMAT(replace(one, offset=0)),
    ),
    Broken("dtype narrowed", PACKED, test_delivery, "pack", with_values(PACK, torch.Tensor.half)),
    Broken(
        "NaN bits lost",
        PACKED, test_delivery, "pack",
        with_values(PACK, lambda v: torch.where(v.isnan(), torch.full_like(v, torch.nan), v)),
    ),
    Broken(
        "rows out of line with their columns",
        PACKED, test_delivery, "pack", with_values(PACK, lambda v: v.flip(0)),
    ),
    Broken("accounts lost", PACKED, test_delivery, "unpack", without_accounts),
    Broken("ranks not compared", RANKS, test_delivery, "merge", first_of_each_site),
    Broken("stages not joined", CAPTURE, test_delivery, "merge", first_of_each_site),
    Broken("requests swapped", CAPTURE, test_delivery, "assemble", swapped_requests),
    Broken("last row due forgotten", CAPTURE, runs, "_due", due_but_one),
    Broken(
        "gaps allowed",
        GAP, test_delivery, "assemble", functools.partial(runs.assemble, allow_cached=True),
    ),
    Broken("a request starves", TURNS, test_interleave, "round_robin", BY_REQUEST),
    Broken("own order lost", OWN_ORDER, test_interleave, "round_robin", backwards),
    Broken("never put back", BACK, test_interleave, "by_request", lambda c: np.arange(len(c))),
]  # fmt: skip

NOTICED = (AssertionError, TapcheckError, pytest.fail.Exception)
INPUTS = [random.Random(number).randbytes(1000) for number in range(200)]


@functools.cache
def runner(test: Test) -> tuple[Callable[[bytes], object], list[BaseException]]:
    """How to run a property test on one input, and where its failures go.

    Hypothesis itself sees none, so it neither prints them nor saves them for the test's next run.
    """
    handle = test.hypothesis  # type: ignore[attr-defined]
    inner = handle.inner_test
    failures: list[BaseException] = []

    @functools.wraps(inner)
    def noting(*args: Any, **kwargs: Any) -> None:
        try:
            inner(*args, **kwargs)
        except NOTICED as failure:
            failures.append(failure)

    handle.inner_test = noting
    fuzz = handle.fuzz_one_input
    handle.inner_test = inner
    return fuzz, failures


def fails(test: Test, data: bytes) -> bool:
    """Whether the property test fails on what Hypothesis makes of these bytes."""
    run, failures = runner(test)
    failures.clear()
    run(data)
    return bool(failures)


@pytest.mark.parametrize("broken", BROKEN, ids=[broken.title for broken in BROKEN])
def test_a_broken_variant_is_noticed_and_what_is_not_broken_passes_on_the_same_input(
    broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broken.owner, broken.name, broken.replacement)
    noticed = next((data for data in INPUTS if fails(broken.test, data)), None)
    monkeypatch.undo()
    assert noticed is not None, "its test passed on every input"
    assert not fails(broken.test, noticed)
