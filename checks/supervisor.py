"""Runs jobs in a child process: a crash or a hang becomes a status, and the rest still run."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tapcheck.checks.jobs import Job, check_names
from tapcheck.compatibility.rows import EngineSettings, decode_check
from tapcheck.compatibility.verdict import CheckResult, Outcome, status

# The longest measured job, a cold start of an engine in a subprocess, took 45 s on two cores.
JOB_SECONDS = 300.0


@dataclass
class Run:
    """What a run of jobs found so far."""

    results: list[CheckResult] = field(default_factory=list)
    settings: list[EngineSettings] = field(default_factory=list)
    situations: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def run_jobs(
    jobs: Sequence[Job],
    *,
    log: Path,
    on_start: Callable[[Job], None] = lambda _job: None,
    on_result: Callable[[CheckResult], None] = lambda _result: None,
    seconds_per_job: float = JOB_SECONDS,
) -> Run:
    """Run `jobs` in order; every check that they owe gets a result.

    The checker's own test comes first: when it doesn't pass, nothing else runs, since a checker
    that can't fail proves nothing. What the jobs print goes to the file `log`.
    """
    run = Run()
    started = time.monotonic()

    def keep(results: Sequence[CheckResult]) -> None:
        run.results += results
        for result in results:
            on_result(result)

    pending = list(jobs)
    while pending:
        for job, outcome, event in _run_child(tuple(pending), log, seconds_per_job, on_start):
            pending.remove(job)
            if event is None or "reason" in event:
                keep(_without_verdict(job, outcome, _reason(outcome, event, log)))
            else:
                keep([decode_check(result) for result in event["results"]])
                run.settings += [EngineSettings(**settings) for settings in event["settings"]]
                _add(run.situations, event["situations"])
            if job.topology is None and status(run.results[-1]) != "pass":
                why = "not run: the checker's own test did not pass, so a pass would mean nothing"
                for skipped in pending:
                    keep(_without_verdict(skipped, "error", why))
                pending = []
                break
    run.seconds = time.monotonic() - started
    return run


def _run_child(
    jobs: Sequence[Job], log: Path, seconds: float, on_start: Callable[[Job], None]
) -> Iterator[tuple[Job, Outcome, dict[str, Any] | None]]:
    """Each job's end, until the child has done all or has been lost with the job it was at."""
    read_end, write_end = os.pipe()
    with log.open("ab") as output, tempfile.TemporaryFile() as stdin:
        stdin.write(json.dumps([asdict(job) for job in jobs]).encode())
        stdin.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-m", "tapcheck.checks.child", str(write_end)],
            stdin=stdin,
            stdout=output,
            stderr=output,
            pass_fds=[write_end],
            env={"VLLM_LOGGING_LEVEL": "WARNING", **os.environ},
        )
    os.close(write_end)
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(read_end, lines), daemon=True).start()
    current: Job | None = None
    try:
        while True:
            try:
                line = lines.get(timeout=seconds)
            except queue.Empty:
                yield current or jobs[0], "timeout", {"reason": f"no end after {seconds:.0f} s"}
                return
            if line is None:
                if current is not None or child.wait() != 0:
                    yield current or jobs[0], "crash", None
                return
            event = json.loads(line)
            if "started" in event:
                current = jobs[event["started"]]
                on_start(current)
            else:
                job = jobs[event.get("finished", event.get("failed"))]
                current = None
                yield job, "completed" if "finished" in event else "error", event
    finally:
        _kill_tree(child)


def _read(descriptor: int, lines: queue.Queue[str | None]) -> None:
    with os.fdopen(descriptor, encoding="utf-8") as events:
        for line in events:
            lines.put(line)
    lines.put(None)


def _kill_tree(child: subprocess.Popen[bytes]) -> None:
    import psutil

    try:
        family = psutil.Process(child.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    if child.poll() is None:
        child.kill()
    child.wait()
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=10)


def _reason(outcome: Outcome, event: Mapping[str, Any] | None, log: Path) -> str:
    if event is not None:
        return str(event["reason"])
    last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
    return f"the process that ran the checks ended in a {outcome}; its last words: {''.join(last)}"


def _without_verdict(job: Job, outcome: Outcome, reason: str) -> list[CheckResult]:
    return [CheckResult(name=name, outcome=outcome, reason=reason) for name in check_names(job)]


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        merged = max if name.startswith("most_") else int.__add__
        total[name] = merged(total.get(name, 0), count)
