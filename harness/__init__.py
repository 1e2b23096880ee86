"""tapcheck proves that the activations you capture are the activations the model computed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapcheck.backend import Backend
    from tapcheck.capture import Capture, Row, join
    from tapcheck.errors import TapcheckError
    from tapcheck.hf import HFBackend
    from tapcheck.request import Request
    from tapcheck.sites import Site, all_sites
    from tapcheck.storage import load_capture, save_capture
    from tapcheck.vllm.async_backend import AsyncVLLMBackend
    from tapcheck.vllm.backend import VLLMBackend

__all__ = [
    "AsyncVLLMBackend",
    "Backend",
    "Capture",
    "HFBackend",
    "Request",
    "Row",
    "Site",
    "TapcheckError",
    "VLLMBackend",
    "all_sites",
    "join",
    "load_capture",
    "save_capture",
]

# Imported on first use: `import tapcheck` must not load torch, transformers or vllm.
_HOME = {
    "AsyncVLLMBackend": "tapcheck.vllm.async_backend",
    "Backend": "tapcheck.backend",
    "Capture": "tapcheck.capture",
    "HFBackend": "tapcheck.hf",
    "Request": "tapcheck.request",
    "Row": "tapcheck.capture",
    "Site": "tapcheck.sites",
    "TapcheckError": "tapcheck.errors",
    "VLLMBackend": "tapcheck.vllm.backend",
    "all_sites": "tapcheck.sites",
    "join": "tapcheck.capture",
    "load_capture": "tapcheck.storage",
    "save_capture": "tapcheck.storage",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tapcheck' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
