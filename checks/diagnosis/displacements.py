"""Rows that belong elsewhere: hypotheses about which request or position a site's rows are of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tapcheck.capture import IntArray
from tapcheck.checks.diagnosis.evidence import (
    Case,
    Hypothesis,
    Lookup,
    Predict,
    Rows,
    Sample,
    norms,
)
from tapcheck.checks.numerics import FloatArray
from tapcheck.checks.pairing import widened
from tapcheck.sites import Site

BoolArray = npt.NDArray[np.bool_]

_BLOCK = 2048
# The part of the rows from a position on, or of a forward pass, that fails for all to be shifted.
_MOST = 0.7
_OWNERSHIP = "look at which rows of a batch are given to which request"
_OFFSET = "look for an offset in the step layout, or rows of another step"


@dataclass(frozen=True, eq=False)
class _Healthy:
    """The healthy rows of a sample's site: arrays of shape [rows], distances [sample, rows].

    step: that in which the capture under test took the row of the same request and position.
    distances: of each sampled row from each of these, relative.
    """

    request: IntArray
    position: IntArray
    step: IntArray
    distances: FloatArray


def displaced(case: Case, sample: Sample) -> Iterator[Hypothesis]:
    """Shifts, reversed and wrongly padded prompts, and rows of other requests."""
    if case.truth.width(sample.site) != sample.values.shape[1]:
        return
    request, position = case.truth.owners(sample.site)
    step = case.steps(sample.site, request, position)
    healthy = _Healthy(request, position, step, _distances(case, sample))
    lengths = np.array([r.prompt_length for r in case.expected.requests], np.int64)
    prompt = sample.position < lengths[sample.request]
    yield from _padded(case, sample, lengths, prompt)
    mirrored = np.where(prompt, lengths[sample.request] - 1 - sample.position, sample.position)
    yield Hypothesis(
        "reversed_prompt",
        f"these rows are {sample.site} in reverse: position p of a prompt holds its p-th row "
        "from the end",
        "look for a prompt, or its rows, turned round on the way",
        _predict(sample, sample.request, mirrored, moved=mirrored != sample.position),
    )
    own = np.where(request[None] == sample.request[:, None], healthy.distances, np.inf)
    offsets = position[own.argmin(axis=1)] - sample.position
    common = [int(off) for off, _ in Counter(offsets[offsets != 0].tolist()).most_common(2)]
    for shift in dict.fromkeys([*common, -1, 1]):
        yield _shifted(case, sample, shift)
    yield from _other_request(case, sample, healthy)
    for shift in (-1, 1):
        yield from _offset_in_batch(case, sample, healthy, shift)


def _distances(case: Case, sample: Sample) -> FloatArray:
    values = case.truth.capture.rows[sample.site].values
    mine = sample.values.float()
    blocks = []
    for start in range(0, len(values), _BLOCK):
        block = widened(values[start : start + _BLOCK]).float()
        blocks.append(torch.cdist(mine, block) / norms(block).T)
    return torch.cat(blocks, dim=1).nan_to_num(nan=torch.inf).double().numpy()


def _predict(
    sample: Sample, request: IntArray, position: IntArray, *, moved: BoolArray | None = None
) -> Predict:
    """The healthy rows (request[i], position[i]) of the sample's site, where `moved` says so."""

    def predict(lookup: Lookup) -> Rows | None:
        rows = lookup.at(sample.site, request, position)
        if rows is None or moved is None:
            return rows
        return Rows(rows.values, rows.found & torch.from_numpy(moved))

    return predict


def _padded(
    case: Case, sample: Sample, lengths: IntArray, prompt: BoolArray
) -> Iterator[Hypothesis]:
    """Prompts read from the left edge of a batch that was padded on the left."""
    padding = lengths.max() - lengths[sample.request]
    errors = sample.summary.errors
    # The longest prompt has no padding, so its rows must be right.
    if not prompt.all() or not padding.all() or errors is None:
        return
    late = sample.position - padding
    behind = late >= 0
    longest = case.expected.requests[int(lengths.argmax())]
    yield Hypothesis(
        "wrong_padding_side",
        f"every prompt shorter than the longest, {longest.id!r}, is late by the difference in "
        f"length, and {longest.id!r} is right",
        "count positions from the first token that is no padding",
        _predict(sample, sample.request, late, moved=behind),
        least=min(0.5, 3 / len(sample)),
    )


