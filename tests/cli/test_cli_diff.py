"""`tapcheck diff`: two files, no engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commandline import Done
from safetensors.torch import save_file
from synthetic import perturbed, synthetic_capture

from tapcheck.capture import Capture, SiteRows
from tapcheck.sites import Site
from tapcheck.storage import save_capture

SITES = ("resid_pre.1", "resid_post.1")


@pytest.fixture
def healthy() -> Capture:
    return synthetic_capture(sites=SITES)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Capture], Path]:
    def write(name: str, capture: Capture) -> Path:
        save_capture(capture, tmp_path / name)
        return tmp_path / name

    return write


def with_nan(capture: Capture, site: str, row: int) -> Capture:
    rows = dict(capture.rows)
    place = Site(*[part if at == 0 else int(part) for at, part in enumerate(site.split("."))])
    values = rows[place].values.clone()
    values[row, 3] = torch.nan
    rows[place] = SiteRows(rows[place].columns, values)
    return replace(capture, rows=rows)


def test_equal_captures_pass(
    cli: Callable[..., Done], write: Callable[[str, Capture], Path], healthy: Capture
) -> None:
    one, other = write("one", healthy), write("other", healthy)
    done = cli("diff", one, other, "--json", "result.json")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"captures match: {len(healthy)} rows at 2 sites")
    result = json.loads(Path("result.json").read_text(encoding="utf-8"))
    assert result["verdict"] == "pass"
    assert result["rows_due"] == result["rows_compared"] == len(healthy)
    assert result["worst_relative_error"] == 0
    assert [(check["name"], check["status"]) for check in result["checks"]] == [
        ("tokens", "pass"),
        ("ledger", "pass"),
        ("values", "pass"),
    ]
    assert all(check["reason"] for check in result["checks"])


def test_values_beyond_the_tolerance_fail_and_the_printed_tolerance_passes(
    cli: Callable[..., Done], write: Callable[[str, Capture], Path], healthy: Capture
) -> None:
    one, other = write("one", perturbed(healthy, 1e-3)), write("other", healthy)
    done = cli("diff", one, other, "--json", "result.json")
    assert done.code == 1
    assert "captures differ: request 'a', site resid_pre.1, position 0" in done.out
    result = json.loads(Path("result.json").read_text(encoding="utf-8"))
    assert result["verdict"] == "fail"
    assert result["worst_relative_error"] == pytest.approx(1e-3, rel=1e-2)
    assert {check["name"] for check in result["checks"] if check["status"] == "fail"} == {"values"}
    assert result["message"] in done.out
    enough = done.out.partition("rtol=")[2].split()[0]
    assert cli("diff", one, other, "--rtol", enough).code == 0


def test_nan_fails_and_is_named(
    cli: Callable[..., Done], write: Callable[[str, Capture], Path], healthy: Capture
) -> None:
    columns = healthy[SITES[1]].columns
    broken = with_nan(healthy, SITES[1], 4)
    done = cli("diff", write("one", broken), write("other", healthy), "--json", "result.json")
    request = healthy.requests[int(columns.request[4])].id
    assert done.code == 1
    assert f"request {request!r}, site {SITES[1]}, position {columns.position[4]}" in done.out
    assert "NaN" in done.out
    result = json.loads(Path("result.json").read_text(encoding="utf-8"))
    assert (result["verdict"], result["worst_relative_error"]) == ("fail", None)


def test_nan_in_both_captures_fails_too(
    cli: Callable[..., Done], write: Callable[[str, Capture], Path], healthy: Capture
) -> None:
    broken = write("one", with_nan(healthy, SITES[0], 0))
    assert cli("diff", broken, broken).code == 1


def test_other_tokens_fail_before_anything_else_is_said(
    cli: Callable[..., Done], write: Callable[[str, Capture], Path], healthy: Capture
) -> None:
    first, *rest = healthy.requests
    prompt = (first.prompt_token_ids[0] + 1, *first.prompt_token_ids[1:])
    other = replace(healthy, requests=(replace(first, prompt_token_ids=prompt), *rest))
    done = cli("diff", write("one", other), write("other", healthy), "--json", "result.json")
    assert done.code == 1
    assert done.out.startswith("captures differ in their tokens: request 'a', position 0")
    result = json.loads(Path("result.json").read_text(encoding="utf-8"))
    assert result["checks"][0] == {
        "name": "tokens",
        "status": "fail",
        "reason": "1 differences",
    }


def test_a_lost_site_fails(
    cli: Callable[..., Done], write: Callable[[str, Capture], Path], healthy: Capture
) -> None:
    half = write("one", healthy.select(sites=SITES[:1]))
    done = cli("diff", half, write("other", healthy), "--json", "result.json")
    assert done.code == 1
    assert "missing" in done.out
    result = json.loads(Path("result.json").read_text(encoding="utf-8"))
    assert result["rows_compared"] < result["rows_due"]


def test_two_captures_without_rows_do_not_pass(
    cli: Callable[..., Done], write: Callable[[str, Capture], Path], healthy: Capture
) -> None:
    empty = write("empty", replace(healthy, rows={}))
    done = cli("diff", empty, empty, "--json", "result.json")
    assert done.code == 1
    result = json.loads(Path("result.json").read_text(encoding="utf-8"))
    assert (result["verdict"], result["rows_compared"]) == ("fail", 0)
    assert result["checks"][-1]["status"] == "fail"


def damage(path: Path, how: str) -> None:
    whole = path.read_bytes()
    if how == "truncated":
        path.write_bytes(whole[:-100])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("no capture", encoding="utf-8")
    elif how == "header":
        path.write_bytes(whole.replace(b'\\"a\\"', b'\\"z\\"', 1))
    else:
        save_file({"weight": torch.zeros(2)}, path)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("truncated", "damaged, truncated or not a safetensors file"),
        ("empty", "damaged, truncated or not a safetensors file"),
        ("text", "damaged, truncated or not a safetensors file"),
        ("header", "its checksum doesn't match"),
        ("foreign", "a safetensors file, but not of a capture"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_file_that_is_no_capture_is_refused_by_name(
    how: str,
    reason: str,
    first: bool,
    refused: Callable[..., str],
    write: Callable[[str, Capture], Path],
    healthy: Capture,
) -> None:
    good, bad = write("good", healthy), write("bad", healthy)
    damage(bad, how)
    err = refused("diff", *([bad, good] if first else [good, bad]), "--json", "result.json")
    assert str(bad) in err
    assert reason in err


def test_a_missing_file_and_a_folder_are_refused_by_name(
    refused: Callable[..., str],
    write: Callable[[str, Capture], Path],
    healthy: Capture,
    tmp_path: Path,
) -> None:
    good = write("good", healthy)
    assert "nowhere: there is no such file" in refused("diff", good, "nowhere")
    assert str(tmp_path) in refused("diff", tmp_path, good)


@pytest.mark.parametrize("rtol", ["1", "1.5", "-0.1", "nan", "inf", "x"])
def test_a_tolerance_that_judges_nothing_is_refused(
    rtol: str,
    refused: Callable[..., str],
    write: Callable[[str, Capture], Path],
    healthy: Capture,
) -> None:
    good = write("good", healthy)
    err = refused("diff", good, good, f"--rtol={rtol}", "--json", "result.json")
    assert "rtol" in err
    assert "number" in err


def test_an_unwritable_result_is_refused_before_the_captures_are_read(
    refused: Callable[..., str], tmp_path: Path, unwritable: Path
) -> None:
    (tmp_path / "folder").mkdir()
    for path, reason in (
        (tmp_path / "none" / "result.json", "there is no folder"),
        (tmp_path / "folder", "is a folder"),
        (unwritable / "result.json", "can't write in"),
    ):
        err = refused("diff", "missing", "missing", "--json", path)
        assert "'--json'" in err
        assert reason in err
        assert "no such file" not in err


def test_a_result_is_never_written_over_a_device(refused: Callable[..., str]) -> None:
    assert "no regular file" in refused("diff", "one", "other", "--json", "/dev/null")
