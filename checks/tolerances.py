"""Fixed tolerances on the relative error of a row, one for each dtype.

They are measured, not derived: vLLM 0.32.0's CPU build against Transformers on a trained 30-layer
model (SmolLM2-135M-Instruct), every point of every layer, 28 prompt and 24 generated tokens, the
worst row; each tolerance leaves a factor of about 2. In brackets, how far Transformers itself was
from its own run in a wider dtype: what the dtype costs whoever computes.

- float32: 1.9e-5 (7.5e-6 from float64), hence 5e-5. Tiny random models stay below 1e-5.
- float16: 6.4e-3 (1.1e-2 from float32), hence 1.5e-2.
- bfloat16: 1.05e-1 (1.6e-1 from float32), hence 2e-1: so coarse that a 2 % scale passes.
"""

from __future__ import annotations

import math

import torch

from tapcheck.errors import TapcheckError

RTOL = {torch.float32: 5e-5, torch.float16: 1.5e-2, torch.bfloat16: 2e-1}


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
