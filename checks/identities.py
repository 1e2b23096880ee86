"""Identities of the residual stream: one capture, held against itself; no second engine is needed.

    resid_pre[L+1] == resid_post[L]
    resid_mid[L]   == resid_pre[L] + attn_out[L]
    resid_post[L]  == resid_mid[L] + mlp_out[L]
    resid_post[L]  == resid_pre[L] + attn_out[L] + mlp_out[L]   where resid_mid wasn't captured
    resid_pre[0]   == scale * embed                             where the first layer takes that in

An identity is judged where its sites were captured, row by row. Nothing but rounding may part its
sides. Of each rounding to a dtype the error is at most eps / 2 of what is rounded, feature by
feature, hence eps / 2 of its norm. `_ROUNDINGS` counts them, in multiples of the norm of the
largest of the tensors: one for every stream that a backend may have summed itself as it read it,
one for every sum that the model rounds, which is two where that is no larger than two terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch

from tapcheck.capture import Capture, IntArray
from tapcheck.checks.ledger import RowBook
from tapcheck.checks.measures import completed
from tapcheck.checks.numerics import FloatArray
from tapcheck.checks.tolerances import check_rtol
from tapcheck.compatibility.verdict import CheckResult, Condition, unmet
from tapcheck.sites import Site

# By number of terms. One: both sides may be sums that were rounded as they were read. Two: both
# streams as they were read, and their sum. Three: both streams, the sum, and what was added first.
_ROUNDINGS = {1: 2, 2: 3, 3: 5}

_ROWS_AT_A_TIME = 4096


@dataclass(frozen=True)
class Identity:
    """`total` is the sum of `terms`, or `scale` times the only one."""

    total: Site
    terms: tuple[Site, ...]
    scale: float = 1.0

    @property
    def sites(self) -> tuple[Site, ...]:
        """The total and the terms."""
        return (self.total, *self.terms)

    def __str__(self) -> str:
        scale = "" if self.scale == 1 else f"{self.scale:.6g} * "
        return f"{self.total} == {scale}{' + '.join(map(str, self.terms))}"


@dataclass(frozen=True, eq=False)
class Judged:
    """An identity's rows: `keys` in the book and the arrays have one entry for each, in its order.

    `error` is the norm of the difference of both sides, inf where that is no number; `largest` and
    `smallest` are the norms of the largest and smallest of the identity's tensors. `allowed` is the
    largest part of `largest` that an error may be, and `eps` that of the coarsest dtype. Where the
    widths differ no row has a number, and every error is inf.
    """

    identity: Identity
    keys: IntArray
    error: FloatArray
    largest: FloatArray
    smallest: FloatArray
    allowed: float
    eps: float
    unmatched: int

    @property
    def relative_error(self) -> FloatArray:
        """The error as a part of the largest tensor; 0 where both are 0."""
        numbers = np.isfinite(self.error) & (self.largest > 0)
        error: FloatArray = self.error.copy()
        error[numbers] /= self.largest[numbers]
        return error

    @property
    def of_allowed(self) -> FloatArray:
        """The relative error as a part of what is allowed: above 1, the identity is broken."""
        error = self.relative_error
        if self.allowed:
            error /= self.allowed
        else:
            error[error > 0] = np.inf
        return error

    @property
    def broken(self) -> IntArray:
        """The rows in which the identity doesn't hold."""
        return np.flatnonzero(self.of_allowed > 1)

    @property
    def telling(self) -> int:
        """Rows with no term so small, or zero, that its loss would be taken for rounding."""
        return int((self.smallest > self.allowed * self.largest).sum())


