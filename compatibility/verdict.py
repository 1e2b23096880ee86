"""Results of checks, and the status that follows from them: derived, never typed in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["completed", "skip", "xfail", "error", "timeout", "crash", "not exercised"]
Status = Literal["pass", "fail", "skip", "xfail", "error", "timeout", "crash", "not exercised"]
Verdict = Literal["pass", "fail"]
Metric = int | float


@dataclass(frozen=True)
class Condition:
    """What a metric must satisfy; `limit` is a number or the name of another metric."""

    metric: str
    op: Literal["<=", ">=", "=="]
    limit: Metric | str


@dataclass(frozen=True)
class CheckResult:
    """One claim, judged: its metrics against its conditions.

    `outcome` is "completed" when the check ran to its end, whatever it found. `reason` says in one
    line what happened. `first_divergence` names request, site and position of the first row that
    differs, in execution order. `source_hash` identifies the code that judged.
    """

    name: str
    outcome: Outcome
    reason: str
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    first_divergence: str | None = None
    seconds: float = 0.0
    source_hash: str = ""


def unmet(result: CheckResult) -> list[Condition]:
    """The conditions that the metrics don't satisfy; an absent metric or a NaN satisfies none."""
    return [condition for condition in result.conditions if not _holds(condition, result.metrics)]


def status(result: CheckResult) -> Status:
    """Pass or fail from metrics and conditions; a completed check without conditions fails."""
    if result.outcome != "completed":
        return result.outcome
    return "pass" if result.conditions and not unmet(result) else "fail"


def _holds(condition: Condition, metrics: Mapping[str, Metric]) -> bool:
    value = metrics.get(condition.metric, math.nan)
    limit = condition.limit
    bound = metrics.get(limit, math.nan) if isinstance(limit, str) else limit
    if condition.op == "<=":
        return value <= bound
    if condition.op == ">=":
        return value >= bound
    return value == bound


def row_verdict(results: Iterable[CheckResult], expected: Iterable[str]) -> Verdict:
    """Pass when every expected check is there once and passes, and no other result is worse.

    An expected failure counts as a pass beside one real pass at least; a skip, an absent check or
    one whose situation never arose does not.
    """
    statuses: dict[str, Status] = {}
    for result in results:
        if result.name in statuses:
            return "fail"
        statuses[result.name] = status(result)
    complete = all(name in statuses for name in expected)
    sound = "pass" in statuses.values() and set(statuses.values()) <= {"pass", "xfail"}
    return "pass" if complete and sound else "fail"