def _shifted(case: Case, sample: Sample, shift: int) -> Hypothesis:
    by = "one position" if abs(shift) == 1 else f"{abs(shift)} positions"
    side = "late" if shift < 0 else "early"
    neighbour = {-1: "the previous position", 1: "the next position"}.get(
        shift, f"the position {by} {'before' if shift < 0 else 'after'}"
    )
    where = _failing_runs(case, sample)
    if where is not None:
        claim = f"rows are {by} {side} {where}: each equals the expected row of {neighbour}"
        return Hypothesis(
            "shifted_rows",
            claim,
            _OFFSET,
            _predict(sample, sample.request, sample.position + shift),
            shift,
        )
    claim = (
        f"single rows are stale: each equals the expected row of {neighbour}, and the rows after "
        "it are right"
    )
    return Hypothesis(
        "stale_row",
        claim,
        "look for a buffer that is read before the step has written it",
        _predict(sample, sample.request, sample.position + shift),
        shift,
    )


def _failing_runs(case: Case, sample: Sample) -> str | None:
    """Where rows fail together: `from position 17 on`, or `in prefill chunk 2`.

    Together they are when they run on to the end of their request, or fill one forward pass. None
    for single rows.
    """
    errors = sample.summary.errors
    assert errors is not None
    failing = np.zeros(len(errors), dtype=bool)
    failing[errors.failing] = True
    after = bad = longest = 0
    first: tuple[int, int] | None = None
    for number in np.unique(errors.request[failing]):
        mine = errors.request == number
        start = int(errors.position[mine & failing].min())
        tail = mine & (errors.position >= start)
        after, bad = after + int(tail.sum()), bad + int((tail & failing).sum())
        longest = max(longest, int((tail & failing).sum()))
        first = first or (int(number), start)
    if first is None:
        return "from position 0 on"
    if longest > 1 and bad >= _MOST * after:
        return f"from {place_of(case, sample.site, *first)} on"
    return _failing_chunk(
        case, sample.site, first, errors.position[failing & (errors.request == first[0])]
    )


def _failing_chunk(case: Case, site: Site, first: tuple[int, int], failing: IntArray) -> str | None:
    """`in prefill chunk 2, positions 17 to 32`: the forward pass whose rows most of those are."""
    steps, positions = _steps(case, site, first[0])
    chunk = positions[steps == steps[np.searchsorted(positions, first[1])]]
    inside = np.isin(failing, chunk)
    length = case.expected.requests[first[0]].prompt_length
    if (
        len(chunk) < 2
        or chunk[-1] >= length
        or inside.sum() < _MOST * max(len(chunk), len(failing))
    ):
        return None
    number = len(np.unique(steps[: np.searchsorted(positions, chunk[0]) + 1]))
    return f"in prefill chunk {number}, positions {chunk[0]} to {chunk[-1]}"


def _steps(case: Case, site: Site, request: int) -> tuple[IntArray, IntArray]:
    """The step and the position of each row of a request at a site, by position."""
    owner, positions = case.delivered.owners(site)
    mine = owner == request
    order = np.argsort(positions[mine], kind="stable")
    return case.actual.rows[site].columns.step[mine][order], positions[mine][order]


def place_of(case: Case, site: Site, request: int, position: int) -> str:
    """`position 17 (the first row of prefill chunk 2)`: a position, and what begins there."""
    steps, positions = _steps(case, site, request)
    where = int(np.searchsorted(positions, position))
    length = case.expected.requests[request].prompt_length
    text = f"position {position}"
    if position == length:
        return f"{text} (the first generated token)"
    if 0 < where < len(steps) and position < length and steps[where] != steps[where - 1]:
        chunk = len(np.unique(steps[: where + 1]))
        return f"{text} (the first row of prefill chunk {chunk})"
    return text


def _other_request(case: Case, sample: Sample, healthy: _Healthy) -> Iterator[Hypothesis]:
    """For each request, the one whose rows at the same positions are nearest.

    Or, as slots of a batch that are exchanged give them, in the same places of the same steps.
    """
    alike = healthy.position[None] == sample.position[:, None]
    yield from _held_by_others(case, sample, healthy, alike)
    step, place = healthy.step, _place_in_step(healthy)
    own = case.truth.rows_of(sample.site, sample.request, sample.position)
    in_turn = (step[None] == step[own, None]) & (place[None] == place[own, None])
    yield from _held_by_others(case, sample, healthy, in_turn & ~alike)


