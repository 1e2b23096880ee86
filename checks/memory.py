"""Whether a float32 copy of a model fits in memory, before it is loaded."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from tapcheck.models import load_config

_FLOAT32_BYTES = 4
# Activations and what the loader holds twice, beside the weights.
_OVERHEAD = 1.25


def memory_for_float32(model: str) -> int:
    """Bytes that Transformers needs to run the model in float32, from its config alone."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        skeleton = auto.from_config(load_config(model))
    parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    return int(parameters * _FLOAT32_BYTES * _OVERHEAD)


def free_memory(device: str) -> int:
    """Bytes that are free on `cuda`, or on the host for `cpu`."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return int(psutil.virtual_memory().available)
