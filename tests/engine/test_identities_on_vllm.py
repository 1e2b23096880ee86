"""The identities of the residual stream in captures from a real vLLM engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tapcheck.capture import Capture, SiteRows
from tapcheck.checks.identities import identities_hold
from tapcheck.compatibility.verdict import status
from tapcheck.sites import Site

pytestmark = pytest.mark.engine

# Four layers, of which three have a next one, and two sums in each; then what the embedding gives,
# to which gpt2 adds its positions.
IDENTITIES = {"llama": 12, "gpt2": 11, "gemma2": 12, "qwen2": 12}
SCALES = {"llama": 1, "gemma2": 1, "qwen2": 1}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "float32"),
        ("gpt2", "float32"),
        ("gemma2", "float32"),
        ("qwen2", "float32"),
        ("gemma2", "bfloat16"),
        ("llama", "bfloat16"),
    ],
)
def test_a_capture_is_what_its_parts_add_up_to(
    name: str,
    dtype: str,
    model_zoo: Callable[[str], Path],
    vllm_capture: Callable[..., Capture],
) -> None:
    capture = vllm_capture(model_zoo(name), dtype=dtype, max_new_tokens=6, max_model_len=64)
    result = identities_hold(capture)
    assert status(result) == "pass", result.reason
    rows = sum(request.seen_length for request in capture.requests)
    assert result.metrics["identities"] == IDENTITIES[name]
    for count in ("rows_checked", "rows_telling"):
        assert result.metrics[count] == IDENTITIES[name] * rows
    assert ("embedding_scale" in result.metrics) is (name in SCALES)
    if name in SCALES:
        assert result.metrics["embedding_scale"] == pytest.approx(SCALES[name], rel=1e-3)
    for layer in range(3):
        border = capture[f"resid_post.{layer}"].values, capture[f"resid_pre.{layer + 1}"].values
        assert torch.equal(*border)
    for site in (Site("resid_post", 2), Site("attn_out", 0)):
        halved = SiteRows(capture.rows[site].columns, capture.rows[site].values / 2)
        broken = identities_hold(replace(capture, rows={**capture.rows, site: halved}))
        assert status(broken) == "fail"
        assert str(site) in broken.reason
