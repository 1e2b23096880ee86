"""Graph mode on real compiled engines: auxiliary outputs and static taps in the forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tapcheck.capture import Capture
from tapcheck.checks import assert_captures_match
from tapcheck.checks.metamorphic import same_on_both
from tapcheck.compatibility.verdict import status
from tapcheck.errors import CaptureError, EngineError, SiteError
from tapcheck.fixtures.pool import EnginePool
from tapcheck.request import Request
from tapcheck.vllm.backend import VLLMBackend
from tapcheck.vllm.graph import place
from tapcheck.vllm.loading import CONFIG_KEY, plan_of

pytestmark = pytest.mark.engine

LAYERS = (0, 1, 3)
TAPS = ("embed", "mlp_out.1", "attn_out.2", "resid_mid.2", "resid_pre.3", "final_norm")
SITES = [*(f"resid_post.{layer}" for layer in LAYERS), *TAPS, "logits"]


@pytest.fixture
def compiled(engine_pool: EnginePool, llama: Path) -> VLLMBackend:
    """Tiny llama, compiled, in this process; chunks of 16 tokens."""
    return engine_pool.acquire(
        llama, graph_layers=LAYERS, graph_taps=TAPS, block_size=32, max_num_batched_tokens=16
    )


def worker_of(engine: VLLMBackend) -> Any:
    core: Any = engine._llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker


def test_every_row_of_a_compiled_engine_is_delivered_and_equals_transformers(
    compiled: VLLMBackend,
    requests: list[Request],
    hf_capture: Callable[..., Capture],
    llama: Path,
) -> None:
    assert sorted(map(str, compiled.sites)) == sorted(SITES)
    capture = compiled.capture(requests, SITES, max_new_tokens=9)
    assert capture.metadata["mode"] == "graph"
    assert capture.metadata["engine"]["enforce_eager"] is False
    due = sum(request.seen_length for request in capture.requests) * len(SITES)
    assert len(capture) == due
    situations = capture.metadata["situations"].values()
    for name in ("mixed_passes", "unfinished_prefills"):
        assert sum(situation[name] for situation in situations) > 0, name
    assert_captures_match(capture, hf_capture(llama, capture.requests, sites=SITES), rtol=1e-5)


def test_a_forward_hook_does_not_fire_where_the_taps_read(compiled: VLLMBackend) -> None:
    fired = []
    layer = worker_of(compiled).model_runner.model.model.layers[1]
    handle = layer.register_forward_hook(lambda *_: fired.append(1))
    capture = compiled.capture([Request("r", (1, 2))], ["resid_post.1"], max_new_tokens=3)
    handle.remove()
    assert len(capture) == 4
    assert not fired  # or the forward isn't compiled, and this file shows nothing


def test_prompts_that_differ_give_rows_that_differ(compiled: VLLMBackend) -> None:
    one, other = (
        compiled.capture([Request("r", prompt)], SITES, max_new_tokens=1)
        for prompt in ((3, 1, 4), (2, 7, 1))
    )
    for site in one.sites:
        for a, b in zip(one[site].values, other[site].values, strict=True):
            assert (a - b).norm() > 0.1 * a.norm(), site


def test_a_site_that_is_not_in_the_graph_is_refused_with_those_that_are(
    compiled: VLLMBackend,
) -> None:
    with pytest.raises(SiteError, match=r"resid_post\.2 is not among the sites") as caught:
        compiled.capture([Request("r", (1, 2))], ["resid_post.0", "resid_post.2"])
    assert "resid_mid.2" in str(caught.value)
    assert "graph_layers" in str(caught.value)
    assert len(compiled.capture([Request("r", (1, 2))], ["resid_post.0"], max_new_tokens=1)) == 2


def test_rows_that_the_compiled_forward_did_not_write_end_the_capture(
    compiled: VLLMBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    taps = worker_of(compiled).tapcheck_graph
    (site,) = [site for site in taps._static if str(site) == "mlp_out.1"]
    tap = taps._static[site]
    with monkeypatch.context() as patch:
        # as if the graph wrote to a buffer of another start
        patch.setattr(tap, "buffer", tap.buffer.clone())
        with pytest.raises(CaptureError, match=r"site mlp_out\.1: 2 of 2 rows .* not written"):
            compiled.capture([Request("r", (1, 2))], ["mlp_out.1"], max_new_tokens=1)
    assert len(compiled.capture([Request("r", (1, 2))], ["mlp_out.1"], max_new_tokens=1)) == 2


def test_auxiliary_outputs_that_are_missing_end_the_capture(
    compiled: VLLMBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    taps = worker_of(compiled).tapcheck_graph
    with monkeypatch.context() as patch:
        patch.setattr(taps, "_aux", taps._aux[:-1])
        with pytest.raises(EngineError, match="3 auxiliary outputs where 2 were asked for"):
            compiled.capture([Request("r", (1, 2))], ["resid_post.0"], max_new_tokens=1)


def test_the_plan_is_part_of_the_compile_cache_s_key(compiled: VLLMBackend) -> None:
    config = compiled._llm.llm_engine.vllm_config
    key = config.compute_hash()
    other = copy.copy(config)
    assert other.compute_hash() == key
    other.additional_config = {CONFIG_KEY: {**config.additional_config[CONFIG_KEY], "layers": [0]}}
    assert other.compute_hash() != key
    other.additional_config = {}
    assert other.compute_hash() != key


def test_speculation_that_takes_the_auxiliary_outputs_is_refused(compiled: VLLMBackend) -> None:
    worker = worker_of(compiled)
    placed, plan = worker.tapcheck_graph, plan_of(worker)
    assert plan is not None
    try:
        place(worker, plan)  # they are in use by now
        assert isinstance(worker.tapcheck_graph, EngineError)
        assert "speculative" in str(worker.tapcheck_graph)
    finally:
        worker.tapcheck_graph = placed


def test_hook_mode_and_graph_mode_capture_the_same(
    engine_pool: EnginePool, compiled: VLLMBackend, requests: list[Request], llama: Path
) -> None:
    graph = compiled.capture(requests, SITES, max_new_tokens=5)
    hook = engine_pool.acquire(llama).capture(graph.requests, SITES)
    result = same_on_both(graph, hook, rtol=1e-5)
    assert status(result) == "pass", result.reason
    assert "mode" in result.reason


def test_a_model_without_auxiliary_outputs_is_refused_with_the_way_out(
    engine_pool: EnginePool, model_zoo: Callable[[str], Path]
) -> None:
    with pytest.raises(EngineError, match="GPT2LMHeadModel has no auxiliary outputs") as caught:
        engine_pool.acquire(model_zoo("gpt2"), graph_layers=[1, 3])
    assert "graph_taps=['resid_post.1', 'resid_post.3']" in str(caught.value)


def test_static_taps_need_no_interface_of_the_model(
    engine_pool: EnginePool, model_zoo: Callable[[str], Path], hf_capture: Callable[..., Capture]
) -> None:
    sites = ["resid_post.0", "attn_out.1", "mlp_out.3", "resid_post.3"]
    model = model_zoo("gemma2")
    engine = engine_pool.acquire(model, graph_taps=sites)
    capture = engine.capture([Request("r", tuple(range(3, 40)))], sites, max_new_tokens=4)
    assert_captures_match(capture, hf_capture(model, capture.requests, sites=sites), rtol=1e-5)


def test_a_compiled_engine_in_a_subprocess_delivers_every_row(
    engine_pool: EnginePool,
    model_zoo: Callable[[str], Path],
    requests: list[Request],
    hf_capture: Callable[..., Capture],
) -> None:
    model = model_zoo("qwen2")
    sites = ["resid_post.0", "resid_post.2", "resid_post.3", *(f"mlp_out.{n}" for n in range(4))]
    engine = engine_pool.acquire(
        model, in_process=False, graph_layers=[0, 2, 3], graph_taps=sites[3:]
    )
    capture = engine.capture(requests, sites, max_new_tokens=6)
    assert capture.metadata["engine"]["topology"] == "subprocess"
    assert len(capture) == sum(r.seen_length for r in capture.requests) * len(sites)
    assert_captures_match(capture, hf_capture(model, capture.requests, sites=sites), rtol=1e-5)
