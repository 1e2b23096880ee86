from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import captures
from synthetic import perturbed, synthetic_capture

from tapcheck.capture import Capture, SiteRows
from tapcheck.checks.comparison import Comparison
from tapcheck.checks.equivalence import assert_captures_match, compare_captures
from tapcheck.checks.faults import FAULTS
from tapcheck.checks.tolerances import ToleranceError
from tapcheck.request import Request
from tapcheck.sites import Site, parse_site

HEALTHY = synthetic_capture()
SMALL = HEALTHY.select(sites=["resid_mid.1", "resid_post.1"])
ROWS = 23
SITES = 18


def with_values(capture: Capture, site: str, edit: Callable[[torch.Tensor], None]) -> Capture:
    """The capture with one site's values edited."""
    rows = capture[site]
    values = rows.values.clone()
    edit(values)
    return replace(capture, rows={**capture.rows, parse_site(site): SiteRows(rows.columns, values)})


def with_request(capture: Capture, at: int, request: Request) -> Capture:
    requests = list(capture.requests)
    requests[at] = request
    return replace(capture, requests=tuple(requests))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_capture_equals_itself_exactly(dtype: torch.dtype) -> None:
    capture = synthetic_capture(dtype)
    comparison = assert_captures_match(capture, capture)
    assert comparison.passed
    assert comparison.rows_due == comparison.rows_compared == ROWS * SITES
    assert comparison.worst_relative_error == comparison.smallest_passing_rtol == 0
    assert comparison.first_divergence is None


@given(captures())
def test_any_finite_capture_with_rows_equals_itself(capture: Capture) -> None:
    ordered = join_in_order(capture)
    judged = all(
        rows.values.numel() and bool(rows.values.isfinite().all()) for rows in ordered.rows.values()
    )
    comparison = compare_captures(ordered, ordered, rtol=0)
    assert comparison.passed == (judged and len(ordered) > 0)


def join_in_order(capture: Capture) -> Capture:
    """The capture with each site's rows in order of request and position."""
    rows = {}
    for site, unordered in capture.rows.items():
        columns = unordered.columns
        rows[site] = unordered.take(np.lexsort((columns.position, columns.request)))
    return replace(capture, rows=rows)


@given(st.floats(1e-4, 0.5), st.integers(0, 9))
def test_the_smallest_passing_tolerance_is_the_smallest(relative: float, seed: int) -> None:
    noisy = perturbed(SMALL, relative, seed)
    smallest = compare_captures(noisy, SMALL, rtol=0).smallest_passing_rtol
    assert smallest == pytest.approx(relative, rel=1e-3)
    assert smallest is not None
    assert compare_captures(noisy, SMALL, rtol=smallest).passed
    assert not compare_captures(noisy, SMALL, rtol=math.nextafter(smallest, 0)).passed


@given(st.integers(0, 2**16))
def test_interleaving_requests_differently_changes_no_number(seed: int) -> None:
    noisy = perturbed(SMALL, 1e-3)
    order = np.random.default_rng(seed).permutation(3)
    columns = noisy["resid_mid.1"].columns
    index = np.argsort(order[columns.request], kind="stable")
    mixed = replace(noisy, rows={site: rows.take(index) for site, rows in noisy.rows.items()})
    assert compare_captures(mixed, SMALL) == compare_captures(noisy, SMALL)


def test_the_order_of_requests_in_a_capture_does_not_matter() -> None:
    assert compare_captures(HEALTHY.select(requests=["c", "a", "b"]), HEALTHY).passed


@pytest.mark.parametrize(("relative", "passed"), [(4e-6, True), (1e-4, False)])
def test_the_fixed_tolerance_of_the_dtype_is_used(relative: float, passed: bool) -> None:
    assert compare_captures(perturbed(HEALTHY, relative), HEALTHY).passed == passed


def test_the_expected_dtype_gives_the_tolerance() -> None:
    narrowed = synthetic_capture(torch.bfloat16)
    assert compare_captures(HEALTHY, narrowed).passed
    assert {site.rtol for site in compare_captures(HEALTHY, narrowed).sites} == {2e-1}


def test_a_capture_that_lost_precision_on_the_way_fails_and_the_message_names_both_dtypes() -> None:
    narrowed = synthetic_capture(torch.bfloat16)
    with pytest.raises(AssertionError, match=r"bfloat16.*float32"):
        assert_captures_match(narrowed, HEALTHY)
    assert compare_captures(narrowed, HEALTHY, rtol=1e-2).passed


