"""Whole sessions with a real engine: what a user writes, and that nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.engine

DOWNSTREAM = """
from tapcheck.checks import assert_captures_match

def test_captures(capture_pair):
    actual, expected = capture_pair(sites=["resid_post.0"], prompts=[[5, 9, 200]])
    assert_captures_match(actual, expected)
"""

# Each ends its session in its own way, with an engine live in a subprocess.
ENDINGS = {
    "normally": "pass",
    "with an exception": "raise RuntimeError('the test fails')",
    "with Ctrl-C": "print('READY', flush=True); signal.pause()",
    "by a kill": "print('READY', flush=True); signal.pause()",
}
ENGINE_TEST = """
import signal

def test_it(engine_pool):
    engine_pool.acquire({model!r}, in_process=False)
    assert engine_pool.leaked_processes() == []
    {ending}
"""
TIME_LIMIT_TEST = """
import os, signal
import pytest

@pytest.mark.engine
@pytest.mark.timeout({seconds}, method="thread")
def test_it(engine_pool):
    engine_pool.acquire({model!r}, in_process=False)
    signal.pause()
"""


def test_a_downstream_suite_needs_under_ten_lines(
    pytester: pytest.Pytester, model_zoo: Callable[[str], Path]
) -> None:
    assert len(DOWNSTREAM.strip().splitlines()) < 10
    pytester.makepyfile(test_mine=DOWNSTREAM)
    result = pytester.runpytest_subprocess(f"--tapcheck-model={model_zoo('llama')}", timeout=300)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["captures compared: 18 of 18 rows due, worst relative error *"])


def test_without_a_model_the_failure_says_how_to_name_one(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_mine=DOWNSTREAM)
    result = pytester.runpytest_subprocess(timeout=300)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*capture_pair was given no model: *--tapcheck-model MODEL*"])


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_session_leaves_nothing_running(
    tmp_path: Path, model_zoo: Callable[[str], Path], ending: str
) -> None:
    test = ENGINE_TEST.format(model=str(model_zoo("llama")), ending=ENDINGS[ending])
    session = _start_session(tmp_path, test)
    if ending in ("with Ctrl-C", "by a kill"):
        _read_until(session, "READY")
        assert len(_processes_of(session)) >= 4  # pytest, the guard, the engine core, a worker
        if ending == "with Ctrl-C":
            os.killpg(session.pid, signal.SIGINT)  # as a terminal does: the whole group
        else:
            session.kill()
    output, _ = session.communicate(timeout=300)
    expected = {
        "normally": pytest.ExitCode.OK,
        "with an exception": pytest.ExitCode.TESTS_FAILED,
        "with Ctrl-C": pytest.ExitCode.INTERRUPTED,
        "by a kill": -signal.SIGKILL,
    }
    assert session.returncode == expected[ending], output
    _assert_nothing_left(session)


@pytest.mark.slow
def test_a_time_limit_that_fires_leaves_nothing_running(
    tmp_path: Path, model_zoo: Callable[[str], Path]
) -> None:
    # Long enough for vLLM to be imported and its processes to start, too short for an engine.
    session = _start_session(
        tmp_path, TIME_LIMIT_TEST.format(model=str(model_zoo("llama")), seconds=15)
    )
    output, _ = session.communicate(timeout=300)
    assert session.returncode == 1
    assert "Stack of MainThread" in output
    _assert_nothing_left(session)


def _start_session(folder: Path, test: str) -> subprocess.Popen[str]:
    """Run pytest on `test` in a session of the operating system's of its own."""
    (folder / "test_it.py").write_text(test)
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "test_it.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _read_until(session: subprocess.Popen[str], text: str) -> None:
    assert session.stdout is not None
    seen = []
    for line in session.stdout:
        seen.append(line)
        if text in line:
            return
    pytest.fail(f"the session ended before it said {text}: {''.join(seen)}")


def _processes_of(session: subprocess.Popen[str]) -> list[psutil.Process]:
    """Every live process of the session, whoever is its parent by now."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session.pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def _assert_nothing_left(session: subprocess.Popen[str]) -> None:
    _, alive = psutil.wait_procs(_processes_of(session), timeout=20)
    left = [process for process in alive if process.is_running()]
    commands = [process.cmdline() for process in left]
    for process in left:
        process.kill()
    assert commands == []
