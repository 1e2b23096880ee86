"""Faults to inject into a healthy capture: a check that doesn't catch one of them is no check.

Every fault is deterministic, leaves the capture it is given untouched, and changes at least one
row; where the capture lacks what the fault needs, it raises CaptureError. Faults of what the model
computes can't be made from a capture: those are in `tapcheck.checks.faults.models`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from tapcheck.capture import Capture, SiteRows, concatenate
from tapcheck.checks.faults.rewriting import (
    lacks,
    lookup,
    mapped,
    middle_pair,
    moved,
    overlay,
    replaced,
    request_pairs,
    residual_site,
    rows_at,
    sites_of,
    some_row,
    with_rows,
)
from tapcheck.sites import Site

Inject = Callable[[Capture], Capture]
# What a row is narrowed to on its way, by the dtype in which it was taken.
NARROWER = {
    torch.float64: torch.float32,
    torch.float32: torch.bfloat16,
    torch.float16: torch.float8_e4m3fn,
    torch.bfloat16: torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Fault:
    """A mistake that capture code makes, and the function that makes it on purpose."""

    name: str
    description: str
    inject: Inject
    parameters: Mapping[str, float | str] = field(default_factory=dict)


FAULTS: dict[str, Fault] = {}


def _fault(**parameters: float | str) -> Callable[[Inject], Inject]:
    """Register a fault under the function's name, described by its docstring."""

    def register(inject: Inject) -> Inject:
        name, description = inject.__name__, " ".join((inject.__doc__ or "").split())

        def checked(capture: Capture) -> Capture:
            faulty = inject(capture)
            if faulty == capture:
                raise lacks(name, "rows that the fault would change: those it touches are the same")
            return faulty

        FAULTS[name] = Fault(name, description, checked, parameters)
        return inject

    return register


# --- rows that are lost, or not where they belong -------------------------------------------------


@_fault()
def lost_row(capture: Capture) -> Capture:
    """One row in the middle of one site was never delivered."""
    site, at = some_row(capture, "lost_row")
    rows = capture.rows[site]
    return with_rows(capture, {site: rows.take(np.delete(np.arange(len(rows)), at))})


@_fault()
def duplicated_row(capture: Capture) -> Capture:
    """One row in the middle of one site was delivered twice."""
    site, at = some_row(capture, "duplicated_row")
    rows = capture.rows[site]
    return with_rows(capture, {site: rows.take(np.insert(np.arange(len(rows)), at, at))})


@_fault()
def swapped_requests(capture: Capture) -> Capture:
    """Two requests hold each other's values, at every position that both have."""
    for one, other in request_pairs(capture):
        changed = dict(moved(capture, one, other, both_ways=True))
        if changed:
            return with_rows(capture, changed)
    raise lacks("swapped_requests", "two requests with different values at one position")


@_fault()
def stale_request(capture: Capture) -> Capture:
    """At every site, a request still holds the rows of one before it, at the positions of both."""
    for one, other in request_pairs(capture):
        changed = dict(moved(capture, other, one, both_ways=False))
        if changed:
            return with_rows(capture, changed)
    raise lacks("stale_request", "two requests with different values at one position")


@_fault()
def stale_row(capture: Capture) -> Capture:
    """The last row of one request at one site still holds the position before it."""
    for site in (some_row(capture, "stale_row")[0], *capture.sites):
        index, values = lookup(capture, site, site, shift=-1)
        if len(index):
            last = int(capture.rows[site].columns.position[index].argmax())
            row = (index[last : last + 1], values[last : last + 1])
            return with_rows(capture, {site: overlay(capture, site, row)})
    raise lacks("stale_row", "two neighbouring positions of one request")


@_fault(shift=-1)
def shifted_rows(capture: Capture) -> Capture:
    """At every site, each row holds the values of the position before it in its request."""
    changed = {}
    for site in capture.sites:
        index, values = lookup(capture, site, site, shift=-1)
        if len(index):
            changed[site] = overlay(capture, site, (index, values))
    if not changed:
        raise lacks("shifted_rows", "two neighbouring positions of one request")
    return with_rows(capture, changed)


