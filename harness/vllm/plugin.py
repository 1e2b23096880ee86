"""The `vllm.general_plugins` entry point: vLLM calls it in every one of its processes."""

from __future__ import annotations

import functools
import os
from typing import Any

ATTACH = "TAPCHECK_ATTACH"


def register() -> None:
    """Do nothing, unless TAPCHECK_ATTACH=1: then make every engine started here attachable.

    With it, code that builds its own `LLM` can be captured by `VLLMBackend.attach` unchanged: an
    engine without a worker extension gets tapcheck's. Hooks are only placed when a capture asks.
    """
    if os.environ.get(ATTACH) != "1":
        return
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config
    if hasattr(create, "__wrapped__"):
        return

    from tapcheck.vllm.protocol import WORKER_EXTENSION

    @functools.wraps(create)
    def create_attachable(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.worker_extension_cls = self.worker_extension_cls or WORKER_EXTENSION
        return create(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_attachable  # type: ignore[method-assign]
