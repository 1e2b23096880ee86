"""A small trained model: massive activations, real text, 30 layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tapcheck.capture import Capture, SiteRows
from tapcheck.checks import assert_captures_match, compare_captures
from tapcheck.checks.faults import FAULTS
from tapcheck.checks.faults.models import MODEL_FAULTS
from tapcheck.checks.noise_floor import PERTURBATIONS, REFERENCE_DTYPES
from tapcheck.checks.selftest import selftest
from tapcheck.models import encode
from tapcheck.sites import Site, all_sites

pytestmark = [pytest.mark.engine, pytest.mark.network]

TEXTS = (
    "The capital of France is",
    "Water boils at a temperature of one hundred degrees, and it freezes when",
    "def add(a, b):\n    return",
)


def test_the_trained_model_equals_transformers_at_every_layer_in_float32(
    real_model: Path, capture_pair: Callable[..., tuple[Capture, Capture]]
) -> None:
    prompts = [encode(real_model, text) for text in TEXTS]
    actual, expected = capture_pair(
        real_model, prompts=prompts, sites=all_sites(30), max_new_tokens=8, max_model_len=512
    )
    comparison = assert_captures_match(actual, expected)
    assert comparison.rows_compared == comparison.rows_due == len(actual)
    assert len(actual) == len(all_sites(30)) * sum(len(ids) + 7 for ids in prompts)


def test_in_bfloat16_it_passes_and_a_2_percent_scale_or_one_misplaced_row_fails(
    real_model: Path,
    capture_pair: Callable[..., tuple[Capture, Capture]],
    hf_capture: Callable[..., Capture],
) -> None:
    sites = [site for site in all_sites(30) if site.point != "logits"]
    prompts = [encode(real_model, text) for text in TEXTS]
    actual, expected = capture_pair(
        real_model,
        prompts=prompts,
        sites=sites,
        max_new_tokens=8,
        dtype="bfloat16",
        max_model_len=512,
    )
    again = functools.partial(hf_capture, real_model, actual.requests, sites=sites)
    floor: dict[str, Any] = {
        "reference": again(),
        "repeats": [again(dtype="bfloat16", perturb=seed) for seed in (1, 2, 3)],
    }
    assert_captures_match(actual, expected, **floor)
    for layer in (0, 14, 29):
        site = Site("resid_post", layer)
        rows = actual.rows[site]
        swapped = rows.values.clone()
        swapped[[7, 8]] = swapped[[8, 7]]
        scaled = rows.values * 1.02
        for values in (scaled, swapped):
            faulty = replace(actual, rows={**actual.rows, site: SiteRows(rows.columns, values)})
            found = compare_captures(faulty, expected, **floor)
            assert [failing.site for failing in found.failing_sites] == [site]
            if values is scaled:  # the fixed tolerance can't see it
                assert compare_captures(faulty, expected).passed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_it_makes_of_random_tokens_is_judged_by_what_repeats_show(
    real_model: Path, capture_pair: Callable[..., tuple[Capture, Capture]],
    hf_capture: Callable[..., Capture], dtype: str,
) -> None:  # fmt: skip
    """Which is nearer to the edges of a trained model than text is."""
    generator = torch.Generator().manual_seed(11)
    lengths = (3, 9, 16, 23, 41)
    prompts = [torch.randint(49152, (n,), generator=generator).tolist() for n in lengths]
    sites = all_sites(30)
    actual, expected = capture_pair(
        real_model, prompts=prompts, sites=sites, max_new_tokens=6, dtype=dtype, max_model_len=512
    )
    again = functools.partial(hf_capture, real_model, actual.requests, sites=sites)
    comparison = assert_captures_match(
        actual,
        expected,
        reference=again(dtype=REFERENCE_DTYPES[dtype]),
        repeats=[again(dtype=dtype, perturb=seed) for seed in PERTURBATIONS],
    )
    assert comparison.rows_compared == comparison.rows_due == len(actual)


def test_every_fault_is_caught_and_named_in_its_bfloat16_captures(real_model: Path) -> None:
    found = selftest(real_model, dtype="bfloat16", healthy=1)
    assert (found.missed, found.false_alarms) == ((), ())
    assert found.named >= 0.95 * len(found.injections)
    assert len(found.injections) == len({*FAULTS, *MODEL_FAULTS}) - 1
    assert "no sliding window" in found.not_applicable[0]
