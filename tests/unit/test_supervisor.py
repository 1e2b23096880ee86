"""Whatever becomes of the process that runs the checks, each check gets one result."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tapcheck.checks.jobs import SELFTEST, Job, check_names, plan_jobs
from tapcheck.checks.supervisor import CHILD, Run, run_jobs
from tapcheck.compatibility.verdict import CheckResult, status

# What a child does with a job is written in the job's path. It runs as a script, and speaks the
# protocol of checks/child.py.
SCRIPT = '''
import json, os, signal, subprocess, sys, time

events = os.fdopen(int(sys.argv[1]), "w", errors="surrogateescape")
jobs = json.load(sys.stdin)
print("child", os.getpid(), "begins with", len(jobs), flush=True)

def tell(event):
    events.write(event if isinstance(event, str) else json.dumps(event) + "\\n")
    events.flush()

def result(name, good=True):
    return {"name": name, "outcome": "completed", "reason": "measured", "metrics": {"n": int(good)},
            "conditions": [{"metric": "n", "op": "==", "limit": 1}], "first_divergence": None,
            "seconds": 0.5, "source_hash": "00"}

def finish(index, job, good=True, drop=0, situations=None):
    kinds = ["ledger", "equivalence", "tokens", "top_k_logprobs", "kl_divergence", "identities"]
    names = [f"{kind}[{job['model']},{job['topology']}]" for kind in kinds]
    oracle = ["padding_changes_nothing", "last_layer_is_before_the_final_norm",
              "layers_are_unique", "attention_is_the_model_s_own", "dtype_is_as_requested"]
    if job["topology"] is None:
        names = ["selftest", *[f"{kind}[{job['model']}]" for kind in oracle]]
    kinds = ["capture_changes_nothing", "alone_equals_batched", "reordered",
             "cold_equals_warm_prefix", "one_shot_equals_chunked"]
    names = [f"{kind}[{job['model']}]" for kind in kinds] if job["metamorphic"] else names
    tell({"finished": index, "results": [result(name, good) for name in names[drop:]],
          "settings": [], "situations": situations or {"requests": 8, "most_requests_at_once": 3}})

def orphan():
    """A grandchild that outlives its parent, keeps the event pipe open, and says its id."""
    sleeper = "import time; time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", sleeper], pass_fds=[int(sys.argv[1])])
    print("orphan", process.pid, flush=True)

for index, job in enumerate(jobs):
    what = job["path"]
    if what == "exit before start":
        sys.exit(0)
    tell({"started": index})
    if what == "abort":
        print("last words before the end", flush=True)
        os.abort()
    elif what == "exit":
        sys.exit(3)
    elif what == "silent exit":
        sys.exit(0)
    elif what == "hang":
        orphan()
        time.sleep(600)
    elif what == "orphan, then killed":
        orphan()
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "fail":
        tell({"failed": index, "reason": "no such model"})
    elif what == "variable":
        tell({"failed": index, "reason": os.environ["TAPCHECK_TOLD"]})
    elif what == "bad":
        finish(index, job, good=False)
    elif what == "owes":
        finish(index, job, drop=1)
    elif what.startswith("garbage "):
        tell(what.removeprefix("garbage ") + "\\n")
        finish(index, job)
    elif what == "half a line":
        tell('{"finished": 0, "resul')
        os.abort()
    elif what == "wrong job":
        finish(index + 1 if index + 1 < len(jobs) else 0, jobs[(index + 1) % len(jobs)])
    else:
        finish(index, job)
    if what == "abort afterwards":
        os.abort()
    if what == "hang at exit":
        orphan()
        import atexit
        atexit.register(time.sleep, 600)
'''

GOOD = Job("good", "good", "float32", "cpu", "in_process")
CHECKS = len(check_names(GOOD))
ENDS = [
    "abort",
    "exit",
    "exit before start",
    "silent exit",
    "fail",
    "bad",
    "owes",
    "half a line",
    "wrong job",
    "abort afterwards",
    "garbage not json",
    "garbage 5",
    "garbage {}",
    'garbage "text"',
    'garbage {"finished": 99}',
    'garbage {"finished": 0}',
    'garbage {"finished": 0, "results": [1], "settings": [], "situations": {}}',
    'garbage {"failed": 0}',
    "garbage \udcff",
]


def job(path: str, model: str = "m") -> Job:
    return Job(model, path, "float32", "cpu", "subprocess")


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "child.py"
    script.write_text(SCRIPT)
    return [sys.executable, str(script)]


@pytest.fixture
def run(tmp_path: Path, command: list[str]) -> Callable[..., Run]:
    """Run jobs with the script, and prove that what ran is gone and every check has a result."""

    def go(*jobs: Job, seconds: float = 60.0) -> Run:
        log = tmp_path / "log"
        told: list[CheckResult] = []
        found = run_jobs(
            jobs, log=log, on_result=told.append, seconds_per_job=seconds, command=command
        )
        assert told == found.results
        assert [r.name for r in found.results] == [name for j in jobs for name in check_names(j)]
        assert not processes_in(log)
        return found

    return go


def test_the_child_is_given_variables_and_this_process_is_not(
    command: list[str], tmp_path: Path
) -> None:
    told = {"TAPCHECK_TOLD": "by the caller"}
    found = run_jobs([job("variable")], log=tmp_path / "log", command=command, variables=told)
    assert {result.reason for result in found.results} == {"by the caller"}
    assert "TAPCHECK_TOLD" not in os.environ


def processes_in(log: Path) -> list[int]:
    """Processes still alive of those that the log names."""
    alive = []
    for line in log.read_text(errors="replace").splitlines():
        kind, _, rest = line.partition(" ")
        if kind in ("child", "orphan"):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(rest.split()[0]))
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process.pid)
    return alive


def children(tmp_path: Path) -> int:
    return (tmp_path / "log").read_text(errors="replace").count("begins with")


def statuses(found: Run) -> list[str]:
    return [status(result) for result in found.results]


def test_jobs_that_run_share_one_child_and_add_up(run: Callable[..., Run], tmp_path: Path) -> None:
    found = run(job("good", "a"), job("good", "b"))
    assert statuses(found) == ["pass"] * 2 * CHECKS
    assert found.situations == {"requests": 16, "most_requests_at_once": 3}
    assert found.seconds > 0
    assert children(tmp_path) == 1


def test_a_job_that_crashes_says_how_and_the_rest_still_run(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    found = run(job("good", "a"), job("abort", "b"), job("good", "c"))
    assert statuses(found) == ["pass"] * CHECKS + ["crash"] * CHECKS + ["pass"] * CHECKS
    assert "signal SIGABRT" in found.results[CHECKS].reason
    assert "last words before the end" in found.results[CHECKS].reason
    assert children(tmp_path) == 2


@pytest.mark.parametrize(
    ("path", "words"),
    [("exit", "exit code 3"), ("silent exit", "exit code 0"), ("exit before start", "exit code 0")],
)
def test_a_child_that_ends_early_is_a_crash(run: Callable[..., Run], path: str, words: str) -> None:
    found = run(job(path, "a"), job("good", "b"))
    assert statuses(found) == ["crash"] * CHECKS + ["pass"] * CHECKS
    assert words in found.results[0].reason


def test_last_words_are_those_of_the_child_that_was_lost(
    tmp_path: Path, command: list[str]
) -> None:
    log = tmp_path / "log"
    log.write_text("an earlier run's words\n")
    command[1:] = ["-c", "raise SystemExit(7)"]
    (result, *_) = run_jobs([job("good")], log=log, command=command).results
    assert "exit code 7" in result.reason
    assert "without a word" in result.reason


def test_a_job_that_hangs_times_out_and_its_whole_tree_is_gone(run: Callable[..., Run]) -> None:
    found = run(job("hang", "a"), job("good", "b"), seconds=5)
    assert statuses(found) == ["timeout"] * CHECKS + ["pass"] * CHECKS
    assert "no end after 5 s" in found.results[0].reason


def test_an_orphan_that_keeps_the_pipe_open_hides_no_crash_and_is_ended(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tapcheck.checks.supervisor._GRACE_SECONDS", 0.5)
    found = run(job("orphan, then killed", "a"), job("good", "b"))
    assert statuses(found) == ["crash"] * CHECKS + ["pass"] * CHECKS
    assert "signal SIGKILL" in found.results[0].reason


def test_a_child_that_hangs_after_its_last_job_is_ended(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tapcheck.checks.supervisor._GRACE_SECONDS", 0.5)
    assert statuses(run(job("hang at exit"))) == ["pass"] * CHECKS


def test_a_crash_after_a_job_takes_nothing_from_its_results(run: Callable[..., Run]) -> None:
    assert statuses(run(job("abort afterwards"))) == ["pass"] * CHECKS


def test_a_crash_between_jobs_is_the_next_one_s(run: Callable[..., Run]) -> None:
    found = run(job("abort afterwards", "a"), job("good", "b"), job("good", "c"))
    assert statuses(found) == ["pass"] * CHECKS + ["crash"] * CHECKS + ["pass"] * CHECKS


def test_a_job_that_fails_is_an_error_with_its_reason(run: Callable[..., Run]) -> None:
    found = run(job("fail", "a"), job("good", "b"))
    assert statuses(found) == ["error"] * CHECKS + ["pass"] * CHECKS
    assert {result.reason for result in found.results[:CHECKS]} == {"no such model"}


def test_a_job_that_reports_other_checks_than_it_owes_is_an_error(run: Callable[..., Run]) -> None:
    found = run(job("owes", "a"), job("good", "b"))
    assert statuses(found) == ["error"] * CHECKS + ["pass"] * CHECKS
    assert "owes ledger[a,subprocess]" in found.results[0].reason


@pytest.mark.parametrize("path", [end for end in ENDS if end.startswith("garbage")])
def test_garbage_instead_of_an_event_is_an_error(run: Callable[..., Run], path: str) -> None:
    found = run(job(path, "a"), job("good", "b"))
    assert statuses(found) == ["error"] * CHECKS + ["pass"] * CHECKS
    assert found.results[0].reason.startswith("its process sent what is no event")


@pytest.mark.parametrize("path", ["fail", "bad", "abort", "owes", "garbage 5"])
def test_nothing_runs_when_the_checker_s_own_test_does_not_pass(
    run: Callable[..., Run], tmp_path: Path, path: str
) -> None:
    selftest, *engines = plan_jobs({"m": "good"}, "float32", "cpu")
    own = check_names(selftest)
    assert own[0] == SELFTEST
    found = run(Job("m", path, "float32", "cpu", None), *engines)
    assert status(found.results[0]) != "pass"
    rest = found.results[len(own) :]
    assert [status(result) for result in rest] == ["error"] * (2 * CHECKS + 5)
    assert all("checker's own test did not pass" in result.reason for result in rest)
    assert children(tmp_path) == 1


def test_a_passing_selftest_lets_the_rest_run(run: Callable[..., Run]) -> None:
    found = run(*plan_jobs({"a": "good", "b": "good"}, "float32", "cpu"))
    assert statuses(found) == ["pass"] * (6 + 4 * CHECKS + 5)


def test_every_check_has_one_result_whatever_happens_to_each_job(run: Callable[..., Run]) -> None:
    found = run(*[job(path, str(index)) for index, path in enumerate(ENDS)], GOOD)
    assert len(found.results) == CHECKS * (len(ENDS) + 1)
    assert statuses(found)[-CHECKS:] == ["pass"] * CHECKS


@pytest.mark.parametrize("path", ["hang", "good"])
def test_an_interrupt_leaves_no_process(tmp_path: Path, command: list[str], path: str) -> None:
    def interrupt(_result: object) -> None:
        raise KeyboardInterrupt

    jobs = [job("good", "a"), job(path, "b")]
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, log=tmp_path / "log", on_result=interrupt, command=command)
    assert children(tmp_path) == 1
    assert not processes_in(tmp_path / "log")


def test_an_interrupt_while_a_job_starts_leaves_no_process(
    tmp_path: Path, command: list[str]
) -> None:
    def interrupt(_job: Job) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs([job("hang")], log=tmp_path / "log", on_start=interrupt, command=command)
    assert not processes_in(tmp_path / "log")


def test_a_start_is_told_once_for_each_job_that_starts(tmp_path: Path, command: list[str]) -> None:
    started: list[str] = []
    jobs = [job("good", "a"), job("abort", "b"), job("good", "c")]
    run_jobs(
        jobs, log=tmp_path / "log", on_start=lambda j: started.append(j.model), command=command
    )
    assert started == ["a", "b", "c"]


def test_the_real_child_reports_a_model_that_it_can_t_load(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    found = run_jobs([Job("m", str(nowhere), "float32", "cpu", "in_process")], log=tmp_path / "log")
    assert CHILD[1:] == ("-m", "tapcheck.checks.child")
    assert statuses(found) == ["error"] * CHECKS
    assert found.results[0].reason == f"model '{nowhere}': no such folder"
