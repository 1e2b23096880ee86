from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_rows import check, skipped

from tapcheck.compatibility.verdict import CheckResult, Condition, row_verdict, status, unmet

NUMBERS = st.integers(-(10**6), 10**6) | st.floats(allow_nan=False)
OTHER_OUTCOMES = ("skip", "error", "timeout", "crash", "not exercised")


def judged(value: float, op: str, limit: float | str, **others: float) -> CheckResult:
    condition = Condition("value", op, limit)  # type: ignore[arg-type]
    return CheckResult("claim", "completed", "", {"value": value, **others}, (condition,))


def test_a_check_passes_when_every_condition_holds() -> None:
    assert status(check(error=1e-5)) == "pass"
    assert status(check(error=1.1e-5)) == "fail"
    assert unmet(check(error=1.0)) == [Condition("relative_error", "<=", 1e-5)]


@given(NUMBERS, NUMBERS)
def test_conditions_compare_as_their_operators_do(value: float, limit: float) -> None:
    assert (status(judged(value, "<=", limit)) == "pass") == (value <= limit)
    assert (status(judged(value, ">=", limit)) == "pass") == (value >= limit)
    assert (status(judged(value, "==", limit)) == "pass") == (value == limit)


@given(NUMBERS, NUMBERS)
def test_a_limit_may_be_another_metric(value: float, floor: float) -> None:
    assert status(judged(value, "<=", "floor", floor=floor)) == status(judged(value, "<=", floor))


@pytest.mark.parametrize("op", ["<=", ">=", "=="])
def test_nan_and_absent_metrics_satisfy_nothing(op: str) -> None:
    assert status(judged(math.nan, op, 0.0)) == "fail"
    assert status(judged(0.0, op, math.nan)) == "fail"
    assert status(judged(0.0, op, "never measured")) == "fail"
    assert status(CheckResult("x", "completed", "", {}, (Condition("a", "==", 0),))) == "fail"


def test_a_completed_check_without_conditions_fails() -> None:
    assert status(CheckResult("claim", "completed", "looked fine", {"rows": 3})) == "fail"


@pytest.mark.parametrize("outcome", ["xfail", *OTHER_OUTCOMES])
def test_what_did_not_complete_keeps_its_outcome_whatever_its_metrics(outcome: str) -> None:
    assert status(check(outcome=outcome)) == outcome


def test_a_row_passes_when_every_expected_check_passes() -> None:
    assert row_verdict([check("a"), check("b")], ["a", "b"]) == "pass"
    assert row_verdict([check("a"), skipped("b", "xfail")], ["a", "b"]) == "pass"


@pytest.mark.parametrize("outcome", OTHER_OUTCOMES)
def test_a_row_with_anything_short_of_a_pass_fails(outcome: str) -> None:
    assert row_verdict([check("a"), skipped("b", outcome)], ["a", "b"]) == "fail"
    assert row_verdict([check("a"), skipped("b", outcome)], ["a"]) == "fail"


def test_a_row_fails_when_a_check_fails_or_is_absent_or_comes_twice() -> None:
    assert row_verdict([check("a"), check("b", error=1.0)], ["a", "b"]) == "fail"
    assert row_verdict([check("a")], ["a", "b"]) == "fail"
    assert row_verdict([check("a"), check("a")], ["a"]) == "fail"


def test_a_row_in_which_nothing_passed_fails() -> None:
    assert row_verdict([], []) == "fail"
    assert row_verdict([skipped("a", "xfail")], ["a"]) == "fail"
