from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from sample_rows import CPU_BUILD, H200

from tapcheck.compatibility import known_issues as module
from tapcheck.compatibility.errors import KnownIssueError
from tapcheck.compatibility.known_issues import (
    COMBINATION_KEYS,
    VERSION_KEYS,
    KnownIssue,
    Value,
    environment_terms,
    known_issues,
    matching_issues,
    parse_issues,
    possible_issues,
    refuse_known_bad,
)

HEALTHY: dict[str, Value] = {
    **environment_terms(CPU_BUILD),
    "runner": "v1",
    "mode": "hook",
    "enforce_eager": True,
    "in_process": True,
    "architecture": "llama",
    "pipeline_parallel_size": 1,
    "tensor_parallel_size": 1,
    "quantization": None,
    "dtype": "float32",
    "compiled": False,
    "cudagraph_mode": "NONE",
    "batch_invariant": False,
    "prefix_caching": True,
    "speculative_method": None,
    "extracts_in_order": None,
    "experts": False,
    "linear_attention": False,
}


def alternatives(issue: KnownIssue, key: str) -> list[Value]:
    """Values of a combination that satisfy each alternative of a term."""
    term = issue.when[key]
    options: list[Value] = [term] if isinstance(term, str | int) else list(term or ())
    if key not in VERSION_KEYS:
        return options
    versions = [next(iter(SpecifierSet(str(option)))).version for option in options]
    return [version.replace("*", "0") for version in versions]


def other_value(key: str, value: Value) -> Value:
    """A value of this key that is no alternative of any issue's term, where there is one."""
    if isinstance(value, bool):
        return not value
    if key in VERSION_KEYS:
        return "0.0.1"
    return 99 if isinstance(value, int) else "something else"


CASES = [
    (issue, key, value)
    for issue in known_issues()
    for key in issue.when
    for value in alternatives(issue, key)
]


def holding(issue: KnownIssue, **changes: Value) -> dict[str, Value]:
    first = {key: alternatives(issue, key)[0] for key in issue.when}
    return {**first, **changes}


def case_id(value: Any) -> str:
    return value.id if isinstance(value, KnownIssue) else str(value)


def test_there_are_ten_issues_at_least_each_with_its_source() -> None:
    assert len(known_issues()) >= 10
    for issue in known_issues():
        assert "https://" in issue.source or "measured by tapcheck" in issue.source, issue.id


@pytest.mark.parametrize(("issue", "key", "value"), CASES, ids=case_id)
def test_an_issue_is_refused_under_each_alternative(
    issue: KnownIssue, key: str, value: Value
) -> None:
    with pytest.raises(KnownIssueError) as raised:
        refuse_known_bad(holding(issue, **{key: value}))
    for part in (issue.id, issue.symptom, issue.way_out, issue.source, f"{key}={value!r}"):
        assert part in str(raised.value)


@pytest.mark.parametrize(("issue", "key", "value"), CASES, ids=case_id)
def test_an_issue_lifts_when_any_term_stops_holding(
    issue: KnownIssue, key: str, value: Value
) -> None:
    combination = holding(issue, **{key: value})
    assert issue in matching_issues(combination)
    assert issue not in matching_issues({**combination, key: other_value(key, value)})
    del combination[key]
    assert issue not in matching_issues(combination)
    assert issue in possible_issues(combination)


def test_a_healthy_combination_is_not_refused() -> None:
    assert HEALTHY.keys() == COMBINATION_KEYS
    assert matching_issues(HEALTHY) == []
    refuse_known_bad(HEALTHY)


def test_every_issue_that_matches_is_named() -> None:
    with pytest.raises(KnownIssueError) as raised:
        refuse_known_bad({**HEALTHY, "architecture": "olmo2", "enforce_eager": False})
    assert "olmo2-and-gpt-neox-in-process" in str(raised.value)
    assert "hooks-under-compilation" in str(raised.value)


def test_possible_issues_are_those_that_nothing_rules_out() -> None:
    assert possible_issues({}) == list(known_issues())
    on_gpu = {**environment_terms(CPU_BUILD), "distribution": "vllm"}
    possible = {issue.id for issue in possible_issues(on_gpu)}
    assert "hooks-under-compilation" in possible
    assert "olmo2-and-gpt-neox-in-process" not in possible


def test_a_gpu_rules_out_what_is_seen_on_other_capabilities_only() -> None:
    replay = "gemma-4-26b-a4b-graph-replay-on-capability-10"
    for capability, possible in (("10.0", True), ("10.3", True), ("9.0", False), ("12.0", False)):
        gpu = replace(H200, capability=capability)
        terms = environment_terms(replace(CPU_BUILD, gpu=gpu, vllm_distribution="vllm"))
        assert (replay in [issue.id for issue in possible_issues(terms)]) is possible
    assert replay not in [issue.id for issue in possible_issues(environment_terms(CPU_BUILD))]


def test_a_misspelt_key_is_an_error_and_not_a_combination_without_issues() -> None:
    for lookup in (matching_issues, possible_issues, refuse_known_bad):
        with pytest.raises(ValueError, match=r"no combination has the key enforce_eagr: keys are"):
            lookup({"mode": "hook", "enforce_eagr": False})


def issue(**changes: Any) -> dict[str, Any]:
    text = {"symptom": "crashes", "source": "measured", "way_out": "don't"}
    return {"id": "an-issue", "when": {"mode": "hook"}, **text, **changes}


@pytest.mark.parametrize(
    ("specifier", "version", "holds"),
    [
        (">=0.28,<0.30", "0.28.0", True),
        (">=0.28,<0.30", "0.30.0", False),
        (["==0.28.0", ">0.31"], "0.32.0", True),
        (["==0.28.0", ">0.31"], "0.30.0", False),
        ("==0.32.0", "0.32.0+cpu", True),
        (">=0.32", "0.33.0rc1", True),
        (">=0.32", "from source", False),
        (">=0.32", None, False),
    ],
)
def test_version_terms_are_specifiers(
    monkeypatch: pytest.MonkeyPatch, specifier: Any, version: str | None, holds: bool
) -> None:
    issues = parse_issues({"schema_version": 1, "issues": [issue(when={"vllm": specifier})]})
    monkeypatch.setattr(module, "known_issues", lambda: issues)
    assert matching_issues({"vllm": version}) == (list(issues) if holds else [])


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ([issue(when={})], r"\$\.issues\[0\]\.when"),
        ([issue(when={"vendor": "x"})], r"\$\.issues\[0\]\.when: .*'vendor'"),
        ([issue(when={"enforce_eager": 0})], r"\$\.issues\[0\]\.when\.enforce_eager"),
        ([issue(source="")], r"\$\.issues\[0\]\.source"),
        ([issue(when={"vllm": "0.32.0"})], "an-issue, vllm: Invalid specifier"),
        ([issue(), issue()], "share an id: an-issue"),
    ],
)
def test_bad_issue_data_is_refused(bad: list[Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_issues({"schema_version": 1, "issues": bad})


def test_the_schema_and_the_code_know_the_same_keys() -> None:
    path = Path(module.__file__).with_name("known_issues.schema.json")
    terms = json.loads(path.read_text())["$defs"]["issue"]["properties"]["when"]["properties"]
    assert terms.keys() == COMBINATION_KEYS
    versions = {key for key, term in terms.items() if term.get("$ref") == "#/$defs/versions"}
    assert versions == VERSION_KEYS
