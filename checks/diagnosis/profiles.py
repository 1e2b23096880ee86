"""Faults of what the model computes: at which site and position its values begin to differ.

Nothing in the captures equals such rows. What is left is the pattern: a site before which all
agree, after which all differ, and the positions from which they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tapcheck.capture import IntArray
from tapcheck.checks.comparison import Comparison, RowErrors
from tapcheck.checks.diagnosis.displacements import BoolArray, place_of
from tapcheck.checks.diagnosis.evidence import Case, Diagnosis
from tapcheck.checks.noise_floor import FEWEST_ROWS
from tapcheck.checks.numerics import FloatArray
from tapcheck.sites import Site

# A token is wrong that is, at most sites, further off than this: in floors, whose median over the
# sites is near 1 for a healthy token; in tolerances, which are above the worst healthy row.
_WRONG_FLOORS = 1.75
_WRONG_TOLERANCES = 2.0
# A site shows it when wrong tokens are typically this part of that off.
_SHOWS = 0.8
_MOST_SITES = 0.8
_MOST_TOKENS = 0.6
# The relative error of a first token, which sees only itself, that no rounding gives.
_UNKNOWN_TO_A_ROW = 0.05
# Where positions or other tokens first show: embeddings that know positions, and attention.
_SEES_POSITIONS = frozenset(
    ("embed", "resid_pre", "q", "k", "pattern", "z", "attn_out", "resid_mid", "resid_post")
)


@dataclass(frozen=True, eq=False)
class Profile:
    """How far off each token is at each site: `standing` [sites, tokens], NaN where not compared.

    The unit is what makes a token wrong; request and position, [tokens], say which it is.
    """

    sites: tuple[Site, ...]
    request: IntArray
    position: IntArray
    standing: FloatArray

    @classmethod
    def of(cls, comparison: Comparison) -> Profile:
        """The profile of every row that was compared."""
        compared = [(one.site, one.errors) for one in comparison.sites if one.errors is not None]
        keys = [errors.request << 40 | errors.position for _, errors in compared]
        tokens = np.unique(np.concatenate([np.empty(0, np.int64), *keys]))
        standing = np.full((len(compared), len(tokens)), np.nan)
        for at, (_, errors) in enumerate(compared):
            standing[at, np.searchsorted(tokens, keys[at])] = _standing(errors)
        sites = tuple(site for site, _ in compared)
        return cls(sites, tokens >> 40, tokens & ((1 << 40) - 1), standing)

    def wrong_from(self, site: int) -> BoolArray:
        """The tokens that are wrong at most of the sites from one on, [tokens]."""
        return _median(self.standing[site:], axis=0) > 1

    def shows(self, wrong: BoolArray) -> BoolArray:
        """The sites at which these tokens are typically off, [sites]."""
        return _median(self.standing[:, wrong], axis=1) > _SHOWS


def _standing(errors: RowErrors) -> FloatArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        if errors.floor is None:
            return errors.ratio / _WRONG_TOLERANCES
        return errors.relative_error / errors.floor / _WRONG_FLOORS


def _median(values: FloatArray, axis: int) -> FloatArray:
    """The median along an axis without NaN; 0 where there is nothing else."""
    there = np.asarray(~np.isnan(values).all(axis=axis))
    found = np.zeros(len(there))
    kept = np.compress(there, values, axis=1 - axis)
    if kept.size:
        found[there] = np.nanmedian(kept, axis=axis)
    return found


def computation_findings(case: Case) -> Iterator[Diagnosis]:
    """What the model computed otherwise, by where it begins; nothing where only taps differ."""
    profile = Profile.of(case.comparison)
    failing = {one.site for one in case.comparison.failing_sites}
    suspected = next((at for at, site in enumerate(profile.sites) if site in failing), None)
    if suspected is None:
        return
    wrong = profile.wrong_from(suspected)
    if int(wrong.sum()) < FEWEST_ROWS:
        return
    shows = profile.shows(wrong)
    first = int(shows.argmax())
    # The model computes each site from those before it: what it computes wrong, all sites show.
    after = shows[first + 1 :]
    if not first or not len(after) or float(after.mean()) < _MOST_SITES:
        return
    if profile.sites[first].point not in _SEES_POSITIONS:
        return
    starts = _starts(profile, wrong)
    if starts and all(position == 0 for position in starts.values()):
        yield from _from_the_first(case, profile, first)
    elif starts and all(position > 0 for position in starts.values()):
        yield from _from_a_position(case, profile, wrong, first, starts)


def _starts(profile: Profile, wrong: BoolArray) -> dict[int, int]:
    """The first wrong position of each request with one; nothing unless most after it are wrong."""
    starts: dict[int, int] = {}
    after = bad = 0
    for number in np.unique(profile.request[wrong]).tolist():
        mine = profile.request == number
        starts[number] = int(profile.position[mine & wrong].min())
        tail = mine & (profile.position >= starts[number])
        after, bad = after + int(tail.sum()), bad + int((tail & wrong).sum())
    return starts if bad >= _MOST_TOKENS * after else {}


def _errors_at(case: Case, site: Site) -> RowErrors:
    return next(
        one.errors for one in case.comparison.sites if one.site == site and one.errors is not None
    )


def _from_the_first(case: Case, profile: Profile, first: int) -> Iterator[Diagnosis]:
    """Even the first token differs, which sees nothing but itself: something stands before it."""
    site = profile.sites[first]
    errors = _errors_at(case, site)
    requests = len(np.unique(errors.request))
    off = errors.relative_error[errors.position == 0]
    if len(off) != requests or not float(np.median(off)) >= _UNKNOWN_TO_A_ROW:
        return
    yield Diagnosis(
        "extra_start_token",
        f"from position 0 on {site} is of other inputs: something stands before the first token "
        "that neither tokens nor positions show, such as a start token",
        f"the first token of each of {requests} requests, which sees only itself, is typically off "
        f"by {float(np.median(off)):.2g}; the sites before agree, those after differ",
        "compare the token ids that the model was given, with add_special_tokens and padding",
    )


def _from_a_position(
    case: Case, profile: Profile, wrong: BoolArray, first: int, starts: dict[int, int]
) -> Iterator[Diagnosis]:
    """Right up to a position, wrong from there on: rotary positions, or a sliding window."""
    site, (request, start) = profile.sites[first], next(iter(starts.items()))
    near, far = _growth(_errors_at(case, site), starts)
    where = (
        f"from {place_of(case, site, request, start)} on, {site} of request "
        f"{case.comparison.request_ids[request]!r} is of"
    )
    evidence = (
        f"{int(wrong.sum()):,} of {len(wrong):,} tokens are off at most sites, none before; "
        f"the sites before {site} agree, those after differ; the error is {near:.2g} at first, "
        f"{far:.2g} later"
    )
    window = _window(case)
    known = window is not None and min(starts.values()) in range(window, window + 4)
    said = f"which is the model's window, {window}" if known else "if that is the model's window"
    offset = Diagnosis(
        "wrong_position_offset",
        f"{where} other positions: an offset in the position embedding would do that",
        evidence,
        "compare the position ids that the model was given from there on",
    )
    sliding = Diagnosis(
        "sliding_window_off",
        f"{where} another attention mask: a sliding window that is off, or of another size, would "
        f"do that, {said}",
        evidence,
        "compare the sliding window of both engines' configurations",
    )
    masked = site.point not in ("embed", "resid_pre", "q", "k") and len(set(starts.values())) == 1
    if not masked or (window is not None and not known):
        yield offset
    elif known or near < far:
        yield from (sliding, offset)
    else:
        yield from (offset, sliding)


def _growth(errors: RowErrors, starts: dict[int, int]) -> tuple[float, float]:
    """The median error of the first two wrong rows, and of those from the fifth on.

    A window that is off lets in one key more with each row, so that its error grows; an offset is
    there at once.
    """
    begin = np.array([starts.get(number, 1 << 39) for number in errors.request.tolist()], np.int64)
    since = errors.position - begin
    early = errors.relative_error[(since >= 0) & (since < 2)]
    late = errors.relative_error[since >= 4]
    both = [part for part in (early, late) if len(part)] or [np.zeros(1)]
    return float(np.median(both[0])), float(np.median(both[-1]))


def _window(case: Case) -> int | None:
    """The model's sliding window, if a capture says so."""
    for capture in (case.actual, case.expected):
        engine = capture.metadata.get("engine")
        window = engine.get("sliding_window") if isinstance(engine, dict) else None
        if isinstance(window, int) and window > 0:
            return window
    return None
