"""Whether a copy of a model in a wide dtype fits in memory, before it is loaded."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from tapcheck.models import load_config

# Activations and what the loader holds twice, beside the weights.
_OVERHEAD = 1.25


def memory_for(model: str, dtype: str) -> int:
    """Bytes that Transformers needs to run the model in `dtype`, from its config alone."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        skeleton = auto.from_config(load_config(model))
    parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    return int(parameters * getattr(torch, dtype).itemsize * _OVERHEAD)


def free_memory(device: str) -> int:
    """Bytes that are free on `cuda`, or on the host for `cpu`."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return int(psutil.virtual_memory().available)
