"""The output checks on a real engine: sound models pass, and one of other weights fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tapcheck.capture import Capture
from tapcheck.checks.outputs import greedy_tokens, kl_divergence, top_k_logprobs
from tapcheck.compatibility.verdict import CheckResult, status
from tapcheck.fixtures.pool import EnginePool
from tapcheck.hf import HFBackend
from tapcheck.models import encode
from tapcheck.request import Request

pytestmark = pytest.mark.engine

NEW_TOKENS = 6
CHECKS = (greedy_tokens, top_k_logprobs, kl_divergence)
TEXTS = ("The capital of France is", "Water freezes when", "def add(a, b):\n    return")


def judged(actual: Capture, expected: Capture) -> dict[str, CheckResult]:
    return {check.__name__: check(actual, expected) for check in CHECKS}


def forced(model: Path, actual: Capture, dtype: str) -> Capture:
    with HFBackend(model, dtype=dtype) as reference:
        return reference.capture(actual.requests, ["logits"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_engine_s_outputs_are_transformers_own(
    name: str,
    dtype: str,
    engine_pool: EnginePool,
    model_zoo: Callable[[str], Path],
    requests: list[Request],
) -> None:
    model = model_zoo(name)
    engine = engine_pool.acquire(model, dtype=dtype)
    actual = engine.capture(requests, ["logits"], max_new_tokens=NEW_TOKENS)
    results = judged(actual, forced(model, actual, dtype))
    assert {name: status(result) for name, result in results.items()} == dict.fromkeys(
        (check.__name__ for check in CHECKS), "pass"
    ), results
    rows = sum(request.prompt_length + NEW_TOKENS - 1 for request in requests)
    assert results["greedy_tokens"].metrics["tokens_compared"] == NEW_TOKENS * len(requests)
    assert results["top_k_logprobs"].metrics["rows_compared"] == rows
    assert results["kl_divergence"].metrics["rows_compared"] == rows


def with_a_stronger_layer(model: Path, folder: Path, factor: float) -> Path:
    """The model with one layer's MLP `factor` times as strong, saved in `folder`."""
    auto: Any = AutoModelForCausalLM
    wrong = auto.from_pretrained(model)
    with torch.no_grad():
        wrong.model.layers[2].mlp.down_proj.weight.mul_(factor)
    wrong.save_pretrained(folder)
    return folder


def test_weights_that_are_2_percent_off_in_one_layer_fail_in_float32(
    engine_pool: EnginePool, llama: Path, requests: list[Request], tmp_path: Path
) -> None:
    engine = engine_pool.acquire(llama)
    actual = engine.capture(requests, ["logits"], max_new_tokens=NEW_TOKENS)
    wrong = with_a_stronger_layer(llama, tmp_path, 1.02)
    results = judged(actual, forced(wrong, actual, "float32"))
    assert status(results["top_k_logprobs"]) == status(results["kl_divergence"]) == "fail"


def test_weights_of_another_model_fail_in_bfloat16(
    engine_pool: EnginePool, llama: Path, requests: list[Request], tmp_path: Path
) -> None:
    engine = engine_pool.acquire(llama, dtype="bfloat16")
    actual = engine.capture(requests, ["logits"], max_new_tokens=NEW_TOKENS)
    wrong = with_a_stronger_layer(llama, tmp_path, -1.0)
    results = judged(actual, forced(wrong, actual, "bfloat16"))
    assert {status(result) for result in results.values()} == {"fail"}


@pytest.mark.network
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trained_model_s_outputs_are_transformers_own(
    dtype: str, engine_pool: EnginePool, real_model: Path
) -> None:
    requests = [Request(str(i), tuple(encode(real_model, text))) for i, text in enumerate(TEXTS)]
    engine = engine_pool.acquire(real_model, dtype=dtype, max_model_len=512)
    actual = engine.capture(requests, ["logits"], max_new_tokens=NEW_TOKENS)
    for result in judged(actual, forced(real_model, actual, dtype)).values():
        assert status(result) == "pass", result
