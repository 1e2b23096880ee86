"""Rows of the matrix that record faults: each shows as what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tapcheck.checks.jobs import TINY_RTOL, Job, check_names, plan_jobs
from tapcheck.checks.sources import source_hash
from tapcheck.checks.suite import run_job
from tapcheck.compatibility.environment import collect_environment
from tapcheck.compatibility.errors import RowError
from tapcheck.compatibility.matrix import render_markdown, shown_verdict
from tapcheck.compatibility.rows import MatrixRow, new_row, read_row, write_row
from tapcheck.compatibility.versions import TESTED_VLLM
from tapcheck.layout import Segment
from tapcheck.vllm.adapters import V1RunnerAdapter

pytestmark = pytest.mark.engine


def recorded(llama: Path, folder: Path) -> tuple[MatrixRow, Path]:
    """The row of the checks of one engine, run now, and its file."""
    job = Job("tiny-llama", str(llama), "float32", "cpu", "in_process", TINY_RTOL)
    found = run_job(job)
    row = new_row(
        duration_s=1.0,
        environment=collect_environment("cpu"),
        settings=found.settings,
        situations=found.situations,
        checks=found.results,
        expected_checks=check_names(job),
    )
    return row, write_row(row, folder)


def cell(page: str, version: str) -> str:
    """What the page shows for a version under runner V1, hook mode and the CPU build."""
    line = next(line for line in page.splitlines() if line.startswith(f"| {version} "))
    return line.split("|")[2].strip()


def test_an_adapter_that_is_broken_for_one_version_fails_there_and_nowhere_else(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two slots of a decoding batch are told the wrong way round."""
    import vllm

    told = V1RunnerAdapter._segments

    def in_the_wrong_order(adapter: V1RunnerAdapter, starts: list[int]) -> tuple[Segment, ...]:
        segments = told(adapter, starts)
        if len(segments) > 1 and segments[0].rows == segments[1].rows == 1:
            return (segments[1], segments[0], *segments[2:])
        return segments

    monkeypatch.setattr(V1RunnerAdapter, "_segments", in_the_wrong_order)
    row, file = recorded(llama, tmp_path)
    assert row == read_row(file)
    assert row.verdict == "fail"
    (equivalence,) = (check for check in row.checks if check.name.startswith("equivalence"))
    assert equivalence.metrics["failing_sites"] > 0
    assert "the rows equal the expected rows of other requests" in equivalence.reason
    page = render_markdown([row], {check.name: source_hash(plan_jobs) for check in row.checks})
    assert cell(page, vllm.__version__).startswith("[fail]")
    others = [version for version in TESTED_VLLM if version != vllm.__version__]
    assert {cell(page, version) for version in others} == {"unknown"}


def test_a_row_edited_to_pass_is_refused_and_one_of_older_checks_is_stale(
    llama: Path, tmp_path: Path
) -> None:
    row, file = recorded(llama, tmp_path)
    now = {check.name: source_hash(plan_jobs) for check in row.checks}
    assert (row.verdict, shown_verdict(row, now)) == ("pass", "pass")

    later = {**now, row.checks[0].name: "the hash after its source changed"}
    assert shown_verdict(row, later) == "stale"
    assert "stale" in render_markdown([row], later)

    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    document["checks"][0]["status"] = "fail"
    file.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(RowError, match=r"edited|says 'fail', but"):
        read_row(file)
