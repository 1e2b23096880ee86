from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tapcheck.checks.tolerances import ToleranceError, check_rtol, default_rtol


def test_a_coarser_dtype_has_a_larger_tolerance() -> None:
    limits = [default_rtol(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    assert limits == sorted(limits)
    assert limits[0] == 5e-5


def test_a_dtype_that_was_never_measured_has_no_fixed_tolerance() -> None:
    with pytest.raises(ToleranceError, match=r"float64.*pass rtol"):
        default_rtol(torch.float64)


@pytest.mark.parametrize("rtol", [-1e-9, 1, 2.0, math.inf, math.nan, True, "0.1", None])
def test_what_is_no_tolerance_is_refused(rtol: Any) -> None:
    with pytest.raises(ToleranceError, match="not a tolerance"):
        check_rtol(rtol)


@pytest.mark.parametrize("rtol", [0, 0.0, 1e-5, 0.999])
def test_a_tolerance_is_a_number_from_zero_to_below_one(rtol: float) -> None:
    assert check_rtol(rtol) == rtol
