"""The process in which the checks run: jobs in, events out, so that a crash ends only a job.

Run by `checks/supervisor.py` as `python -m tapcheck.checks.child FD`, with jobs as JSON on stdin;
events are JSON lines on the file descriptor FD.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any, TextIO

from tapcheck.checks.jobs import Job
from tapcheck.compatibility.errors import TapcheckError
from tapcheck.compatibility.rows import encode_check


def main() -> None:
    """Run the jobs on stdin, one event line before and after each."""
    events = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    jobs = [Job(**job) for job in json.load(sys.stdin)]
    for index, job in enumerate(jobs):
        _tell(events, {"started": index})
        try:
            from tapcheck.checks.suite import run_job

            finding = run_job(job)
        except Exception as error:
            ours = isinstance(error, TapcheckError)
            reason = str(error) if ours else f"{type(error).__name__}: {error}"
            if not ours:
                sys.excepthook(*sys.exc_info())  # to the log, for whoever looks into it
            _tell(events, {"failed": index, "reason": reason})
            continue
        _tell(
            events,
            {
                "finished": index,
                "results": [encode_check(result) for result in finding.results],
                "settings": [asdict(settings) for settings in finding.settings],
                "situations": finding.situations,
            },
        )


def _tell(events: TextIO, event: dict[str, Any]) -> None:
    events.write(json.dumps(event) + "\n")
    events.flush()


if __name__ == "__main__":
    main()
