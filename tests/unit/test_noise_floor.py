"""The noise floor: what a wider reference allows each row, and each site as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tapcheck.capture import Capture, Columns, SiteRows
from tapcheck.checks.equivalence import assert_captures_match, compare_captures
from tapcheck.checks.noise_floor import (
    MOST_ALLOWED,
    ROW_LIMIT,
    UNSETTLED_LIMIT,
    allowances,
    limits,
    row_floors,
    suspects,
)
from tapcheck.checks.tolerances import RTOL, ToleranceError
from tapcheck.request import Request
from tapcheck.sites import Site

SITE = Site("resid_post", 1)
WIDTH = 64
NOISE = 0.01


def captures(
    rows: int = 40, seed: int = 0, noise: float = NOISE
) -> tuple[Capture, Capture, Capture]:
    """A candidate, an expected capture and their float32 reference, of two requests."""
    generator = torch.Generator().manual_seed(seed)
    half = rows - rows // 2
    requests = (Request("a", tuple(range(half))), Request("b", tuple(range(rows // 2))))
    request = np.repeat([0, 1], [half, rows // 2])
    position = np.concatenate([np.arange(half), np.arange(rows // 2)])
    columns = Columns(request, position, position, position, position)
    truth = torch.randn(rows, WIDTH, generator=generator)

    def narrow() -> Capture:
        error = noise * torch.randn(rows, WIDTH, generator=generator)
        values = (truth * (1 + error)).bfloat16()
        return Capture(requests, {SITE: SiteRows(columns, values)})

    candidate, expected = narrow(), narrow()
    return candidate, expected, Capture(requests, {SITE: SiteRows(columns, truth)})


def changed(capture: Capture, change: Callable[[torch.Tensor], torch.Tensor]) -> Capture:
    rows = capture.rows[SITE]
    return replace(capture, rows={SITE: SiteRows(rows.columns, change(rows.values.clone()))})


def swapped(values: torch.Tensor) -> torch.Tensor:
    values[[7, 8]] = values[[8, 7]]
    return values


def one_nan(values: torch.Tensor) -> torch.Tensor:
    values[3, 5] = torch.nan
    return values


@given(st.integers(0, 2**31), st.integers(2, 80))
def test_a_capture_with_the_noise_of_its_dtype_passes(seed: int, rows: int) -> None:
    candidate, expected, reference = captures(rows, seed)
    comparison = compare_captures(candidate, expected, reference=reference)
    assert comparison.passed
    assert 0 < comparison.worst_ratio < 1
    assert comparison.sites[0].rtol is None


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda values: values * 1.02, id="2 % scale"),
        pytest.param(lambda values: values * 0.98, id="-2 % scale"),
        pytest.param(swapped, id="neighbours swapped"),
        pytest.param(one_nan, id="NaN"),
        pytest.param(torch.zeros_like, id="zeros"),
        pytest.param(lambda values: values.to(torch.float8_e4m3fn).bfloat16(), id="float8"),
    ],
)
def test_what_the_fixed_tolerance_of_bfloat16_may_pass_fails(
    fault: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    candidate, expected, reference = captures()
    comparison = compare_captures(changed(candidate, fault), expected, reference=reference)
    assert not comparison.passed
    assert comparison.failing_sites[0].site == SITE
    with pytest.raises(AssertionError, match=r"resid_post\.1"):
        assert_captures_match(changed(candidate, fault), expected, reference=reference)


def test_an_engine_that_truncates_passes_and_a_2_percent_scale_of_it_fails() -> None:
    """Where little else is lost, truncation moves all rows by more than half of their floor."""
    _, expected, reference = captures(noise=1e-3)
    bits = reference.rows[SITE].values.view(torch.int32) & ~0xFFFF
    truncated = replace(
        reference,
        rows={SITE: SiteRows(reference.rows[SITE].columns, bits.view(torch.float32).bfloat16())},
    )
    comparison = compare_captures(truncated, expected, reference=reference)
    floor = comparison.sites[0].floor
    assert floor is not None
    assert floor.bias < -0.5
    assert comparison.passed
    scaled = changed(truncated, lambda values: values * 1.02)
    assert not compare_captures(scaled, expected, reference=reference).passed


def test_a_2_percent_scale_is_said_to_be_the_site_s_and_not_a_row_s() -> None:
    candidate, expected, reference = captures()
    faulty = changed(candidate, lambda values: values * 1.02)
    with pytest.raises(AssertionError) as caught:
        assert_captures_match(faulty, expected, reference=reference)
    headline = str(caught.value).splitlines()[0]
    assert "site resid_post.1 as a whole is wrong" in headline
    assert "1.90 noise floors too large (+1.96%), 0.76 is allowed" in headline
    assert "none fails alone" in headline


def test_neighbours_that_are_alike_are_told_apart_by_which_is_nearer() -> None:
    """The two rows differ by less than a row alone may be off."""
    candidate, expected, reference = captures()

    def alike(values: torch.Tensor) -> torch.Tensor:
        values[8] = values[7] + 8 * NOISE * values[8]
        return values

    near = [changed(capture, alike) for capture in (candidate, expected, reference)]
    assert compare_captures(near[0], near[1], reference=near[2]).passed
    comparison = compare_captures(changed(near[0], swapped), near[1], reference=near[2])
    errors = comparison.sites[0].errors
    assert errors is not None
    assert errors.floor is not None
    assert (errors.relative_error[[7, 8]] < allowances(errors.floor, torch.bfloat16)[[7, 8]]).all()
    assert errors.failing.tolist() == [7, 8]


@pytest.mark.parametrize("luck", [0.0, 40.0])
def test_one_row_that_transformers_hit_or_missed_swings_no_verdict(luck: float) -> None:
    candidate, expected, reference = captures()
    truth = reference.rows[SITE].values

    def one_row(values: torch.Tensor) -> torch.Tensor:
        values[5] = (truth[5] + luck * (values[5].float() - truth[5])).bfloat16()
        return values

    assert compare_captures(candidate, changed(expected, one_row), reference=reference).passed
    scaled = changed(candidate, lambda values: values * 1.02)
    assert not compare_captures(scaled, changed(expected, one_row), reference=reference).passed


@given(st.permutations(range(12)))
def test_the_order_in_which_rows_were_delivered_changes_nothing(order: list[int]) -> None:
    candidate, expected, reference = captures(12)
    take = np.array(order, np.int64)
    mixed = [
        replace(capture, rows={SITE: capture.rows[SITE].take(take)})
        for capture in (expected, reference)
    ]
    one = compare_captures(candidate, expected, reference=reference)
    other = compare_captures(candidate, mixed[0], reference=mixed[1])
    assert one.sites == other.sites


@pytest.mark.parametrize("repeats", [0, 1, 3])
def test_a_row_that_the_dtype_does_not_settle_fails_unless_a_repeat_shows_it(repeats: int) -> None:
    """The candidate and one repeat are on one side of an edge, Transformers on the other."""
    candidate, expected, reference = captures()

    def tipped(values: torch.Tensor) -> torch.Tensor:
        values[5] = 1.6 * values[5]
        return values

    others = [expected] * (repeats - 1) + [changed(expected, tipped)] * bool(repeats)
    comparison = compare_captures(
        changed(candidate, tipped), expected, reference=reference, repeats=others
    )
    assert comparison.passed == bool(repeats)
    assert not compare_captures(
        changed(candidate, swapped), expected, reference=reference, repeats=others
    ).passed


def test_repeats_loosen_no_verdict_on_a_site_as_a_whole() -> None:
    """Whose rows are all off, as those of a perturbed embedding are."""
    candidate, expected, reference = captures()
    scaled = changed(candidate, lambda values: values * 1.02)
    assert not compare_captures(scaled, expected, reference=reference, repeats=[scaled]).passed


def test_a_row_floor_is_never_below_its_site_s_median_nor_what_storing_costs() -> None:
    floors = row_floors([np.array([0.0, 0.1, 0.2, 0.3, 9.0])], torch.bfloat16)
    assert floors.tolist() == [0.2, 0.2, 0.2, 0.3, 9.0]
    assert (row_floors([np.zeros(3)], torch.bfloat16) == 2**-9).all()
    assert len(row_floors([np.empty(0)], torch.bfloat16)) == 0


def test_no_row_may_be_as_far_off_as_another_token_s_unless_transformers_itself_nearly_is() -> None:
    allowed = allowances(np.array([1e-3, 0.06, 0.1, 0.9]), torch.bfloat16)
    unsettled = [UNSETTLED_LIMIT * 0.1, UNSETTLED_LIMIT * 0.9]
    assert allowed == pytest.approx([ROW_LIMIT * 1e-3, MOST_ALLOWED, *unsettled])


def test_float32_allows_what_its_fixed_tolerance_does_and_a_sensitive_row_more() -> None:
    floor = np.array([1e-7, 1e-7, 1e-7, 1e-4])
    allowed = [RTOL[torch.float32]] * 3 + [ROW_LIMIT * 1e-4]
    assert allowances(floor, torch.float32).tolist() == allowed


def test_a_row_is_a_suspect_beyond_a_few_floors_unless_it_fails_already() -> None:
    error, floor = np.array([0.003, 0.005, 0.03]), np.full(3, 1e-3)
    assert suspects(error, floor, np.full(3, 0.02)).tolist() == [1]


def test_a_row_nearer_to_its_own_than_to_its_neighbour_s_is_not_taken_for_that() -> None:
    """The neighbour is a row that the dtype doesn't settle: much is within a few of its floors."""
    candidate, expected, reference = captures()

    def unsettled(values: torch.Tensor) -> torch.Tensor:
        values[8] = 1.5 * values[8]
        return values

    def off(values: torch.Tensor) -> torch.Tensor:
        values[7] = 1.08 * values[7]  # 8 floors
        return values

    near = changed(expected, unsettled)
    assert compare_captures(changed(candidate, off), near, reference=reference).passed


