"""What comparisons and missing GPUs leave in the reports."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapcheck.fixtures.summary import Compared, Properties, add_compared, read_compared

CAPTURES = """
import numpy as np
import torch
from tapcheck.capture import Capture, Columns, SiteRows
from tapcheck.checks import assert_captures_match
from tapcheck.request import Request
from tapcheck.sites import Site

def capture(scale=1.0, rows=3):
    position = np.arange(rows, dtype=np.int64)
    zeros = np.zeros(rows, np.int64)
    columns = Columns(zeros, position, zeros, zeros, zeros)
    values = torch.arange(1.0, 1.0 + 4 * rows).reshape(rows, 4) * scale
    request = Request("r", tuple(range(rows)))
    return Capture((request,), {Site("resid_post", 0): SiteRows(columns, values)})
"""
COMPARING = (
    CAPTURES
    + """
def test_match():
    assert_captures_match(capture(), capture())
    assert_captures_match(capture(1 + 2**-12, rows=5), capture(rows=5), rtol=0.01)

def test_differ():
    assert_captures_match(capture(1.5), capture())

def test_compares_nothing():
    pass
"""
)

_COMPARED = st.builds(
    Compared,
    st.integers(0, 99),
    st.integers(0, 99),
    st.sampled_from([0.0, 0.5, math.nan, 2.0]),
    st.sampled_from([None, "request 'a'", "request 'b'"]),
)


@given(st.lists(_COMPARED, min_size=1), st.lists(st.tuples(st.text(), st.text())))
def test_a_tests_properties_hold_the_sum_of_its_comparisons(
    parts: list[Compared], others: Properties
) -> None:
    properties = list(others)
    for part in parts:
        add_compared(properties, part)
    total = read_compared(properties)
    assert total is not None
    assert total.rows_due == sum(part.rows_due for part in parts)
    assert total.rows_compared == sum(part.rows_compared for part in parts)
    errors = [part.worst_error for part in parts]
    if any(map(math.isnan, errors)):
        assert math.isnan(total.worst_error)
    else:
        assert total.worst_error == max(errors)
    first = next((part.first_divergence for part in parts if part.first_divergence), None)
    assert total.first_divergence == first
    assert properties[: len(others)] == others
    assert len(properties) == len(others) + 3 + (first is not None)


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_the_summary_counts_rows_and_names_the_worst_error_of_each_test(
    pytester: pytest.Pytester, workers: list[str]
) -> None:
    pytester.makepyfile(test_it=COMPARING)
    result = pytester.runpytest_subprocess(*workers)
    result.assert_outcomes(passed=2, failed=1)
    assert result.outlines.count("captures compared: 11 of 11 rows due, worst relative error 0.5")
    result.stdout.fnmatch_lines_random(
        [
            "  test_it.py::test_match: 8 of 8 rows due, worst relative error 0.00024",
            "  test_it.py::test_differ: 3 of 3 rows due, worst relative error 0.5",
        ]
    )
    result.stdout.no_fnmatch_line("*test_compares_nothing:*")


@pytest.mark.parametrize("workers", [[], ["-n", "1"]])
def test_the_numbers_land_in_junit(pytester: pytest.Pytester, workers: list[str]) -> None:
    pytester.makepyfile(test_it=COMPARING)
    pytester.runpytest_subprocess("--junitxml=out.xml", *workers)
    found = {
        case.get("name"): {item.get("name"): item.get("value") for item in case.iter("property")}
        for case in ET.parse(pytester.path / "out.xml").iter("testcase")
    }
    assert found == {
        "test_match": {
            "tapcheck_rows_due": "8",
            "tapcheck_rows_compared": "8",
            "tapcheck_worst_relative_error": str(2**-12),
        },
        "test_differ": {
            "tapcheck_rows_due": "3",
            "tapcheck_rows_compared": "3",
            "tapcheck_worst_relative_error": "0.5",
            "tapcheck_first_divergence": "request 'r', site resid_post.0, position 0",
        },
        "test_compares_nothing": {},
    }


def test_a_lost_row_lands_in_junit_as_the_first_divergence(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        CAPTURES + "\ndef test_lost():\n    assert_captures_match(capture(rows=2), capture())\n"
    )
    pytester.runpytest_subprocess("--junitxml=out.xml").assert_outcomes(failed=1)
    found = {
        item.get("name"): item.get("value")
        for item in ET.parse(pytester.path / "out.xml").iter("property")
    }
    assert found["tapcheck_first_divergence"] == "request 'r', site resid_post.0, position 2"


@pytest.mark.parametrize("workers", [[], ["-n", "1"]])
def test_the_summary_counts_gpu_tests_that_were_not_run_by_reason(
    pytester: pytest.Pytester, workers: list[str]
) -> None:
    pytester.makepyfile(
        test_it="""
        import pytest
        @pytest.mark.gpu
        def test_gpu(): pass
        """
    )
    result = pytester.runpytest("--tapcheck-device=cpu", "--junitxml=out.xml", *workers)
    result.stdout.fnmatch_lines(
        [
            "gpu tests skipped: 1",
            "  1: needs a CUDA GPU: the device is set to cpu",
        ]
    )
    [item] = ET.parse(pytester.path / "out.xml").iter("property")
    assert item.get("name") == "tapcheck_gpu_skip"


def test_a_session_without_captures_has_no_summary(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest()
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*captures compared*")
    result.stdout.no_fnmatch_line("*= tapcheck =*")


def test_captures_that_are_not_equal_are_explained(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(CAPTURES + "\ndef test_equal():\n    assert capture(1.5) == capture()\n")
    result = pytester.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*assert capture == capture, which compares bit for bit",
            "*request 'r', site resid_post.0, position 0*",
        ]
    )


def test_captures_that_differ_by_a_bit_alone_are_explained(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        CAPTURES + "\ndef test_equal():\n    assert capture(1 + 2**-23) == capture()\n"
    )
    result = pytester.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*request 'r', site resid_post.0, position 0*"])


def test_other_comparisons_are_left_to_pytest(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        CAPTURES
        + "\ndef test_other():\n    assert capture() == 3\n\ndef test_not():\n"
        + "    assert capture() != capture()\n"
    )
    result = pytester.runpytest()
    result.assert_outcomes(failed=2)
    result.stdout.no_fnmatch_line("*bit for bit*")


def test_the_summary_lists_the_worst_comparisons_first_and_counts_the_rest(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        import pytest
        from tapcheck.fixtures.summary import Compared, add_compared

        @pytest.mark.parametrize("error", [*(n * 1e-7 for n in range(11)), float("nan")])
        def test_it(error, request):
            add_compared(request.node.user_properties, Compared(1, 1, error))
        """
    )
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(passed=12)
    lines = [line for line in result.outlines if "::test_it[" in line]
    assert "error nan" in lines[0]
    assert lines[1].endswith("worst relative error 1e-06")
    assert len(lines) == 10
    result.stdout.fnmatch_lines(["  and 2 tests more, none of them worse"])
