"""The words that client and worker exchange: JSON text, and packed bytes for rows.

Nothing else crosses the process boundary, so vLLM's insecure serialization is never needed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tapcheck import errors
from tapcheck.errors import EngineError, TapcheckError, first_line
from tapcheck.handover import Receiver
from tapcheck.request import Request
from tapcheck.sites import Site, parse_sites
from tapcheck.transport import RowBatch, merge, unpack

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


def in_step(method: str, call: int, replies: Sequence[Any]) -> list[Any]:
    """What the workers replied to call number `call`, without the number that each reply carries.

    Raises EngineError when a reply is of another call: vLLM leaves replies in its queues when a
    call fails in one of several workers or is given up, and hands them to the next call.
    """
    for rank, reply in enumerate(replies):
        numbered = isinstance(reply, tuple | list) and len(reply) == 2
        if not numbered or reply[0] != call:
            answered = f"call {reply[0]}" if numbered else "a call that isn't tapcheck's"
            raise EngineError(
                f"worker {rank} answered {answered} where {method!r} was call {call}: an earlier "
                "call failed or was given up, and vLLM kept its reply in the queue. Every later "
                "reply would be off by one: close this engine and start another"
            )
    return [reply[1] for reply in replies]


@contextlib.contextmanager
def engine_errors() -> Iterator[None]:
    """Say in an EngineError what failed inside vLLM."""
    try:
        yield
    except Exception as error:
        raise EngineError(
            f"the engine failed: {type(error).__name__}: {first_line(error)}. See vLLM's log above "
            "for the cause. If its process has ended, close this backend and start another"
        ) from error


def sites_of_all(replies: Sequence[str], num_layers: int) -> tuple[Site, ...]:
    """The sites that the workers name, each pipeline stage its own, in execution order."""
    names = {name for reply in replies for name in decode(reply)}
    return parse_sites(names, num_layers) if names else ()


def drain_arguments(runs: Mapping[str, Request]) -> str:
    """What a worker needs to drain these owners, as JSON."""
    return json.dumps({owner: request.seen_length for owner, request in runs.items()})


def received(
    replies: Sequence[bytes | str], receiver: Receiver, runs: Mapping[str, Request]
) -> RowBatch:
    """The rows of one drain of workers in other processes; raises what a worker replied instead.

    Raises HandoverError, and takes none, when a worker's memory is out of reach.
    """
    sent = [decode(reply) if isinstance(reply, str) else reply for reply in replies]
    names = {owner: request.id for owner, request in runs.items()}
    return merge([unpack(drain) for drain in receiver.receive(sent)], names)


def unreachable(error: Exception) -> str:
    """What to say when an RPC fails: the extension is absent, or the engine is gone."""
    return (
        f"the engine's workers did not answer tapcheck: {first_line(error)}. If this is an engine "
        "of your own, start it with worker_extension_cls="
        "'tapcheck.vllm.worker.TapcheckWorkerExtension' or with TAPCHECK_ATTACH=1; if it ran "
        "before, its process has ended: see its log above"
    )
