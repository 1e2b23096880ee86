"""Matrix rows: one run of the checks on one combination, kept as a file of its own.

A file carries what is derived (status of each check, verdict, footer) for its readers; reading it
derives them again and refuses a file that says otherwise.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from tapcheck.compatibility.environment import Environment, Gpu
from tapcheck.compatibility.errors import RowError
from tapcheck.compatibility.files import write_whole
from tapcheck.compatibility.schema import violation
from tapcheck.compatibility.verdict import (
    CheckResult,
    Condition,
    Metric,
    Verdict,
    row_verdict,
    status,
)

SCHEMA_VERSION = 1
RECORDED_ROWS = Path(__file__).with_name("rows")

_SCHEMA = "row.schema.json"
_NOT_FINITE = ("nan", "inf", "-inf")
# An absolute path, but no URL and no fraction.
_PATH = re.compile(r"(?<![\w.~/])(?!//)(?:~?/|[A-Za-z]:\\)[^\s'\"`)\],;:]+")


@dataclass(frozen=True)
class EngineSettings:
    """One engine that ran, as read from the live engine; None where vLLM has no value.

    `model` is a name, never a path. `dtype` was asked for, `engine_dtype` is what ran.
    """

    model: str
    revision: str | None
    dtype: str
    engine_dtype: str
    quantization: str | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    runner: Literal["v1", "v2"]
    mode: Literal["hook", "graph"]
    topology: Literal["in_process", "subprocess"]
    attention_backend: str | None
    block_size: int | None
    model_impl: str | None


@dataclass(frozen=True)
class MatrixRow:
    """What one run of the checks found, where and when.

    `recorded_at` is UTC, such as `2026-01-31T12:00:00Z`; `duration_s` is in seconds. `situations`
    counts how often each situation arose over the run.
    """

    id: str
    recorded_at: str
    duration_s: float
    environment: Environment
    settings: tuple[EngineSettings, ...]
    situations: Mapping[str, int]
    checks: tuple[CheckResult, ...]
    expected_checks: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """Pass only if every expected check is there and passes."""
        return row_verdict(self.checks, self.expected_checks)


def new_row(
    *,
    duration_s: float,
    environment: Environment,
    settings: Iterable[EngineSettings],
    situations: Mapping[str, int],
    checks: Iterable[CheckResult],
    expected_checks: Iterable[str],
) -> MatrixRow:
    """A row stamped with this moment and a fresh id; paths in reasons become `<path>`."""
    now = datetime.now(timezone.utc)
    return MatrixRow(
        id=f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}",
        recorded_at=f"{now:%Y-%m-%dT%H:%M:%SZ}",
        duration_s=duration_s,
        environment=environment,
        settings=tuple(dict.fromkeys(settings)),
        situations=dict(situations),
        checks=tuple(_without_paths(check) for check in checks),
        expected_checks=tuple(expected_checks),
    )


def write_row(row: MatrixRow, folder: Path) -> Path:
    """Write `folder/<id>.json`, whole or not at all, and return its path.

    Creates the folder. Raises RowError for a row that breaks the schema, names a check twice, or
    is there already.
    """
    path = Path(folder) / f"{row.id}.json"
    document = to_document(row)
    _refuse(path, _problem(document))
    try:
        text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    except ValueError as error:
        raise RowError(f"{path} can't be written: a duration is not finite") from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text, exclusive=True)
    except FileExistsError as error:
        raise RowError(f"{path} is there already: rows are never overwritten") from error
    except OSError as error:
        raise RowError(f"{path} can't be written: {error.strerror or error}") from error
    return path


def read_row(path: Path) -> MatrixRow:
    """Read one row; raises RowError that names the file, the place in it and the reason.

    Refused: what isn't JSON or breaks the schema, an interrupted recording (no footer), an edited
    row (the footer's hash differs), a check named twice, a status or verdict that its metrics and
    conditions don't give.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise RowError(f"{path} can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise RowError(f"{path} is not a matrix row: not JSON ({error})") from error
    _refuse(path, _problem(document))
    return _from_document(document)


def read_rows(folder: Path) -> list[MatrixRow]:
    """Read every `*.json` in a folder, oldest first.

    Raises one RowError that lists all files that can't be read, and all ids found twice.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RowError(f"{folder} is not a folder: name the one that holds the recorded rows")
    rows: dict[str, tuple[MatrixRow, Path]] = {}
    problems: list[str] = []
    for path in sorted(folder.glob("*.json")):
        try:
            row = read_row(path)
        except RowError as error:
            problems.append(str(error))
            continue
        if row.id in rows:
            problems.append(f"{path} holds the same row as {rows[row.id][1].name}: keep one")
        elif path.stem != row.id:
            problems.append(f"{path} holds the row {row.id}: name it {row.id}.json")
        rows.setdefault(row.id, (row, path))
    if problems:
        raise RowError("\n".join(problems))
    return sorted((row for row, _ in rows.values()), key=lambda row: (row.recorded_at, row.id))


def stale_checks(row: MatrixRow, current_hashes: Mapping[str, str]) -> list[str]:
    """The row's checks whose code has changed or is gone since, in the row's order.

    `current_hashes` gives the hash of each check's source, by the check's name.
    """
    return [
        check.name for check in row.checks if current_hashes.get(check.name) != check.source_hash
    ]


def to_document(row: MatrixRow) -> dict[str, Any]:
    """The row as its file holds it: plain JSON values, statuses, verdict and footer included."""
    body = {
        "schema_version": SCHEMA_VERSION,
        "id": row.id,
        "recorded_at": row.recorded_at,
        "duration_s": row.duration_s,
        "environment": asdict(row.environment),
        "settings": [asdict(settings) for settings in row.settings],
        "situations": dict(row.situations),
        "expected_checks": list(row.expected_checks),
        "checks": [encode_check(check) for check in row.checks],
        "verdict": row.verdict,
    }
    return {**body, "footer": _footer(body)}


def _from_document(document: Mapping[str, Any]) -> MatrixRow:
    """The inverse of `to_document`, for a document that has been validated."""
    environment = document["environment"]
    gpu = environment["gpu"]
    return MatrixRow(
        id=document["id"],
        recorded_at=document["recorded_at"],
        duration_s=document["duration_s"],
        environment=Environment(**{**environment, "gpu": gpu and Gpu(**gpu)}),
        settings=tuple(EngineSettings(**settings) for settings in document["settings"]),
        situations=document["situations"],
        checks=tuple(decode_check(check) for check in document["checks"]),
        expected_checks=tuple(document["expected_checks"]),
    )


def _problem(document: Any) -> str | None:
    """Why a document is not a sound row; the most telling reason first."""
    if isinstance(document, dict) and "schema_version" in document:
        version = document["schema_version"]
        if version != SCHEMA_VERSION:
            return (
                f"it has schema version {version!r}, and this tapcheck reads {SCHEMA_VERSION}: "
                "read it with the tapcheck that wrote it, or a newer one"
            )
        if "footer" not in document:
            return "it has no footer: the recording was interrupted; run the checks again"
    broken = violation(document, _SCHEMA)
    if broken is not None:
        return f"it breaks {_SCHEMA} at {broken}"
    body = {key: value for key, value in document.items() if key != "footer"}
    if document["footer"] != _footer(body):
        return "its footer doesn't fit its content: it was edited; run the checks again"
    return _contradiction(document, _from_document(document))


def _contradiction(document: Mapping[str, Any], row: MatrixRow) -> str | None:
    """What a whole, valid row says that doesn't follow from the rest of it."""
    if not row.id.startswith(re.sub("[-:]", "", row.recorded_at) + "-"):
        return f"its id {row.id} doesn't begin with the time of recording {row.recorded_at}"
    times = Counter(check.name for check in row.checks)
    twice = [name for name, count in times.items() if count > 1]
    if twice:
        return f"it has more than one result of {', '.join(twice)}"
    for said, check in zip(document["checks"], row.checks, strict=True):
        if said["status"] != status(check):
            return (
                f"check {check.name!r} says {said['status']!r}, but its outcome, metrics and "
                f"conditions give {status(check)!r}"
            )
    if document["verdict"] != row.verdict:
        return f"it says {document['verdict']!r}, but its checks give {row.verdict!r}"
    return None


def _refuse(path: Path, problem: str | None) -> None:
    if problem is not None:
        raise RowError(f"{path} is not a sound matrix row: {problem}")


def _footer(body: Mapping[str, Any]) -> dict[str, Any]:
    """What closes a row: proof that it is whole and unedited."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    return {"complete": True, "checks": len(body["checks"]), "sha256": digest}


def encode_check(check: CheckResult) -> dict[str, Any]:
    """A check as JSON, with its derived status; `decode_check` is the inverse."""
    return {
        "name": check.name,
        "status": status(check),
        "outcome": check.outcome,
        "reason": check.reason,
        "metrics": {name: _encode_metric(value) for name, value in check.metrics.items()},
        "conditions": [
            {
                "metric": condition.metric,
                "op": condition.op,
                "limit": condition.limit
                if isinstance(condition.limit, str)
                else _encode_metric(condition.limit),
            }
            for condition in check.conditions
        ],
        "first_divergence": check.first_divergence,
        "seconds": check.seconds,
        "source_hash": check.source_hash,
    }


def decode_check(document: Mapping[str, Any]) -> CheckResult:
    """A check from its JSON; the status in it is left for the caller to compare."""
    return CheckResult(
        name=document["name"],
        outcome=document["outcome"],
        reason=document["reason"],
        metrics={name: _decode_metric(value) for name, value in document["metrics"].items()},
        conditions=tuple(
            Condition(item["metric"], item["op"], _decode_limit(item["limit"]))
            for item in document["conditions"]
        ),
        first_divergence=document["first_divergence"],
        seconds=document["seconds"],
        source_hash=document["source_hash"],
    )


def _encode_metric(value: Metric) -> Metric | str:
    number = int(value) if isinstance(value, int) else float(value)  # NumPy's numbers too
    return number if math.isfinite(number) else str(number)


def _decode_metric(value: Metric | str) -> Metric:
    return float(value) if isinstance(value, str) else value


def _decode_limit(value: Metric | str) -> Metric | str:
    return _decode_metric(value) if value in _NOT_FINITE else value


def _without_paths(check: CheckResult) -> CheckResult:
    divergence = check.first_divergence
    return replace(
        check,
        reason=_PATH.sub("<path>", check.reason),
        first_divergence=divergence and _PATH.sub("<path>", divergence),
    )


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
