"""Fixed tolerances on the relative error of a row, one for each dtype.

They are measured, not derived: vLLM against Transformers on a trained 30-layer model of 135M
parameters (SmolLM2-135M-Instruct), the worst row.

- float32, 28 prompt and 24 generated tokens: 1.9e-5 was the worst row of any point (`mlp_out.10` at position 0, where the massive
  activation of later layers builds up; there Transformers' own float32 run is 7.5e-6 from its
  float64 run). 5e-5 leaves a factor of 2.5. Tiny random models stay below 1e-5.
- bfloat16, 35 tokens, residual stream: vLLM was 4e-2 from Transformers, and Transformers itself 6e-2 from its own float32
  run; two runs that far from the truth are up to sqrt(2) x 6e-2 apart, hence 8e-2. That is
  coarse: a 2 % scale passes it.
- float16: rounds 8 times finer than bfloat16, hence an eighth of its tolerance.
"""

from __future__ import annotations

import math

import torch

from tapcheck.errors import TapcheckError

RTOL = {torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


class ToleranceError(TapcheckError, ValueError):
    """A tolerance that can't judge anything, or a dtype for which none is known."""


def default_rtol(dtype: torch.dtype) -> float:
    """The fixed tolerance of a dtype; raises ToleranceError for one that was never measured."""
    if dtype not in RTOL:
        known = ", ".join(dtype_name(known) for known in RTOL)
        raise ToleranceError(
            f"no fixed tolerance is known for {dtype_name(dtype)}, only for {known}: pass rtol"
        )
    return RTOL[dtype]


def coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The dtype that rounds more coarsely: it bounds how well values of the two can agree."""
    return one if torch.finfo(one).eps >= torch.finfo(other).eps else other


def check_rtol(rtol: float) -> float:
    """Return `rtol`; raises ToleranceError unless it is a number from 0 up to, but not, 1."""
    valid = isinstance(rtol, (int, float)) and not isinstance(rtol, bool)
    if not valid or math.isnan(rtol) or not 0 <= rtol < 1:
        raise ToleranceError(
            f"rtol={rtol!r} is not a tolerance: it is the largest relative error a row may have, "
            "a number from 0 to below 1 (at 1, a tap that delivers zeros would pass)"
        )
    return float(rtol)


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
