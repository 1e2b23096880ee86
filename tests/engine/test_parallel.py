"""Workers that share one model: tensor-parallel ranks and pipeline stages, two processes each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tapcheck.capture import Capture
from tapcheck.checks import assert_captures_match
from tapcheck.checks.metamorphic import same_on_both
from tapcheck.compatibility.verdict import status
from tapcheck.errors import EngineError
from tapcheck.fixtures.pool import EnginePool
from tapcheck.request import Request
from tapcheck.sites import all_sites
from tapcheck.transport import RowBatch
from tapcheck.vllm import protocol
from tapcheck.vllm.backend import VLLMBackend

pytestmark = pytest.mark.engine

REQUESTS = [Request(str(n), tuple((n * 31 + at * 7) % 512 for at in range(n))) for n in (1, 9, 40)]
LIMITS: dict[str, Any] = {
    "in_process": False,
    "block_size": 32,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
}


@pytest.fixture(scope="module", autouse=True)
def one_core_for_each_worker() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        yield


@pytest.fixture
def delivered(monkeypatch: pytest.MonkeyPatch) -> list[list[RowBatch]]:
    """The batches of each drain, as they came from the workers."""
    drains: list[list[RowBatch]] = []
    merge = protocol.merge

    def recorded(batches: list[RowBatch], names: dict[str, str]) -> RowBatch:
        drains.append(list(batches))
        return merge(drains[-1], names)

    monkeypatch.setattr(protocol, "merge", recorded)
    return drains


@pytest.fixture(scope="module")
def two_ranks_capture(engine_pool: EnginePool, llama: Path) -> Capture:
    """Everything, captured while the first test has its engine: the last one has another."""
    engine = engine_pool.acquire(llama, tensor_parallel_size=2, **LIMITS)
    return engine.capture(REQUESTS, all_sites(4), max_new_tokens=4)


@pytest.fixture
def two_ranks(engine_pool: EnginePool, llama: Path) -> VLLMBackend:
    return engine_pool.acquire(llama, tensor_parallel_size=2, **LIMITS)


@pytest.fixture(scope="module")
def tied(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny llama whose output head is its embedding: the last stage has that module too."""
    folder = tmp_path_factory.mktemp("tied") / "model"
    shutil.copytree(llama, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def two_stages(engine_pool: EnginePool, tied: Path) -> VLLMBackend:
    return engine_pool.acquire(tied, pipeline_parallel_size=2, **LIMITS)


@pytest.mark.usefixtures("two_ranks_capture")
def test_both_ranks_bring_the_same_rows_which_are_delivered_once(
    two_ranks: VLLMBackend,
    hf_capture: Callable[..., Capture],
    llama: Path,
    delivered: list[list[RowBatch]],
) -> None:
    actual = two_ranks.capture(REQUESTS, all_sites(4), max_new_tokens=4)
    assert actual.metadata["engine"]["tensor_parallel_size"] == 2
    assert actual.situations["unfinished_prefills"] > 0
    ((one, other),) = delivered
    assert set(one.values) == set(other.values) == set(all_sites(4))
    assert len(one) == len(other) == len(actual["embed"])
    assert_captures_match(actual, hf_capture(llama, actual.requests), rtol=1e-5)


def test_a_reply_that_vllm_left_in_a_queue_is_never_taken_for_another_calls(
    two_ranks: VLLMBackend,
) -> None:
    two_ranks._call("tapcheck_describe")
    with pytest.raises(Exception, match="timed out"):
        two_ranks._llm.collective_rpc("execute_dummy_batch", timeout=0)
    with pytest.raises(EngineError, match="worker 0 answered a call that isn't tapcheck's where"):
        two_ranks.capture(REQUESTS, ["resid_post.1"])


def test_each_stage_brings_its_own_layers(
    two_stages: VLLMBackend,
    hf_capture: Callable[..., Capture],
    tied: Path,
    delivered: list[list[RowBatch]],
) -> None:
    assert two_stages.sites == all_sites(4)
    actual = two_stages.capture(REQUESTS, all_sites(4), max_new_tokens=6)
    assert actual.metadata["engine"]["pipeline_parallel_size"] == 2
    ((first, second),) = delivered
    assert not set(first.values) & set(second.values)
    assert {site.layer for site in first.values} == {None, 0, 1}
    assert {site.layer for site in second.values} == {None, 2, 3}
    assert_captures_match(actual, hf_capture(tied, actual.requests), rtol=1e-5)


def test_sites_of_one_stage_alone(
    two_stages: VLLMBackend, hf_capture: Callable[..., Capture], tied: Path
) -> None:
    for sites in (["resid_post.0"], ["resid_mid.2", "logits"]):
        actual = two_stages.capture(REQUESTS, sites, ["generated[*]"], max_new_tokens=4)
        expected = hf_capture(tied, actual.requests, sites=sites, select=["generated[*]"])
        assert_captures_match(actual, expected, rtol=1e-5)


def test_two_ranks_capture_what_one_does(
    engine_pool: EnginePool,
    two_ranks_capture: Capture,
    llama: Path,
) -> None:
    alone = engine_pool.acquire(llama, **{**LIMITS, "in_process": True})
    one = alone.capture(REQUESTS, all_sites(4), max_new_tokens=4)
    result = same_on_both(one, two_ranks_capture, rtol=1e-5)
    assert status(result) == "pass", result.reason
    assert "tensor_parallel_size" in result.reason
