"""The checks of the main job on a CUDA device: what `pytest -m gpu` runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tapcheck.checks.jobs import TOPOLOGIES, Job, Topology, check_names
from tapcheck.checks.suite import run_job
from tapcheck.compatibility.verdict import status

pytestmark = [pytest.mark.gpu(min_memory_gb=8), pytest.mark.engine]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("model", ["llama", "gpt2", "qwen2"])
def test_every_check_passes_on_cuda(
    model: str, topology: Topology, dtype: str, model_zoo: Callable[[str], Path]
) -> None:
    job = Job(f"tiny-{model}", str(model_zoo(model)), dtype, "cuda", topology)
    results = run_job(job).results
    assert {result.name: status(result) for result in results} == {
        result.name: "pass" for result in results
    }
    assert len(results) == len(check_names(job))


def test_every_metamorphic_check_passes_on_cuda(model_zoo: Callable[[str], Path]) -> None:
    job = Job("tiny-llama", str(model_zoo("llama")), "float32", "cuda", "in_process", None, True)
    results = run_job(job).results
    assert {result.name: status(result) for result in results} == {
        result.name: "pass" for result in results
    }
    assert len(results) == len(check_names(job))