def identities_hold(capture: Capture, *, rtol: float | None = None) -> CheckResult:
    """The residual stream is what its parts add up to, in every row that was captured.

    `rtol` is the largest error of a row as a part of its identity's largest tensor, None for what
    the roundings of the captured dtype explain. Rows that one of the sites lacks are counted and
    not judged. Not exercised when no identity's sites were captured, or only zeros.
    """
    if rtol is not None:
        check_rtol(rtol)
    book = RowBook.open(capture.requests, capture.requests)
    claimed = [_judge(capture, book, identity, rtol) for identity in _between_streams(capture)]
    embedding = _embedding(capture, book, rtol)
    if embedding is not None:
        claimed = sorted([embedding, *claimed], key=lambda judged: judged.identity.total)
    judged = [one for one in claimed if len(one.keys)]
    broken = [one for one in judged if len(one.broken)]
    left_out = embedding is None and {Site("embed"), Site("resid_pre", 0)} <= set(capture.rows)
    reason = _verdict(judged, broken, book) + _not_judged(left_out, claimed)
    result = completed(
        identities_hold,
        reason,
        _metrics(judged, broken, claimed, embedding),
        Condition("identities", ">=", 1),
        Condition("rows_telling", ">=", 1),
        Condition("rows_broken", "==", 0),
        Condition("worst_error_of_allowed", "<=", 1),
        first=_first_row(broken[0], book) if broken else None,
    )
    if unmet(result) and not broken:
        return replace(result, outcome="not exercised")
    return result


def _between_streams(capture: Capture) -> Iterator[Identity]:
    """The identities whose sites were all captured, in execution order of what they give."""
    captured = set(capture.rows)
    for layer in sorted({site.layer for site in captured if site.layer is not None}):
        pre, attn, mid, mlp, post = (
            Site(point, layer)
            for point in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
        )
        parallel = [] if mid in captured else [Identity(post, (pre, attn, mlp))]
        for identity in (
            Identity(pre, (Site("resid_post", layer - 1),)),
            Identity(mid, (pre, attn)),
            Identity(post, (mid, mlp)),
            *parallel,
        ):
            if set(identity.sites) <= captured:
                yield identity


def _embedding(capture: Capture, book: RowBook, rtol: float | None) -> Judged | None:
    """`resid_pre.0 == scale * embed`, where at least half of the rows say so.

    Otherwise the model puts something in between, such as position embeddings or a norm. The scale
    is one for all rows: the median of what each row says. Some models multiply by the root of the
    width.
    """
    identity = Identity(Site("resid_pre", 0), (Site("embed"),))
    if not set(identity.sites) <= set(capture.rows):
        return None
    judged = _judge(capture, book, identity, rtol)
    if 2 * len(judged.broken) > len(judged.keys):
        scale = _scale(capture, book, identity)
        judged = _judge(capture, book, replace(identity, scale=scale), rtol)
    return None if 2 * len(judged.broken) > len(judged.keys) else judged


def _scale(capture: Capture, book: RowBook, identity: Identity) -> float:
    _, (total, embed), _ = _matched(capture, book, identity)
    one, other = (capture.rows[s].values for s in identity.sites)
    if one.shape[1] != other.shape[1]:
        return 1.0
    found = [
        (a * b).sum(-1) / (b * b).sum(-1)
        for a, b in (
            (one[total[rows]].double(), other[embed[rows]].double()) for rows in _chunks(len(total))
        )
    ]
    scale = float(torch.cat(found).nanmedian())
    return scale if np.isfinite(scale) else 1.0


def _matched(
    capture: Capture, book: RowBook, identity: Identity
) -> tuple[IntArray, list[torch.Tensor], int]:
    """The keys that all of the identity's sites have, where those rows are, and how many haven't.

    Of a row that was delivered twice it is the first copy.
    """
    keys = [book.delivered_keys(capture.rows[site].columns) for site in identity.sites]
    common = reduce(np.intersect1d, keys)
    every = reduce(np.union1d, keys)
    places = []
    for mine in keys:
        distinct, first = np.unique(mine, return_index=True)
        places.append(torch.from_numpy(first[np.searchsorted(distinct, common)]))
    return common, places, len(every) - len(common)


def _judge(capture: Capture, book: RowBook, identity: Identity, rtol: float | None) -> Judged:
    keys, places, unmatched = _matched(capture, book, identity)
    values = [capture.rows[site].values for site in identity.sites]
    eps = max(torch.finfo(part.dtype).eps for part in values)
    allowed = _ROUNDINGS[len(identity.terms)] * eps / 2 if rtol is None else rtol
    if len({part.shape[1] for part in values}) > 1:
        nothing = np.full(len(keys), np.nan)
        numbers = (np.full(len(keys), np.inf), nothing, nothing)
    else:
        numbers = _norms(values, places, identity.scale)
    return Judged(identity, keys, *numbers, allowed, eps, unmatched)


