"""What checks share: how a result is made of measurements, and what captures are measured for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from tapcheck.capture import COLUMN_NAMES, Capture, Columns
from tapcheck.checks.comparison import Comparison
from tapcheck.checks.message import explain, where
from tapcheck.checks.sources import source_hash
from tapcheck.checks.tolerances import default_rtol
from tapcheck.compatibility.verdict import CheckResult, Condition

Metrics = Mapping[str, int | float]

_NO_ROWS = Columns(**{name: np.empty(0, np.int64) for name in COLUMN_NAMES})


def completed(
    judge: Callable[..., object],
    reason: str,
    metrics: Metrics,
    *conditions: Condition,
    first: str | None = None,
) -> CheckResult:
    """The result of the check `judge`, which ran to its end; whoever runs it adds its full name."""
    return CheckResult(
        name=judge.__name__,
        outcome="completed",
        reason=reason,
        metrics=metrics,
        conditions=conditions,
        first_divergence=first,
        source_hash=source_hash(judge),
    )


def comparison_result(
    judge: Callable[..., object],
    comparison: Comparison,
    *conditions: Condition,
    metrics: Metrics | None = None,
    note: str = "",
) -> CheckResult:
    """The result of a check that passes when a comparison does, and `conditions` hold too.

    The reason has the likeliest diagnosis and the `note`, where there is one.
    """
    limits = [site.rtol for site in comparison.sites if site.rtol is not None]
    tolerance = (
        Condition("worst_relative_error", "<=", max(limits, default=0.0))
        if limits or not comparison.sites
        else Condition("worst_ratio", "<=", 1)
    )
    first = comparison.first_divergence or next(iter(comparison.ledger.entries), None)
    likeliest = [found.claim for found in comparison.diagnoses[:1]]
    return completed(
        judge,
        "; ".join([explain(comparison).splitlines()[0], *likeliest, *filter(None, [note])]),
        {
            "rows_due": comparison.rows_due,
            "rows_compared": comparison.rows_compared,
            "sites": len(comparison.sites),
            "failing_sites": len(comparison.failing_sites),
            "token_problems": len(comparison.token_problems),
            "ledger_problems": len(comparison.ledger.entries),
            "worst_relative_error": comparison.worst_relative_error,
            **_noise_metrics(comparison),
            **(metrics or {}),
        },
        Condition("rows_compared", ">=", 1),
        Condition("rows_compared", "==", "rows_due"),
        Condition("token_problems", "==", 0),
        Condition("ledger_problems", "==", 0),
        Condition("failing_sites", "==", 0),
        tolerance,
        *conditions,
        first=where(first) if first else None,
    )


def _noise_metrics(comparison: Comparison) -> dict[str, float]:
    """How far a comparison with a reference was from its limits; empty under a fixed tolerance."""
    floors = [site.floor for site in comparison.sites if site.floor is not None]
    if not floors:
        return {}
    return {
        "worst_ratio": comparison.worst_ratio,
        "worst_site_median": max(floor.median_ratio for floor in floors),
        "worst_site_bias": max(abs(floor.bias) for floor in floors),
        "largest_noise_floor": max(floor.median_floor for floor in floors),
    }


def near_the_largest(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Whether each of the `chosen` tokens [rows] is as good as the likeliest; bool [rows].

    `logits` are [rows, vocabulary]. In a narrow dtype two tokens can tie: a token counts when its
    logit is as near to the largest as the dtype's fixed tolerance allows a logit of
    root-mean-square size to be off. NaN never counts.
    """
    allowed = default_rtol(logits.dtype) * logits.float().pow(2).mean(-1).sqrt()
    gap = logits.float().amax(-1) - logits.float().gather(-1, chosen[:, None])[:, 0]
    return gap <= allowed


def count_situations(capture: Capture) -> dict[str, int]:
    """How often what makes ownership hard arose, from the steps that rows say they came from."""
    # Any site will do, unless rows were lost: then the one that lost the fewest.
    columns = max((rows.columns for rows in capture.rows.values()), key=len, default=_NO_ROWS)
    lengths = np.array([request.prompt_length for request in capture.requests])
    decode = columns.position >= lengths[columns.request]
    steps = np.unique(columns.step)
    owners = [np.unique(columns.request[columns.step == step]).size for step in steps]
    mixed = [np.unique(decode[columns.step == step]).size == 2 for step in steps]
    return {
        "requests": len(capture.requests),
        "steps": len(steps),
        "most_requests_in_one_step": max(owners, default=0),
        "steps_mixing_prefill_and_decode": sum(mixed),
        "prompt_rows": int((~decode).sum()),
        "generated_rows": int(decode.sum()),
    }
