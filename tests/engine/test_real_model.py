"""A small trained model: massive activations, real text, 30 layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tapcheck.capture import Capture
from tapcheck.checks import assert_captures_match
from tapcheck.models import encode
from tapcheck.sites import all_sites

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
