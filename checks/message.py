"""What a person reads when two captures differ: the first wrong thing first, then the evidence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from tabulate import tabulate

from tapcheck.checks.comparison import Comparison, RowDifference, SiteSummary, TokenProblem
from tapcheck.checks.ledger import KINDS, Ledger, LedgerEntry
from tapcheck.checks.noise_floor import SiteFloor

MAX_TOKEN_PROBLEMS = 5
MAX_LEDGER_LINES = 8
MAX_SITES = 20
MAX_RANGES = 6
MAX_NAMES = 3


def explain(comparison: Comparison) -> str:
    """The verdict in one line; for a comparison that failed, the evidence below it."""
    if comparison.passed:
        return _passed(comparison)
    sections = [
        [_headline(comparison)],
        _token_lines(comparison.token_problems),
        _ledger_lines(comparison.ledger),
        _divergence_lines(comparison),
        _site_table(comparison.failing_sites),
        _diagnosis_lines(comparison),
        [_smallest_rtol(comparison), f"what to try next: {_next(comparison)}"],
    ]
    return "\n".join(line for section in sections for line in section)


def where(entry: LedgerEntry | RowDifference) -> str:
    """A row's request, site and position, as every message writes them."""
    return f"request {entry.request_id!r}, site {entry.site}, position {entry.position}"


def _passed(comparison: Comparison) -> str:
    limits = sorted({site.rtol for site in comparison.sites if site.rtol is not None})
    allowed = f", allowed {' and '.join(f'{x:.2g}' for x in limits)}" if limits else ""
    return (
        f"captures match: {comparison.rows_compared:,} rows at "
        f"{_count(len(comparison.sites), 'site')}, worst relative error "
        f"{comparison.worst_relative_error:.2g}{allowed}{_noise(comparison)}"
        f"{_outliers(comparison.sites)}{_cached(comparison.ledger)}"
    )


def _noise(comparison: Comparison) -> str:
    """How near the noise floor a comparison with a reference was."""
    floors = [site.floor for site in comparison.sites if site.floor is not None]
    if not floors:
        return ""
    worst = max(floors, key=lambda floor: floor.median_ratio / floor.median_limit)
    return (
        f", the worst row at {comparison.worst_ratio:.0%} of what the noise floor allows it, the "
        f"median row of a site at most {worst.median_ratio:.2f} floors off"
    )


def _outliers(sites: Sequence[SiteSummary]) -> str:
    """Which features were judged apart from the rest of their rows."""
    found = [(site.outliers, site.site) for site in sites if site.outliers is not None]
    if not found:
        return ""
    largest, site = max(found, key=lambda one: one[0].largest)
    features = sorted({feature for outliers, _ in found for feature in outliers.features})
    names = _named("feature", list(map(str, features)))
    return (
        f"; outlier {names}, up to {largest.largest:.6g} at {site}, judged apart from the others "
        f"in {_count(sum(outliers.rows for outliers, _ in found), 'row')}"
    )


def _cached(ledger: Ledger) -> str:
    """What was left out of the comparison, as no capture can have it."""
    if not ledger.cached:
        return ""
    positions = sum(cached.stop - cached.start for cached in ledger.cached)
    of = _count(len({cached.request_id for cached in ledger.cached}), "request")
    return f"; {_count(positions, 'position')} of {of} not compared: read from the prefix cache"


def _headline(comparison: Comparison) -> str:
    if comparison.token_problems:
        return f"captures differ in their tokens: {_token_line(comparison.token_problems[0])}"
    entries, failing = comparison.ledger.entries, comparison.failing_sites
    if entries:
        first = entries[0]
        return (
            f"captures differ in their rows: {where(first)} is {first.kind}: {first.reason} "
            f"({_count(len(entries), 'problem')} with {comparison.rows_due:,} rows due)"
        )
    if not failing:
        empty = ", ".join(map(str, comparison.empty_sites[:MAX_NAMES])) or "any site"
        return f"captures were not compared: no rows at {empty}, and no rows are no evidence"
    site = failing[0]
    if site.errors is None:
        return f"captures differ: {_widths(site)}"
    if site.first is None:
        return f"captures differ: site {site.site} as a whole is wrong: {_as_a_whole(site.floor)}"
    row = site.first
    what = f"the relative error is {row.relative_error:.3g}, {row.allowed:.3g} is allowed"
    if row.relative_error <= row.allowed:  # then its outliers are what fails
        what = (
            f"the relative error of its outlier features, the largest of which is "
            f"{row.outlier_feature}, is {row.outlier_error:.3g}, {row.outlier_allowed:.3g} is "
            "allowed"
        )
    if row.nan_count or row.inf_count:
        what = _nonfinite(row)
    return f"captures differ: {where(row)} is the first wrong row: {what}"


