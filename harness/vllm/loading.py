"""Between loading and compilation: what graph mode does to vLLM's worker and model there.

Like the runner adapters, this reads undocumented internals; tests/engine/test_graph_mode.py fails
when one of them changes its meaning.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

# Where a graph engine's plan stands in vLLM's additional_config: it reaches every worker, and is
# part of the compile cache's key.
CONFIG_KEY = "tapcheck"


def tap_after_loading() -> None:
    """Make every worker of this process that is asked to place its taps once it has its weights.

    An engine without a plan under CONFIG_KEY is started as ever.
    """
    from vllm.v1.worker.gpu_worker import Worker

    load = Worker.load_model
    if hasattr(load, "tapcheck"):
        return

    @functools.wraps(load)
    def load_and_tap(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(self, *args, **kwargs)
        plan = plan_of(self)
        if plan is not None:
            from tapcheck.vllm.graph import place

            place(self, plan)
        return result

    load_and_tap.tapcheck = True  # type: ignore[attr-defined]
    Worker.load_model = load_and_tap  # type: ignore[method-assign]


def plan_of(worker: Any) -> dict[str, Any] | None:
    """What a graph engine was asked to tap; None for any other engine."""
    config = worker.vllm_config.additional_config
    plan: dict[str, Any] | None = config.get(CONFIG_KEY) if isinstance(config, dict) else None
    return plan


def most_rows(worker: Any) -> int:
    """How many rows a forward pass of this worker has at most."""
    return int(worker.vllm_config.scheduler_config.max_num_batched_tokens)


def has_aux_outputs(model: nn.Module) -> bool:
    """Whether the model has vLLM's EAGLE-3 interface."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    return bool(supports_eagle3(model))


def aux_outputs_in_use(worker: Any) -> bool:
    """Whether a speculative method of the engine takes the auxiliary outputs."""
    return bool(worker.model_runner.use_aux_hidden_state_outputs)


def ask_for_aux_outputs(worker: Any, layers: Sequence[int]) -> None:
    """Have the forward return the stream after each of these layers, in ascending order."""
    model: Any = worker.model_runner.model
    # Index 0 is what enters the first layer.
    model.set_aux_hidden_state_layers(tuple(layer + 1 for layer in layers))
    worker.model_runner.use_aux_hidden_state_outputs = True


def split_output(output: Any) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """A model's final hidden states and its auxiliary outputs."""
    if isinstance(output, torch.Tensor):
        return output, ()
    hidden, aux = output
    return hidden, aux


@contextlib.contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """A context in which the model's forward runs as it is written, and nothing is compiled."""
    compiled = never_compile(model)
    try:
        yield
    finally:
        for module in compiled:
            module.do_not_compile = False  # type: ignore[assignment]


def never_compile(model: nn.Module) -> list[nn.Module]:
    """Have the model's forward run as it is written; returns the modules that would be compiled."""
    compiled = [m for m in model.modules() if getattr(m, "do_not_compile", True) is False]
    for module in compiled:
        module.do_not_compile = True  # type: ignore[assignment]
    return compiled
