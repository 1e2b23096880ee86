"""What the failing rows of one site may be instead: each hypothesis predicts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch

from tapcheck.checks.diagnosis.displacements import displaced
from tapcheck.checks.diagnosis.evidence import GAIN, Case, Hypothesis, Lookup, Rows, Sample, norms
from tapcheck.checks.faults import transposed
from tapcheck.checks.numerics import outliers
from tapcheck.sites import LAYER_POINTS, Site

_READ_ELSEWHERE = "look at which site the tap is attached to"
_MOST_HEADS = 128
# The part of the sampled rows that must be of one step, for heads to be told from tokens.
_STEP_PART = 0.2
# Rows from which the weights of a norm are fitted, at least; as many others put them to the test.
_FITTED = 6
_SCALES = (
    "look for a scale (of the embedding, the attention or the residual) applied once too often, "
    "or not at all"
)


def hypotheses(case: Case, sample: Sample) -> Iterator[Hypothesis]:
    """All that is known to go wrong with a tap, the likelier first where two predict the same."""
    yield from displaced(case, sample)
    yield from _other_sites(case, sample)
    yield from _residual_sums(sample)
    yield _scale(case, sample)
    yield from _zero_features(sample)
    yield from _transpositions(case, sample)
    if sample.site.point.startswith("resid_") or sample.site.point == "embed":
        yield from _norms(sample)


def _there(sample: Sample, site: Site, lookup: Lookup) -> Rows | None:
    """The healthy rows of the sample's requests and positions at a site."""
    return lookup.at(site, sample.request, sample.position)


def _other_sites(case: Case, sample: Sample) -> Iterator[Hypothesis]:
    site = sample.site
    for other in sorted(case.expected.rows, key=lambda other: _nearness(site, other)):
        if other == site or case.truth.width(other) != case.truth.width(site):
            continue
        fault, why = _reading(site, other, case)
        yield Hypothesis(
            fault,
            f"these rows are {other}, not {site}: {why[0]}",
            why[1],
            lambda lookup, other=other: _there(sample, other, lookup),  # type: ignore[misc]
            _relation(site, other),
        )


def _nearness(site: Site, other: Site) -> tuple[bool, bool, int, Site]:
    """A sort key: the same point first, then the same layer, then by distance."""
    distance = abs((other.layer or 0) - (site.layer or 0))
    return other.point != site.point, other.layer != site.layer, distance, other


def _relation(site: Site, other: Site) -> object:
    """What makes two readings of another site one mistake, made at several sites."""
    if site.layer is None or other.layer is None:
        return other.point
    same = site.point == other.point
    return other.layer - site.layer if same else (other.point, other.layer - site.layer)


def _reading(site: Site, other: Site, case: Case) -> tuple[str, tuple[str, str]]:
    """The fault of a tap at `site` that delivers `other`, what it means, and the way out."""
    last = max((known.layer or 0 for known in case.expected.sites), default=0)
    if site.point == other.point and site.layer is not None and other.layer is not None:
        off = other.layer - site.layer
        by = "one" if abs(off) == 1 else str(abs(off))
        return "layer_off_by_one", (
            f"the layer is off by {by}",
            f"look for a layer index that is off by {by}",
        )
    if site.point in ("final_norm", "attn_in", "mlp_in") and other.point.startswith("resid_"):
        into = {"final_norm": "resid_post", "attn_in": "resid_pre", "mlp_in": "resid_mid"}
        if other == Site(into[site.point], last if site.layer is None else site.layer):
            said = "the norm is missing", "the tap reads what goes into the norm: read its output"
            return "pre_norm_for_post_norm", said
    if site.point.startswith("resid_") and other.point in ("final_norm", "attn_in", "mlp_in"):
        name = "post_norm_for_pre_norm"
        if other.point == "final_norm" and site == Site("resid_post", last):
            name = "last_layer_after_final_norm"
        said = "the tap reads the stream after the norm", "read what goes into the norm"
        return name, said
    if site.layer == other.layer and site.point in LAYER_POINTS and other.point in LAYER_POINTS:
        return _in_one_layer(site, other)
    return "wrong_site", (f"the tap reads {other.point}", _READ_ELSEWHERE)


def _in_one_layer(site: Site, other: Site) -> tuple[str, tuple[str, str]]:
    update = {"resid_mid": "attn_out", "resid_post": "mlp_out"}
    if update.get(site.point) == other.point:
        said = "the residual is missing", "the tap leaves out the residual add"
        return "missing_residual", said
    streams = ("resid_pre", "resid_mid", "resid_post")
    if site.point in streams and other.point in streams:
        if streams.index(other.point) > streams.index(site.point):
            return "overwritten_in_place", (
                "the buffer held the layer's later value when it was read",
                "copy rows when they are taken, before a fused kernel adds to them in place",
            )
        left_out = "attention's output" if other.point == "resid_pre" else "the MLP's output"
        if (site.point, other.point) == ("resid_post", "resid_pre"):
            left_out = "the whole layer's output"
        return "wrong_site", (f"{left_out} is missing", _READ_ELSEWHERE)
    return "wrong_site", (f"the tap reads {other.point}", _READ_ELSEWHERE)


