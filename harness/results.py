"""What the commands hand to machines: JSON files, known to be writable before the work begins."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from tapcheck.compatibility.environment import Environment
    from tapcheck.compatibility.known_issues import KnownIssue
    from tapcheck.compatibility.nearest import Difference
    from tapcheck.compatibility.rows import MatrixRow


def check_summary(row: MatrixRow) -> dict[str, Any]:
    """What `tapcheck check --json` writes; the rows are those of all its equivalence checks."""
    from tapcheck.compatibility.verdict import status

    def total(name: str) -> int:
        return sum(int(check.metrics.get(name, 0)) for check in equivalences)

    equivalences = [check for check in row.checks if check.name.startswith("equivalence[")]
    errors = [check.metrics.get("worst_relative_error", math.nan) for check in equivalences]
    worst = max(errors, default=math.nan) if not any(map(math.isnan, errors)) else math.nan
    return {
        "verdict": row.verdict,
        "rows_due": total("rows_due"),
        "rows_compared": total("rows_compared"),
        "worst_relative_error": _finite(worst),
        "seconds": row.duration_s,
        "checks": [
            {"name": check.name, "status": status(check), "reason": check.reason}
            for check in row.checks
        ],
    }


def env_summary(
    environment: Environment,
    nearest: MatrixRow | None,
    differing: Sequence[Difference],
    issues: Sequence[KnownIssue],
    command: str,
) -> dict[str, Any]:
    """What `tapcheck env --json` writes; `command` is what to run next."""
    return {
        "environment": asdict(environment),
        "nearest_row": nearest.id if nearest else None,
        "nearest_verdict": nearest.verdict if nearest else None,
        "differences": [asdict(difference) for difference in differing],
        "known_issues": [asdict(issue) for issue in issues],
        "run_next": command,
    }


def write_json(path: Path | None, value: Any) -> None:
    """Write `value` to `path`, whole or not at all; None is no file."""
    if path is None:
        return
    from tapcheck.compatibility.files import write_whole

    write_whole(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def require_writable(option: str, path: Path | None) -> None:
    """Raise BadParameter, before minutes of work, when `path` can't be written; None is no file."""
    if path is None:
        return
    problem = None
    if path.is_dir():
        problem = f"{str(path)!r} is a folder: name a file in it"
    elif path.exists() and not path.is_file():
        problem = f"{str(path)!r} is no regular file"
    else:
        problem = _unwritable(path.parent)
    if problem is not None:
        raise typer.BadParameter(problem, param_hint=f"'{option}'")


def require_folder(option: str, folder: Path | None) -> None:
    """As `require_writable`, for a folder that may have to be made; None is no folder."""
    if folder is None:
        return
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    problem = _unwritable(there)
    if problem is not None:
        raise typer.BadParameter(problem, param_hint=f"'{option}'")


def require_page(path: Path | None) -> None:
    """As `require_writable`, for a report as an HTML page, which takes what draws its figures."""
    require_writable("--html", path)
    _require_plots(path)


def require_bundle(folder: Path | None) -> None:
    """As `require_page`, for a folder of reports and captures that is to be made, or is empty."""
    require_folder("--bundle", folder)
    if folder is not None and folder.is_dir() and any(folder.iterdir()):
        problem = f"{str(folder)!r} holds something already: name a new folder"
        raise typer.BadParameter(problem, param_hint="'--bundle'")
    _require_plots(folder)


def _require_plots(path: Path | None) -> None:
    if path is None:
        return
    from tapcheck.checks.report import require_plots

    require_plots()


def _unwritable(folder: Path) -> str | None:
    """Why no file can be made in `folder`; found out by making one."""
    if not folder.exists():
        return f"there is no folder {str(folder)!r}: make it first"
    if not folder.is_dir():
        return f"{str(folder)!r} is no folder"
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"can't write in {str(folder)!r}: {error.strerror}"
    return None


def _finite(value: float) -> float | None:
    """JSON has no NaN: a number that isn't finite is null."""
    return value if math.isfinite(value) else None
