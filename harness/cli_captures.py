"""The commands that capture into a file and judge one file against another."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tapcheck.results import require_bundle, require_page, require_writable
from tapcheck.terminal import out, quiet_engine

if TYPE_CHECKING:
    from tapcheck.hf import HFBackend
    from tapcheck.request import Request
    from tapcheck.vllm.backend import VLLMBackend

BackendName = Enum("BackendName", {"hf": "hf", "vllm": "vllm"})
ModeName = Enum("ModeName", {"hook": "hook", "graph": "graph"})
DtypeName = Enum("DtypeName", {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"})

JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON.")
]
DtypeOption = Annotated[DtypeName, typer.Option(help="The dtype in which the model runs.")]


def capture(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, id, or tiny-llama.")],
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
    mode: Annotated[
        ModeName,
        typer.Option(help="Hooks on an eager vLLM, or taps in the graph of a compiled one."),
    ] = ModeName.hook,
) -> int:
    """Capture activations from one engine into a file."""
    prompts = _prompts(prompt or [], prompt_ids or [])
    require_writable("-o", output)
    if backend is BackendName.hf and not (in_process and mode is ModeName.hook):
        raise typer.BadParameter("--no-in-process and --mode graph are settings of --backend vllm")
    selectors = select or ["all"]
    if is_tiny(model):
        _, model = named_model(model)
    requests = _requests(model, site, selectors, prompts)

    from tapcheck.storage import save_capture

    graph_taps = site if mode is ModeName.graph else ()
    with (
        quiet_engine(backend.value),
        _engine(backend, model, dtype.value, in_process, graph_taps) as engine,
    ):
        captured = engine.capture(requests, site, selectors, max_new_tokens=max_new_tokens)
    save_capture(captured, output)
    out.print(f"{output}: {len(captured)} rows at {', '.join(map(str, captured.sites))}")
    return 0


def is_tiny(model: str) -> bool:
    """Whether a name such as tiny-llama stands for a model that tapcheck builds itself."""
    from tapcheck.fixtures.zoo import TINY_MODELS

    prefix, _, name = model.partition("-")
    return prefix == "tiny" and name in TINY_MODELS and not Path(model).exists()


def named_model(model: str) -> tuple[str, str]:
    """A model's name, and its folder or id; raises ModelError for one that can't be judged."""
    if is_tiny(model):
        from tapcheck.fixtures.zoo import build_tiny_model

        return model, str(build_tiny_model(model.partition("-")[2]))
    from tapcheck.models import require_tappable

    require_tappable(model)
    return Path(model).resolve().name if Path(model).exists() else model, model


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
    backend: BackendName, model: str, dtype: str, in_process: bool, graph_taps: Sequence[str]
) -> HFBackend | VLLMBackend:
    if backend is BackendName.hf:
        from tapcheck.hf import HFBackend

        return HFBackend(model, dtype=dtype)
    from tapcheck.vllm.backend import VLLMBackend

    return VLLMBackend(model, dtype=dtype, in_process=in_process, graph_taps=graph_taps)


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
    repeat: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Another run of EXPECTED, for the same purpose; repeatable."
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
    repeats = [load_capture(path) for path in repeat or ()]
    comparison = compare_captures(mine, theirs, rtol=rtol, reference=wider, repeats=repeats)
    if json_file or html:
        data = report.report_data(comparison, mine, theirs, wider)
        if json_file:
            report.write_json(json_file, data)
        if html:
            report.write_html(html, data)
    out.print(explain(comparison))
    if bundle and not comparison.passed:
        report.write_bundle(
            bundle, mine, theirs, comparison, reference=wider, repeats=repeats, rtol=rtol
        )
        out.print(f"{bundle} replays this elsewhere: see {bundle / 'README.md'}")
    return 0 if comparison.passed else 1
