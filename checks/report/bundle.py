"""A folder that replays a failed comparison elsewhere: slices of the captures and the reports."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from tapcheck.capture import Capture
from tapcheck.checks.comparison import Comparison, RowDifference
from tapcheck.checks.equivalence import compare_captures
from tapcheck.checks.ledger import LedgerEntry
from tapcheck.checks.message import explain, where
from tapcheck.checks.report.data import report_data, write_json
from tapcheck.checks.report.page import write_html
from tapcheck.checks.report.plots import ReportError
from tapcheck.compatibility.files import write_whole
from tapcheck.sites import Site
from tapcheck.storage import save_capture

# Of the first wrong row, how many positions on either side are kept, and at how many requests.
NEAR_POSITIONS = 3
NEAR_REQUESTS = 8

_README = """\
# A comparison that failed

{headline}

To replay it, in this folder, with tapcheck {version} (no GPU and no vLLM needed):

```sh
{command}
```

| file | what |
| --- | --- |
{files}
| requests.json | the token ids of the requests in them |
| report.html, report.json | the report of the whole comparison, with settings and environments |

The captures hold {cut}. Replayed, the first problem is the same.
"""
_ROLES = {
    "actual": "the capture that was judged",
    "expected": "the capture that it should match",
    "reference": "the same tokens in a wider dtype",
}
_REPEAT = "repeat-"
_A_REPEAT = "another run of what was expected"


@dataclass(frozen=True)
class _Cut:
    """Which rows a slice keeps; None keeps all. `text` says so."""

    text: str
    requests: frozenset[str] | None = None
    sites: frozenset[Site] | None = None
    positions: frozenset[int] | None = None

    def of(self, capture: Capture) -> Capture:
        """The slice of a capture; its requests keep all their tokens."""
        ids = [request.id for request in capture.requests]
        sliced = capture.select(
            requests=ids if self.requests is None else [i for i in ids if i in self.requests],
            sites=[s for s in capture.sites if self.sites is None or s in self.sites],
        )
        if self.positions is None:
            return sliced
        wanted = list(self.positions)
        return replace(
            sliced,
            rows={
                site: rows.take(np.flatnonzero(np.isin(rows.columns.position, wanted)))
                for site, rows in sliced.rows.items()
            },
        )


def write_bundle(
    directory: str | Path,
    actual: Capture,
    expected: Capture,
    comparison: Comparison,
    *,
    reference: Capture | None = None,
    repeats: Sequence[Capture] = (),
    rtol: float | None = None,
) -> None:
    """Write what replays a failed comparison to `directory`, which must be new or empty.

    `rtol`, `reference` and `repeats` are those of the comparison. The slices are as small as still
    give the same first divergence. Raises ReportError for a comparison that passed, for a folder
    that holds something, or where matplotlib is not installed.
    """
    directory = Path(directory)
    if comparison.passed:
        raise ReportError("the captures match: there is no failure to bundle")
    _require_empty(directory)
    captures = {"actual": actual, "expected": expected}
    captures |= {} if reference is None else {"reference": reference}
    captures |= {f"{_REPEAT}{number}": repeat for number, repeat in enumerate(repeats, 1)}
    cut, slices = _smallest_that_replays(captures, comparison, rtol)
    data = report_data(comparison, actual, expected, reference)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}.tmp")
    partial.mkdir()
    try:
        for role, capture in slices.items():
            save_capture(capture, partial / f"{role}.safetensors")
        write_json(partial / "report.json", data)
        write_html(partial / "report.html", data)
        write_whole(partial / "requests.json", _requests(slices["expected"]))
        write_whole(partial / "README.md", _readme(comparison, cut, list(slices), rtol))
        os.replace(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _require_empty(directory: Path) -> None:
    """Raise ReportError unless `directory` is not there, or is an empty folder."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ReportError(f"{directory} holds something already: name a new folder for the bundle")


