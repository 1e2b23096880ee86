"""Features that dwarf their row are judged apart: they neither hide a fault nor cause a failure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tapcheck.capture import Capture, Columns, SiteRows
from tapcheck.checks.comparison import Comparison
from tapcheck.checks.equivalence import compare_captures
from tapcheck.checks.message import explain
from tapcheck.checks.numerics import OUTLIER_LENGTH, outliers, row_metrics
from tapcheck.checks.report.data import report_data
from tapcheck.request import Request
from tapcheck.sites import Site

SITE = Site("resid_post", 1)
WIDTH, ROWS, FEATURE = 128, 40, 77
MASSIVE = 22_500.0
NOISE = 0.01

Change = Callable[[torch.Tensor], torch.Tensor]


def capture_of(values: torch.Tensor) -> Capture:
    at = np.arange(len(values))
    columns = Columns(np.zeros(len(values), np.int64), at, at, at, at)
    return Capture((Request("a", tuple(range(len(values)))),), {SITE: SiteRows(columns, values)})


def truth(rows: slice, seed: int = 0) -> torch.Tensor:
    """Rows of which those at `rows` have one massive activation."""
    values = 10 * torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    values[rows, FEATURE] = MASSIVE
    return values


def narrow(values: torch.Tensor, seed: int) -> torch.Tensor:
    """The values as a run in bfloat16 gives them: the massive one is rounded, no more."""
    generator = torch.Generator().manual_seed(seed)
    error = NOISE * torch.randn(values.shape, generator=generator)
    error[:, FEATURE] = 0
    return (values * (1 + error)).bfloat16()


def others_times(factor: float, rows: slice) -> Change:
    def change(values: torch.Tensor) -> torch.Tensor:
        scaled = values.clone()
        scaled[rows] = (scaled[rows].float() * factor).to(values.dtype)
        scaled[:, FEATURE] = values[:, FEATURE]
        return scaled

    return change


def by_floor(rows: slice, change: Change = lambda values: values) -> Comparison:
    right = truth(rows)
    return compare_captures(
        capture_of(change(narrow(right, 1))),
        capture_of(narrow(right, 2)),
        reference=capture_of(right),
    )


EVERY, FIRST = slice(None), slice(1)


@pytest.mark.parametrize("rows", [EVERY, FIRST])
def test_a_healthy_capture_with_massive_activations_passes_and_says_so(rows: slice) -> None:
    comparison = by_floor(rows)
    assert comparison.passed, explain(comparison)
    found = comparison.sites[0].outliers
    assert found is not None
    assert (found.rows, found.failing) == (len(range(ROWS)[rows]), 0)
    assert found.features == (FEATURE,)
    assert found.largest == pytest.approx(MASSIVE, rel=1e-2)
    assert "outlier feature 77, up to 22528 at resid_post.1, judged apart" in explain(comparison)


@pytest.mark.parametrize("factor", [1.02, 0.0])
def test_a_massive_activation_in_every_row_hides_no_scale_of_the_others(factor: float) -> None:
    """In the whole row a 2 % scale of the others is an error of 1e-4, a 30th of a rounding."""
    assert not by_floor(EVERY, others_times(factor, EVERY)).passed


def test_a_scale_of_rows_with_massive_activations_is_named() -> None:
    comparison = by_floor(EVERY, lambda values: (values.float() * 1.02).bfloat16())
    assert not comparison.passed
    assert comparison.diagnoses[0].fault == "scaled"


def test_a_massive_activation_hides_no_fault_in_its_own_row() -> None:
    """The other features of the first token are zeros: 0.5 % of the row, whose floor is 1 %."""
    comparison = by_floor(FIRST, others_times(0.0, FIRST))
    first = comparison.first_divergence
    assert first is not None
    assert (first.position, first.outlier_feature) == (0, FEATURE)
    assert first.relative_error == pytest.approx(1, abs=0.01)
    assert first.outlier_error < first.outlier_allowed
    assert "judged apart, the largest is 77" in explain(comparison)


def test_its_rounding_alone_which_is_the_same_in_every_row_fails_no_site() -> None:
    """One step of bfloat16 away in every row: two floors of the whole row, in the median."""
    step = 2.0**7  # of bfloat16, at 22,500

    def next_value(values: torch.Tensor) -> torch.Tensor:
        moved = values.float()
        moved[:, FEATURE] += step
        return moved.bfloat16()

    comparison = by_floor(EVERY, next_value)
    assert comparison.passed, explain(comparison)
    assert comparison.sites[0].outliers is not None
    assert comparison.sites[0].outliers.worst_relative_error == pytest.approx(
        156 / MASSIVE, rel=0.1
    )


@pytest.mark.parametrize("judge", [by_floor, None])
def test_a_wrong_massive_activation_fails_and_is_named(judge: object) -> None:
    def halved(values: torch.Tensor) -> torch.Tensor:
        wrong = values.clone()
        wrong[0, FEATURE] *= 0.5
        return wrong

    right = truth(FIRST)
    comparison = (
        by_floor(FIRST, halved)
        if judge
        else compare_captures(capture_of(halved(right)), capture_of(right))
    )
    assert not comparison.passed
    assert comparison.sites[0].failing == 1
    found = comparison.sites[0].outliers
    assert found is not None
    assert found.failing == 1
    assert found.worst_relative_error == pytest.approx(0.5, rel=0.02)
    assert comparison.worst_relative_error == found.worst_relative_error
    assert "error of its outlier features, the largest of which is 77, is 0." in explain(comparison)


def test_a_fixed_tolerance_sees_the_others_too() -> None:
    right = truth(EVERY)
    wrong = capture_of(others_times(1 + 1e-4, EVERY)(right))
    comparison = compare_captures(wrong, capture_of(right))
    assert comparison.sites[0].failing == ROWS
    whole = (wrong.rows[SITE].values - right).norm(dim=1) / right.norm(dim=1)
    assert float(whole.max()) < 5e-5  # which the tolerance of float32 would pass


def test_the_report_has_the_outliers_of_each_site() -> None:
    right = truth(FIRST)
    actual, expected = capture_of(others_times(2.0, FIRST)(right)), capture_of(right)
    data = report_data(compare_captures(actual, expected), actual, expected)
    (site,) = data["sites"]
    assert (site["outliers"]["rows"], site["outliers"]["features"]) == (1, [FEATURE])
    assert data["first_divergence"]["outlier_feature"] == FEATURE


@given(st.integers(1, 8), st.sampled_from([64, 128, 512, 1024]), st.integers(0, 2**31))
def test_any_number_of_equal_outliers_is_found_up_to_a_64th_of_the_width(
    count: int, width: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, width, generator=generator)
    where = torch.randperm(width, generator=generator)[:count]
    rows[1, where] = 100 * rows.norm()
    found = outliers(rows)
    assert found.sum(dim=1).tolist() == [0, count if count <= width // 64 else 0, 0]
    assert bool(found[1, where].all()) == (count <= width // 64)


@given(st.floats(0.5, 3.99) | st.floats(4.01, 40), st.integers(0, 99))
def test_what_is_apart_is_longer_by_the_factor_than_all_that_is_left(
    ratio: float, seed: int
) -> None:
    rows = torch.randn(1, 256, generator=torch.Generator().manual_seed(seed))
    rows[0, 9] = 0
    rows[0, 9] = ratio * rows.norm()
    assert bool(outliers(rows).any()) == (ratio >= OUTLIER_LENGTH)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_with_outliers_that_is_not_finite_still_fails(value: float) -> None:
    right = truth(EVERY)
    for feature in (3, FEATURE):
        wrong = right.clone()
        wrong[5, feature] = value
        for pair in ((wrong, right), (right, wrong)):
            metrics = row_metrics(*pair)
            assert np.flatnonzero(~(metrics.relative_error <= np.inf)).tolist() == [5]
            assert metrics.outlier_feature[5] == -1


def test_zero_rows_and_narrow_rows_have_no_outliers() -> None:
    assert not outliers(torch.zeros(2, 128)).any()
    assert not outliers(torch.tensor([[1.0, 1e6, 1.0]])).any()