def test_one_bad_row_among_large_ones_is_not_hidden() -> None:
    def edit(values: torch.Tensor) -> None:
        values[3] *= 1e4

    def edit_and_break(values: torch.Tensor) -> None:
        edit(values)
        values[7] += 0.01

    expected = with_values(HEALTHY, "resid_post.1", edit)
    comparison = compare_captures(with_values(HEALTHY, "resid_post.1", edit_and_break), expected)
    (site,) = comparison.failing_sites
    assert (site.failing, site.rows) == (1, ROWS)


def test_the_first_divergence_is_first_in_execution_order() -> None:
    def edit(values: torch.Tensor) -> None:
        values[10] += 1

    faulty = HEALTHY
    for site in ("logits", "resid_pre.2", "mlp_out.1", "resid_post.1", "attn_out.2"):
        faulty = with_values(faulty, site, edit)
    comparison = compare_captures(faulty, HEALTHY)
    names = [str(site.site) for site in comparison.failing_sites]
    assert names == ["mlp_out.1", "resid_post.1", "resid_pre.2", "attn_out.2", "logits"]
    first = comparison.first_divergence
    assert first is not None
    assert first.site == Site("mlp_out", 1)
    columns = HEALTHY["embed"].columns
    assert first.request_id == HEALTHY.requests[columns.request[10]].id
    assert first.position == columns.position[10]