@_fault()
def reversed_prompt(capture: Capture) -> Capture:
    """At every site, the rows of each prompt come in reverse order."""
    lengths = np.array([request.prompt_length for request in capture.requests], np.int64)
    changed = {}
    for site in capture.sites:
        columns = capture.rows[site].columns
        length = lengths[columns.request]
        prompt = columns.position < length
        wanted = np.where(prompt, length - 1 - columns.position, columns.position)
        changed[site] = overlay(capture, site, rows_at(capture, site, columns.request, wanted))
    return with_rows(capture, changed)


@_fault()
def wrong_padding_side(capture: Capture) -> Capture:
    """Prompts padded on the left were read from the left edge of their batch.

    Rows of a prompt that is shorter than the longest are late by the difference; where there was
    padding stands the request's first row, as padding that attends to itself resembles a first
    token.
    """
    lengths = np.array([request.prompt_length for request in capture.requests], np.int64)
    changed = {}
    for site in capture.sites:
        columns = capture.rows[site].columns
        length = lengths[columns.request]
        late = np.maximum(columns.position - (lengths.max() - length), 0)
        wanted = np.where(columns.position < length, late, columns.position)
        changed[site] = overlay(capture, site, rows_at(capture, site, columns.request, wanted))
    return with_rows(capture, changed)


@_fault()
def double_start_token(capture: Capture) -> Capture:
    """The start token stands twice before each prompt, and every row is one position late.

    The first row is there twice. Token ids and positions say so; a model that had seen the token
    twice would also have computed other values, which a capture alone can't tell.
    """
    requests = tuple(
        replace(request, prompt_token_ids=request.prompt_token_ids[:1] + request.prompt_token_ids)
        for request in capture.requests
    )
    rows = {}
    for site, given in capture.rows.items():
        late = replace(given.columns, position=given.columns.position + 1)
        first = np.flatnonzero(given.columns.position == 0)
        columns = concatenate([given.columns.take(first), late])
        values = torch.cat([given.values[torch.from_numpy(first)], given.values])
        order = np.lexsort((columns.position, columns.request, columns.step))
        rows[site] = SiteRows(columns, values).take(order)
    if not any(map(len, rows.values())):
        raise lacks("double_start_token", "rows")
    return replace(capture, requests=requests, rows=rows)


# --- rows of another site -------------------------------------------------------------------------


@_fault(shift=1)
def layer_off_by_one(capture: Capture) -> Capture:
    """Every site holds the values of the same point one layer later, where that was captured."""
    changed = {}
    for site in capture.sites:
        later = Site(site.point, site.layer + 1) if site.layer is not None else site
        if later != site and later in capture.rows:
            changed[site] = replaced(capture, site, later)
    if not changed:
        raise lacks("layer_off_by_one", "one point at two consecutive layers")
    return with_rows(capture, changed)


@_fault()
def wrong_site(capture: Capture) -> Capture:
    """One mlp_out holds its layer's attn_out."""
    pairs = [(site, Site("attn_out", site.layer)) for site in sites_of(capture, "mlp_out")]
    site, other = middle_pair(capture, pairs, "wrong_site", "the attn_out and mlp_out of a layer")
    return with_rows(capture, {site: replaced(capture, site, other)})


@_fault()
def missing_residual(capture: Capture) -> Capture:
    """One resid_post lacks the residual add: it holds what the MLP, or the layer, adds to it."""
    site, stream = residual_site(capture, "missing_residual")
    update = Site("mlp_out", site.layer)
    if update in capture.rows:
        return with_rows(capture, {site: replaced(capture, site, update)})
    index, residual = lookup(capture, site, stream)
    right = capture.rows[site].values[torch.from_numpy(index)]
    return with_rows(capture, {site: overlay(capture, site, (index, right - residual))})


