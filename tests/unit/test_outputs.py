"""Output checks: what they measure, that equal outputs pass, and that each fails when it should."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import synthetic_capture

from tapcheck.capture import Capture, SiteRows
from tapcheck.checks import outputs
from tapcheck.checks.outputs import (
    LIMITS,
    LOGITS,
    OutputLimits,
    default_limits,
    greedy_tokens,
    kl_divergence,
    kl_nats,
    limits_by_noise,
    top_k_logprobs,
)
from tapcheck.checks.tolerances import ToleranceError
from tapcheck.compatibility.verdict import CheckResult, status, unmet

NEW = 4
VOCABULARY = 64
Check = Callable[[Capture, Capture], CheckResult]
ROW_CHECKS = [top_k_logprobs, kl_divergence]
CHECKS = [greedy_tokens, *ROW_CHECKS]


def healthy(dtype: torch.dtype = torch.float32) -> Capture:
    """A capture of logits whose generated tokens are those that they choose."""
    capture = synthetic_capture(
        dtype, lengths=((5, NEW), (3, NEW), (7, NEW)), width=VOCABULARY, sites=["logits"]
    )
    requests = []
    for request in capture.requests:
        positions = range(request.prompt_length - 1, request.prompt_length - 1 + NEW)
        rows = [capture.row(request.id, "logits", position) for position in positions]
        chosen = tuple(int(row.argmax()) for row in rows)
        requests.append(replace(request, generated_token_ids=chosen))
    return replace(capture, requests=tuple(requests))


def with_values(capture: Capture, values: torch.Tensor) -> Capture:
    return replace(capture, rows={LOGITS: SiteRows(capture[LOGITS].columns, values)})


def taking(capture: Capture, index: Iterable[int]) -> Capture:
    """The capture with the rows at `index`, in that order."""
    return replace(capture, rows={LOGITS: capture[LOGITS].take(np.array(list(index), np.int64))})


def with_tokens(capture: Capture, index: int, tokens: Iterable[int]) -> Capture:
    requests = list(capture.requests)
    requests[index] = replace(requests[index], generated_token_ids=tuple(tokens))
    return replace(capture, requests=tuple(requests))


def failing(result: CheckResult) -> set[str]:
    assert status(result) == "fail"
    return {condition.metric for condition in unmet(result)}


def rows_of(seed: int, rows: int, width: int, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)


pairs_of_rows = st.builds(
    lambda seed, rows, width, scale: (
        rows_of(seed, rows, width, scale),
        rows_of(seed + 1, rows, width, scale),
    ),
    st.integers(0, 2**31),
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from([1e-3, 1.0, 30.0]),
)


# --- the divergence ------------------------------------------------------------------------------


@given(pairs_of_rows)
def test_the_divergence_is_torch_s_and_that_of_its_definition(
    pair: tuple[torch.Tensor, torch.Tensor],
) -> None:
    mine, theirs = (torch.log_softmax(logits, -1) for logits in pair)
    found = kl_nats(mine, theirs)
    torch_s = torch.nn.functional.kl_div(mine, theirs, reduction="none", log_target=True).sum(-1)
    by_hand = [
        sum(np.exp(e) * (e - a) for a, e in zip(actual, expected, strict=True))
        for actual, expected in zip(mine.numpy(), theirs.numpy(), strict=True)
    ]
    torch.testing.assert_close(found, torch_s, rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(found.numpy(), by_hand, rtol=1e-9, atol=1e-13)


@given(pairs_of_rows)
def test_the_divergence_is_never_negative_and_zero_between_equals(
    pair: tuple[torch.Tensor, torch.Tensor],
) -> None:
    mine, theirs = (torch.log_softmax(logits, -1) for logits in pair)
    assert bool((kl_nats(mine, theirs) >= 0).all())
    assert kl_nats(mine, mine).tolist() == [0.0] * len(mine)


def test_the_divergence_of_impossible_tokens() -> None:
    impossible = torch.tensor([[0.0, -torch.inf]], dtype=torch.float64)
    even = torch.log_softmax(torch.zeros(1, 2, dtype=torch.float64), -1)
    assert kl_nats(impossible, impossible).tolist() == [0.0]
    assert kl_nats(even, impossible).tolist() == pytest.approx([np.log(2)])
    assert kl_nats(impossible, even).tolist() == [torch.inf]
    assert bool(kl_nats(even, torch.full_like(even, torch.nan)).isnan().all())
    assert bool(kl_nats(torch.full_like(even, torch.nan), even).isnan().all())


# --- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("dtype", list(LIMITS))
def test_equal_outputs_pass(check: Check, dtype: torch.dtype) -> None:
    capture = healthy(dtype)
    result = check(capture, capture)
    assert status(result) == "pass"
    assert result.first_divergence is None
    assert len(result.source_hash) == 64


def test_equal_outputs_differ_by_nothing() -> None:
    capture = healthy()
    logprobs, divergence = (check(capture, capture).metrics for check in ROW_CHECKS)
    assert (logprobs["worst_logprob_difference"], logprobs["mean_overlap"]) == (0, 1)
    assert (divergence["median_kl"], divergence["worst_kl"]) == (0, 0)
    assert logprobs["rows_compared"] == divergence["rows_due"] == 5 + 3 + 7 + 3 * (NEW - 1)


@pytest.mark.parametrize("check", ROW_CHECKS)
@settings(max_examples=20)
@given(constant=st.floats(-100, 100), seed=st.integers(0, 100))
def test_a_constant_added_to_a_row_changes_nothing(
    check: Check, constant: float, seed: int
) -> None:
    capture = healthy()
    values = capture[LOGITS].values.double()
    shift = torch.rand(len(values), 1, generator=torch.Generator().manual_seed(seed)) * constant
    wide = with_values(capture, values)
    result = check(with_values(capture, values + shift), capture)
    assert status(result) == "pass"
    assert status(check(wide, capture)) == "pass"


@pytest.mark.parametrize("check", CHECKS)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_the_order_of_rows_and_of_requests_changes_nothing(check: Check, seed: int) -> None:
    capture = healthy()
    order = np.random.default_rng(seed).permutation(len(capture[LOGITS]))
    backwards = capture.select(requests=[r.id for r in reversed(capture.requests)])
    assert status(check(capture, taking(capture, order))) == "pass"
    assert status(check(backwards, capture)) == "pass"
    assert status(check(capture, backwards)) == "pass"


@pytest.mark.parametrize("block", [1, VOCABULARY, 3 * VOCABULARY, 1 << 20])
def test_the_size_of_blocks_changes_no_metric(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = healthy()
    other = with_values(capture, capture[LOGITS].values + 0.01 * capture[LOGITS].values.roll(1))
    whole = [check(other, capture).metrics for check in ROW_CHECKS]
    monkeypatch.setattr(outputs, "_BLOCK_ELEMENTS", block)
    assert [check(other, capture).metrics for check in ROW_CHECKS] == whole


def swapped(capture: Capture) -> Capture:
    """Two rows of the first request, exchanged."""
    columns = capture[LOGITS].columns
    at = np.flatnonzero((columns.request == 0) & np.isin(columns.position, (2, 3)))
    values = capture[LOGITS].values.clone()
    values[torch.from_numpy(at)] = values[torch.from_numpy(at[::-1].copy())]
    return with_values(capture, values)


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("check", ROW_CHECKS)
def test_two_rows_that_were_exchanged_fail_and_the_first_is_named(
    check: Check, dtype: torch.dtype
) -> None:
    capture = healthy(dtype)
    result = check(swapped(capture), capture)
    assert {"worst_logprob_difference", "worst_kl"} & failing(result)
    assert result.first_divergence == "request 'a', site logits, position 2"


@pytest.mark.parametrize("check", ROW_CHECKS)
def test_logits_that_are_2_percent_too_large_fail_in_float32(check: Check) -> None:
    capture = healthy()
    assert failing(check(with_values(capture, capture[LOGITS].values * 1.02), capture))


def test_a_small_mistake_in_every_row_fails_by_the_median_alone() -> None:
    capture = healthy()
    limits = OutputLimits(1.0, 0.9, 1e-9, 1.0)
    other = with_values(capture, capture[LOGITS].values * 1.001)
    assert failing(kl_divergence(other, capture, limits=limits)) == {"median_kl"}


def test_other_tokens_among_the_likeliest_fail_by_the_overlap() -> None:
    capture = healthy()
    values = capture[LOGITS].values
    limits = OutputLimits(1e9, 0.9, 1.0, 1.0)
    other = with_values(capture, values.roll(7, 1))
    result = top_k_logprobs(other, capture, limits=limits)
    assert failing(result) == {"mean_overlap"}
    assert result.metrics["mean_overlap"] < 0.3


def test_tokens_that_tie_with_the_last_of_the_likeliest_are_among_them() -> None:
    capture = healthy()
    level = torch.zeros_like(capture[LOGITS].values)
    level[:, :3] = 5.0
    mine = level.clone()
    mine[:, -20:] += 1e-6  # other tokens come out on top of those that tie
    result = top_k_logprobs(with_values(capture, mine), with_values(capture, level))
    assert (status(result), result.metrics["mean_overlap"]) == ("pass", 1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("check", ROW_CHECKS)
@pytest.mark.parametrize("side", ["actual", "expected", "both"])
def test_a_row_that_is_not_finite_fails(check: Check, value: float, side: str) -> None:
    capture = healthy()
    values = capture[LOGITS].values.clone()
    values[4] = value
    broken = with_values(capture, values)
    actual = capture if side == "expected" else broken
    expected = capture if side == "actual" else broken
    result = check(actual, expected)
    assert failing(result) >= {"worst_kl"} or failing(result) >= {"worst_logprob_difference"}
    assert result.first_divergence is not None


@pytest.mark.parametrize("check", ROW_CHECKS)
def test_one_nan_in_a_row_fails(check: Check) -> None:
    capture = healthy()
    values = capture[LOGITS].values.clone()
    values[4, 9] = torch.nan
    assert failing(check(with_values(capture, values), capture))


@pytest.mark.parametrize("check", ROW_CHECKS)
def test_a_lost_and_a_duplicated_row_fail_and_say_so(check: Check) -> None:
    capture = healthy()
    rows = range(len(capture[LOGITS]))
    lost = check(taking(capture, list(rows)[:-1]), capture)
    assert failing(lost) == {"rows_compared", "problems"}
    assert "is missing" in lost.reason
    twice = check(taking(capture, [*rows, 3]), capture)
    assert failing(twice) == {"problems"}
    assert "is duplicated" in twice.reason


@pytest.mark.parametrize("check", CHECKS)
def test_no_rows_fail(check: Check) -> None:
    capture = healthy()
    nothing = taking(capture, [])
    assert {"rows_compared", "tokens_compared"} & failing(check(nothing, nothing))
    assert {"rows_compared", "tokens_due"} & failing(check(*[replace(nothing, requests=())] * 2))


@pytest.mark.parametrize("check", CHECKS)
def test_a_capture_without_logits_fails_and_says_so(check: Check) -> None:
    capture = healthy()
    without = replace(capture, rows={})
    result = check(capture, without)
    assert failing(result) >= {"problems"}
    assert result.reason.startswith("the expected capture has no logits")


@pytest.mark.parametrize("check", ROW_CHECKS)
def test_a_candidate_without_logits_fails_and_says_so(check: Check) -> None:
    capture = healthy()
    result = check(replace(capture, rows={}), capture)
    assert failing(result) >= {"problems", "rows_compared"}
    assert "the site was not captured at all" in result.reason


@pytest.mark.parametrize("check", ROW_CHECKS)
def test_vocabularies_of_other_sizes_fail_and_say_so(check: Check) -> None:
    capture = healthy()
    wider = torch.nn.functional.pad(capture[LOGITS].values, (0, 8), value=-1e4)
    result = check(with_values(capture, wider), capture)
    assert failing(result) >= {"problems", "rows_compared"}
    assert result.reason == "logits of 72 tokens, expected 64; no row was compared"


@pytest.mark.parametrize("check", CHECKS)
def test_other_tokens_fail_and_the_reason_names_the_first(check: Check) -> None:
    capture = healthy()
    first, *rest = capture.requests[1].generated_token_ids
    result = check(with_tokens(capture, 1, ((first + 1) % VOCABULARY, *rest)), capture)
    assert "problems" in failing(result)
    assert result.reason.startswith(f"request 'b': token id {(first + 1) % VOCABULARY}")


@pytest.mark.parametrize("check", CHECKS)
def test_a_request_that_only_one_capture_has_fails(check: Check) -> None:
    capture = healthy()
    assert "problems" in failing(check(capture.select(requests=["a", "c"]), capture))
    assert "problems" in failing(check(capture, capture.select(requests=["a", "c"])))


def test_k_and_dtypes_that_can_t_be_judged_are_refused() -> None:
    capture = healthy()
    with pytest.raises(ToleranceError, match="k=0"):
        top_k_logprobs(capture, capture, k=0)
    assert status(top_k_logprobs(capture, capture, k=VOCABULARY + 1)) == "pass"
    with pytest.raises(ToleranceError, match="known for float64"):
        default_limits(torch.float64)
    wide = healthy(torch.float64)
    with pytest.raises(ToleranceError, match="pass limits"):
        kl_divergence(wide, wide)
    assert status(kl_divergence(wide, wide, limits=LIMITS[torch.float32])) == "pass"


# --- tokens --------------------------------------------------------------------------------------


def test_every_generated_token_is_counted() -> None:
    result = greedy_tokens(healthy(), healthy(), new_tokens=NEW)
    assert status(result) == "pass"
    assert result.metrics == {
        "tokens_due": 12,
        "tokens_compared": 12,
        "tokens_different": 0,
        "problems": 0,
    }


@pytest.mark.parametrize("nth", range(NEW))
def test_a_token_that_is_not_the_likeliest_fails_and_its_position_is_named(nth: int) -> None:
    capture = healthy()
    tokens = list(capture.requests[1].generated_token_ids)
    tokens[nth] = (tokens[nth] + 1) % VOCABULARY
    forced = with_tokens(capture, 1, tokens)
    result = greedy_tokens(forced, forced)
    assert failing(result) == {"tokens_different"}
    assert result.metrics["tokens_different"] == 1
    assert result.first_divergence == f"request 'b', position {3 + nth}"


@pytest.mark.parametrize("count", [0, 1, NEW - 1])
def test_a_request_that_stopped_early_fails(count: int) -> None:
    capture = healthy()
    short = with_tokens(capture, 2, capture.requests[2].generated_token_ids[:count])
    assert failing(greedy_tokens(short, short, new_tokens=NEW)) == {"tokens_compared"}


def test_the_row_that_a_token_was_chosen_from_must_be_there() -> None:
    capture = healthy()
    gap = taking(capture, np.flatnonzero(capture[LOGITS].columns.position != 5))
    result = greedy_tokens(capture, gap)
    assert failing(result) == {"tokens_compared"}
    assert result.metrics["tokens_different"] == 0  # the others are still paired by position


def test_tokens_chosen_from_nan_fail() -> None:
    capture = healthy()
    values = torch.full_like(capture[LOGITS].values, torch.nan)
    assert failing(greedy_tokens(capture, with_values(capture, values))) == {"tokens_different"}


def second_choice(capture: Capture, gap: float) -> Capture:
    """The capture, with the second likeliest token `gap` below the likeliest and generated."""
    values = capture[LOGITS].values.clone()
    columns = capture[LOGITS].columns
    row = int(np.flatnonzero((columns.request == 0) & (columns.position == 4))[0])
    best = int(values[row].argmax())
    other = (best + 1) % VOCABULARY
    values[row, best], values[row, other] = 16.0, 16.0 - gap
    tokens = other, *capture.requests[0].generated_token_ids[1:]
    return with_tokens(with_values(capture, values), 0, tokens)


def test_a_tie_in_a_narrow_dtype_is_no_wrong_token() -> None:
    tie = second_choice(healthy(torch.bfloat16), 0.25)
    assert status(greedy_tokens(tie, tie)) == "pass"
    clear = second_choice(healthy(torch.bfloat16), 2.0)
    assert failing(greedy_tokens(clear, clear)) == {"tokens_different"}
    exact = second_choice(healthy(), 0.25)
    assert failing(greedy_tokens(exact, exact)) == {"tokens_different"}


def noisy(capture: Capture, noise: float, seed: int) -> Capture:
    values = capture[LOGITS].values.float()
    generator = torch.Generator().manual_seed(seed)
    error = noise * torch.randn(values.shape, generator=generator)
    return with_values(capture, (values * (1 + error)).bfloat16())


def test_limits_by_noise_pass_what_is_as_far_off_as_transformers_own_run_and_no_more() -> None:
    reference = healthy()
    reference = with_values(reference, 8 * reference[LOGITS].values)
    expected, actual = noisy(reference, 0.05, 1), noisy(reference, 0.05, 2)
    limits = limits_by_noise(expected, reference)
    for check in (top_k_logprobs, kl_divergence):
        assert status(check(actual, expected)) == "fail"  # the default limits are of a calmer model
        assert status(check(actual, expected, limits=limits)) == "pass"
        assert status(check(noisy(reference, 0.4, 3), expected, limits=limits)) == "fail"


def test_limits_by_noise_are_those_of_the_repeat_that_is_furthest_off() -> None:
    reference = healthy()
    reference = with_values(reference, 8 * reference[LOGITS].values)
    expected, repeat = noisy(reference, 0.05, 1), noisy(reference, 0.4, 3)
    limits = limits_by_noise(expected, reference, [expected, repeat, expected])
    assert limits == limits_by_noise(repeat, reference)
    assert limits != limits_by_noise(expected, reference)
    for check in (top_k_logprobs, kl_divergence):
        assert status(check(noisy(reference, 0.4, 4), expected, limits=limits)) == "pass"


def test_limits_by_noise_are_never_below_the_default_ones() -> None:
    reference = healthy()
    exact = with_values(reference, reference[LOGITS].values.bfloat16())
    assert limits_by_noise(exact, with_values(exact, exact[LOGITS].values.float())) == (
        default_limits(torch.bfloat16)
    )
    broken = with_values(exact, torch.full_like(exact[LOGITS].values, torch.nan))
    assert limits_by_noise(broken, reference) == default_limits(torch.bfloat16)
