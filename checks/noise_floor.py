"""How far off a row may be, by what its dtype costs Transformers itself.

Captures of the same tokens: the candidate a, Transformers at the candidate's dtype h, Transformers
in a wider dtype r, and any number of repeats of h whose embeddings were perturbed by a rounding
(`HFBackend.capture(..., perturb=seed)`). For row i of a site, with Euclidean norms:

- error[i] = |a - r| / |r|, and own[i] = |h - r| / |r|, of h and of each repeat
- floor[i] = max(own[i] of h and every repeat, the median of h's own over the site, eps(dtype) / 4)

Norms leave out the features that dwarf their row (`tapcheck.checks.numerics`): the row verdict
judges these too, with errors and a floor of their own, whose median is over the rows that have any.
The median keeps a row that Transformers happened to hit from condemning the candidate; eps / 4 is
what storing a value costs on average, with nothing computed. Repeats find the rows that the dtype
does not settle: some tokens are on an edge, such as that of a massive activation, and which side a
run lands on is luck. Two verdicts, both needed:

- **row**: error[i] <= ROW_LIMIT * floor[i], and <= MOST_ALLOWED, beyond which a row is as good as
  another token's, or UNSETTLED_LIMIT * floor[i] if that is more. It finds single wrong rows.
- **site**, of n >= FEWEST_ROWS rows: the median of error / floor, and the bias, the median of
  (|a| - |h|) / |r| over the median floor, are near 1 and 0: see `limits`. These floors are of h
  alone. Medians of many rows hardly vary, so these find what moves every row a little, such as a
  2 % scale, and no single row, lucky or not, moves them.

In float32 the dtype is not all that engines differ by, so what its fixed tolerance allows passes.

The constants are measured. Clean rows: two runs of Transformers in bfloat16 that differ as engines
do (`tapcheck.checks.selftest`), SmolLM2-135M-Instruct on 42 batches of random tokens, 153 sites,
751,842 rows. With three repeats error / floor was 0.70 at the median, 2.7 at the 99.99th percentile
and 4.5 at most, and the worst row took half of what it may. Without repeats it was 35 at most, and
4 of 110 such batches were condemned, all for a few tokens (none of 40 batches of the model's own
samples): what a trained model makes of random tokens is nearer to its edges.

Clean sites: vLLM 0.32.0's CPU build in bfloat16, SmolLM2-135M-Instruct on 36 prompts of text
(259,616 rows at 152 sites), and tiny random llama, gpt2 and gemma2 models (14,850 rows). Median of
a site 0.87 to 1.03; bias at most 0.12. Medians of fewer rows vary more: of n rows drawn at random,
6,000 times for each n, the largest were

| n | 4 | 8 | 16 | 32 | 64 |
| --- | --- | --- | --- | --- | --- |
| median of error / floor | 1.72 | 1.51 | 1.23 | 1.13 | 1.08 |
| bias | 0.95 | 0.71 | 0.54 | 0.30 | 0.24 |

which 1 + 3 / sqrt(n) and 3 / sqrt(n) leave room for. Kernels that truncate where Transformers
rounds shorten all rows: on a CPU without AVX-512 the same engine's attention outputs are up to
0.47 % short, 0.6 eps(bfloat16). At layer 0, where little else is lost, that is a bias of 1.5 floors
and a median of 1.65. To truncate costs eps / 2 at most on average, to do so twice no more than eps:
so much either median may always be off. Faulty: another token's row is mostly 30
floors off and more; a 2 % scale on any one of the 217 sites of these models gives a bias of 0.58
or more. A neighbour's row can be as near as 5 floors: a row beyond SUSPECT_LIMIT floors that is
nearer than that to the row of the position before or after it, and nearer than to its own, fails
too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from tapcheck.checks.numerics import FloatArray, IntArray, RowMetrics
from tapcheck.checks.tolerances import RTOL

# What the reference of each dtype is run in.
REFERENCE_DTYPES: Mapping[str, str] = MappingProxyType(
    {"bfloat16": "float32", "float16": "float32", "float32": "float64"}
)

# Seeds of the perturbed repeats that tapcheck's own checks take.
PERTURBATIONS = (1, 2, 3)

ROW_LIMIT = 16.0
SUSPECT_LIMIT = 4.0
MOST_ALLOWED = 0.5
UNSETTLED_LIMIT = 8.0
FEWEST_ROWS = 4


@dataclass(frozen=True)
class SiteFloor:
    """A site as a whole against its floor, in the terms of this module's docstring."""

    rows: int
    median_floor: float
    median_ratio: float
    median_limit: float
    bias: float
    bias_limit: float

    @property
    def passed(self) -> bool:
        """Whether both medians are within their limits."""
        return self.median_ratio <= self.median_limit and abs(self.bias) <= self.bias_limit


def limits(rows: int, always: float = 0.0) -> tuple[float, float]:
    """The largest median of error / floor, and bias, that a site of so many rows may have.

    `always` is what `always_allowed` gives for the dtype, in floors of the site.
    """
    if rows < FEWEST_ROWS:
        return math.inf, math.inf
    either = max(3 / math.sqrt(rows), always)
    return 1 + max(0.5, either), max(0.25, either)


def row_floors(own_errors: Sequence[FloatArray], dtype: torch.dtype) -> FloatArray:
    """The floor of each row, shape [rows], from the errors of Transformers' own runs in `dtype`.

    The first is the expected run, whose median counts too; the others are its repeats.
    """
    expected = own_errors[0]
    if not len(expected):
        return expected
    stored = torch.finfo(dtype).eps / 4
    floor: FloatArray = np.maximum.reduce([*own_errors, np.full_like(expected, stored)])
    return np.maximum(floor, np.median(expected))


def always_allowed(dtype: torch.dtype) -> float:
    """How far off all rows of a site may be, relative: what truncation costs, or float32 allows."""
    return RTOL[dtype] if dtype == torch.float32 else float(torch.finfo(dtype).eps)


def allowances(floor: FloatArray, dtype: torch.dtype) -> FloatArray:
    """The largest relative error that each row of a site in `dtype` may have, shape [rows]."""
    unsettled = np.maximum(MOST_ALLOWED, UNSETTLED_LIMIT * floor)
    allowed: FloatArray = np.minimum(ROW_LIMIT * floor, unsettled)
    return np.maximum(allowed, RTOL[dtype]) if dtype == torch.float32 else allowed


def suspects(error: FloatArray, floor: FloatArray, allowed: FloatArray) -> IntArray:
    """The rows that pass alone but are far enough off to ask whether they are another's."""
    return np.flatnonzero((error > SUSPECT_LIMIT * floor) & (error <= allowed))


def site_floor(candidate: RowMetrics, own: RowMetrics, dtype: torch.dtype) -> SiteFloor | None:
    """The site's two medians; None where a row isn't finite or there is none.

    `candidate` and `own` hold the same rows, in `dtype`, against the reference. Repeats have no
    part in it: their embeddings are off on purpose.
    """
    if not len(own) or not np.isfinite(candidate.relative_error + own.relative_error).all():
        return None
    floor = row_floors([own.relative_error], dtype)
    typical = float(np.median(floor))
    median_limit, bias_limit = limits(len(floor), always_allowed(dtype) / typical)
    shift = np.median(candidate.norm_ratio - own.norm_ratio)
    return SiteFloor(
        rows=len(floor),
        median_floor=typical,
        median_ratio=float(np.median(candidate.relative_error / floor)),
        median_limit=median_limit,
        bias=float(shift) / typical,
        bias_limit=bias_limit,
    )
