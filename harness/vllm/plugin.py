"""The `vllm.general_plugins` entry point: vLLM calls it in every one of its processes."""

from __future__ import annotations

import functools
import os
from typing import Any

ATTACH = "TAPCHECK_ATTACH"
GRAPH = "TAPCHECK_GRAPH"  # set by tapcheck while it starts an engine for graph mode


def register() -> None:
    """Do nothing, unless one of tapcheck's variables is set.

    TAPCHECK_ATTACH=1 makes every engine started here attachable: code that builds its own `LLM`
    can be captured by `VLLMBackend.attach` unchanged, since an engine without a worker extension
    gets tapcheck's. Hooks are only placed when a capture asks. TAPCHECK_GRAPH=1 lets workers place
    the taps that their engine's configuration asks for.
    """
    if os.environ.get(GRAPH) == "1":
        from tapcheck.vllm.loading import tap_after_loading

        tap_after_loading()
    if os.environ.get(ATTACH) == "1":
        _make_attachable()


def _make_attachable() -> None:
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