def _as_a_whole(floor: SiteFloor | None) -> str:
    """Which of a site's medians is beyond its limit."""
    assert floor is not None  # without one only rows fail
    parts = []
    if floor.median_ratio > floor.median_limit:
        parts.append(
            f"the median row is {floor.median_ratio:.2f} noise floors off, "
            f"{floor.median_limit:.2f} is allowed"
        )
    if abs(floor.bias) > floor.bias_limit:
        side = "large" if floor.bias > 0 else "small"
        parts.append(
            f"norms are {abs(floor.bias):.2f} noise floors too {side} "
            f"({floor.bias * floor.median_floor:+.2%}), {floor.bias_limit:.2f} is allowed"
        )
    return f"{' and '.join(parts)} (over {floor.rows:,} rows, of which none fails alone)"


def _widths(site: SiteSummary) -> str:
    return (
        f"site {site.site} has rows of width {site.actual_width}, expected {site.expected_width}: "
        "no value could be compared"
    )


def _nonfinite(row: RowDifference) -> str:
    return (
        f"{row.nan_count} NaN and {row.inf_count} Inf, the first at feature {row.feature} "
        f"(actual {row.actual_value:.6g}, expected {row.expected_value:.6g})"
    )


def _token_line(problem: TokenProblem) -> str:
    at = "" if problem.position is None else f", position {problem.position}"
    return f"request {problem.request_id!r}{at}: {problem.reason}"


def _token_lines(problems: Sequence[TokenProblem]) -> list[str]:
    if not problems:
        return []
    shown = [f"  {_token_line(problem)}" for problem in problems[:MAX_TOKEN_PROBLEMS]]
    title = f"tokens: {_count(len(problems), 'request')} that differ"
    return [title, *shown, *_more(len(problems) - len(shown), "request")]


def _ledger_lines(ledger: Ledger) -> list[str]:
    if not ledger.entries:
        return []
    counts = [f"{len(found):,} {kind}" for kind in KINDS if (found := ledger.of_kind(kind))]
    groups = _grouped(ledger.entries)
    lines = []
    for (kind, positions, sites), (reason, requests) in list(groups.items())[:MAX_LEDGER_LINES]:
        lines.append(
            f"  {kind}: {_named('request', requests)}, {_named('site', sites)}, "
            f"{'positions' if len(positions) > 1 else 'position'} {_ranges(positions)}: {reason}"
        )
    title = f"rows: {ledger.due:,} due, {ledger.delivered:,} delivered, {', '.join(counts)}"
    return [title, *lines, *_more(len(groups) - len(lines), "group of rows", "groups of rows")]


_Group = tuple[str, tuple[int, ...], tuple[str, ...]]


def _grouped(entries: Sequence[LedgerEntry]) -> dict[_Group, tuple[str, list[str]]]:
    """Entries by kind, positions and sites, with the first one's reason and all their requests."""
    sites: dict[tuple[str, str, tuple[int, ...]], tuple[str, list[str]]] = {}
    per_site = groupby(entries, key=lambda entry: (entry.kind, entry.request_id, entry.site))
    for (kind, request_id, site), group in per_site:
        rows = list(group)
        key = (kind, request_id, tuple(row.position for row in rows))
        sites.setdefault(key, (rows[0].reason, []))[1].append(str(site))
    groups: dict[_Group, tuple[str, list[str]]] = {}
    for (kind, request_id, positions), (reason, names) in sites.items():
        key_of_group = (kind, positions, tuple(names))
        groups.setdefault(key_of_group, (reason, []))[1].append(repr(request_id))
    return groups


