"""How far two tensors of rows are apart, row by row.

For a row `a` (actual) and `e` (expected), with d = a - e and Euclidean norms:

- relative error = |d| / |e|; 0 when a and e are both zero, infinite when only e is
- cosine         = a.e / (|a| |e|); 1 when both are zero, 0 when one is
- norm ratio     = |a| / |e|; 1 when both are zero, infinite when only e is
- largest absolute difference = max |d[i]|, at the first feature i that reaches it

A row with a NaN or an Inf in `a` or `e` has NaN for all four, and the feature is the first that
isn't finite. NaN satisfies no tolerance, so such a row never passes.

**Outlier features** would hide the others: where one feature of `e` is 22,500 and all others
together are 2,700 long, as at the first token of SmolLM2-135M from layer 11 on, an error of 13 % in
those is one of 1.5 % in the row. So the features that dwarf their row are judged apart: relative
error, cosine and norm ratio are those of the other features, and the outliers have a relative error
of their own. The m largest features of `e` are outliers when even the smallest of them is
OUTLIER_LENGTH times as long as all that is left; m is the largest number for which that holds, up
to MOST_OUTLIERS and a 64th of the width. Published definitions compare with the median magnitude
(1,000 times: Sun et al. 2024, "Massive Activations in Large Language Models") or with a constant
(6.0: Dettmers et al. 2022, "LLM.int8()"). This one bounds what one feature can hide: errors of all
others together look at most about OUTLIER_LENGTH times smaller than they are. Both papers find few
outliers in a row, hence MOST_OUTLIERS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Elements in one block: torch runs operations below 2**15 on one thread, and waking others costs
# more than it gains (on a busy machine, a hundred times more). A block also stays in the cache.
BLOCK_ELEMENTS = (1 << 15) - 1
WIDE_BLOCK_ELEMENTS = 1 << 22  # for rows that are wider than that
OUTLIER_LENGTH = 4.0
MOST_OUTLIERS = 8
_ROW_PART = 64
_MEASURED = 8
# Norms below this are of elements whose squares float32 can't hold in full.
TINY_NORM = 1e-12


@dataclass(frozen=True, eq=False)
class RowMetrics:
    """Metrics of n pairs of rows, as defined above; every array has shape [n].

    nan_count, inf_count: features where either row holds a NaN, or else an Inf. outlier_error: the
    relative error of the outlier features, which the first three metrics leave out; 0 where there
    are none. outlier_feature: the largest of them, -1 where there are none.
    """

    relative_error: FloatArray
    cosine: FloatArray
    norm_ratio: FloatArray
    max_abs_diff: FloatArray
    max_abs_feature: IntArray
    nan_count: IntArray
    inf_count: IntArray
    outlier_error: FloatArray
    outlier_feature: IntArray

    @property
    def largest_error(self) -> FloatArray:
        """The relative error of the outlier features or of the others, whichever is larger, [n]."""
        return np.maximum(self.relative_error, self.outlier_error)

    def __len__(self) -> int:
        return len(self.relative_error)

    @classmethod
    def concatenate(cls, parts: Sequence[RowMetrics]) -> RowMetrics:
        """The metrics of all parts, one after the other; of no pair of rows without parts."""
        no_rows = np.empty(0)
        arrays = {
            field.name: np.concatenate([no_rows, *(getattr(part, field.name) for part in parts)])
            for field in fields(cls)
        }
        whole = ("max_abs_feature", "nan_count", "inf_count", "outlier_feature")
        return cls(**arrays | {name: arrays[name].astype(np.int64) for name in whole})


def row_metrics(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    actual_index: IntArray | None = None,
    expected_index: IntArray | None = None,
    block_elements: int | None = None,
) -> RowMetrics:
    """Compare row `actual_index[i]` of `actual` with row `expected_index[i]` of `expected`.

    Both tensors have shape [rows, width], in any floating dtype each; without indices, row i is
    compared with row i. Rows are widened to float32 (float64 when either tensor is, and for rows
    that float32 can't square), about `block_elements` at a time. Raises ValueError when the widths
    differ or are 0, or when the two have different numbers of rows.
    """
    if actual.shape[1] != expected.shape[1] or actual.shape[1] == 0:
        raise ValueError(f"rows of width {actual.shape[1]} and {expected.shape[1]}")
    left = np.arange(len(actual)) if actual_index is None else actual_index
    right = np.arange(len(expected)) if expected_index is None else expected_index
    if len(left) != len(right):
        raise ValueError(f"{len(left)} rows against {len(right)}")
    wide = torch.float64 if torch.float64 in (actual.dtype, expected.dtype) else torch.float32
    width = actual.shape[1]
    if block_elements is None:
        block_elements = BLOCK_ELEMENTS if width <= BLOCK_ELEMENTS else WIDE_BLOCK_ELEMENTS
    step = max(1, block_elements // width)
    take_left, take_right = _taker(actual, left), _taker(expected, right)
    measured = np.empty((_MEASURED, len(left)))
    for at in range(0, len(left), step):
        a, e = take_left(at, at + step).to(wide), take_right(at, at + step).to(wide)
        measured[:, at : at + step] = _measured(a, e)
    metrics, unsafe, dwarfed = _by_formula(measured)
    for look_closer, rows in ((_again_in_float64, unsafe), (_judge_apart, dwarfed)):
        for at in range(0, len(rows), step):
            some = rows[at : at + step]
            a = actual.index_select(0, torch.from_numpy(left[some])).to(wide)
            e = expected.index_select(0, torch.from_numpy(right[some])).to(wide)
            look_closer(metrics, some, a, e)
    return metrics


def _taker(rows: torch.Tensor, index: IntArray) -> Callable[[int, int], torch.Tensor]:
    """What gives the rows index[start:stop]: a view where the whole index is one run, as mostly."""
    if len(index) and bool((np.diff(index) == 1).all()):
        run = rows[int(index[0]) : int(index[-1]) + 1]
        return lambda start, stop: run[start:stop]
    return lambda start, stop: rows.index_select(0, torch.from_numpy(index[start:stop]))


def _measured(a: torch.Tensor, e: torch.Tensor) -> FloatArray:
    """What the formulas need of each row, [_MEASURED, n]: norms, the product, and extremes."""
    difference = a - e
    norms = [torch.linalg.vector_norm(x, dim=1).numpy() for x in (a, e, difference)]
    dot = torch.linalg.vecdot(a, e).numpy()
    absolute, values = difference.abs_().numpy(), e.numpy()
    feature = absolute.argmax(axis=1)  # an order of magnitude faster than torch's
    largest = absolute[np.arange(len(feature)), feature]
    extremes = values.max(axis=1), values.min(axis=1)
    return np.array([*norms, dot, largest, feature, *extremes], np.float64)


def _by_formula(measured: FloatArray) -> tuple[RowMetrics, IntArray, IntArray]:
    """The metrics of whole rows taken to be finite, and which rows need a closer look.

    Those that aren't finite, or that float32 can't square; and those that may have outliers.
    """
    norm_a, norm_e, norm_d, dot, largest, feature, highest, lowest = measured
    both_zero = (norm_a == 0) & (norm_e == 0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        relative = np.where(norm_d == 0, 0.0, norm_d / norm_e)
        ratio = np.where(both_zero, 1.0, norm_a / norm_e)
        cosine = np.where(both_zero, 1.0, np.clip(dot / norm_a / norm_e, -1.0, 1.0))
        one_zero = (norm_a == 0) != (norm_e == 0)
        unsafe = ~np.isfinite(norm_a + norm_e + norm_d) | (np.minimum(norm_a, norm_e) < TINY_NORM)
        # No row has an outlier whose largest feature isn't at least this part of it.
        peak = np.maximum(highest, -lowest)
        dwarfed = ~unsafe & (peak**2 * (MOST_OUTLIERS + 1) >= norm_e**2)
    zeros = np.zeros(len(dot), np.int64)
    metrics = RowMetrics(
        relative_error=relative,
        cosine=np.where(one_zero, 0.0, cosine),
        norm_ratio=ratio,
        max_abs_diff=largest.copy(),
        max_abs_feature=feature.astype(np.int64),
        nan_count=zeros,
        inf_count=zeros.copy(),
        outlier_error=np.zeros(len(dot)),
        outlier_feature=np.full(len(dot), -1, np.int64),
    )
    return metrics, np.flatnonzero(unsafe), np.flatnonzero(dwarfed)


def _again_in_float64(
    metrics: RowMetrics, rows: IntArray, a: torch.Tensor, e: torch.Tensor
) -> None:
    """Put the metrics of these rows, `a` and `e`, in place anew, and mark those not finite."""
    again, _, _ = _by_formula(_measured(a.double(), e.double()))
    for field in fields(RowMetrics):
        getattr(metrics, field.name)[rows] = getattr(again, field.name)
    finite = np.flatnonzero((a.isfinite() & e.isfinite()).all(dim=1).numpy())
    at = torch.from_numpy(finite)
    _judge_apart(metrics, rows[finite], a[at].double(), e[at].double())
    _mark_nonfinite(metrics, rows, a, e)


def outliers(rows: torch.Tensor) -> torch.Tensor:
    """Which features dwarf their row, bool, of the shape [n, width] of `rows`; see the module."""
    width = rows.shape[1]
    found = torch.zeros(rows.shape, dtype=torch.bool)
    most = min(MOST_OUTLIERS, width // _ROW_PART)
    if not most:
        return found
    squares, features = rows.double().square().topk(most + 1, dim=1)
    left = rows.double().square().sum(dim=1, keepdim=True) - squares.cumsum(dim=1)
    dwarfs = (squares >= OUTLIER_LENGTH**2 * left) & (squares > 0)
    dwarfs[:, most] = False
    # Up to the last feature that dwarfs what is left: those before it are larger.
    upto = dwarfs.flip(1).cumsum(dim=1).flip(1) > 0
    return found.scatter_(1, features, upto)


def _judge_apart(metrics: RowMetrics, rows: IntArray, a: torch.Tensor, e: torch.Tensor) -> None:
    """Put the metrics of these rows without their outlier features in place, where they have any.

    The largest absolute difference and its feature stay those of the whole row.
    """
    apart = outliers(e)
    some = apart.any(dim=1)
    if not bool(some.any()):
        return
    rows, apart, mine, theirs = rows[some.numpy()], apart[some], a[some], e[some]
    others, _, _ = _by_formula(_measured(mine.masked_fill(apart, 0), theirs.masked_fill(apart, 0)))
    for name in ("relative_error", "cosine", "norm_ratio"):
        getattr(metrics, name)[rows] = getattr(others, name)
    mine, theirs = mine.masked_fill(~apart, 0), theirs.masked_fill(~apart, 0)
    alone, _, _ = _by_formula(_measured(mine, theirs))
    metrics.outlier_error[rows] = alone.relative_error
    metrics.outlier_feature[rows] = theirs.abs().numpy().argmax(axis=1)


def _mark_nonfinite(metrics: RowMetrics, rows: IntArray, a: torch.Tensor, e: torch.Tensor) -> None:
    """Count what isn't finite in these rows, and give those that hold any NaN for metrics."""
    nan = a.isnan() | e.isnan()
    inf = (a.isinf() | e.isinf()) & ~nan
    metrics.nan_count[rows] = nan.sum(dim=1).numpy()
    metrics.inf_count[rows] = inf.sum(dim=1).numpy()
    broken = (nan | inf).any(dim=1).numpy()
    first = (nan | inf).int().argmax(dim=1).numpy()
    at = rows[broken]
    metrics.max_abs_feature[at] = first[broken]
    for name in ("relative_error", "cosine", "norm_ratio", "max_abs_diff"):
        getattr(metrics, name)[at] = np.nan
