"""Pairs of captures to compare, actual and expected, one for each kind of outcome."""

from __future__ import annotations

from dataclasses import replace

from synthetic import perturbed, synthetic_capture

from tapcheck.capture import SiteRows
from tapcheck.checks.faults import FAULTS

HEALTHY = synthetic_capture()
EMPTY = replace(HEALTHY, rows={})
NARROW = replace(
    HEALTHY,
    rows={
        site: SiteRows(rows.columns, rows.values[:, :8]) if str(site) == "mlp_out.1" else rows
        for site, rows in HEALTHY.rows.items()
    },
)
OTHER_TOKENS = replace(
    HEALTHY,
    requests=(replace(HEALTHY.requests[0], prompt_token_ids=(9, 9)), *HEALTHY.requests[1:]),
)
PAIRS = {
    "passing": (perturbed(HEALTHY, 1e-5), HEALTHY),
    "exact": (HEALTHY, HEALTHY),
    "empty": (EMPTY, EMPTY),
    "half empty": (EMPTY, HEALTHY),
    "other widths": (NARROW, HEALTHY),
    "other tokens": (OTHER_TOKENS, HEALTHY),
    "lost request": (HEALTHY.select(requests=["a", "c"]), HEALTHY),
    "extra request": (HEALTHY, HEALTHY.select(requests=["a", "c"])),
    "lost site": (HEALTHY.select(sites=["embed", "resid_post.1"]), HEALTHY),
    **{name: (fault.inject(HEALTHY), HEALTHY) for name, fault in FAULTS.items()},
}
