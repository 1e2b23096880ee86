"""The words that client and worker exchange: JSON text, and packed bytes for rows.

Nothing else crosses the process boundary, so vLLM's insecure serialization is never needed.
"""

from __future__ import annotations

import json
from typing import Any

from tapcheck import errors
from tapcheck.errors import EngineError, TapcheckError

WORKER_EXTENSION = "tapcheck.vllm.worker.TapcheckWorkerExtension"


def encode_result(value: Any) -> str:
    """A successful reply."""
    return json.dumps({"ok": value})


def encode_error(error: Exception) -> str:
    """A failed reply; what isn't ours keeps its class name in the message."""
    if isinstance(error, TapcheckError):
        return json.dumps({"error": type(error).__name__, "message": str(error)})
    message = f"inside the vLLM worker: {type(error).__name__}: {error}"
    return json.dumps({"error": "CaptureError", "message": message})


def decode(reply: str) -> Any:
    """The value of a successful reply; raises the error of a failed one, by its own class."""
    answer = json.loads(reply)
    if "ok" in answer:
        return answer["ok"]
    name = answer["error"]
    raise (getattr(errors, name) if name in errors.__all__ else EngineError)(answer["message"])


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its class name when it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
