"""Engines that the tests in this folder share, and what they compare with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tapcheck.capture import Capture
from tapcheck.checks.suite import make_requests
from tapcheck.fixtures.pool import EnginePool
from tapcheck.layout import Repeat, StepLayout
from tapcheck.request import Request
from tapcheck.vllm.backend import VLLMBackend


@pytest.fixture(scope="session")
def llama(model_zoo: Callable[[str], Path]) -> Path:
    """Tiny llama: fused residual, `self_attn`."""
    return model_zoo("llama")


@pytest.fixture(scope="session")
def require_runner() -> Callable[[Capture], None]:
    """A function that fails unless a capture's engine has the model runner that was asked for."""
    asked = {"0": "v1", "1": "v2"}.get(os.environ.get("VLLM_USE_V2_MODEL_RUNNER", ""))

    def check(capture: Capture) -> None:
        assert asked in (None, capture.metadata["engine"]["runner"])

    return check


@pytest.fixture
def engine(engine_pool: EnginePool, llama: Path) -> VLLMBackend:
    """Tiny llama in this process, with a block size that short prompts share blocks under."""
    return engine_pool.acquire(llama, block_size=32, max_num_batched_tokens=64)


@pytest.fixture(scope="session")
def requests() -> list[Request]:
    """Eight requests of different lengths, within a vocabulary of 512."""
    return make_requests(512)


@pytest.fixture
def layouts(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A context that gives the list of the step layouts that in-process workers were told."""
    from tapcheck.vllm.worker import WorkerTaps

    @contextlib.contextmanager
    def watching() -> Iterator[list[StepLayout]]:
        seen: list[StepLayout] = []
        begin = WorkerTaps._begin

        def both(taps: WorkerTaps, step: StepLayout | Repeat) -> None:
            seen.append(step.layout if isinstance(step, Repeat) else step)
            begin(taps, step)

        with monkeypatch.context() as patch:
            patch.setattr(WorkerTaps, "_begin", both)
            yield seen

    return watching
