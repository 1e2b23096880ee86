"""The engine core in a subprocess, and engines that somebody else started."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapcheck.capture import Capture
from tapcheck.checks import assert_captures_match
from tapcheck.errors import EngineError
from tapcheck.fixtures.pool import EnginePool
from tapcheck.request import Request
from tapcheck.sites import all_sites
from tapcheck.vllm.backend import VLLMBackend
from tapcheck.vllm.engine import engine_environment, release_engine_memory

pytestmark = pytest.mark.engine


def test_a_capture_from_a_subprocess_equals_transformers_in_every_dtype_and_order(
    engine_pool: EnginePool,
    hf_capture: Callable[..., Capture],
    llama: Path,
    requests: list[Request],
    require_runner: Callable[[Capture], None],
) -> None:
    engine = engine_pool.acquire(llama, in_process=False)
    before = time.monotonic_ns(), time.time_ns()
    actual = engine.capture(requests, all_sites(4), max_new_tokens=6)
    after = time.monotonic_ns(), time.time_ns()
    require_runner(actual)
    assert actual.metadata["engine"]["topology"] == "subprocess"
    assert_captures_match(actual, hf_capture(llama, actual.requests), rtol=1e-5)
    keys = [(row.request_id, row.position, row.site) for row in actual]
    order = {request.id: index for index, request in enumerate(actual.requests)}
    assert keys == sorted(keys, key=lambda key: (order[key[0]], key[1], key[2]))
    columns = actual["resid_post.0"].columns
    by_step = np.argsort(columns.step, kind="stable")
    for stamped, begin, end in zip(
        (columns.monotonic_ns, columns.unix_ns), before, after, strict=True
    ):
        taken = stamped[by_step]
        assert begin <= taken[0] < taken[-1] <= end  # in the worker, while the capture ran
        assert (np.diff(taken) >= 0).all()


@pytest.mark.parametrize(
    "mode", [{}, {"graph_taps": ["resid_post.1", "mlp_out.2"]}], ids=["hook", "graph"]
)
def test_models_that_vllm_runs_by_transformers_classes_are_captured(
    mode: dict[str, Any],
    engine_pool: EnginePool,
    hf_capture: Callable[..., Capture],
    llama: Path,
    requests: list[Request],
) -> None:
    """Their tensors have a batch dimension of one. In process they would change Transformers'."""
    engine = engine_pool.acquire(llama, in_process=False, model_impl="transformers", **mode)
    assert engine.metadata["engine"]["model_impl"] == "transformers"
    actual = engine.capture(requests, engine.sites, max_new_tokens=4)
    assert_captures_match(actual, hf_capture(llama, actual.requests, sites=actual.sites), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_dtype_that_the_engine_runs_is_the_dtype_captured(
    engine_pool: EnginePool, llama: Path, dtype: str
) -> None:
    engine = engine_pool.acquire(llama, dtype=dtype)
    capture = engine.capture([Request("r", (5, 9, 200))], ["resid_post.1", "mlp_out.2"])
    for site in capture.sites:
        assert str(capture[site].values.dtype) == f"torch.{dtype}"
    assert capture.metadata["engine"]["engine_dtype"] == dtype


@pytest.fixture
def start_llm(engine_pool: EnginePool, llama: Path) -> Iterator[Callable[..., Any]]:
    """A function that starts a plain `vllm.LLM` in this process, as a team's own code would."""
    engine_pool.close()
    started: list[Any] = []

    def start(**arguments: Any) -> Any:
        from vllm import LLM

        with engine_environment(in_process=True):
            started.append(LLM(str(llama), dtype="float32", skip_tokenizer_init=True, **arguments))
        return started[-1]

    yield start
    for llm in started:
        llm.llm_engine.engine_core.shutdown()
    started.clear()
    release_engine_memory()


def test_an_engine_started_with_the_worker_extension_can_be_attached_to(
    start_llm: Callable[..., Any], hf_capture: Callable[..., Capture], llama: Path
) -> None:
    llm = start_llm(
        enforce_eager=True,
        worker_extension_cls="tapcheck.vllm.worker.TapcheckWorkerExtension",
    )
    backend = VLLMBackend.attach(llm)
    actual = backend.capture([Request("r", (5, 9, 200))], ["resid_post.3"], max_new_tokens=3)
    assert_captures_match(actual, hf_capture(llama, actual.requests, sites=["resid_post.3"]))
    backend.close()
    assert llm.generate([{"prompt_token_ids": [1]}], use_tqdm=False)


def test_the_general_plugin_makes_an_engine_attachable_only_when_asked_to(
    monkeypatch: pytest.MonkeyPatch, start_llm: Callable[..., Any]
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from tapcheck.vllm.plugin import register

    untouched = EngineArgs.create_engine_config
    monkeypatch.setattr(EngineArgs, "create_engine_config", untouched)
    register()
    assert EngineArgs.create_engine_config is untouched
    monkeypatch.setenv("TAPCHECK_ATTACH", "1")
    llm = start_llm(enforce_eager=True)
    backend = VLLMBackend.attach(llm)
    assert len(backend.capture([Request("r", (5, 9))], ["embed"], max_new_tokens=2)) == 3


def test_an_engine_that_was_compiled_is_refused_on_attach(start_llm: Callable[..., Any]) -> None:
    llm = start_llm(
        enforce_eager=False,
        compilation_config={"mode": 0, "cudagraph_mode": "NONE"},
        worker_extension_cls="tapcheck.vllm.worker.TapcheckWorkerExtension",
    )
    backend = VLLMBackend.attach(llm)
    with pytest.raises(EngineError, match="without enforce_eager=True"):
        backend.capture([Request("r", (5, 9))], ["embed"])


def test_an_engine_starts_in_a_process_that_has_loaded_numba(
    start_llm: Callable[..., Any],
) -> None:
    import llvmlite.binding.ffi as binding

    start_llm(enforce_eager=True)
    assert sys.modules["llvmlite.binding.ffi"] is binding
