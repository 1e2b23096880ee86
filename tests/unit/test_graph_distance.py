"""How far two reads of a dummy pass are apart, in which attention's output is any memory."""

from __future__ import annotations

import math

import pytest
import torch

from tapcheck.vllm.graph import relative_distance

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    "values",
    [[1.0, -2.0], [0.0, 0.0], [3e38, -3e38], [INF, -INF], [NAN, 1.0], [NAN, NAN], [1e-40, 0.0]],
)
def test_what_is_alike_is_no_distance_apart_whatever_it_is(values: list[float]) -> None:
    read = torch.tensor([values])
    assert relative_distance(read, read.clone()) == 0


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        ([0.0, 0.0], [1.0, 2.0]),
        ([1.0, 2.0], [0.0, 0.0]),
        ([NAN, 1.0], [1.0, 1.0]),
        ([1.0, 1.0], [NAN, 1.0]),
        ([INF, 1.0], [1.0, 1.0]),
        ([-3e38, 3e38], [3e38, 3e38]),
    ],
)
def test_what_is_not_alike_is_never_near(read: list[float], expected: list[float]) -> None:
    assert not relative_distance(torch.tensor([read]), torch.tensor([expected])) <= 0.9


def test_a_rounding_is_small_however_large_the_values() -> None:
    expected = torch.tensor([[3e38, 1e38]])
    assert 0 < relative_distance(expected * (1 + 1e-6), expected) < 1e-5
