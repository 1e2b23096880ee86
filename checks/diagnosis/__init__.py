"""Why two captures differ: hypotheses held against all sites, and those that explain the numbers.

A hypothesis is accepted when the failing rows, held against what it predicts, would pass the judge
that condemned them (see `tapcheck.checks.diagnosis.evidence`). Accepted ones are ranked by how many
of the failing sites they explain, then by how well. Rows are sampled: at most SAMPLE at each of
MAX_SITES failing sites.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tapcheck.capture import Capture
from tapcheck.checks.comparison import Comparison, SiteSummary
from tapcheck.checks.diagnosis.evidence import SAMPLE, Case, Diagnosis, Hypothesis, Verdict, spread
from tapcheck.checks.diagnosis.hypotheses import hypotheses
from tapcheck.checks.diagnosis.patterns import (
    agreement,
    ledger_findings,
    part_findings,
    site_findings,
    token_findings,
    width_findings,
)
from tapcheck.checks.diagnosis.profiles import computation_findings

__all__ = ["MAX_DIAGNOSES", "MAX_SITES", "SAMPLE", "Diagnosis", "diagnose"]

MAX_SITES = 12
MAX_DIAGNOSES = 5


def diagnose(
    actual: Capture,
    expected: Capture,
    comparison: Comparison,
    *,
    reference: Capture | None = None,
) -> tuple[Diagnosis, ...]:
    """The hypotheses that explain why a comparison of these captures failed, the likeliest first.

    Empty when it passed, and when nothing known explains it. `reference` as it was given to
    `compare_captures`.
    """
    if comparison.passed:
        return ()
    case = Case(actual, expected, comparison, reference)
    tokens = list(token_findings(case))
    found = tokens or list(ledger_findings(case))
    by_rows, enough = _by_rows(case)
    if not enough:
        found += computation_findings(case)
    found += by_rows
    distinct = {(one.fault, one.claim): one for one in found}
    return tuple(distinct.values())[:MAX_DIAGNOSES]


@dataclass(frozen=True, eq=False)
class _Accepted:
    """What explains one of the failing sites: a finding, and how it is ranked."""

    finding: Diagnosis
    typical: float
    order: int


def _by_rows(case: Case) -> tuple[list[Diagnosis], bool]:
    """What explains the failing rows of sampled sites, ranked, and whether that is enough.

    It is when it explains the first failing site, or most of them: then no theory of what the
    model computed is needed.
    """
    failing = case.comparison.failing_sites
    chosen = [failing[at] for at in spread(len(failing), MAX_SITES)]
    by_key: dict[tuple[str, object], list[_Accepted]] = {}
    enough = False
    for summary in chosen:
        for key, accepted in _explained(case, summary):
            by_key.setdefault(key, []).append(accepted)
            enough = enough or summary is failing[0]
    ranked = sorted(by_key.values(), key=_rank)
    diagnoses = []
    for group in ranked:
        found = group[0].finding
        if len(failing) > 1:
            sampled = "" if len(chosen) == len(failing) else " tried"
            so = f"so at {len(group)} of {len(chosen)} failing sites{sampled}"
            found = replace(found, evidence=f"{found.evidence}; {so}")
        diagnoses.append(found)
    return diagnoses, enough or any(2 * len(group) >= len(chosen) for group in ranked)


def _rank(group: list[_Accepted]) -> tuple[int, int, int]:
    """The most sites first; then the best fit, by factors of two; then the known order."""
    typical = max(accepted.typical for accepted in group)
    fit = -99 if typical == 0 else max(round(math.log2(typical)), -99)
    return -len(group), fit, group[0].order


def _explained(case: Case, summary: SiteSummary) -> Iterator[tuple[tuple[str, object], _Accepted]]:
    """The findings and accepted hypotheses at one site, each once."""
    facts = [*width_findings(case, summary), *site_findings(case, summary)]
    for finding in facts:
        yield (finding.fault, None), _Accepted(finding, 0.0, -1)
    sample = None if facts else case.sample(summary)
    if sample is None:
        return
    seen: set[tuple[str, object]] = set()
    for order, hypothesis in enumerate(hypotheses(case, sample)):
        key = hypothesis.fault, hypothesis.detail
        verdict = None if key in seen else case.judge(sample, hypothesis)
        if verdict is not None:
            seen.add(key)
            finding = _finding(summary, hypothesis, verdict)
            yield key, _Accepted(finding, verdict.typical, order)
    if not seen:
        for finding in part_findings(case, summary):
            yield (finding.fault, None), _Accepted(finding, 1.0, 99)


def _finding(summary: SiteSummary, hypothesis: Hypothesis, verdict: Verdict) -> Diagnosis:
    many = summary.failing or summary.rows
    evidence = f"{verdict.tried} of {many:,} failing rows tried, {agreement(verdict.worst)}"
    return Diagnosis(
        hypothesis.fault, hypothesis.claim, evidence, hypothesis.way_out, verdict.worst
    )
