"""Asynchronous scheduling, which vLLM turns off on CPU: a forward runs on after the stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tapcheck.capture import Capture
from tapcheck.checks import assert_captures_match
from tapcheck.errors import EngineError
from tapcheck.fixtures.pool import EnginePool
from tapcheck.request import Request

pytestmark = [pytest.mark.gpu(min_memory_gb=8), pytest.mark.engine]

REQUESTS = [Request(f"r{n}", tuple((n * 31 + at * 7) % 512 for at in range(n))) for n in (3, 9, 40)]
SITES = ["embed", "resid_post.1", "resid_post.3", "logits"]


@pytest.fixture(autouse=True)
def model_runner_v1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")


def test_the_row_of_the_extra_forward_after_a_stop_is_never_delivered(
    engine_pool: EnginePool, hf_capture: Callable[..., Capture], model_zoo: Callable[[str], Path]
) -> None:
    from vllm import SamplingParams

    llama = model_zoo("llama")
    engine = engine_pool.acquire(llama, async_scheduling=True, gpu_memory_utilization=0.5)
    assert engine.metadata["engine"]["async_scheduling"]
    free = engine.capture(REQUESTS, ["embed"], max_new_tokens=24)
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=24,
            detokenize=False,
            stop_token_ids=[request.generated_token_ids[6 + 4 * at]],
        )
        for at, request in enumerate(free.requests)
    ]
    actual = engine.capture(REQUESTS, SITES, sampling_params=params)
    assert actual.situations["unseen_rows"] > 0, "no forward ran on after a stop"
    assert_captures_match(actual, hf_capture(llama, actual.requests, sites=SITES))


def test_speculation_under_asynchronous_scheduling_is_refused(
    engine_pool: EnginePool, model_zoo: Callable[[str], Path]
) -> None:
    engine = engine_pool.acquire(
        model_zoo("llama"),
        async_scheduling=True,
        speculative_config={"method": "ngram_gpu", "num_speculative_tokens": 2},
        gpu_memory_utilization=0.5,
    )
    if not engine.metadata["engine"]["async_scheduling"]:
        pytest.skip("this vLLM schedules synchronously when it speculates")
    with pytest.raises(EngineError, match="async_scheduling=False"):
        engine.capture(REQUESTS, SITES)