def _norms(
    values: Sequence[torch.Tensor], places: Sequence[torch.Tensor], scale: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Of each row, the norms of the error, of the largest tensor and of the smallest."""
    found = [np.empty((3, 0))]
    for rows in _chunks(len(places[0])):
        total, *terms = (
            part[place[rows]].double() for part, place in zip(values, places, strict=True)
        )
        terms = [scale * term for term in terms]
        error = (
            (reduce(torch.add, terms) - total)
            .norm(dim=-1)
            .nan_to_num(nan=torch.inf, posinf=torch.inf)
        )
        norms = torch.stack([part.norm(dim=-1) for part in (total, *terms)])
        # The total may be small without anything being amiss: terms can cancel.
        smallest = norms[1:].amin(dim=0)
        found.append(torch.stack([error, norms.amax(dim=0), smallest]).numpy())
    error, largest, smallest = np.concatenate(found, axis=1)
    return error, largest, smallest


def _chunks(rows: int) -> Iterator[slice]:
    for start in range(0, rows, _ROWS_AT_A_TIME):
        yield slice(start, start + _ROWS_AT_A_TIME)


def _metrics(
    judged: Sequence[Judged],
    broken: Sequence[Judged],
    claimed: Sequence[Judged],
    embedding: Judged | None,
) -> dict[str, int | float]:
    scale = {} if embedding is None else {"embedding_scale": embedding.identity.scale}
    errors = [one.relative_error for one in judged]
    return {
        "identities": len(judged),
        "identities_broken": len(broken),
        "sites": len({site for one in judged for site in one.identity.sites}),
        "rows_checked": sum(len(one.keys) for one in judged),
        "rows_telling": sum(one.telling for one in judged),
        "rows_broken": sum(len(one.broken) for one in broken),
        "rows_unmatched": sum(one.unmatched for one in claimed),
        "worst_relative_error": max((float(e.max()) for e in errors), default=0.0),
        "worst_error_in_eps": max(
            (float(e.max()) / one.eps for e, one in zip(errors, judged, strict=True)), default=0.0
        ),
        "worst_error_of_allowed": max((float(one.of_allowed.max()) for one in judged), default=0.0),
        **scale,
    }


def _verdict(judged: Sequence[Judged], broken: Sequence[Judged], book: RowBook) -> str:
    rows = sum(len(one.keys) for one in judged)
    if not judged:
        return (
            "no identity could be checked: it takes the rows of resid_pre, attn_out and resid_mid, "
            "of resid_mid, mlp_out and resid_post, or of resid_post and the next layer's resid_pre"
        )
    if not broken:
        worst = max(judged, key=lambda one: float(one.of_allowed.max()))
        return (
            f"{len(judged)} identities hold in all of their {rows:,} rows; the worst error is "
            f"{float(worst.relative_error.max()):.2g} of the largest term, in {worst.identity}, "
            f"{worst.allowed:.2g} is allowed"
        )
    first = broken[0]
    row = int(first.broken[0])
    error = first.relative_error[row]
    widths = " (the widths differ)" if np.isnan(first.largest[row]) else ""
    return (
        f"{len(broken)} of {len(judged)} identities are broken, the first is {first.identity} in "
        f"{len(first.broken):,} of {len(first.keys):,} rows: {_first_row(first, book)}: the error "
        f"is {error:.3g} of the largest term{widths}, {first.allowed:.2g} is allowed"
    )


def _first_row(judged: Judged, book: RowBook) -> str:
    request, position = book.owner(int(judged.keys[judged.broken[0]]))
    return f"request {request.id!r}, site {judged.identity.total}, position {position}"


def _not_judged(embedding_left_out: bool, claimed: Sequence[Judged]) -> str:
    """What was not judged, or tells nothing, and why; empty where there is no such thing."""
    told = ""
    silent = sum(len(one.keys) - one.telling for one in claimed)
    if silent:
        told += f"; in {silent:,} rows a term is zero, or so small that its loss would not show"
    if embedding_left_out:
        told += "; embed is not judged, as resid_pre.0 is no multiple of it in most rows"
    unmatched = sum(one.unmatched for one in claimed)
    if unmatched:
        told += f"; {unmatched:,} rows are not judged, as another site of their identity lacks them"
    return told
