"""Runs jobs in a child process: a crash or a hang becomes a status, and the rest still run."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tapcheck.checks.jobs import Job, check_names
from tapcheck.compatibility.rows import EngineSettings, decode_check
from tapcheck.compatibility.verdict import CheckResult, Outcome, status

# Compiled and interpreted engines take minutes on two cores that others use too.
JOB_SECONDS = 900.0

CHILD = (sys.executable, "-m", "tapcheck.checks.child")
# How long a child that has run its jobs may take to end, and the pipe of one that ended to close.
_GRACE_SECONDS = 10.0


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
    command: Sequence[str] = CHILD,
    variables: Mapping[str, str] | None = None,
) -> Run:
    """Run `jobs` in order; every check that they owe gets exactly one result.

    The checker's own test comes first: when it doesn't pass, nothing else runs, since a checker
    that can't fail proves nothing. What the jobs print goes to the file `log`. `command` speaks
    the protocol of `checks/child.py`; no process of it is left when this returns or raises.
    `variables` are added to its environment.
    """
    run = Run()
    started = time.monotonic()

    def keep(results: Sequence[CheckResult]) -> None:
        run.results += results
        for result in results:
            on_result(result)

    pending = list(jobs)
    while pending:
        with contextlib.closing(
            _run_child(tuple(pending), command, variables or {}, log, seconds_per_job, on_start)
        ) as ends:
            for job, end in ends:
                pending.remove(job)
                if isinstance(end, Finished):
                    keep(end.results)
                    run.settings += end.settings
                    _add(run.situations, end.situations)
                else:
                    keep(_without_verdict(job, end.outcome, end.reason))
                if job.topology is None and not all(map(_stands, run.results)):
                    why = "not run: the checker's own test did not pass, so a pass means nothing"
                    for skipped in pending:
                        keep(_without_verdict(skipped, "error", why))
                    pending = []
                    break
    run.seconds = time.monotonic() - started
    return run


def _stands(result: CheckResult) -> bool:
    """Whether a check of the checker leaves a pass of the others worth something."""
    return status(result) in ("pass", "not exercised")


@dataclass(frozen=True)
class Finished:
    """A job that ran to its end."""

    results: tuple[CheckResult, ...]
    settings: tuple[EngineSettings, ...]
    situations: dict[str, int]


@dataclass(frozen=True)
class Lost:
    """A job that has no verdict, and why."""

    outcome: Outcome
    reason: str


def _run_child(
    jobs: Sequence[Job],
    command: Sequence[str],
    variables: Mapping[str, str],
    log: Path,
    seconds: float,
    on_start: Callable[[Job], None],
) -> Generator[tuple[Job, Finished | Lost], None, None]:
    """Each job's end, until the child has done all or has been lost with the job it was at."""
    log_start = log.stat().st_size if log.exists() else 0
    child, lines = _start(jobs, command, variables, log)
    try:
        for job in jobs:  # the child takes them in this order
            while True:
                try:
                    line = lines.get(timeout=seconds)
                except queue.Empty:
                    yield job, Lost("timeout", f"no end after {seconds:g} s")
                    return
                if line is None:
                    yield job, Lost("crash", _last_words(child.wait(), log, log_start))
                    return
                try:
                    end = _read_event(line, job, jobs)
                except (ValueError, LookupError, TypeError, AttributeError) as error:
                    yield job, Lost("error", f"its process sent what is no event: {error!r}")
                    return
                if end is not None:
                    break
                on_start(job)
            yield job, end
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_SECONDS)
    finally:
        _kill(child)


def _read_event(line: str, job: Job, jobs: Sequence[Job]) -> Finished | Lost | None:
    """The end that an event announces; None where it is the start. Raises for what is neither."""
    event = json.loads(line)
    kind, *_ = event
    if jobs[event[kind]] != job:
        raise ValueError(f"{kind} job {event[kind]} out of order")
    if kind == "started":
        return None
    if kind == "failed":
        return Lost("error", str(event["reason"]))
    results = tuple(decode_check(result) for result in event["results"])
    names = [result.name for result in results]
    if sorted(names) != sorted(check_names(job)):
        owed = ", ".join(check_names(job))
        return Lost("error", f"the job owes {owed}, but reported {', '.join(names) or 'nothing'}")
    settings = tuple(EngineSettings(**settings) for settings in event["settings"])
    situations = {name: int(count) for name, count in event["situations"].items()}
    return Finished(results, settings, situations)


def _start(
    jobs: Sequence[Job], command: Sequence[str], variables: Mapping[str, str], log: Path
) -> tuple[subprocess.Popen[bytes], queue.Queue[str | None]]:
    """A child at work on `jobs`, and its event lines; None follows the last."""
    read_end, write_end = os.pipe()
    with log.open("ab") as output, tempfile.TemporaryFile() as stdin:
        stdin.write(json.dumps([asdict(job) for job in jobs]).encode())
        stdin.seek(0)
        try:
            child = subprocess.Popen(
                [*command, str(write_end)],
                stdin=stdin,
                stdout=output,
                stderr=output,
                pass_fds=[write_end],
                env={"VLLM_LOGGING_LEVEL": "WARNING", **os.environ, **variables},
                start_new_session=True,  # a group of its own, to be killed as one
            )
        finally:
            os.close(write_end)
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(read_end, lines), daemon=True)
    reader.start()
    threading.Thread(target=_await_end, args=(child, reader, lines), daemon=True).start()
    return child, lines


def _read(descriptor: int, lines: queue.Queue[str | None]) -> None:
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as events:
        for line in events:
            lines.put(line)


def _await_end(
    child: subprocess.Popen[bytes], reader: threading.Thread, lines: queue.Queue[str | None]
) -> None:
    """Announce the end when the child has ended: an orphan of it may keep the pipe open."""
    child.wait()
    reader.join(_GRACE_SECONDS)
    lines.put(None)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End the child and all that it started, orphans in its process group included."""
    import psutil

    try:
        family = psutil.Process(child.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    child.wait()
    psutil.wait_procs(family, timeout=_GRACE_SECONDS)


def _last_words(returncode: int, log: Path, start: int) -> str:
    """How a child ended, and the last line that it printed."""
    how = f"exit code {returncode}"
    if returncode < 0:
        how = f"signal {signal.Signals(-returncode).name}"
    with log.open("rb") as output:
        output.seek(start)
        text = output.read().decode(errors="replace")
    said = [line.strip() for line in text.splitlines() if line.strip()]
    words = f"its last words: {said[-1][:300]}" if said else "without a word"
    return f"the process that ran the checks ended early ({how}), {words}"


def _without_verdict(job: Job, outcome: Outcome, reason: str) -> list[CheckResult]:
    return [CheckResult(name=name, outcome=outcome, reason=reason) for name in check_names(job)]


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        merged = max if name.startswith("most_") else int.__add__
        total[name] = merged(total.get(name, 0), count)
