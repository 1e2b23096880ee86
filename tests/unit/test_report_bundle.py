from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_pairs import EMPTY, HEALTHY, PAIRS
from jsonschema import Draft202012Validator
from synthetic import perturbed, synthetic_capture

from tapcheck.checks.equivalence import compare_captures
from tapcheck.checks.faults import FAULTS
from tapcheck.checks.jobs import plan_jobs
from tapcheck.checks.message import where
from tapcheck.checks.report import ReportError, bundle, write_bundle
from tapcheck.checks.report.data import SCHEMA
from tapcheck.checks.suite import check_equivalence
from tapcheck.compatibility.verdict import status
from tapcheck.storage import load_capture

REPLAYED = sorted(set(PAIRS) - {"passing", "exact", "empty", "half empty"})


@pytest.mark.parametrize("name", REPLAYED)
def test_a_bundle_replays_the_first_divergence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "write_html", lambda path, data: None)  # a second each
    actual, expected = PAIRS[name]
    comparison = compare_captures(actual, expected)
    write_bundle(tmp_path / "bundle", actual, expected, comparison)
    one = load_capture(tmp_path / "bundle" / "actual.safetensors")
    other = load_capture(tmp_path / "bundle" / "expected.safetensors")
    again = compare_captures(one, other)
    assert repr(again.first_divergence) == repr(comparison.first_divergence)  # NaN is not NaN
    assert again.token_problems[:1] == comparison.token_problems[:1]
    for ours, theirs in zip(again.ledger.entries[:1], comparison.ledger.entries[:1], strict=True):
        assert (ours.kind, ours.request_id, ours.site, ours.position) == (
            theirs.kind,
            theirs.request_id,
            theirs.site,
            theirs.position,
        )
    assert len(one) + len(other) < len(actual) + len(expected)
    report = json.loads((tmp_path / "bundle" / "report.json").read_text(encoding="utf-8"))
    Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8"))).validate(report)
    assert report["rows_due"] == comparison.rows_due


def test_a_bundle_of_a_noise_floor_keeps_the_rows_that_make_it(tmp_path: Path) -> None:
    lengths = ((40, 0), (40, 0))
    wide = synthetic_capture(torch.float64, lengths=lengths)
    healthy = synthetic_capture(lengths=lengths)
    expected, actual = perturbed(healthy, 1e-3), perturbed(healthy, 1e-3, seed=2)
    broken = FAULTS["scaled"].inject(actual)
    comparison = compare_captures(broken, expected, reference=wide)
    assert not comparison.passed
    floor: dict[str, Any] = {
        "reference": wide,
        "repeats": [perturbed(healthy, 1e-3, seed=seed) for seed in (3, 4)],
    }
    assert not compare_captures(broken, expected, **floor).passed
    write_bundle(tmp_path / "b", broken, expected, comparison, **floor)
    names = ("actual", "expected", "reference", "repeat-1", "repeat-2")
    one, other, reference, *repeats = (
        load_capture(tmp_path / "b" / f"{name}.safetensors") for name in names
    )
    again = compare_captures(one, other, reference=reference, repeats=repeats)
    assert again.failing_sites[0].site == comparison.failing_sites[0].site
    assert again.first_divergence is not None
    assert comparison.first_divergence is not None
    assert where(again.first_divergence) == where(comparison.first_divergence)
    # a row's allowance comes of its site's floors, of which the bundle has a part
    assert again.first_divergence.allowed == pytest.approx(comparison.first_divergence.allowed, 0.1)
    readme = (tmp_path / "b" / "README.md").read_text("utf-8")
    files = [f"--{name[:-2]} {name}.safetensors" for name in names[3:]]
    assert " ".join(["--reference reference.safetensors", *files]) in readme


def test_a_bundle_of_two_empty_captures_is_all_that_there_is(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", EMPTY, EMPTY, compare_captures(EMPTY, EMPTY))
    assert load_capture(tmp_path / "b" / "actual.safetensors") == EMPTY


def test_a_bundle_is_refused_where_it_would_mislead_or_overwrite(tmp_path: Path) -> None:
    broken = FAULTS["scaled"].inject(HEALTHY)
    comparison = compare_captures(broken, HEALTHY)
    with pytest.raises(ReportError, match="captures match"):
        write_bundle(tmp_path / "b", HEALTHY, HEALTHY, compare_captures(HEALTHY, HEALTHY))
    (tmp_path / "kept").write_text("kept", encoding="utf-8")
    with pytest.raises(ReportError, match="holds something already"):
        write_bundle(tmp_path, broken, HEALTHY, comparison)
    unsavable = replace(HEALTHY, metadata={"model": object()})
    with pytest.raises(Exception, match="not JSON"):
        write_bundle(tmp_path / "b", broken, unsavable, comparison)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_check_of_an_engine_writes_a_bundle_when_its_rows_differ(tmp_path: Path) -> None:
    healthy = HEALTHY.select(sites=["mlp_out.1", "resid_post.1"])
    jobs = plan_jobs({"org/name": "path"}, "float32", "cpu", 1e-5, tmp_path)
    folders = {job.topology: job.bundle for job in jobs[1:-1]}
    assert folders == {
        "in_process": str(tmp_path / "org--name-in_process"),
        "subprocess": str(tmp_path / "org--name-subprocess"),
    }
    assert jobs[0].bundle is jobs[-1].bundle is None  # neither is held against Transformers
    folder = folders["in_process"]
    assert folder is not None
    assert status(check_equivalence(healthy, healthy, 1e-5, bundle=folder)) == "pass"
    assert not Path(folder).exists()
    broken = FAULTS["swapped_requests"].inject(healthy)
    result = check_equivalence(broken, healthy, 1e-5, bundle=folder)
    assert status(result) == "fail"
    assert "--rtol 1e-05" in (Path(folder) / "README.md").read_text(encoding="utf-8")
    report = json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))
    assert result.reason == f"{report['headline']}; {report['diagnoses'][0]['claim']}"
