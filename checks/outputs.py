"""Output checks: the tokens, logprobs and distributions of two engines on the same tokens.

Both captures have the site `logits`, and `expected` was teacher-forced on the tokens of `actual`:
each row of one has its like in the other, by request and position, those of prompts included. The
row at a position tells of the token after it. Logits are compared as log probabilities, in float64
and a few rows at a time, so that a constant added to a row makes no difference.

The default limits are measured: vLLM 0.32.0's CPU build against Transformers, SmolLM2-135M-Instruct
on 187 rows of text and tiny random llama, gpt2 and qwen2 models on 225 rows each; the worst of
these, always SmolLM2's but for the overlap. Beside it, a model whose MLP of one layer (the first,
the middle or the last) is 2 % too strong, as that fault was seen least, and most.

                       float32  2 % fault      float16  2 % fault      bfloat16  2 % fault
    logprob, worst     4.9e-5   0.018 - 0.36   0.056    0.031 - 0.34   0.50      0.031 - 0.44
    overlap, mean      1.000    0.967 - 0.991  0.996    0.967 - 0.991  0.983     0.972 - 0.991
    KL, median row     2.2e-11  1.5e-5 - 6e-4  2.2e-5   3e-5 - 6e-4    1.5e-3    2e-5 - 2e-3
    KL, worst row      3.8e-10  2e-5 - 0.013   2.7e-4   5e-5 - 0.015   0.020     3e-5 - 0.025

Float32 leaves room between the two, and its limits leave a factor of 5 in logprobs, whose square a
divergence grows with. The narrow ones leave 2 to 4. Of the 2 % faults float32 catches 12 of 12,
float16 5 of 6 (SmolLM2 and llama) and bfloat16 none; of 10 % ones, bfloat16 catches 9 of 12.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from tapcheck.capture import Capture, IntArray, SiteRows
from tapcheck.checks.ledger import RowBook, cached_positions
from tapcheck.checks.measures import Metrics, completed, near_the_largest
from tapcheck.checks.message import where
from tapcheck.checks.numerics import FloatArray
from tapcheck.checks.pairing import Pairs
from tapcheck.checks.tokens import compare_tokens
from tapcheck.checks.tolerances import ToleranceError, dtype_name
from tapcheck.compatibility.verdict import CheckResult, Condition
from tapcheck.request import Request
from tapcheck.sites import Site

LOGITS = Site("logits")
# As many of the likeliest tokens as vLLM's own tests of logprobs look at.
TOP_K = 5
_BLOCK_ELEMENTS = 1 << 20  # 8 MiB in float64
# Two runs that are each as far from the truth are up to twice that from each other, and a
# divergence grows with the square.
NOISE_FACTOR = 4.0


@dataclass(frozen=True)
class OutputLimits:
    """How far outputs may be apart: nats, and `mean_overlap` a part of the likeliest tokens."""

    worst_logprob_difference: float
    mean_overlap: float
    median_kl: float
    worst_kl: float


LIMITS: Mapping[torch.dtype, OutputLimits] = MappingProxyType(
    {
        torch.float32: OutputLimits(2.5e-4, 0.995, 1e-9, 1e-8),
        torch.float16: OutputLimits(0.12, 0.99, 5e-5, 1e-3),
        torch.bfloat16: OutputLimits(1.0, 0.96, 3e-3, 5e-2),
    }
)


def default_limits(dtype: torch.dtype) -> OutputLimits:
    """The limits for expected logits of a dtype; raises ToleranceError for one never measured."""
    if dtype not in LIMITS:
        known = ", ".join(dtype_name(known) for known in LIMITS)
        raise ToleranceError(
            f"no limits on outputs are known for {dtype_name(dtype)}, only for {known}: pass limits"
        )
    return LIMITS[dtype]


def limits_by_noise(
    expected: Capture, reference: Capture, repeats: Sequence[Capture] = ()
) -> OutputLimits:
    """The limits that these very rows set: what the dtype costs Transformers' own outputs, widened.

    `reference` holds the logits of the same tokens in a wider dtype, `repeats` those of further
    runs of `expected` (see `tapcheck.checks.noise_floor`). Of each number it is NOISE_FACTOR times
    the largest of any run, and never less than the default limit. Raises ToleranceError as
    `default_limits` does.
    """
    least = default_limits(expected.rows[LOGITS].values.dtype)
    runs = [_limits_of(run, reference, least) for run in (expected, *repeats)]
    return OutputLimits(
        max(run.worst_logprob_difference for run in runs),
        min(run.mean_overlap for run in runs),
        max(run.median_kl for run in runs),
        max(run.worst_kl for run in runs),
    )


def _limits_of(run: Capture, reference: Capture, least: OutputLimits) -> OutputLimits:
    shared = _SharedRows.match(run, reference)
    difference, overlap = shared.measure(lambda mine, theirs: _top_k(mine, theirs, TOP_K), 2)
    (divergence,) = shared.measure(lambda mine, theirs: kl_nats(mine, theirs)[None], 1)
    if not len(divergence) or not np.isfinite(divergence + difference).all():
        return least
    return OutputLimits(
        max(least.worst_logprob_difference, NOISE_FACTOR * float(difference.max())),
        min(least.mean_overlap, 1 - NOISE_FACTOR * (1 - _mean(overlap))),
        max(least.median_kl, NOISE_FACTOR * _median(divergence)),
        max(least.worst_kl, NOISE_FACTOR * float(divergence.max())),
    )


def greedy_tokens(
    actual: Capture, expected: Capture, *, new_tokens: int | None = None
) -> CheckResult:
    """Each token that `actual` generated is the one that `expected` finds likeliest.

    Every request must have generated `new_tokens`, or for None what it has in `expected`. In a
    narrow dtype two tokens can tie: one counts as equal when the expected logit for it ties with
    the largest, see `near_the_largest`.
    """
    rows = expected.rows.get(LOGITS)
    problems = _token_problems(actual, expected)
    if rows is None:
        problems.append("the expected capture has no logits")
    number = {request.id: index for index, request in enumerate(expected.requests)}
    compared, different, first = 0, 0, None
    for request in actual.requests:
        chosen, wrong = _choices(request, rows, number.get(request.id, -1))
        compared += chosen
        different += len(wrong)
        if wrong and first is None:
            first = f"request {request.id!r}, position {wrong[0]}"
    due = sum(
        len(request.generated_token_ids) if new_tokens is None else new_tokens
        for request in expected.requests
    )
    reason = f"{compared - different} of {compared} generated tokens are the likeliest expected"
    return completed(
        greedy_tokens,
        "; ".join([*problems[:1], reason]),
        {
            "tokens_due": due,
            "tokens_compared": compared,
            "tokens_different": different,
            "problems": len(problems),
        },
        Condition("tokens_due", ">=", 1),
        Condition("tokens_compared", "==", "tokens_due"),
        Condition("tokens_different", "==", 0),
        Condition("problems", "==", 0),
        first=first,
    )


def top_k_logprobs(
    actual: Capture, expected: Capture, *, k: int = TOP_K, limits: OutputLimits | None = None
) -> CheckResult:
    """The `k` likeliest tokens of each row are the same, with the same log probabilities.

    A row's difference is the largest over the expected `k` likeliest, in nats. Its overlap is the
    part of the actual `k` likeliest that are among the expected ones or tie with the last of them.
    `limits` None are the default ones of the expected dtype. Raises ToleranceError for a `k` below
    1, and for a dtype without default limits.
    """
    if k < 1:
        raise ToleranceError(f"k={k}: compare at least the likeliest token")
    shared = _SharedRows.match(actual, expected)
    limits = limits or default_limits(shared.dtype)
    difference, overlap = shared.measure(lambda mine, theirs: _top_k(mine, theirs, k), 2)
    mean, (worst, place) = _mean(overlap), shared.worst(difference)
    return shared.result(
        top_k_logprobs,
        f"{mean:.2%} of the {k} likeliest tokens agree ({limits.mean_overlap:.2%} must), and their "
        f"logprobs differ by {worst:.2g} nats at most ({limits.worst_logprob_difference:.2g} "
        f"allowed), at {place}",
        {
            "k": k,
            "mean_overlap": mean,
            "median_logprob_difference": _median(difference),
            "worst_logprob_difference": worst,
        },
        Condition("mean_overlap", ">=", limits.mean_overlap),
        Condition("worst_logprob_difference", "<=", limits.worst_logprob_difference),
        first=shared.first_above(difference, limits.worst_logprob_difference),
    )


def kl_divergence(
    actual: Capture, expected: Capture, *, limits: OutputLimits | None = None
) -> CheckResult:
    """KL(expected || actual) of each row's distribution over the next token is small, in nats.

    The median row is judged as well as the worst: rounding sets the worst, and a small mistake in
    every row shows first in the median. `limits` None are the default ones of the expected dtype;
    raises ToleranceError where there are none.
    """
    shared = _SharedRows.match(actual, expected)
    limits = limits or default_limits(shared.dtype)
    (divergence,) = shared.measure(lambda mine, theirs: kl_nats(mine, theirs)[None], 1)
    median, (worst, place) = _median(divergence), shared.worst(divergence)
    return shared.result(
        kl_divergence,
        f"KL divergence is {median:.2g} nats at the median row ({limits.median_kl:.2g} allowed), "
        f"and {worst:.2g} at the worst ({limits.worst_kl:.2g} allowed), {place}",
        {"median_kl": median, "worst_kl": worst},
        Condition("median_kl", "<=", limits.median_kl),
        Condition("worst_kl", "<=", limits.worst_kl),
        first=shared.first_above(divergence, limits.worst_kl),
    )


def kl_nats(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """KL(expected || actual) in nats, [rows], of log probabilities [rows, vocabulary].

    A token impossible in `expected` adds nothing; one impossible only in `actual`, infinity.
    """
    probability = expected.exp()
    # Not `probability > 0`: a NaN must stay one.
    terms = torch.where(probability == 0, 0.0, probability * (expected - actual))
    return terms.sum(-1).clamp_min(0.0)


def _top_k(actual: torch.Tensor, expected: torch.Tensor, k: int) -> torch.Tensor:
    """Difference and overlap of each row, [2, rows], of log probabilities [rows, vocabulary]."""
    k = min(k, expected.shape[-1])
    theirs, tokens = expected.topk(k)
    mine = actual.gather(-1, tokens)
    difference = torch.where(mine == theirs, 0.0, (mine - theirs).abs()).amax(-1)
    as_likely = expected.gather(-1, actual.topk(k).indices) >= theirs[:, -1:]
    return torch.stack((difference, as_likely.double().mean(-1)))


def _choices(request: Request, rows: SiteRows | None, number: int) -> tuple[int, list[int]]:
    """How many generated tokens were compared, and the positions of those that aren't likeliest.

    `number` is the request's in the columns of `rows`.
    """
    if rows is None:
        return 0, []
    # The row before a generated token is the one that it was chosen from.
    nth = rows.columns.position - (request.prompt_length - 1)
    generated = torch.tensor(request.generated_token_ids, dtype=torch.int64)
    at = np.flatnonzero((rows.columns.request == number) & (nth >= 0) & (nth < len(generated)))
    chosen = generated[torch.from_numpy(nth[at])]
    wrong = ~near_the_largest(rows.values[torch.from_numpy(at)], chosen)
    return len(at), sorted((rows.columns.position[at[wrong.numpy()]] + 1).tolist())


def _token_problems(actual: Capture, expected: Capture) -> list[str]:
    return [
        f"request {problem.request_id!r}: {problem.reason}"
        + ("" if problem.position is None else f" at position {problem.position}")
        for problem in compare_tokens(actual.requests, expected.requests)
    ]


@dataclass(frozen=True, eq=False)
class _SharedRows:
    """The rows of logits that two captures share, None where they can't have any.

    dtype: the expected one. rows_due: those that must be shared. problems: what is wrong with
    either capture's tokens or rows, in words.
    """

    dtype: torch.dtype
    rows_due: int
    pairs: Pairs | None
    problems: tuple[str, ...]

    @classmethod
    def match(cls, actual: Capture, expected: Capture) -> _SharedRows:
        mine, theirs = actual.rows.get(LOGITS), expected.rows.get(LOGITS)
        problems = _token_problems(actual, expected)
        if theirs is None:
            problems.append("the expected capture has no logits")
            return cls(torch.float32, 0, None, tuple(problems))
        dtype = theirs.values.dtype
        book = RowBook.open(expected.requests, actual.requests, cached_positions(actual))
        keys = RowBook.open(expected.requests, expected.requests).delivered_keys(theirs.columns)
        due = book.computed(np.unique(keys))
        problems += [
            f"{where(entry)} is {entry.kind}: {entry.reason}"
            for entry in book.entries(LOGITS, due, None if mine is None else mine.columns)
        ]
        if mine is None:
            return cls(dtype, len(due), None, tuple(problems))
        if mine.values.shape[1] != theirs.values.shape[1]:
            widths = mine.values.shape[1], theirs.values.shape[1]
            problems.append("logits of {} tokens, expected {}".format(*widths))
            return cls(dtype, len(due), None, tuple(problems))
        pairs = Pairs.match(LOGITS, mine, theirs, book, keys)
        return cls(dtype, len(due), pairs, tuple(problems))

    def measure(
        self, metric: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], numbers: int
    ) -> FloatArray:
        """`metric` of log probabilities, actual and expected, for all rows: [numbers, rows]."""
        found = [np.empty((numbers, 0))]
        if self.pairs is not None:
            pairs = self.pairs
            step = max(1, _BLOCK_ELEMENTS // max(1, pairs.actual.values.shape[1]))
            for start in range(0, len(pairs.keys), step):
                block = slice(start, start + step)
                mine = _log_probabilities(pairs.actual.values, pairs.left[block])
                theirs = _log_probabilities(pairs.expected.values, pairs.right[block])
                found.append(metric(mine, theirs).numpy())
        return np.concatenate(found, axis=1)

    def worst(self, values: FloatArray) -> tuple[float, str]:
        """The largest of one value for each row (a NaN is larger than any), and where it is."""
        if not len(values):
            return math.nan, "no row"
        at = int(values.argmax())
        return float(values[at]), self._place(at)

    def first_above(self, values: FloatArray, limit: float) -> str | None:
        """The first row, by request and position, whose value isn't within the limit."""
        above = np.flatnonzero(~(values <= limit))
        return self._place(int(above[0])) if len(above) else None

    def _place(self, row: int) -> str:
        assert self.pairs is not None
        request, position = self.pairs.book.owner(int(self.pairs.keys[row]))
        return f"request {request.id!r}, site {LOGITS}, position {position}"

    def result(
        self,
        judge: Callable[..., CheckResult],
        reason: str,
        metrics: Metrics,
        *conditions: Condition,
        first: str | None,
    ) -> CheckResult:
        """The check's result, which also fails where a row, or anything else, is amiss."""
        compared = 0 if self.pairs is None else len(self.pairs.keys)
        if not compared:
            reason = "no row was compared"
        return completed(
            judge,
            "; ".join([*self.problems[:1], reason]),
            {
                "rows_due": self.rows_due,
                "rows_compared": compared,
                "problems": len(self.problems),
                **metrics,
            },
            Condition("rows_compared", ">=", 1),
            Condition("rows_compared", "==", "rows_due"),
            Condition("problems", "==", 0),
            *conditions,
            first=first,
        )


def _log_probabilities(logits: torch.Tensor, rows: IntArray) -> torch.Tensor:
    chosen = logits.index_select(0, torch.from_numpy(rows))
    return torch.log_softmax(chosen.to(torch.float64), dim=-1)


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _median(values: FloatArray) -> float:
    return float(np.median(values)) if len(values) else math.nan