def _smallest_that_replays(
    captures: dict[str, Capture], comparison: Comparison, rtol: float | None
) -> tuple[_Cut, dict[str, Capture]]:
    """The first of the cuts with which comparing finds the same; the whole captures do.

    One that is diagnosed, as the comparison was, goes before a smaller one that isn't.
    """
    found, diagnosed = _findings(comparison), bool(comparison.diagnoses)
    undiagnosed: tuple[_Cut, dict[str, Capture]] | None = None
    for cut in _cuts(captures, comparison):
        slices = {role: cut.of(capture) for role, capture in captures.items()}
        again = compare_captures(
            slices["actual"],
            slices["expected"],
            rtol=rtol,
            reference=slices.get("reference"),
            repeats=[slice for role, slice in slices.items() if role.startswith(_REPEAT)],
        )
        if _findings(again) == found:
            if bool(again.diagnoses) == diagnosed:
                return cut, slices
            undiagnosed = undiagnosed or (cut, slices)
    return undiagnosed or (_Cut("all of their rows"), captures)


def _findings(comparison: Comparison) -> tuple[object, ...]:
    """What a replay must find again: the first of each kind of problem."""
    token = comparison.token_problems[0] if comparison.token_problems else None
    entry = comparison.ledger.entries[0] if comparison.ledger.entries else None
    site = comparison.failing_sites[0] if comparison.failing_sites else None
    row = comparison.first_divergence
    return (
        token,
        entry and (entry.kind, where(entry)),
        site and (site.site, site.failing > 0),
        row and where(row),
    )


def _cuts(captures: dict[str, Capture], comparison: Comparison) -> Iterator[_Cut]:
    """From a handful of rows around the first problem of each kind up to whole layers."""
    row = comparison.first_divergence
    rows: list[LedgerEntry | RowDifference] = list(comparison.ledger.entries[:1])
    rows += [] if row is None else [row]
    wrong = {*(each.site for each in rows), *(each.site for each in comparison.failing_sites[:1])}
    places = [(each.request_id, each.position) for each in rows]
    places += [(each.request_id, each.position or 0) for each in comparison.token_problems[:1]]
    ids = [request_id for request_id, _ in places]
    if not ids and not wrong:
        return
    captured = {site for capture in captures.values() for site in capture.sites}
    sites = _near(wrong, captured) if wrong else None  # other tokens are wrong at every site
    names = f"{', '.join(map(str, sorted(wrong)))} and the layers next to it" if wrong else "all"
    others = [request.id for request in captures["expected"].requests]
    requests = frozenset([*ids, *others][: NEAR_REQUESTS + len(ids)])
    near = frozenset(
        position + step
        for _, position in places
        for step in range(-NEAR_POSITIONS, NEAR_POSITIONS + 1)
        if position + step >= min(0, position)
    )
    if near:
        some = f"at most {len(near)} positions, from {min(near)} to {max(near)},"
        yield _Cut(f"{some} of {len(requests)} requests, at sites: {names}", requests, sites, near)
    yield _Cut(f"all rows of {len(requests)} requests, at sites: {names}", requests, sites)
    yield _Cut(f"all rows of all requests, at sites: {names}", None, sites)


def _near(wrong: set[Site], sites: set[Site]) -> frozenset[Site]:
    """The sites whose layer is at most one away from that of a wrong one."""
    last = max((site.layer for site in sites if site.layer is not None), default=0)

    def layer(site: Site) -> int:
        if site.layer is None:
            return -1 if site.point == "embed" else last + 1
        return site.layer

    return frozenset(
        site for site in sites if any(abs(layer(site) - layer(each)) <= 1 for each in wrong)
    )


def _requests(capture: Capture) -> str:
    requests = [
        {
            "id": request.id,
            "prompt_token_ids": request.prompt_token_ids,
            "generated_token_ids": request.generated_token_ids,
        }
        for request in capture.requests
    ]
    return json.dumps(requests) + "\n"


def _readme(comparison: Comparison, cut: _Cut, roles: Sequence[str], rtol: float | None) -> str:
    command = ["tapcheck", "diff", "actual.safetensors", "expected.safetensors"]
    if "reference" in roles:
        command += ["--reference", "reference.safetensors"]
    for role in roles:
        command += ["--repeat", f"{role}.safetensors"] if role.startswith(_REPEAT) else []
    if rtol is not None:
        command += ["--rtol", repr(rtol)]
    return _README.format(
        headline=_quoted(explain(comparison).splitlines()[0]),
        version=version("tapcheck"),
        command=shlex.join(command),
        files="\n".join(
            f"| {role}.safetensors | {_ROLES.get(role, _A_REPEAT)} |" for role in roles
        ),
        cut=cut.text,
    )


def _quoted(text: str) -> str:
    """Text that Markdown shows as it is: a request id may hold anything."""
    return "    " + text
