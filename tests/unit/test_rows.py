from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_rows import CPU_BUILD, ENGINE, H200, HASHES, ROW, check, row, skipped

from tapcheck.compatibility.environment import Environment
from tapcheck.compatibility.errors import RowError
from tapcheck.compatibility.rows import (
    MatrixRow,
    _footer,
    new_row,
    read_row,
    read_rows,
    stale_checks,
    to_document,
    write_row,
)
from tapcheck.compatibility.verdict import CheckResult, Condition

Edit = Callable[[dict[str, Any]], None]


def store(document: Any, folder: Path) -> Path:
    path = folder / f"{ROW.id}.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def edited(folder: Path, edit: Edit, *, footer: bool = True) -> Path:
    """The sound row with one edit, its footer made anew as a forger would."""
    document = to_document(ROW)
    edit(document)
    if footer:
        body = {key: value for key, value in document.items() if key != "footer"}
        document["footer"] = _footer(body)
    return store(document, folder)


METRICS = st.integers(-(2**60), 2**60) | st.floats()
NAMES = st.text(min_size=1).filter(lambda name: name not in ("nan", "inf", "-inf"))
CONDITIONS = st.builds(Condition, NAMES, st.sampled_from(["<=", ">=", "=="]), METRICS | NAMES)
CHECKS = st.builds(
    CheckResult,
    name=NAMES,
    outcome=st.sampled_from(["completed", "skip", "xfail", "error", "not exercised"]),
    reason=st.text(),
    metrics=st.dictionaries(NAMES, METRICS),
    conditions=st.lists(CONDITIONS).map(tuple),
    first_divergence=st.none() | st.text(min_size=1),
    seconds=st.floats(0, 1e9),
    source_hash=st.text(),
)
ROWS = st.builds(
    row,
    checks=st.lists(CHECKS, unique_by=lambda check: check.name, max_size=4).map(tuple),
    expected_checks=st.lists(NAMES, unique=True, min_size=1, max_size=4).map(tuple),
    situations=st.dictionaries(st.text(), st.integers(0, 2**60)),
)


@given(ROWS)
def test_reading_is_the_inverse_of_writing(
    tmp_path_factory: pytest.TempPathFactory, written: MatrixRow
) -> None:
    found = read_row(write_row(written, tmp_path_factory.mktemp("rows")))
    # By their representation, because NaN is not equal to itself.
    assert repr(found) == repr(written)


def test_a_gpu_survives_the_file(tmp_path: Path) -> None:
    on_gpu = row(environment=Environment(**{**vars(CPU_BUILD), "gpu": H200}))
    assert read_row(write_row(on_gpu, tmp_path)) == on_gpu


def test_metrics_that_json_lacks_are_strings_in_the_file(tmp_path: Path) -> None:
    odd = check(metrics={"a": math.nan, "b": math.inf, "c": -math.inf})
    document = json.loads(write_row(row(checks=(odd,)), tmp_path).read_text())
    assert document["checks"][0]["metrics"] == {"a": "nan", "b": "inf", "c": "-inf"}


def test_a_file_carries_status_verdict_and_footer(tmp_path: Path) -> None:
    checks = (check("equivalence"), check("ledger", error=1.0), skipped())
    path = write_row(row(checks=checks), tmp_path)
    document = json.loads(path.read_text())
    assert path.name == f"{ROW.id}.json"
    assert [item["status"] for item in document["checks"]] == ["pass", "fail", "skip"]
    assert document["verdict"] == "fail"
    assert document["footer"]["checks"] == 3


def test_new_rows_are_stamped_and_keep_no_paths() -> None:
    failed = check(
        reason="crashed at /home/someone/run.py:3, see https://host/a/b and ~/x; 1/2 rows",
        first_divergence="request a/0, resid_post.1, in '/var/tmp/out'",
    )
    made = new_row(
        duration_s=1,
        environment=CPU_BUILD,
        settings=[ENGINE, ENGINE],
        situations={},
        checks=[failed],
        expected_checks=["equivalence"],
    )
    assert made.id[:16] == made.recorded_at.replace("-", "").replace(":", "")
    assert made.settings == (ENGINE,)
    assert made.checks[0].reason == (
        "crashed at <path>:3, see https://host/a/b and <path>; 1/2 rows"
    )
    assert made.checks[0].first_divergence == "request a/0, resid_post.1, in '<path>'"


