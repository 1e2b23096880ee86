from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from synthetic import perturbed, synthetic_capture

from tapcheck.capture import Capture, SiteRows
from tapcheck.checks.equivalence import compare_captures
from tapcheck.checks.faults import FAULTS
from tapcheck.sites import parse_site

HEALTHY = synthetic_capture()


def explanation(actual: Capture, expected: Capture = HEALTHY, rtol: float = 1e-4) -> str | None:
    return compare_captures(actual, expected, rtol=rtol).explanation


def replaced(site: str, values: torch.Tensor) -> Capture:
    rows = SiteRows(HEALTHY[site].columns, values)
    return replace(HEALTHY, rows={**HEALTHY.rows, parse_site(site): rows})


@pytest.mark.parametrize(
    ("site", "source", "said"),
    [
        ("resid_post.0", "resid_post.1", "equal the expected resid_post.1"),
        ("resid_post.1", "resid_post.0", "equal the expected resid_post.0"),
        ("resid_post.1", "resid_mid.1", "equal the expected resid_mid.1"),
        ("resid_post.1", "mlp_out.1", "leaves out the residual add"),
        ("resid_mid.1", "attn_out.1", "leaves out the residual add"),
        ("resid_post.2", "final_norm", "after the final norm"),
        ("final_norm", "resid_post.2", "what goes into the final norm"),
        ("embed", "final_norm", "reads final_norm instead of embed"),
    ],
)
def test_rows_of_another_site_are_recognised(site: str, source: str, said: str) -> None:
    text = explanation(replaced(site, HEALTHY[source].values))
    assert text is not None
    assert said in text
    assert "16 of 16 failing rows tried, exactly" in text


def test_a_scale_is_measured() -> None:
    text = explanation(replaced("mlp_out.1", HEALTHY["mlp_out.1"].values * 0.25))
    assert text is not None
    assert "times 0.25" in text


def test_one_row_everywhere_is_a_buffer_delivered_over_and_over() -> None:
    values = HEALTHY["mlp_out.1"].values
    text = explanation(replaced("mlp_out.1", values[4:5].expand_as(values).clone()))
    assert text is not None
    assert "the rows are all the same" in text


def test_an_explanation_survives_noise_within_the_tolerance() -> None:
    noisy = perturbed(HEALTHY, 1e-2)
    text = explanation(FAULTS["shifted_rows"].inject(noisy), rtol=5e-2)
    assert text is not None
    assert "previous position" in text


@pytest.mark.parametrize("relative", [1e-3, 0.1, 0.9])
def test_noise_is_never_explained(relative: float) -> None:
    assert explanation(perturbed(HEALTHY, relative)) is None


def test_noise_just_above_a_coarse_tolerance_is_no_scale() -> None:
    assert explanation(perturbed(HEALTHY, 0.081), rtol=0.08) is None


def test_two_mistakes_at_once_are_not_taken_for_one() -> None:
    values = HEALTHY["mlp_out.1"].values.clone()
    values[:10] *= 2
    values[10:] = 0
    assert explanation(replaced("mlp_out.1", values)) is None


def test_rows_that_are_not_finite_are_not_explained() -> None:
    assert explanation(FAULTS["nan_row"].inject(HEALTHY)) is None


def test_float64_rows_are_explained_to_their_own_precision() -> None:
    healthy = synthetic_capture(torch.float64)
    text = explanation(FAULTS["shifted_rows"].inject(healthy), healthy, rtol=1e-12)
    assert text is not None
    assert "previous position" in text


def test_a_match_needs_no_explanation() -> None:
    assert explanation(HEALTHY) is None


def test_the_request_whose_rows_were_delivered_is_named() -> None:
    text = explanation(FAULTS["swapped_requests"].inject(HEALTHY))
    assert text is not None
    assert "'a' holds those of 'b'" in text


def test_sites_of_another_width_are_no_candidates() -> None:
    logits = SiteRows(HEALTHY["logits"].columns, torch.ones(23, 40))
    wide = replace(HEALTHY, rows={**HEALTHY.rows, parse_site("logits"): logits})
    bad = SiteRows(HEALTHY["final_norm"].columns, torch.randn(23, 16))
    faulty = replace(wide, rows={**wide.rows, parse_site("final_norm"): bad})
    assert explanation(faulty, wide) is None