def _named(noun: str, names: Sequence[str]) -> str:
    """`sites a, b, c and 29 more`."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{noun}{'s' * (len(names) > 1)} {', '.join(names[:MAX_NAMES])}{more}"


def _ranges(positions: Iterable[int]) -> str:
    """`3-7, 9`: positions as ranges, the first few of them."""
    ranges: list[list[int]] = []
    for position in sorted(positions):
        if ranges and position <= ranges[-1][1] + 1:
            ranges[-1][1] = position
        else:
            ranges.append([position, position])
    shown = [f"{low}" if low == high else f"{low}-{high}" for low, high in ranges[:MAX_RANGES]]
    return ", ".join(shown) + f" and {len(ranges) - MAX_RANGES} more" * (len(ranges) > MAX_RANGES)


def _divergence_lines(comparison: Comparison) -> list[str]:
    if not comparison.failing_sites:
        return []
    site = comparison.failing_sites[0]
    row = comparison.first_divergence
    if row is None:
        return [f"numbers: {_widths(site)}"]
    dtypes = site.actual_dtype
    if site.expected_dtype != site.actual_dtype:
        dtypes += f" against {site.expected_dtype}"
    what = "first divergence" if site.first else "worst row of the first site"
    lines = [f"{what}, in execution order: {where(row)} ({dtypes})"]
    if row.nan_count or row.inf_count:
        return [*lines, f"  {_nonfinite(row)}"]
    return [
        *lines,
        f"  relative L2 error      {row.relative_error:.6g}, allowed {row.allowed:.6g}",
        f"  cosine                 {row.cosine:.9f}",
        f"  norm, actual/expected  {row.norm_ratio:.6g}",
        f"  largest difference     {row.max_abs_diff:.6g} at feature {row.feature}: "
        f"actual {row.actual_value:.8g}, expected {row.expected_value:.8g}",
        *_outlier_lines(row),
    ]


def _outlier_lines(row: RowDifference) -> list[str]:
    if row.outlier_feature is None:
        return []
    return [
        f"  outlier features       judged apart, the largest is {row.outlier_feature}: relative L2 "
        f"error {row.outlier_error:.6g}, allowed {row.outlier_allowed:.6g}"
    ]


def _site_table(failing: Sequence[SiteSummary]) -> list[str]:
    compared = [site for site in failing if site.worst]
    if not compared:
        return []
    table = [
        {
            "site": str(site.site),
            "failing rows": f"{site.failing:,} of {site.rows:,}",
            "worst error": f"{worst.relative_error:.2e}",
            "in": f"{worst.request_id!r} at {worst.position}",
            "min cosine": f"{site.min_cosine:.6f}",
            **({"floors off": f"{site.floor.median_ratio:.2f}"} if site.floor else {}),
            "norm ratio": f"{site.min_norm_ratio:.4g} .. {site.max_norm_ratio:.4g}",
            "max |difference|": f"{site.max_abs_diff:.3g}[{site.max_abs_feature}]",
            "NaN, Inf": f"{site.nan_count:,}, {site.inf_count:,}",
        }
        for site in compared[:MAX_SITES]
        if (worst := site.worst)
    ]
    text = tabulate(table, headers="keys", disable_numparse=True)
    return [*text.splitlines(), *_more(len(compared) - len(table), "failing site")]


def _smallest_rtol(comparison: Comparison) -> str:
    smallest = comparison.smallest_passing_rtol
    if smallest is not None:
        # Rounded up: the number that is read must pass when it is typed back.
        return f"smallest tolerance that would have passed: rtol={_round_up(smallest)}"
    reasons = [
        (bool(comparison.token_problems), "token ids differ"),
        (bool(comparison.ledger.entries), "the rows are not those due"),
        (not (comparison.ledger.entries or comparison.failing_sites), "no rows were compared"),
        (any(site.worst is None for site in comparison.failing_sites), "widths differ"),
        (any(site.nan_count or site.inf_count for site in comparison.sites), "NaN or Inf"),
        (comparison.worst_relative_error >= 1, "a row is as wrong as zeros would be"),
    ]
    why = ", ".join(reason for applies, reason in reasons if applies)
    return f"smallest tolerance that would have passed: none ({why})"


def _round_up(value: float) -> str:
    for digits in range(3, 18):
        text = f"{value:.{digits}g}"
        if float(text) >= value:
            return text
    return repr(value)


def _diagnosis_lines(comparison: Comparison) -> list[str]:
    return [
        f"{'or' if at else 'diagnosis'}: {found.claim} ({found.evidence})"
        for at, found in enumerate(comparison.diagnoses)
    ]


def _next(comparison: Comparison) -> str:
    if comparison.token_problems:
        return "make the token ids equal first: rows of other tokens cannot agree"
    if comparison.diagnoses:
        return comparison.diagnoses[0].way_out
    row = comparison.first_divergence
    if row is not None:
        return _next_for_unexplained(row)
    if comparison.failing_sites:
        return "look for one shard of a tensor-parallel model, or for another model"
    if comparison.ledger.entries:
        return "find the step in which the first of these rows was taken or lost"
    return "see what the selectors select of these requests, and whether the taps were called"


def _next_for_unexplained(row: RowDifference) -> str:
    if row.nan_count or row.inf_count:
        return "see whether the model's own output holds NaN or Inf, or only the tap's buffer does"
    return (
        "compare with the site's inputs: the failing rows are no shift, swap, other layer, "
        "residual mistake or scale of the expected ones"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _more(number: int, noun: str, plural: str = "") -> list[str]:
    many = plural or f"{noun}s"
    return [f"  ... and {number:,} more {noun if number == 1 else many}"] if number > 0 else []
