"""Recorded rows that answer for this machine: the nearest one, or one of the very same run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from packaging.version import InvalidVersion, Version

from tapcheck.compatibility.environment import Environment, describe_gpu
from tapcheck.compatibility.rows import MatrixRow, stale_checks

_Gap = tuple[int, ...]
_VERSIONS = ("torch", "transformers", "triton", "python")
_NO_VERSION: _Gap = (1 << 30,) * 3
# The sources themselves are compared by their hash.
_NAMES_OF_SOURCES = ("tapcheck_commit", "tapcheck_dirty")


@dataclass(frozen=True)
class Difference:
    """One field of the environment that a row was recorded with, and what is here instead."""

    field: str
    tested: str
    here: str


def nearest_row(rows: Iterable[MatrixRow], environment: Environment) -> MatrixRow | None:
    """The row whose device, vLLM and other versions are nearest, the newest of equals.

    Device kind and vLLM distribution come first, then the distance between versions. None when
    there are no rows.
    """
    newest_first = sorted(rows, key=lambda row: (row.recorded_at, row.id), reverse=True)
    return min(newest_first, key=lambda row: _distance(row.environment, environment), default=None)


def differences(row: MatrixRow, environment: Environment) -> list[Difference]:
    """Fields of hardware and software that differ, in the order of Environment's fields."""
    tested, here = _flat(row.environment), _flat(environment)
    return [Difference(key, tested[key], here[key]) for key in here if tested[key] != here[key]]


def same_run(
    rows: Iterable[MatrixRow],
    environment: Environment,
    current_hashes: Mapping[str, str],
    asked: Mapping[str, str],
) -> MatrixRow | None:
    """The newest row of this very run: checks, their sources, environment, engines; None if none.

    `current_hashes` gives the source hash of each check that the run consists of, by name; `asked`
    the fields of EngineSettings that were asked for (`dtype`, `mode`). A row in which a check was
    lost (crash, timeout, error) is no such row: what went wrong may not do so again.
    """
    found = [
        row
        for row in rows
        if set(row.expected_checks) == current_hashes.keys()
        and not stale_checks(row, current_hashes)
        and all(gap.field in _NAMES_OF_SOURCES for gap in differences(row, environment))
        and row.settings
        and all(
            getattr(engine, name) == value
            for engine in row.settings
            for name, value in asked.items()
        )
    ]
    return max(found, key=lambda row: (row.recorded_at, row.id), default=None)


def _distance(tested: Environment, here: Environment) -> tuple[bool | _Gap, ...]:
    """Sorts by what matters most for a capture; smaller is nearer."""
    return (
        (tested.gpu is None) != (here.gpu is None),
        tested.vllm_distribution != here.vllm_distribution,
        _gap(tested.vllm, here.vllm),
        (tested.gpu and tested.gpu.name) != (here.gpu and here.gpu.name),
        *(_gap(getattr(tested, name), getattr(here, name)) for name in _VERSIONS),
    )


def _gap(one: str | None, other: str | None) -> _Gap:
    """How far two versions are apart in major, minor and micro."""
    if one == other:
        return (0, 0, 0)
    try:
        first, second = Version(one or ""), Version(other or "")
    except InvalidVersion:
        return _NO_VERSION
    return (
        abs(first.major - second.major),
        abs(first.minor - second.minor),
        abs(first.micro - second.micro),
    )


def _flat(environment: Environment) -> dict[str, str]:
    values = {field.name: getattr(environment, field.name) for field in fields(environment)}
    values["gpu"] = environment.gpu and describe_gpu(environment.gpu)
    return {key: "none" if value is None else str(value) for key, value in values.items()}