def test_the_largest_difference_comes_with_its_feature_and_both_values() -> None:
    def edit(values: torch.Tensor) -> None:
        values[0, 5] = 100.0

    first = compare_captures(with_values(HEALTHY, "embed", edit), HEALTHY).first_divergence
    assert first is not None
    expected = float(HEALTHY["embed"].values[0, 5])
    assert (first.feature, first.actual_value, first.expected_value) == (5, 100.0, expected)
    assert first.max_abs_diff == pytest.approx(100 - expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_row_that_is_not_finite_never_passes(value: float, everywhere: bool) -> None:
    def edit(values: torch.Tensor) -> None:
        values[0, 0] = value

    faulty = with_values(HEALTHY, "resid_post.0", edit)
    comparison = compare_captures(faulty, faulty if everywhere else HEALTHY, rtol=0.99)
    assert not comparison.passed
    assert math.isnan(comparison.worst_relative_error)
    assert comparison.smallest_passing_rtol is None
    (site,) = comparison.failing_sites
    assert (site.failing, site.nan_count + site.inf_count) == (1, 1)
    assert site.max_abs_diff == 0


def test_a_lost_row_fails_whatever_the_numbers_say() -> None:
    comparison = compare_captures(FAULTS["lost_row"].inject(HEALTHY), HEALTHY, rtol=0.99)
    assert not comparison.passed
    assert comparison.rows_compared == comparison.rows_due - 1
    assert comparison.worst_relative_error == 0
    assert comparison.smallest_passing_rtol is None


def test_a_site_that_only_one_capture_has_is_missing_or_unexpected() -> None:
    fewer = HEALTHY.select(sites=["embed", "resid_post.0"])
    missing = compare_captures(fewer, HEALTHY).ledger
    assert len(missing.of_kind("missing")) == len(missing.entries) == ROWS * (SITES - 2)
    unexpected = compare_captures(HEALTHY, fewer).ledger
    assert len(unexpected.of_kind("unexpected")) == len(unexpected.entries) == ROWS * (SITES - 2)


def test_a_request_that_only_one_capture_has_is_a_token_problem() -> None:
    fewer = HEALTHY.select(requests=["a", "c"])
    (missing,) = compare_captures(fewer, HEALTHY).token_problems
    assert (missing.request_id, missing.kind) == ("b", "missing request")
    (unexpected,) = compare_captures(HEALTHY, fewer).token_problems
    assert (unexpected.request_id, unexpected.kind) == ("b", "unexpected request")


def test_a_reference_that_holds_a_row_twice_proves_nothing() -> None:
    twice = FAULTS["duplicated_row"].inject(HEALTHY)
    (entry,) = compare_captures(HEALTHY, twice).ledger.entries
    assert entry.reason == "the expected capture itself holds the row 2 times"


@pytest.mark.parametrize(
    ("tokens", "position", "reason"),
    [
        ((0, 1, 9, 3, 4), 2, "token id 9, expected 2 (in the prompt)"),
        ((0, 0, 1, 2, 3, 4), 1, "its first token is there twice"),
        ((7, 0, 1, 2, 3, 4), 0, "an extra token stands before it"),
        ((1, 2, 3, 4), 0, "its first token is left out"),
        ((4, 3, 2, 1, 0), 0, "it is reversed"),
    ],
)
def test_a_prompt_that_differs_is_explained(
    tokens: tuple[int, ...], position: int, reason: str
) -> None:
    request = replace(HEALTHY.requests[0], prompt_token_ids=tokens)
    comparison = compare_captures(with_request(HEALTHY, 0, request), HEALTHY)
    assert not comparison.passed
    (problem,) = comparison.token_problems
    assert (problem.request_id, problem.position) == ("a", position)
    assert reason in problem.reason


@pytest.mark.parametrize(
    ("generated", "position", "reason"),
    [
        ((50, 51, 9, 53), 7, "token id 9, expected 52"),
        ((50, 51, 52), 8, "the sequence has 8 tokens, expected 9"),
    ],
)
def test_generated_tokens_that_differ_are_placed(
    generated: tuple[int, ...], position: int, reason: str
) -> None:
    request = replace(HEALTHY.requests[0], generated_token_ids=generated)
    (problem,) = compare_captures(with_request(HEALTHY, 0, request), HEALTHY).token_problems
    assert (problem.position, problem.reason) == (position, reason)


def test_tokens_that_moved_from_prompt_to_generated_are_a_problem() -> None:
    request = HEALTHY.requests[0]
    moved = replace(
        request,
        prompt_token_ids=request.token_ids[:6],
        generated_token_ids=request.token_ids[6:],
    )
    (problem,) = compare_captures(with_request(HEALTHY, 0, moved), HEALTHY).token_problems
    assert (problem.kind, problem.position) == ("prompt length", 5)


def test_rows_of_another_width_fail_without_a_number() -> None:
    shard = replace(
        HEALTHY,
        rows={
            site: replace(rows, values=rows.values[:, :8]) if site.layer == 1 else rows
            for site, rows in HEALTHY.rows.items()
        },
    )
    comparison = compare_captures(shard, HEALTHY, rtol=0.99)
    assert not comparison.passed
    assert comparison.rows_compared == ROWS * (SITES - 5)
    assert [site.failing for site in comparison.failing_sites] == [ROWS] * 5
    assert comparison.smallest_passing_rtol is None


@pytest.mark.parametrize("capture", [Capture((), {}), Capture(HEALTHY.requests, {})])
def test_nothing_compared_never_passes(capture: Capture) -> None:
    comparison = compare_captures(capture, capture)
    assert not comparison.passed
    assert math.isnan(comparison.worst_relative_error)
    with pytest.raises(AssertionError, match="no rows are no evidence"):
        assert_captures_match(capture, capture)


def test_a_site_without_rows_in_either_capture_never_passes() -> None:
    nothing = HEALTHY["logits"].take(np.empty(0, np.int64))
    capture = replace(HEALTHY, rows={**HEALTHY.rows, Site("logits"): nothing})
    comparison = compare_captures(capture, capture)
    assert not comparison.passed
    assert comparison.smallest_passing_rtol is None
    with pytest.raises(AssertionError, match="no rows at logits"):
        assert_captures_match(capture, capture)


def test_a_mismatch_is_an_assertion_with_the_whole_message() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_captures_match(FAULTS["dead_tap"].inject(HEALTHY), HEALTHY)
    assert "first divergence" in str(caught.value)


@pytest.mark.parametrize("rtol", [-1, 1, math.nan])
def test_a_tolerance_that_judges_nothing_is_refused(rtol: float) -> None:
    with pytest.raises(ToleranceError):
        assert_captures_match(HEALTHY, HEALTHY, rtol=rtol)


def test_float64_captures_need_a_tolerance() -> None:
    capture = synthetic_capture(torch.float64)
    with pytest.raises(ToleranceError, match="pass rtol"):
        compare_captures(capture, capture)
    assert compare_captures(capture, capture, rtol=1e-12).passed


@given(st.sampled_from(sorted(FAULTS)), st.integers(0, 50))
def test_any_fault_in_any_healthy_capture_fails(name: str, seed: int) -> None:
    healthy = synthetic_capture(seed=seed, lengths=((4, 3), (5, 2)), num_layers=2, width=8)
    comparison: Comparison = compare_captures(FAULTS[name].inject(healthy), healthy)
    assert not comparison.passed