def test_few_rows_are_judged_alone() -> None:
    assert limits(3) == (math.inf, math.inf)
    medians, biases = zip(*[limits(rows) for rows in range(4, 500)], strict=True)
    assert list(medians) == sorted(medians, reverse=True)
    assert (medians[-1], biases[-1]) == (1.5, 0.25)


def test_a_float64_reference_serves_a_float32_capture() -> None:
    candidate, expected, reference = captures()
    wide = [
        changed(capture, lambda values, dtype=dtype: values.to(dtype))
        for capture, dtype in zip(
            (candidate, expected, reference),
            (torch.float32, torch.float32, torch.float64),
            strict=True,
        )
    ]
    assert compare_captures(wide[0], wide[1], reference=wide[2]).passed


def other_tokens(capture: Capture) -> Capture:
    return replace(capture, requests=(Request("a", (9,) * 20), capture.requests[1]))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda c: replace(c, rows={}), r"lacks site resid_post\.1"),
        (
            lambda c: replace(c, rows={SITE: c.rows[SITE].take(np.arange(1, 40))}),
            r"lacks request 'a', site resid_post\.1, position 0",
        ),
        (lambda c: replace(c, rows={SITE: c.rows[SITE].take(np.arange(0))}), "position 0"),
        (lambda c: changed(c, torch.Tensor.bfloat16), "needs it in a wider dtype"),
        (other_tokens, "of other tokens than the expected capture: request 'a'"),
    ],
)
def test_a_reference_that_can_t_serve_is_refused(
    spoil: Callable[[Capture], Capture], reason: str
) -> None:
    candidate, expected, reference = captures()
    with pytest.raises(ToleranceError, match=reason):
        compare_captures(candidate, expected, reference=spoil(reference))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda c: replace(c, rows={}), r"repeat 2 lacks site resid_post\.1"),
        (
            lambda c: replace(c, rows={SITE: c.rows[SITE].take(np.arange(1, 40))}),
            r"repeat 2 lacks request 'a', site resid_post\.1, position 0",
        ),
        (lambda c: changed(c, torch.Tensor.half), "repeat 2 is float16 and the expected"),
        (other_tokens, "repeat 2 is of other tokens than the expected capture: request 'a'"),
    ],
)
def test_a_repeat_that_can_t_serve_is_refused(
    spoil: Callable[[Capture], Capture], reason: str
) -> None:
    candidate, expected, reference = captures()
    repeats = [expected, spoil(expected)]
    with pytest.raises(ToleranceError, match=reason):
        compare_captures(candidate, expected, reference=reference, repeats=repeats)


def test_repeats_without_a_reference_are_refused() -> None:
    candidate, expected, _ = captures()
    with pytest.raises(ToleranceError, match="without the reference"):
        compare_captures(candidate, expected, repeats=[expected])


def test_a_tolerance_beside_a_reference_is_refused() -> None:
    candidate, expected, reference = captures()
    with pytest.raises(ToleranceError, match="give one of the two"):
        compare_captures(candidate, expected, rtol=0.1, reference=reference)
