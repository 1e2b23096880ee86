from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tapcheck.checks.numerics import RowMetrics, row_metrics

FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def rows(*values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def one(actual: list[float], expected: list[float]) -> RowMetrics:
    return row_metrics(rows(actual), rows(expected))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_metrics_are_those_of_the_formulas(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    actual = torch.randn(50, 33, generator=generator).to(dtype)
    expected = (actual + 0.1 * torch.randn(50, 33, generator=generator)).to(dtype)
    a, e = actual.double().numpy(), expected.double().numpy()
    metrics = row_metrics(actual, expected)
    norm_a, norm_e = np.linalg.norm(a, axis=1), np.linalg.norm(e, axis=1)
    np.testing.assert_allclose(
        metrics.relative_error, np.linalg.norm(a - e, axis=1) / norm_e, rtol=1e-5
    )
    np.testing.assert_allclose(metrics.cosine, (a * e).sum(1) / norm_a / norm_e, rtol=1e-5)
    np.testing.assert_allclose(metrics.norm_ratio, norm_a / norm_e, rtol=1e-5)
    np.testing.assert_allclose(metrics.max_abs_diff, np.abs(a - e).max(axis=1), rtol=1e-6)
    np.testing.assert_array_equal(metrics.max_abs_feature, np.abs(a - e).argmax(axis=1))


def test_two_zero_rows_are_equal() -> None:
    metrics = one([0, 0], [0, 0])
    assert (metrics.relative_error[0], metrics.cosine[0], metrics.norm_ratio[0]) == (0, 1, 1)


def test_a_zero_row_against_another_is_as_wrong_as_can_be() -> None:
    dead = one([0, 0], [3, 4])
    assert (dead.relative_error[0], dead.cosine[0], dead.norm_ratio[0]) == (1, 0, 0)
    invented = one([3, 4], [0, 0])
    assert (invented.relative_error[0], invented.cosine[0]) == (math.inf, 0)
    assert invented.norm_ratio[0] == math.inf


@pytest.mark.parametrize("side", ["actual", "expected", "both"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_satisfies_no_tolerance(side: str, value: float) -> None:
    good, bad = [1.0, 2.0, 3.0], [1.0, 2.0, value]
    metrics = one(bad if side != "expected" else good, bad if side != "actual" else good)
    assert not metrics.relative_error[0] <= math.inf
    assert math.isnan(metrics.cosine[0])
    assert metrics.max_abs_feature[0] == 2
    assert (metrics.nan_count[0], metrics.inf_count[0]) == ((1, 0) if math.isnan(value) else (0, 1))


def test_a_broken_row_leaves_its_neighbours_alone() -> None:
    metrics = row_metrics(rows([1, 2], [math.nan, 1], [3, 4]), rows([1, 2], [1, 1], [3, 4]))
    assert metrics.relative_error[[0, 2]].tolist() == [0, 0]
    assert metrics.nan_count.tolist() == [0, 1, 0]


@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1e20, 1e37])
def test_values_whose_squares_float32_cannot_hold_are_still_measured(magnitude: float) -> None:
    metrics = one([3.3 * magnitude, 4.4 * magnitude], [3 * magnitude, 4 * magnitude])
    assert metrics.relative_error[0] == pytest.approx(0.1, rel=1e-5)
    assert metrics.cosine[0] == pytest.approx(1)
    assert metrics.norm_ratio[0] == pytest.approx(1.1, rel=1e-5)


def test_float64_rows_keep_their_precision() -> None:
    expected = torch.ones(1, 4, dtype=torch.float64)
    assert row_metrics(expected + 1e-12, expected).relative_error[0] == pytest.approx(1e-12, 1e-3)


def test_no_rows_have_no_metrics() -> None:
    metrics = row_metrics(torch.empty(0, 4), torch.empty(0, 4))
    assert len(metrics) == 0
    assert metrics.max_abs_feature.dtype == np.int64


@pytest.mark.parametrize(
    ("actual", "expected"), [((2, 3), (2, 4)), ((2, 3), (3, 3)), ((2, 0), (2, 0))]
)
def test_rows_that_cannot_be_paired_are_refused(
    actual: tuple[int, int], expected: tuple[int, int]
) -> None:
    with pytest.raises(ValueError, match=r"rows"):
        row_metrics(torch.ones(actual), torch.ones(expected))


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 40), st.sampled_from(FLOAT_DTYPES))
def test_blocks_and_order_of_rows_change_nothing(
    n: int, width: int, block_elements: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(n)
    actual = torch.randn(n, width, generator=generator).to(dtype)
    expected = torch.randn(n, width, generator=generator).to(dtype)
    order = torch.randperm(n, generator=generator).numpy()
    whole = row_metrics(actual, expected)
    pieces = row_metrics(
        actual,
        expected,
        actual_index=order,
        expected_index=order,
        block_elements=block_elements,
    )
    np.testing.assert_allclose(pieces.relative_error, whole.relative_error[order], rtol=1e-5)
    np.testing.assert_array_equal(pieces.max_abs_feature, whole.max_abs_feature[order])
    np.testing.assert_array_equal(pieces.max_abs_diff, whole.max_abs_diff[order])


def test_rows_wider_than_a_block_are_measured_too() -> None:
    expected = torch.ones(2, 40_000)
    actual = expected.clone()
    actual[1, 39_999] += 2
    metrics = row_metrics(actual, expected)
    assert metrics.relative_error.tolist() == pytest.approx([0, 0.01])
    assert metrics.max_abs_feature[1] == 39_999


@given(st.floats(1e-3, 1e3), st.integers(0, 99))
def test_a_scale_is_the_norm_ratio_and_leaves_the_cosine(scale: float, seed: int) -> None:
    expected = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
    metrics = row_metrics(scale * expected, expected)
    np.testing.assert_allclose(metrics.norm_ratio, scale, rtol=1e-5)
    np.testing.assert_allclose(metrics.cosine, 1, atol=1e-6)
    np.testing.assert_allclose(metrics.relative_error, abs(scale - 1), rtol=1e-4, atol=1e-6)
