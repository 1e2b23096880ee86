"""The metamorphic checks on a real engine: each passes, and its situation really arose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tapcheck.capture import Capture
from tapcheck.checks.jobs import Job, check_names
from tapcheck.checks.metamorphic import (
    alone_equals_batched,
    capture_changes_nothing,
    cold_equals_warm_prefix,
    one_shot_equals_chunked,
    reordered,
    same_on_both,
)
from tapcheck.checks.suite import run_job
from tapcheck.compatibility.verdict import CheckResult, status, unmet
from tapcheck.errors import EngineError
from tapcheck.fixtures.pool import EnginePool
from tapcheck.request import Request
from tapcheck.vllm.backend import VLLMBackend

pytestmark = pytest.mark.engine

# Measured in float32: at most 1.5e-6, where other sizes of a batch take another matrix kernel.
RTOL = 1e-5
NEW_TOKENS = 6


def passing(result: CheckResult) -> CheckResult:
    assert status(result) == "pass", result
    return result


@pytest.mark.parametrize("check", [alone_equals_batched, reordered])
def test_neither_company_nor_order_changes_a_row(
    check: Callable[..., CheckResult], engine: VLLMBackend, requests: list[Request]
) -> None:
    result = passing(check(engine, requests, engine.sites, max_new_tokens=NEW_TOKENS, rtol=RTOL))
    assert result.metrics["most_requests_in_one_step"] > 2
    rows = sum(request.prompt_length + NEW_TOKENS - 1 for request in requests)
    assert result.metrics["rows_compared"] == rows * len(engine.sites)


@pytest.mark.parametrize("select", [["all"], ["prompt[-1]", "generated[*]"]])
def test_a_warm_prefix_cache_changes_no_row(
    engine: VLLMBackend, requests: list[Request], select: list[int | str]
) -> None:
    result = passing(
        cold_equals_warm_prefix(
            engine, requests, engine.sites, select, max_new_tokens=NEW_TOKENS, rtol=RTOL
        )
    )
    assert result.metrics["cached_positions"] == 64  # a block of 32 of each of the two longest


def test_prompts_shorter_than_a_block_exercise_no_prefix_cache(
    engine: VLLMBackend, requests: list[Request]
) -> None:
    result = cold_equals_warm_prefix(engine, requests[:4], ["embed"], max_new_tokens=NEW_TOKENS)
    assert status(result) == "not exercised"


def test_the_prefix_cache_is_really_emptied(engine: VLLMBackend) -> None:
    request = Request("r", tuple(range(7, 7 + 65)))

    def cached() -> int:
        capture = engine.capture([request], ["embed"], max_new_tokens=2, read_prefix_cache=True)
        return capture.situations["cached_positions"]

    engine.reset_prefix_cache()
    assert [cached(), cached()] == [0, 64]
    engine.reset_prefix_cache()
    assert cached() == 0


@pytest.mark.parametrize("select", [["all"], ["prompt[-1]"], ["generated[*]"]])
def test_capture_changes_neither_tokens_nor_logprobs(
    engine: VLLMBackend, requests: list[Request], select: list[int | str]
) -> None:
    result = passing(
        capture_changes_nothing(engine, requests, engine.sites, select, max_new_tokens=NEW_TOKENS)
    )
    assert result.metrics["tokens_compared"] == NEW_TOKENS * len(requests)
    assert result.metrics["logprobs_compared"] >= 5 * NEW_TOKENS * len(requests)
    assert result.metrics["rows_captured"] > 0


def test_a_tap_that_changes_what_it_reads_is_found(
    engine: VLLMBackend, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tapcheck.rowstore import RowStore

    put = RowStore.put

    def clumsy(store: RowStore, site: Any, terms: Any) -> None:
        put(store, site, terms)
        terms[0].mul_(1.0001)  # what is tapped goes on through the model

    monkeypatch.setattr(RowStore, "put", clumsy)
    result = capture_changes_nothing(engine, requests, ["mlp_out.1"], max_new_tokens=NEW_TOKENS)
    engine.reset_prefix_cache()  # of keys and values that the taps spoiled
    assert status(result) == "fail"
    assert "logprobs_different" in {condition.metric for condition in unmet(result)}


def test_an_untapped_run_leaves_no_tap_and_gives_the_tokens_of_a_capture(
    engine: VLLMBackend, requests: list[Request], layouts: Callable[[], Any]
) -> None:
    captured = engine.capture(requests, ["resid_post.0"], max_new_tokens=NEW_TOKENS)
    with layouts() as announced:
        outputs = engine.generate_untapped(requests, max_new_tokens=NEW_TOKENS)
    assert announced == []
    assert [output.request_id for output in outputs] == [request.id for request in requests]
    assert [tuple(output.outputs[0].token_ids) for output in outputs] == [
        request.generated_token_ids for request in captured.requests
    ]
    assert engine.capture(requests, ["resid_post.0"], max_new_tokens=NEW_TOKENS) == captured


def test_an_untapped_run_works_on_an_engine_that_was_never_tapped_and_not_on_a_closed_one(
    engine_pool: EnginePool, llama: Path
) -> None:
    engine_pool.close()
    engine = engine_pool.acquire(llama, max_model_len=128)
    (output,) = engine.generate_untapped([Request("r", (5, 9))], max_new_tokens=3)
    assert len(output.outputs[0].token_ids) == 3
    engine_pool.close()
    with pytest.raises(EngineError, match="was closed"):
        engine.generate_untapped([Request("r", (5, 9))])
    with pytest.raises(EngineError, match="was closed"):
        engine.reset_prefix_cache()


@pytest.fixture(scope="module")
def one_shot(engine_pool: EnginePool, llama: Path, requests: list[Request]) -> Capture:
    """All rows of an engine in this process that takes every prompt in one step."""
    engine = engine_pool.acquire(llama, block_size=32)
    return engine.capture(requests, engine.sites, max_new_tokens=NEW_TOKENS)


def test_chunks_change_no_row(
    one_shot: Capture, engine: VLLMBackend, requests: list[Request]
) -> None:
    chunked = engine.capture(requests, engine.sites, max_new_tokens=NEW_TOKENS)
    result = passing(one_shot_equals_chunked(one_shot, chunked, rtol=RTOL))
    assert result.metrics["unfinished_in_chunks"] > 0
    same = passing(same_on_both(one_shot, chunked, rtol=RTOL))
    assert "settings that differ: max_num_batched_tokens" in same.reason
    assert status(one_shot_equals_chunked(chunked, one_shot, rtol=RTOL)) == "not exercised"


def test_a_subprocess_changes_no_row(
    one_shot: Capture, engine_pool: EnginePool, llama: Path, requests: list[Request]
) -> None:
    engine = engine_pool.acquire(llama, in_process=False, block_size=32)
    other = engine.capture(requests, engine.sites, max_new_tokens=NEW_TOKENS)
    result = passing(same_on_both(one_shot, other, rtol=RTOL))
    assert result.reason.endswith("; settings that differ: topology in process and subprocess")
    assert result.metrics["settings_differing"] == 1
    for check in (cold_equals_warm_prefix, capture_changes_nothing):
        passing(check(engine, requests, ["resid_post.1", "logits"], max_new_tokens=NEW_TOKENS))


def test_the_job_of_the_main_run_owes_and_passes_every_check(
    engine_pool: EnginePool, llama: Path
) -> None:
    engine_pool.close()  # the job starts engines of its own
    job = Job("tiny", str(llama), "float32", "cpu", "in_process", RTOL, metamorphic=True)
    finding = run_job(job)
    assert tuple(result.name for result in finding.results) == check_names(job)
    for result in finding.results:
        passing(result)
    assert finding.situations["cached_positions"] > 0
    assert finding.situations["unfinished_prefills"] > 0
    assert len(finding.settings) == 2