def _residual_sums(sample: Sample) -> Iterator[Hypothesis]:
    """Sums with the stream that runs past the layer, or past its MLP."""
    site, layer = sample.site, sample.site.layer
    if layer is None:
        return
    before = Site("resid_post", layer - 1) if layer else Site("embed")
    entering = [] if site.point == "resid_pre" else [Site("resid_pre", layer), before]
    middle = [Site("resid_mid", layer)] if site.point == "resid_post" else []
    for sign, fault, verb, said, way_out in (
        (-1, "missing_residual", "minus", "missing", "the tap leaves out the residual add"),
        (1, "doubled_residual", "plus", "there twice", "the tap adds the residual twice"),
    ):
        for streams, name in (
            (entering, "the stream that enters the layer"),
            (middle, "resid_mid"),
        ):

            def predict(
                lookup: Lookup, streams: list[Site] = streams, sign: int = sign
            ) -> Rows | None:
                right = _there(sample, site, lookup)
                found = [rows for s in streams if (rows := _there(sample, s, lookup)) is not None]
                if right is None or not found or found[0].values.shape != right.values.shape:
                    return None
                return right.plus(found[0], sign)

            claim = f"these rows are {site} {verb} {name}: the residual is {said}"
            yield Hypothesis(fault, claim, way_out, predict, name)


def _scale(case: Case, sample: Sample) -> Hypothesis:
    """One factor for all rows: the median of the factors that fit each best."""
    right = _there(sample, sample.site, case.truth)
    factor = 1.0
    if right is not None and right.values.shape == sample.values.shape:
        others = right.values.masked_fill(outliers(right.values), 0)
        square = others.square().sum(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        factor = float(((sample.values * others).sum(dim=1) / square).median())
    root = sample.values.shape[1] ** 0.5
    fault, by = "scaled", f"{factor:.4g}"
    for power, text in ((1, "the square root of the width"), (-1, "1 / sqrt(width)")):
        if abs(factor / root**power - 1) < 0.01:
            fault, by = "scaled_by_sqrt_width", f"{text}, {factor:.4g}"

    def predict(lookup: Lookup) -> Rows | None:
        rows = _there(sample, sample.site, lookup)
        return None if rows is None else Rows(factor * rows.values, rows.found)

    floor = sample.summary.floor
    # A bias is evidence enough of a scale that is lost in the rows' own noise.
    biased = floor is not None and abs(floor.bias) > floor.bias_limit
    gain = 0.0 if biased else GAIN
    claim = f"these rows are {sample.site} times {by}"
    return Hypothesis(fault, claim, _SCALES, predict, gain=gain)


def _zero_features(sample: Sample) -> Iterator[Hypothesis]:
    """Some features right, the others zero in every row."""
    width = sample.values.shape[1]
    zero = (sample.values == 0).all(dim=0)
    kept = int((~zero).sum())
    if not 0 < kept <= width - max(width // 16, 2):
        return
    at = (~zero).nonzero()[:, 0]
    together = int(at[-1]) - int(at[0]) + 1 == kept
    where = f"features {int(at[0])} to {int(at[-1])}" if together else f"{kept} features"

    def predict(lookup: Lookup) -> Rows | None:
        rows = _there(sample, sample.site, lookup)
        return None if rows is None else Rows(rows.values * ~zero, rows.found)

    yield Hypothesis(
        "one_shard",
        f"only {where} of {width} are right, the others are zero in every row",
        "gather the shards of all tensor-parallel ranks before rows are taken",
        predict,
        kept,
    )


def _transpositions(case: Case, sample: Sample) -> Iterator[Hypothesis]:
    """The rows of one step, [rows, heads, dim], read as [heads, rows, dim]."""
    if sample.site.point not in ("attn_out", "z", "q", "k", "v"):
        return
    steps = sample.delivered.columns.step
    mine = steps[sample.row]
    step, count = Counter(mine.tolist()).most_common(1)[0]
    block = np.flatnonzero(steps == step)
    width = sample.values.shape[1]
    if len(block) < 2 or count < _STEP_PART * len(sample):
        return
    request, position = (column[block] for column in case.delivered.owners(sample.site))
    place = torch.from_numpy(np.searchsorted(block, sample.row).clip(max=len(block) - 1))
    found = torch.from_numpy(mine == step)
    for heads in (count for count in range(2, _MOST_HEADS + 1) if width % count == 0):

        def predict(lookup: Lookup, heads: int = heads) -> Rows | None:
            rows = lookup.at(sample.site, request, position)
            if rows is None or not bool(rows.found.all()) or rows.values.shape[1] != width:
                return None
            return Rows(transposed(rows.values, heads)[place], found)

        yield Hypothesis(
            "transposed_heads",
            f"the {len(block)} rows of step {step}, of {heads} heads, were read as [heads, rows, "
            "dim] instead of [rows, heads, dim]",
            "transpose heads and tokens back before rows are taken",
            predict,
            "heads",
            least=_STEP_PART,
        )


def _norms(sample: Sample) -> Iterator[Hypothesis]:
    """The rows after a norm: its weights, fitted on some of the rows, must predict the others."""
    if len(sample) < 2 * _FITTED:
        return
    fitted = torch.arange(len(sample)) % 2 == 0
    for centred in (False, True):

        def predict(lookup: Lookup, centred: bool = centred) -> Rows | None:
            rows = _there(sample, sample.site, lookup)
            if rows is None or rows.values.shape != sample.values.shape:
                return None
            x, y = rows.values, sample.values
            if centred:
                x = x - x.mean(dim=1, keepdim=True)
            x = x / norms(x)
            use = fitted & rows.found
            shift_x = x[use].mean(dim=0) if centred else torch.zeros_like(x[0])
            shift_y = y[use].mean(dim=0) if centred else torch.zeros_like(y[0])
            dx, dy = x[use] - shift_x, y[use] - shift_y
            weight = (dx * dy).sum(dim=0) / dx.square().sum(dim=0).clamp_min(1e-30)
            return Rows((x - shift_x) * weight + shift_y, rows.found & ~fitted)

        yield Hypothesis(
            "post_norm_for_pre_norm",
            f"these rows are {sample.site} after a norm (one weight for each feature, fitted on "
            "half of the rows, predicts the others)",
            "read what goes into the norm",
            predict,
            "fitted",
            least=0.4,
        )
