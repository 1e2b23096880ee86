"""How the command line speaks: results, progress, and engines that are kept from speaking."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.text import Text

from tapcheck.errors import EngineError, TapcheckError

if TYPE_CHECKING:
    from tapcheck.checks.jobs import Job
    from tapcheck.compatibility.environment import Environment
    from tapcheck.compatibility.known_issues import KnownIssue
    from tapcheck.compatibility.nearest import Difference
    from tapcheck.compatibility.rows import MatrixRow
    from tapcheck.compatibility.verdict import CheckResult

# Results go to stdout; progress and errors go to stderr.
out = Console(highlight=False, soft_wrap=True, markup=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)


def wrapped(label: str, text: str) -> str:
    """`label` and `text`, on a terminal in as many lines as it takes, indented under the text."""
    if not out.is_terminal:
        return label + text
    lines = textwrap.wrap(
        text,
        max(out.width - len(label), 20),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return label + f"\n{' ' * len(label)}".join(lines)


def style(status: str) -> str:
    """The colour of a status or verdict; rich leaves it out where NO_COLOR asks it to."""
    return "green" if status in ("pass", "xfail") else "red"


def describe_machine(environment: Environment) -> str:
    """What is judged, and where, in two lines."""
    from tapcheck.compatibility.environment import describe_gpu

    gpu = describe_gpu(environment.gpu) if environment.gpu else "no GPU"
    return (
        f"{environment.vllm_distribution} {environment.vllm} against transformers "
        f"{environment.transformers}\n"
        f"torch {environment.torch}, Python {environment.python}, {environment.cpu}, {gpu}"
    )


def print_environment(environment: Environment) -> None:
    """Every field of the environment, a line each."""
    from tapcheck.compatibility.environment import describe_gpu

    values = asdict(environment) | {"gpu": environment.gpu and describe_gpu(environment.gpu)}
    out.print("this machine", style="bold")
    for name, value in values.items():
        out.print(wrapped(f"  {name:20}", "none" if value is None else str(value)))


def print_what_is_known(
    nearest: MatrixRow | None, differing: Sequence[Difference], issues: Sequence[KnownIssue]
) -> None:
    """The nearest tested row, what differs from it, and the known issues that may apply."""
    out.print("\nnearest tested row", style="bold")
    if nearest is None:
        out.print("  none: no run was recorded, so all is unknown")
    else:
        out.print(f"  {nearest.id}, verdict {nearest.verdict}")
    for gap in differing:
        out.print(wrapped(f"  {gap.field:20}", f"tested {gap.tested}, here {gap.here}"))
    out.print("\nknown issues that may apply", style="bold")
    for issue in issues:
        out.print(f"  {issue.id}")
        out.print(wrapped("    ", issue.symptom))
        out.print(wrapped("    way out: ", issue.way_out))


class Progress:
    """What `tapcheck check` shows as it goes: each check as it ends, and a spinner until then."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._ended = 0
        self._width = 0
        self.spinner = err.status("starting")

    def start(self, job: Job) -> None:
        """Head the checks of a job."""
        from tapcheck.checks.jobs import check_names

        engines = {
            None: "the checker's own test",
            "in_process": "vLLM in process against Transformers",
            "subprocess": "vLLM in a subprocess against Transformers",
        }
        heading = "vLLM against itself" if job.metamorphic else engines[job.topology]
        self._print(Text(f"\n{job.model}: {heading}", "bold"))
        self._width = max(len(_claim(name)) for name in check_names(job))
        self.spinner.update(f"check {self._ended + 1} of {self._expected}")

    def result(self, result: CheckResult) -> None:
        """Show how a check ended, and what it lacks if it failed."""
        from tapcheck.compatibility.verdict import status

        self._ended += 1
        found = status(result)
        label = f"  {found:<5}  {_claim(result.name):<{self._width}}  "
        lines = [wrapped(label, result.reason)]
        if found == "fail":
            lines += [wrapped(" " * len(label), line) for line in _why_it_failed(result)]
        text = Text("\n".join(lines))
        text.stylize(style(found), 2, 2 + len(found))
        self._print(text)

    def _print(self, text: Text) -> None:
        """Print a result where the spinner isn't: both may be on one terminal."""
        self.spinner.stop()
        out.print(text)
        self.spinner.start()


def _claim(name: str) -> str:
    """`ledger` of `ledger[tiny-llama,in_process]`."""
    return name.partition("[")[0]


def _why_it_failed(result: CheckResult) -> Iterator[str]:
    from tapcheck.compatibility.verdict import unmet

    if result.first_divergence:
        yield f"first at {result.first_divergence}"
    for condition in unmet(result):
        value = result.metrics.get(condition.metric, "absent")
        yield f"{condition.metric} is {value}, must be {condition.op} {condition.limit}"


def print_verdict(row: MatrixRow, summary: Mapping[str, Any], recorded: Path | None) -> None:
    """The last lines of `tapcheck check`: its row, its verdict, and where the row is kept."""
    from tapcheck.compatibility.matrix import render_row

    out.print(f"\n{render_row(row)}", end="")
    worst = summary["worst_relative_error"]
    error = "not a number" if worst is None else f"{worst:.2g}"
    out.print(f"\nverdict: {summary['verdict']}", style=f"bold {style(summary['verdict'])}")
    out.print(
        f"{summary['rows_compared']:,} of {summary['rows_due']:,} rows compared, worst relative "
        f"error {error}, {summary['seconds']:.0f} s"
    )
    if recorded is not None:
        out.print(f"recorded in {recorded}; `tapcheck matrix` puts it on the page")


def quiet_libraries() -> None:
    """Keep the engines' own chatter out of a verdict, unless the caller asked for it."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if "transformers" in sys.modules:  # it read the environment when it was imported
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def new_log() -> Path:
    """An empty file for what engines print, in the folder for temporary files."""
    descriptor, name = tempfile.mkstemp(prefix="tapcheck-", suffix=".log")
    os.close(descriptor)
    return Path(name)


@contextlib.contextmanager
def quiet_engine(name: str) -> Iterator[None]:
    """Send what an engine and its processes print to a file, kept and named when it breaks.

    Raises EngineError for whatever breaks in the engine; the file then has the traceback.
    """
    log = new_log()
    kept = False
    try:
        with _output_to(log) as terminal, Console(file=terminal).status(f"capturing in {name}"):
            yield
    except Exception as error:
        if isinstance(error, TapcheckError) and not isinstance(error, EngineError):
            raise
        kept = True
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exception(error, file=file)
        what = str(error)
        if not isinstance(error, EngineError):
            what = f"{name} broke: {type(error).__name__}: {what.strip().partition(chr(10))[0]}"
        raise EngineError(f"{what}\n  what {name} printed is in {log}") from error
    finally:
        if not kept:
            log.unlink(missing_ok=True)


@contextlib.contextmanager
def _output_to(log: Path) -> Iterator[TextIO]:
    """Point stdout and stderr of this process, and of those it starts, at a file.

    Yields the stderr of before.
    """
    saved = {stream: os.dup(stream) for stream in (1, 2)}
    try:
        with log.open("ab") as file:
            _flush()
            for stream in saved:
                os.dup2(file.fileno(), stream)
        with os.fdopen(os.dup(saved[2]), "w", encoding="utf-8") as terminal:
            yield terminal
    finally:
        _flush()
        for stream, descriptor in saved.items():
            os.dup2(descriptor, stream)
            os.close(descriptor)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