def _place_in_step(healthy: _Healthy) -> IntArray:
    """Which of its request's rows in its step each row is, from 0."""
    order = np.lexsort((healthy.position, healthy.step, healthy.request))
    next_request = np.diff(healthy.request[order], prepend=-1)
    begins = next_request | np.diff(healthy.step[order], prepend=-2)
    counted = np.arange(len(order))
    place = np.empty_like(healthy.position)
    place[order] = counted - np.maximum.accumulate(np.where(begins != 0, counted, 0))
    return place


def _held_by_others(
    case: Case, sample: Sample, healthy: _Healthy, beside: BoolArray
) -> Iterator[Hypothesis]:
    """For each request, the other one of whose rows those `beside` the sample's are nearest.

    beside: [sample, healthy rows], at most one row of each request for each of the sample.
    """
    request = healthy.request
    of_another = request[None] != sample.request[:, None]
    there = np.where(beside & of_another, healthy.distances, np.inf)
    nearest = np.where(np.isfinite(there.min(axis=1)), request[there.argmin(axis=1)], -1)
    owner: dict[int, int] = {}
    for number in np.unique(sample.request).tolist():
        votes = Counter(nearest[(sample.request == number) & (nearest >= 0)].tolist())
        if votes:
            owner[number] = int(votes.most_common(1)[0][0])
    if not owner:
        return
    both_ways = all(owner.get(other) == number for number, other in owner.items())
    mine, theirs = next(iter(owner.items()))
    ids = [request.id for request in case.expected.requests]
    named = f"{ids[mine]!r} holds those of {ids[theirs]!r}"
    holders = np.array([owner.get(int(number), -1) for number in sample.request], np.int64)
    held = beside & (request[None] == holders[:, None])
    places = healthy.position[held.argmax(axis=1)]
    predict = _predict(sample, holders, places, moved=held.any(axis=1))
    elsewhere = "" if (places == sample.position).all() else " of the same forward pass"
    if both_ways:
        claim = f"the rows equal the expected rows of other requests{elsewhere}: {named}, and back"
        yield Hypothesis("swapped_requests", claim, _OWNERSHIP, predict)
        return
    claim = (
        f"the rows equal the expected rows of other requests{elsewhere}: {named}, whose own rows "
        "are not its in turn"
    )
    way_out = "look for a buffer that keeps the rows of a request before, and " + _OWNERSHIP[8:]
    yield Hypothesis("stale_request", claim, way_out, predict)


def _offset_in_batch(
    case: Case, sample: Sample, healthy: _Healthy, shift: int
) -> Iterator[Hypothesis]:
    """Each row of a forward pass is its neighbour's in the batch, across requests.

    Nothing is said unless rows of both kinds are there, those whose neighbour is their own
    request's and those whose isn't, and no row is the neighbour of two.
    """
    steps = case.steps(sample.site, sample.request, sample.position)
    holder, place = sample.request.copy(), sample.position + shift
    edges = np.flatnonzero(case.steps(sample.site, holder, place) != steps)
    holder[edges], place[edges] = _across(case, sample, healthy, shift, edges, steps)
    crossed = edges[holder[edges] >= 0]
    taken = set(zip(steps[crossed], holder[crossed], strict=True))
    if not len(crossed) or len(edges) == len(sample) or len(taken) < len(crossed):
        return
    first = crossed[0]
    ids = [request.id for request in case.expected.requests]
    yield Hypothesis(
        "shifted_rows",
        f"each row of a forward pass is that of the row {'before' if shift < 0 else 'after'} it in "
        f"the batch, whichever request's that is: {ids[sample.request[first]]!r} at "
        f"{sample.position[first]} holds {ids[holder[first]]!r} at {place[first]}",
        _OFFSET,
        _predict(sample, holder, place, moved=holder >= 0),
        ("in the batch", shift),
    )


def _across(
    case: Case, sample: Sample, healthy: _Healthy, shift: int, edges: IntArray, steps: IntArray
) -> tuple[IntArray, IntArray]:
    """The neighbours, request and position, of sampled rows with which their request's end.

    That is the nearest of the rows with which another request's begin in that step (or end, for a
    negative `shift`); the request is -1 where there is none.
    """
    before = case.steps(sample.site, healthy.request, healthy.position - shift)
    at_the_edge = before != healthy.step
    holder, place = np.full(len(edges), -1), np.zeros(len(edges), np.int64)
    for number, at in enumerate(edges):
        of_another = healthy.request != sample.request[at]
        there = at_the_edge & of_another & (healthy.step == steps[at])
        if there.any():
            nearest = np.where(there, healthy.distances[at], np.inf).argmin()
            holder[number] = healthy.request[nearest]
            place[number] = healthy.position[nearest]
    return holder, place