@_fault()
def doubled_residual(capture: Capture) -> Capture:
    """One resid_post has the residual added twice."""
    site, stream = residual_site(capture, "doubled_residual")
    index, residual = lookup(capture, site, stream)
    right = capture.rows[site].values[torch.from_numpy(index)]
    return with_rows(capture, {site: overlay(capture, site, (index, right + residual))})


@_fault()
def overwritten_in_place(capture: Capture) -> Capture:
    """Every resid_pre holds what its buffer became: the stream after attention, or the layer.

    The tap kept a reference, and a fused kernel added to the buffer afterwards.
    """
    changed = {}
    for site in sites_of(capture, "resid_pre"):
        later = [Site("resid_mid", site.layer), Site("resid_post", site.layer)]
        for value in [other for other in later if other in capture.rows][:1]:
            changed[site] = replaced(capture, site, value)
    if not changed:
        raise lacks("overwritten_in_place", "a resid_pre with the resid_mid or resid_post after it")
    return with_rows(capture, changed)


@_fault()
def pre_norm_for_post_norm(capture: Capture) -> Capture:
    """A normalised site holds what goes into its norm: final_norm the last resid_post."""
    pairs = [(Site("final_norm"), site) for site in sites_of(capture, "resid_post")[-1:]]
    pairs = [pair for pair in pairs if pair[0] in capture.rows]
    for normalised, stream in (("attn_in", "resid_pre"), ("mlp_in", "resid_mid")):
        pairs += [(site, Site(stream, site.layer)) for site in sites_of(capture, normalised)]
    site, stream_site = middle_pair(
        capture, pairs[:1] or pairs, "pre_norm_for_post_norm", "final_norm and the last resid_post"
    )
    return with_rows(capture, {site: replaced(capture, site, stream_site)})


