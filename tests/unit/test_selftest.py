"""The checker's own test: real healthy captures, every fault, and what counts as a failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tapcheck.checks import selftest as module
from tapcheck.checks.faults import FAULTS, Fault
from tapcheck.checks.faults.models import MODEL_FAULTS
from tapcheck.checks.selftest import Injection, SelfTest, run_selftest, selftest

pytestmark = pytest.mark.usefixtures("one_thread")

FOUND = Injection("m", "float32", "scaled", "capture", True, 1.3, "scaled", "times 1.02")
MISSED = replace(FOUND, fault="dead_tap", caught=False, named_as=None, claim=None)
MISNAMED = replace(FOUND, fault="lost_row")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_every_fault_is_caught_and_named_in_a_real_capture(
    name: str, dtype: str, model_zoo: Callable[[str], Path]
) -> None:
    found = selftest(model_zoo(name), dtype=dtype, healthy=2)
    assert found.passed
    assert found.false_alarms == ()
    names = {injection.fault for injection in found.injections}
    left_out = set() if name == "gemma2" else {"sliding_window_off"}
    assert names == {*FAULTS, *MODEL_FAULTS} - left_out
    assert len(found.not_applicable) == len(left_out)
    assert [one.fault for one in found.injections if not one.named] == []


def test_a_healthy_pair_differs_as_engines_do(model_zoo: Callable[[str], Path]) -> None:
    with module._Engines(model_zoo("llama"), "bfloat16") as engines:
        one, other = engines.pair(0), engines.pair(1)
    assert one.actual.requests == one.expected.requests
    assert one.actual.requests != other.actual.requests
    assert one.actual != one.expected
    assert one.reference is not None
    comparison = one.compare(one.actual)
    assert comparison.passed
    assert comparison.diagnoses == ()


def test_a_fault_that_nothing_shows_fails_the_test(
    model_zoo: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAULTS, "invisible", Fault("invisible", "Nothing.", lambda given: given))
    found = selftest(model_zoo("llama"), healthy=1)
    assert not found.passed
    assert [one.fault for one in found.missed] == ["invisible"]
    assert found.caught == len(found.injections) - 1
    assert "missed: invisible" in found.report()


def test_a_judge_that_condemns_everything_raises_false_alarms(
    model_zoo: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = module.compare_captures
    monkeypatch.setattr(module, "compare_captures", lambda a, e, **_floor: compare(a, e, rtol=1e-9))
    found = selftest(model_zoo("llama"), name="tiny", healthy=2)
    assert not found.passed
    assert (len(found.healthy), len(found.false_alarms)) == (2, 2)
    assert found.false_alarms[1].startswith("tiny, float32, prompts 1: request ")
    assert found.false_alarms[1].endswith("no diagnosis")
    assert "2 of 2 healthy captures condemned" in found.report()


@pytest.mark.parametrize(
    ("found", "passed"),
    [
        (SelfTest((FOUND,), (0.5,)), True),
        (SelfTest((FOUND, MISNAMED), (0.5,)), True),
        (SelfTest((FOUND, MISSED), (0.5,)), False),
        (SelfTest((FOUND,), (0.5,), ("m: condemned",)), False),
        (SelfTest((), (0.5,)), False),
        (SelfTest((FOUND,)), False),
    ],
)
def test_what_passes(found: SelfTest, passed: bool) -> None:
    assert found.passed is passed
    assert found.summary()["verdict"] == ("pass" if passed else "fail")


def test_results_add_up_and_are_reported_by_fault() -> None:
    found = SelfTest((FOUND, MISSED), (0.5, 0.25), (), ("no window",)) + SelfTest(
        (FOUND, MISNAMED), (0.5,)
    )
    summary = json.loads(json.dumps(found.summary()))
    assert (summary["injected"], summary["caught"], summary["named"]) == (4, 3, 2)
    assert (summary["healthy"], summary["false_alarms"], summary["alarms"]) == (3, 0, [])
    assert summary["faults"][1]["fault"] == "dead_tap"
    lines = found.report().splitlines()
    assert lines[2].split() == ["scaled", "2", "of", "2", "scaled"]
    assert "left out: no window" in lines
    assert lines[-2].endswith("took at most 50% and the weakest fault 130%")
    assert lines[-1] == (
        "3 of 4 injected faults caught, 2 named; 0 of 3 healthy captures condemned"
    )


def test_several_names_are_all_reported() -> None:
    found = SelfTest((FOUND, replace(FOUND, named_as=None), replace(FOUND, named_as="x")), (0.5,))
    assert "1 scaled, 1 nothing, 1 x" in found.report()


def test_models_and_dtypes_are_added_up(
    model_zoo: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FAULTS", {"dead_tap": FAULTS["dead_tap"]})
    monkeypatch.setattr(module, "MODEL_FAULTS", {})
    path = str(model_zoo("llama"))
    found = run_selftest({"a": path, "b": path}, ["float32", "bfloat16"], healthy=1)
    assert [(one.model, one.dtype) for one in found.injections] == [
        ("a", "float32"),
        ("a", "bfloat16"),
        ("b", "float32"),
        ("b", "bfloat16"),
    ]
    assert (len(found.healthy), found.named, found.passed) == (4, 4, True)
