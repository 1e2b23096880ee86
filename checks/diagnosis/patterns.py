"""Faults that no other row explains: what tokens, rows, widths and positions show of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tapcheck.checks.comparison import RowErrors, SiteSummary
from tapcheck.checks.diagnosis.displacements import BoolArray
from tapcheck.checks.diagnosis.evidence import Case, Diagnosis, Hypothesis, Lookup, Rows, Sample
from tapcheck.checks.numerics import row_metrics

_SEE = ": see add_special_tokens, and the chat template"
# Numerical noise grows by factors; another computation is further off than this many allowances.
_ANOTHER_COMPUTATION = 2.0
# In floors: of 259,616 rows of a healthy engine, all but those of one token were nearer.
_BEYOND_NOISE = 6.2
_FEWEST_ROWS = 3
# Narrowing a dtype costs a few per cent; a row of clipped or vanished values may be lost.
_MOST_LOST = 0.5
_STREAM = ("embed", "resid_pre", "resid_mid", "resid_post")


def token_findings(case: Case) -> Iterator[Diagnosis]:
    """Prompts that are the expected ones with a token more or less in front, or reversed."""
    mine = {request.id: request.prompt_token_ids for request in case.actual.requests}
    said: dict[tuple[str, str, str], list[str]] = {}
    for request in case.expected.requests:
        got, wanted = mine.get(request.id), request.prompt_token_ids
        if got is None or got == wanted:
            continue
        found = None
        if got == wanted[:1] + wanted:
            found = ("double_start_token", "its first token is there twice", f"add it once{_SEE}")
        elif got[1:] == wanted:
            found = ("extra_start_token", "an extra token stands before it", f"leave it out{_SEE}")
        elif got == wanted[1:]:
            found = ("extra_start_token", "its first token is left out", f"add it in both{_SEE}")
        elif got == wanted[::-1]:
            found = ("reversed_prompt", "it is reversed", "look at the order of token ids")
        if found is not None:
            said.setdefault(found, []).append(request.id)
    for (fault, what, way_out), names in said.items():
        claim = f"the prompt of request {names[0]!r} is not the expected one: {what}"
        evidence = f"so in {len(names)} of {len(case.expected.requests)} requests"
        yield Diagnosis(fault, claim, evidence, way_out)


def ledger_findings(case: Case) -> Iterator[Diagnosis]:
    """Rows that are lost, or there twice."""
    for kind, fault, verb, way_out in (
        ("missing", "lost_row", "missing", "find the step in which it was taken or dropped"),
        ("duplicated", "duplicated_row", "there more than once", "find what delivered it again"),
    ):
        entries = [entry for entry in case.comparison.ledger.entries if entry.kind == kind]
        if not entries:
            continue
        first, sites = entries[0], len({entry.site for entry in entries})
        many = f"{len(entries):,} row{'s are' if len(entries) > 1 else ' is'} {verb}"
        where = f"request {first.request_id!r}, site {first.site}, position {first.position}"
        evidence = f"at {sites} site{'s' * (sites > 1)}; {first.reason}"
        yield Diagnosis(fault, f"{many}, the first of {where}", evidence, way_out)


def site_findings(case: Case, summary: SiteSummary) -> Iterator[Diagnosis]:
    """What one failing site shows by itself: NaN, zeros, one row throughout, a narrower dtype."""
    yield from _not_finite(case, summary)
    sample = case.sample(summary)
    right = None if sample is None else _healthy(case.healthy, sample)
    if sample is None or right is None or right.values.shape != sample.values.shape:
        return
    checked = f"{len(sample)} of {summary.failing or summary.rows:,} failing rows tried, exactly"
    if not bool(sample.values.any()):
        yield Diagnosis(
            "dead_tap",
            f"the rows of {summary.site} are all zeros",
            checked,
            "the tap never wrote them",
        )
        return
    same = len(sample) > 1 and bool((sample.values == sample.values[0]).all())
    if same and not bool((right.values == right.values[0]).all()):
        way_out = "one buffer was delivered over and over, copy rows when they are taken"
        yield Diagnosis(
            "constant_tap", f"the rows of {summary.site} are all the same", checked, way_out
        )
        return
    yield from _narrowed(case, sample)


def _healthy(lookup: Lookup, sample: Sample) -> Rows | None:
    return lookup.at(sample.site, sample.request, sample.position)


def _not_finite(case: Case, summary: SiteSummary) -> Iterator[Diagnosis]:
    errors = summary.errors
    if errors is None or not (summary.nan_count or summary.inf_count):
        return
    broken = np.isnan(errors.relative_error)
    request, position = errors.request[broken], errors.position[broken]
    right = case.healthy.at(summary.site, request, position)
    if right is None or not bool(right.values.isfinite().all()):
        return
    first = case.comparison.request_ids[int(request[0])]
    later = [
        rows
        for site in case.comparison.sites
        if summary.site < site.site
        and (rows := case.delivered.at(site.site, request, position)) is not None
    ]
    healed = any(bool(rows.values[rows.found].isfinite().all()) for rows in later)
    claim = (
        f"{int(broken.sum()):,} of {summary.rows:,} rows of {summary.site} hold NaN or Inf, the "
        f"first of request {first!r} at position {int(position[0])}"
    )
    evidence = "the expected rows are finite"
    way_out = "see whether the model's own output holds NaN or Inf, or only the tap's buffer does"
    if healed:
        evidence += ", and so are rows of later sites at the same positions"
        way_out = "the tap's buffer was read before it was written, or never was"
    yield Diagnosis("nan_row", claim, evidence, way_out)


def _narrowed(case: Case, failing: Sample) -> Iterator[Diagnosis]:
    """Every value fits a narrower dtype, which the expected rows' values don't."""
    # Where some values are beyond such a dtype, only their rows fail, and they are far off: the
    # rows that pass show it as well.
    for sample in (case.sample(failing.summary, every=True), failing):
        right = None if sample is None else _healthy(case.healthy, sample)
        dtype = None if sample is None or right is None else _narrow_dtype(sample, right)
        if sample is None or right is None or dtype is None:
            continue
        errors = row_metrics(sample.values, right.values).relative_error
        # Values of a few kinds, such as zeros and ones, fit any dtype.
        if np.median(errors) <= _MOST_LOST:
            name = str(dtype).removeprefix("torch.")
            yield Diagnosis(
                "narrowed_dtype",
                f"every value of {sample.site} fits {name}, though the rows are of another dtype",
                f"{len(sample)} of {sample.summary.rows:,} rows tried, exactly; the expected ones "
                "don't fit",
                f"find where rows go through {name}, and keep the dtype in which they are captured",
                float(errors.max()),
            )
            return


def _narrow_dtype(sample: Sample, right: Rows) -> torch.dtype | None:
    """The narrowest dtype that all of the sample's values fit, and the healthy ones don't."""
    for narrow in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16):
        coarser = torch.finfo(narrow).eps > torch.finfo(sample.given.dtype).eps
        if coarser and _fits(sample.values, narrow) and not _fits(right.values, narrow):
            return narrow
    return None


def _fits(values: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((values.to(dtype).to(values.dtype) == values).all())


def width_findings(case: Case, summary: SiteSummary) -> Iterator[Diagnosis]:
    """Rows of some other width: those of one tensor-parallel shard, if they equal a part."""
    mine, theirs = summary.actual_width, summary.expected_width
    sample = case.sample_any(summary) if mine != theirs else None
    if sample is None or not mine or theirs % mine:
        return
    for shard in range(theirs // mine):

        def predict(lookup: Lookup, at: int = shard * mine) -> Rows | None:
            rows = _healthy(lookup, sample)
            return None if rows is None else Rows(rows.values[:, at : at + mine], rows.found)

        verdict = case.judge(sample, Hypothesis("half_width", "", "", predict))
        if verdict is not None:
            yield Diagnosis(
                "half_width",
                f"the rows of {summary.site} are {mine} features wide, expected {theirs}: they are "
                f"shard {shard} of {theirs // mine}",
                f"{verdict.tried} rows tried, {agreement(verdict.worst)}",
                "gather the shards of all tensor-parallel ranks before rows are taken",
                verdict.worst,
            )
            return


def agreement(worst: float) -> str:
    """How well rows agree, in words."""
    return f"to a relative error of {worst:.1e}" if worst else "exactly"


def part_findings(case: Case, first: SiteSummary) -> Iterator[Diagnosis]:
    """What is missing is as long as what a shard lacks, and has nothing to do with what is there.

    Of a sum of two unrelated parts, |a|^2 + |r - a|^2 = |r|^2 in every row: a.(r - a) is near 0.
    """
    sample = case.sample(first) if first.site.point in ("attn_out", "mlp_out") else None
    right = None if sample is None else _healthy(case.truth, sample)
    if sample is None or right is None or first.errors is None or not _far_off(first):
        return
    stream = [site for site in case.comparison.sites if site.site.point in _STREAM]
    if not all(site.passed for site in stream if site.site < first.site):
        return
    missing = right.values - sample.values
    cosine = torch.nn.functional.cosine_similarity(sample.values, missing, dim=1).abs().median()
    ratio = float((sample.values.norm(dim=1) / right.values.norm(dim=1)).median())
    failing = int(_bad(first.errors).sum())
    if not (0.3 <= ratio <= 0.95 and float(cosine) <= 0.2 and failing >= 0.9 * len(first.errors)):
        return
    reduced = next((site.passed for site in stream if first.site < site.site), None)
    where = {
        True: "take rows after the all-reduce: the residual stream behind it is right",
        False: "the all-reduce is missing: the residual stream behind it is wrong as well",
        None: "take rows after the all-reduce over tensor-parallel ranks",
    }
    yield Diagnosis(
        "sum_left_out",
        f"the rows of {first.site} look like one part of a sum: what they lack has nothing to do "
        "with them",
        f"{len(sample)} of {failing:,} failing rows tried: typically {ratio:.2f} as long as "
        f"expected, cosine {float(cosine):.2f} with what is missing",
        where[reduced],
    )


def _far_off(site: SiteSummary) -> bool:
    """Whether several rows are wrong by more than noise makes them."""
    errors = site.errors
    if errors is None:
        return False
    bad = _bad(errors)
    if int(bad.sum()) < _FEWEST_ROWS:
        return False
    # A floor's rows are many floors off as it is; a tolerance may just have been too tight.
    return errors.floor is not None or bool(np.median(errors.ratio[bad]) > _ANOTHER_COMPUTATION)


def _bad(errors: RowErrors) -> BoolArray:
    """Which rows are wrong: beyond what they may be off or, with a floor, what noise ever was."""
    if errors.floor is None:
        return ~(errors.relative_error <= errors.allowed)
    return ~(errors.relative_error <= _BEYOND_NOISE * errors.floor)