@_fault()
def post_norm_for_pre_norm(capture: Capture) -> Capture:
    """One resid_pre, or resid_mid, holds the stream after the norm that follows it.

    Without that norm's site the rows are divided by their root mean square, as a norm does whose
    weights are all one.
    """
    streams = (
        sites_of(capture, "resid_pre")
        or sites_of(capture, "resid_mid")
        or sites_of(capture, "resid_post")
    )
    if not streams:
        raise lacks("post_norm_for_pre_norm", "a site of the residual stream")
    site = streams[len(streams) // 2]
    after = Site({"resid_pre": "attn_in", "resid_mid": "mlp_in"}.get(site.point, ""), site.layer)
    if after in capture.rows:
        return with_rows(capture, {site: replaced(capture, site, after)})
    values = capture.rows[site].values
    wide = values.double()
    rms = wide.square().mean(dim=1, keepdim=True).sqrt().clamp_min(1e-30)
    return with_rows(capture, {site: SiteRows(capture.rows[site].columns, (wide / rms).to(values))})


@_fault()
def last_layer_after_final_norm(capture: Capture) -> Capture:
    """The last resid_post holds final_norm, as Transformers' last hidden state does."""
    pairs = [(site, Site("final_norm")) for site in sites_of(capture, "resid_post")[-1:]]
    what = "final_norm and the last resid_post"
    site, norm = middle_pair(capture, pairs, "last_layer_after_final_norm", what)
    return with_rows(capture, {site: replaced(capture, site, norm)})


# --- values that are wrong ------------------------------------------------------------------------


@_fault()
def dead_tap(capture: Capture) -> Capture:
    """One site was never written: all zeros."""
    return mapped(capture, "dead_tap", torch.zeros_like)


@_fault()
def constant_tap(capture: Capture) -> Capture:
    """One site delivered one buffer over and over: every row is its first."""
    return mapped(capture, "constant_tap", lambda values: values[:1].repeat(len(values), 1))


@_fault()
def nan_row(capture: Capture) -> Capture:
    """One row holds NaN, as from a buffer that was never written."""
    site, at = some_row(capture, "nan_row")
    values = capture.rows[site].values.clone()
    values[at] = torch.nan
    return with_rows(capture, {site: SiteRows(capture.rows[site].columns, values)})


@_fault(factor=1.02)
def scaled(capture: Capture) -> Capture:
    """One site is 2 % too large; the fixed tolerance of bfloat16 is too coarse to see that."""
    return mapped(capture, "scaled", lambda values: values * 1.02)


@_fault()
def scaled_by_sqrt_width(capture: Capture) -> Capture:
    """The embedding, or else one site, is multiplied by the square root of its width."""
    site = Site("embed") if capture.rows.get(Site("embed")) else None
    return mapped(
        capture, "scaled_by_sqrt_width", lambda values: values * math.sqrt(values.shape[1]), site
    )


@_fault()
def narrowed_dtype(capture: Capture) -> Capture:
    """One site went through a narrower dtype: float32 bfloat16, the 16-bit ones float8_e4m3fn.

    The values are widened again, so that the dtype says nothing; what float8 can't hold is clipped
    to its largest value.
    """
    return mapped(capture, "narrowed_dtype", narrowed)


def narrowed(values: torch.Tensor) -> torch.Tensor:
    """The values as they come out of the dtype below theirs, in their own dtype."""
    dtype = NARROWER[values.dtype]
    most = torch.finfo(dtype).max
    return values.double().clamp(-most, most).to(dtype).to(values.dtype)


@_fault(shards=2)
def one_shard(capture: Capture) -> Capture:
    """One site holds one tensor-parallel shard of two: the first half is right, the rest zero."""

    def half(values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        values[:, values.shape[1] // 2 :] = 0
        return values

    return mapped(capture, "one_shard", half)


@_fault(shards=2)
def half_width(capture: Capture) -> Capture:
    """One site has only the features of one tensor-parallel shard of two: half the width."""
    return mapped(capture, "half_width", lambda values: values[:, : values.shape[1] // 2].clone())


@_fault(shards=2)
def sum_left_out(capture: Capture) -> Capture:
    """One attn_out, or mlp_out, lacks the sum over two tensor-parallel shards.

    An approximation: what half of the heads add can't be told from a capture. The rows are
    projected onto a fixed half of all directions, which takes away half of their energy by one
    linear map, uncorrelated with what is left, as a shard's missing part is.
    """
    updates = sites_of(capture, "attn_out") or sites_of(capture, "mlp_out")
    if not updates:
        raise lacks("sum_left_out", "an attn_out or mlp_out")
    width = capture.rows[updates[0]].values.shape[1]
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(
        torch.randn(width, max(width // 2, 1), generator=generator, dtype=torch.float64)
    )

    def part(values: torch.Tensor) -> torch.Tensor:
        left: torch.Tensor = values.double() @ basis @ basis.T
        return left.to(values.dtype)

    return mapped(capture, "sum_left_out", part, updates[len(updates) // 2])


@_fault(heads=8)
def transposed_heads(capture: Capture) -> Capture:
    """In each step, one attn_out's [rows, heads, dim] was read as [heads, rows, dim].

    Eight heads, or the most, of two features at least, that a power of two below allows.
    """
    sites = sites_of(capture, "z") or sites_of(capture, "attn_out")
    if not sites:
        raise lacks("transposed_heads", "an attn_out")
    site = sites[len(sites) // 2]
    rows = capture.rows[site]
    width = rows.values.shape[1]
    heads = next((count for count in (8, 4, 2) if width % count == 0 and width > count), 0)
    if not heads:
        raise lacks("transposed_heads", f"a width that heads divide, which {width} is not")
    values = rows.values.clone()
    for step in np.unique(rows.columns.step):
        mine = torch.from_numpy(np.flatnonzero(rows.columns.step == step))
        values[mine] = transposed(rows.values[mine], heads)
    return with_rows(capture, {site: SiteRows(rows.columns, values)})


def transposed(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [rows, heads * dim] as they look when read as [heads, rows, dim], in shape [rows, .]."""
    count, width = values.shape
    return values.view(count, heads, width // heads).transpose(0, 1).reshape(count, width)
