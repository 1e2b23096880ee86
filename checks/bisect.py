"""Which engine settings a failing check depends on: changed one at a time, then together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapcheck.checks.jobs import Job, Mode, check_names
from tapcheck.checks.supervisor import run_jobs
from tapcheck.compatibility.verdict import CheckResult

# What is tried of each setting, where it isn't so already. None leaves it to vLLM.
_ALTERNATIVES: dict[str, tuple[Any, ...]] = {
    "enforce_eager": (True,),
    "mode": ("hook", "graph"),
    "runner": ("v1", "v2"),
    "enable_prefix_caching": (True, False),
    "enable_chunked_prefill": (True, False),
    "attention_backend": (None,),
    "tensor_parallel_size": (1,),
    "dtype": ("float32", "bfloat16"),
}
# A CPU has one attention backend, and ranks only where its cores are bound to them.
_ON_CUDA: dict[str, tuple[Any, ...]] = {
    "attention_backend": (None, "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"),
    "tensor_parallel_size": (1, 2),
}
_DEFAULTS: dict[str, Any] = {
    "mode": "hook",
    "runner": None,
    "dtype": "float32",
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "attention_backend": None,
    "tensor_parallel_size": 1,
}
SETTINGS = tuple(_DEFAULTS)

Settings = Mapping[str, Any]
Change = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Subject:
    """What is judged: one check of one model on one device."""

    model: str
    path: str
    device: str
    check: str
    rtol: float | None = None


def changes_to_try(settings: Settings, device: str, only: Sequence[str] = ()) -> list[Change]:
    """Each change of one setting: to every alternative, or back to vLLM's default.

    `only` names the settings to change, if not all. Graph mode is never eager, so `enforce_eager`
    is changed in hook mode only.
    """
    alternatives = _ALTERNATIVES | (_ON_CUDA if device == "cuda" else {})
    unusual = {name: (None,) for name in settings if name not in alternatives}
    changes: list[Change] = []
    for name, values in (alternatives | unusual).items():
        if (only and name not in only) or (name == "enforce_eager" and _mode(settings) == "graph"):
            continue
        now = settings.get(name, _DEFAULTS.get(name))
        changes += [((name, value),) for value in values if value != now]
    return changes


def smallest_changes(
    changes: Sequence[Change], passes: Callable[[Change], bool], most: int
) -> list[Change]:
    """All the combinations of as few changes as turn the check green, of `most` at most.

    Each combination is tried once; none has two changes of one setting. Empty when none is green.
    """
    for size in range(1, most + 1):
        green = [change for change in _combinations(changes, size) if passes(change)]
        if green:
            return green
    return []


def _combinations(changes: Sequence[Change], size: int) -> Iterator[Change]:
    for chosen in itertools.combinations(changes, size):
        together = tuple(itertools.chain(*chosen))
        if len(dict(together)) == len(together):
            yield together


def job_under(subject: Subject, settings: Settings) -> Job:
    """The job that owes the check, on an engine with these settings.

    Raises LookupError for a check that no job of one engine owes.
    """
    mode = _mode(settings)
    dtype = settings.get("dtype", _DEFAULTS["dtype"])
    not_engine = {"mode", "runner", "dtype"} | ({"enforce_eager"} if mode == "graph" else set())
    engine = {
        name: value
        for name, value in settings.items()
        if name not in not_engine and value is not None
    }
    for metamorphic in (False, True):
        job = Job(
            subject.model,
            subject.path,
            dtype,
            subject.device,
            "in_process",
            subject.rtol if dtype == "float32" else None,
            metamorphic=metamorphic,
            mode=mode,
            engine=engine,
        )
        if _name(subject.check, job) is not None:
            return job
    raise LookupError(subject.check)


def checks_of_one_engine() -> tuple[str, ...]:
    """The names of the checks that can be bisected."""
    jobs = (
        Job("", "", "float32", "cpu", "in_process", metamorphic=metamorphic)
        for metamorphic in (False, True)
    )
    return tuple(name.partition("[")[0] for job in jobs for name in check_names(job))


def judge(
    subject: Subject, settings: Settings, variables: Mapping[str, str], log: Path
) -> CheckResult:
    """Run the check on an engine with these settings, in a process of its own.

    `variables` are those by which a model runner is chosen.
    """
    job = job_under(subject, settings)
    found = run_jobs([job], log=log, variables=variables).results
    results = {result.name: result for result in found}
    name = _name(subject.check, job)
    assert name is not None
    return results[name]


def _name(check: str, job: Job) -> str | None:
    """The full name of a check among those of a job."""
    return next((name for name in check_names(job) if name.partition("[")[0] == check), None)


def _mode(settings: Settings) -> Mode:
    mode: Mode = settings.get("mode", "hook")
    return mode