def test_a_row_is_never_overwritten(tmp_path: Path) -> None:
    path = write_row(ROW, tmp_path)
    before = path.read_bytes()
    with pytest.raises(RowError, match="is there already"):
        write_row(row(duration_s=1.0), tmp_path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_of_concurrent_recorders_with_one_id_exactly_one_wins(tmp_path: Path) -> None:
    def record(seconds: int) -> float | None:
        try:
            write_row(row(duration_s=float(seconds)), tmp_path)
        except RowError:
            return None
        return float(seconds)

    with ThreadPoolExecutor(8) as pool:
        winners = [won for won in pool.map(record, range(32)) if won is not None]
    assert winners == [read_row(tmp_path / f"{ROW.id}.json").duration_s]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (row(id="latest"), r"\$\.id"),
        (row(duration_s=-1.0), r"\$\.duration_s"),
        (row(duration_s=math.nan), "not finite"),
        (row(expected_checks=()), r"\$\.expected_checks"),
        (row(situations={"chunks": -1}), r"\$\.situations\.chunks"),
        (row(checks=(check(), check())), "more than one result of equivalence"),
        (row(checks=(check(metrics={"nan": 1.0}),)), r"\$\.checks\[0\]\.metrics"),
        (row(recorded_at="2026-11-30T07:31:09Z"), "doesn't begin with the time"),
    ],
)
def test_an_unsound_row_is_not_written(tmp_path: Path, bad: MatrixRow, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        write_row(bad, tmp_path / "rows")
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize(
    "model", ["/srv/models/x", "~/x", "./x", "../x", "C:\\models\\x", "\\\\host\\x"]
)
def test_a_path_is_no_model_name(tmp_path: Path, model: str) -> None:
    engine = type(ENGINE)(**{**vars(ENGINE), "model": model})
    with pytest.raises(RowError, match=r"\$\.settings\[0\]\.model"):
        write_row(row(settings=(engine,)), tmp_path)


@pytest.mark.parametrize("length", [0, 1, 200, -3])
def test_a_truncated_row_is_refused(tmp_path: Path, length: int) -> None:
    text = write_row(ROW, tmp_path / "whole").read_text()
    with pytest.raises(RowError, match="not JSON"):
        read_row(store(text[:length], tmp_path))


def test_a_row_without_footer_is_an_interrupted_recording(tmp_path: Path) -> None:
    path = edited(tmp_path, lambda document: document.pop("footer"), footer=False)
    with pytest.raises(RowError, match="the recording was interrupted"):
        read_row(path)


def test_json_that_is_no_row_is_refused(tmp_path: Path) -> None:
    documents: list[Any] = [[], {}, 3, "NaN", "\x00"]
    for document in documents:
        with pytest.raises(RowError, match="not"):
            read_row(store(document, tmp_path))


def test_a_row_of_the_first_schema_version_is_read_for_good() -> None:
    """The file is as tapcheck 0.1.0 wrote it, and is never to be written anew."""
    assert read_row(Path(__file__).with_name(f"{ROW.id}.json")) == ROW


def test_recorders_at_work_at_once_each_leave_a_row_and_readers_see_whole_ones(
    tmp_path: Path,
) -> None:
    made = [row(id=f"20261130T073108Z-{number:06x}") for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        written = [pool.submit(write_row, one, tmp_path) for one in made]
        while not all(one.done() for one in written):
            assert all(found in made for found in read_rows(tmp_path))
    assert read_rows(tmp_path) == made


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RowError, match="can't be read: No such file"):
        read_row(tmp_path / "absent.json")


def set_metric(document: dict[str, Any]) -> None:
    document["checks"][0]["metrics"]["relative_error"] = 9e-6


def test_an_edited_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RowError, match="it was edited"):
        read_row(edited(tmp_path, set_metric, footer=False))
    assert read_row(edited(tmp_path, set_metric)).checks[0].metrics["relative_error"] == 9e-6


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (
            lambda d: d.update(schema_version=2),
            "it has schema version 2, and this tapcheck reads 1",
        ),
        (lambda d: d.update(schema_version="1"), "it has schema version '1', and"),
        (lambda d: d.update(schema_version=None), "it has schema version None, and"),
        (lambda d: d.update(host="a"), r"\$: Additional properties .*'host'"),
        (lambda d: d["environment"].pop("torch"), r"\$\.environment: 'torch' is a required"),
        (lambda d: d["settings"][0].update(mode="magic"), r"\$\.settings\[0\]\.mode: 'magic'"),
        (lambda d: d["checks"][1].update(status="ok"), r"\$\.checks\[1\]\.status: 'ok'"),
        (lambda d: d["checks"][1].update(status="skip"), "says 'skip', but .* give 'pass'"),
        (
            lambda d: d["checks"][0]["metrics"].update(relative_error=1),
            "check 'equivalence' says 'pass', but .* give 'fail'",
        ),
        (lambda d: d["checks"].append(d["checks"][0]), "more than one result of equivalence"),
        (lambda d: d.update(verdict="fail"), "says 'fail', but its checks give 'pass'"),
        (lambda d: d["checks"].pop(), "says 'pass', but its checks give 'fail'"),
        (lambda d: d["expected_checks"].append("kv"), "says 'pass', but its checks give 'fail'"),
    ],
)
def test_a_contradictory_row_is_refused_even_with_a_fitting_footer(
    tmp_path: Path, edit: Edit, reason: str
) -> None:
    with pytest.raises(RowError, match=reason):
        read_row(edited(tmp_path, edit))


def test_rows_of_a_folder_come_oldest_first(tmp_path: Path) -> None:
    older = row(id="20260101T000000Z-ffffff", recorded_at="2026-01-01T00:00:00Z")
    for written in (ROW, older):
        write_row(written, tmp_path)
    (tmp_path / "README.md").write_text("not a row")
    assert read_rows(tmp_path) == [older, ROW]


def test_every_bad_row_of_a_folder_is_reported_at_once(tmp_path: Path) -> None:
    path = write_row(ROW, tmp_path)
    (tmp_path / "copy.json").write_bytes(path.read_bytes())
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(RowError) as raised:
        read_rows(tmp_path)
    lines = str(raised.value).splitlines()
    assert len(lines) == 3
    assert "a.json" in lines[0]
    assert "b.json" in lines[1]
    assert "copy.json holds the same row" in lines[2]


def test_a_row_under_another_name_is_refused(tmp_path: Path) -> None:
    write_row(ROW, tmp_path).rename(tmp_path / "latest.json")
    with pytest.raises(RowError, match=rf"name it {ROW.id}\.json"):
        read_rows(tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RowError, match="is not a folder"):
        read_rows(tmp_path / "absent")


def test_checks_whose_sources_changed_or_are_gone_are_stale() -> None:
    assert stale_checks(ROW, HASHES) == []
    assert stale_checks(ROW, {**HASHES, "new": "x"}) == []
    assert stale_checks(ROW, {**HASHES, "ledger": "changed"}) == ["ledger"]
    assert stale_checks(ROW, {"ledger": HASHES["ledger"]}) == ["equivalence"]
