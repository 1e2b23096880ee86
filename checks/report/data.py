"""A comparison as plain JSON: all that the page shows, and what another program may read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tapcheck.capture import Capture
from tapcheck.checks.comparison import Comparison, RowDifference, SiteSummary
from tapcheck.checks.ledger import KINDS, Ledger
from tapcheck.checks.message import explain
from tapcheck.checks.numerics import FloatArray
from tapcheck.checks.report.maps import error_maps
from tapcheck.compatibility.files import write_whole

SCHEMA = Path(__file__).with_name("report.schema.json")
SCHEMA_VERSION = 1
MOST_LEDGER_ENTRIES = 200
MOST_TOKEN_PROBLEMS = 50
MOST_SITES_NAMED = 200
_LONGEST_SETTING = 300
# The metadata that are kept for each request: their sums are in `situations`.
_OF_REQUESTS = ("cached", "situations")


def report_data(
    comparison: Comparison, actual: Capture, expected: Capture, reference: Capture | None = None
) -> dict[str, Any]:
    """Everything that is known of a comparison, as report.schema.json describes it.

    JSON has no NaN and no infinities: a number that isn't finite is null.
    """
    message = explain(comparison)
    captures = {"actual": actual, "expected": expected, "reference": reference}
    data = {
        "schema_version": SCHEMA_VERSION,
        "tapcheck": version("tapcheck"),
        "verdict": "pass" if comparison.passed else "fail",
        "headline": message.splitlines()[0],
        "diagnoses": [asdict(each) for each in comparison.diagnoses],
        "message": message,
        "rows_due": comparison.rows_due,
        "rows_compared": comparison.rows_compared,
        "worst_relative_error": comparison.worst_relative_error,
        "worst_ratio": comparison.worst_ratio,
        "smallest_passing_rtol": comparison.smallest_passing_rtol,
        "checks": _claims(comparison),
        "first_divergence": _first_divergence(comparison, actual, expected),
        "tokens": {
            "problems": len(comparison.token_problems),
            "shown": [asdict(each) for each in comparison.token_problems[:MOST_TOKEN_PROBLEMS]],
        },
        "ledger": _ledger(comparison.ledger),
        "sites": [_site(summary) for summary in comparison.sites],
        "maps": error_maps(comparison, expected),
        "captures": {name: _capture(each) for name, each in captures.items() if each is not None},
    }
    plain: dict[str, Any] = _plain(data)
    return plain


def write_json(path: str | Path, data: Mapping[str, Any]) -> None:
    """Write the report's data to `path`, a line for each part, whole or not at all."""
    parts = [f"{json.dumps(key)}: {json.dumps(data[key], allow_nan=False)}" for key in data]
    write_whole(Path(path), "{\n" + ",\n".join(parts) + "\n}\n")


def _claims(comparison: Comparison) -> list[dict[str, Any]]:
    """Each claim of a comparison as a check."""
    ledger, failing, sites = comparison.ledger, comparison.failing_sites, comparison.sites
    compared = bool(sites) and not comparison.empty_sites
    claims = (
        ("tokens", not comparison.token_problems, f"{len(comparison.token_problems)} differences"),
        ("ledger", ledger.complete, f"{len(ledger.entries)} rows wrong of {ledger.due} due"),
        (
            "values",
            compared and not failing,
            f"{len(failing)} of {len(sites)} sites fail, {comparison.rows_compared} rows compared",
        ),
    )
    return [
        {"name": name, "status": "pass" if held else "fail", "reason": reason}
        for name, held, reason in claims
    ]


def _first_divergence(
    comparison: Comparison, actual: Capture, expected: Capture
) -> dict[str, Any] | None:
    """The first failing row, with the token that it is of and the step that it was taken in."""
    row = comparison.first_divergence
    if row is None:
        return None
    request = expected.request(row.request_id)
    tokens = request.token_ids
    columns = actual[row.site].columns
    mine = columns.request == actual.requests.index(actual.request(row.request_id))
    step = columns.step[np.flatnonzero(mine & (columns.position == row.position))]
    return {
        **_row(row),
        "alone": bool(comparison.failing_sites[0].failing),
        "part": "generated" if row.position >= request.prompt_length else "prompt",
        "token_id": tokens[row.position] if 0 <= row.position < len(tokens) else None,
        "step": int(step[0]) if len(step) else None,
    }


def _ledger(ledger: Ledger) -> dict[str, Any]:
    return {
        "due": ledger.due,
        "delivered": ledger.delivered,
        "problems": {kind: len(ledger.of_kind(kind)) for kind in KINDS},
        "shown": [
            {
                "kind": entry.kind,
                "request_id": entry.request_id,
                "site": str(entry.site),
                "position": entry.position,
                "reason": entry.reason,
            }
            for entry in ledger.entries[:MOST_LEDGER_ENTRIES]
        ],
        "cached": [asdict(each) for each in ledger.cached[:MOST_LEDGER_ENTRIES]],
    }


def _site(summary: SiteSummary) -> dict[str, Any]:
    names = ("actual_dtype", "expected_dtype", "actual_width", "expected_width", "rtol", "rows")
    numbers = ("failing", "worst_relative_error", "worst_ratio", "min_cosine", "min_norm_ratio")
    more = ("max_norm_ratio", "max_abs_diff", "max_abs_feature", "nan_count", "inf_count")
    errors, floor = summary.errors, summary.floor
    return {
        "site": str(summary.site),
        "point": summary.site.point,
        "layer": summary.site.layer,
        "passed": summary.passed,
        **{name: getattr(summary, name) for name in (*names, *numbers, *more)},
        "median_relative_error": None if errors is None else _median(errors.relative_error),
        "median_allowed": None if errors is None else _median(errors.allowed),
        "floor": {**asdict(floor), "passed": floor.passed} if floor else None,
        "outliers": asdict(summary.outliers) if summary.outliers else None,
        "first": _row(summary.first) if summary.first else None,
        "worst": _row(summary.worst) if summary.worst else None,
    }


def _median(values: FloatArray) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None


def _row(row: RowDifference) -> dict[str, Any]:
    return {**vars(row), "site": str(row.site)}


def _capture(capture: Capture) -> dict[str, Any]:
    """What a capture says of itself: its size, and each of its settings by a dotted name."""
    told = {key: value for key, value in capture.metadata.items() if key not in _OF_REQUESTS}
    environment = told.pop("environment", {})
    return {
        "requests": len(capture.requests),
        "tokens": sum(len(request.token_ids) for request in capture.requests),
        "rows": len(capture),
        "sites": [str(site) for site in capture.sites[:MOST_SITES_NAMED]],
        "sites_in_all": len(capture.sites),
        "settings": dict(_flat(told)),
        "environment": dict(_flat(environment)),
        "situations": capture.situations,
    }


def _flat(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Nested metadata as dotted names and scalars; whatever is no scalar is shortened text."""
    if isinstance(value, Mapping):
        parts = [_flat(each, f"{name}.{key}" if name else str(key)) for key, each in value.items()]
        return [pair for part in parts for pair in part]
    if value is None or isinstance(value, bool | int | float):
        return [(name, value)]
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return [(name, text if len(text) <= _LONGEST_SETTING else f"{text[:_LONGEST_SETTING]}...")]


def _plain(value: Any) -> Any:
    """The same in what JSON has: numbers that aren't finite are null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
