"""What vLLM's clients lack: whoever waits for an engine core that was killed gets an error.

vLLM notices such a death, but leaves those waiting that wait already. This is the one place that
reads its clients' internals; tests/engine/test_engine_faults.py kills real cores.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

_NOTICED_WITHIN_SECONDS = 5.0


def wake_those_waiting_when_it_dies(client: Any) -> None:
    """Watch the engine core's processes of a `vllm.v1.engine.core_client` client.

    When one ends, whoever waits for outputs or for a reply gets vLLM's EngineDeadError. A client
    without processes of its own is left as it is.
    """
    manager = getattr(getattr(client, "resources", None), "engine_manager", None)
    if manager is None or not hasattr(manager, "sentinels"):
        return
    resources, outputs, replies = client.resources, client.outputs_queue, client.utility_results
    loop = asyncio.get_running_loop() if isinstance(outputs, asyncio.Queue) else None

    def fail_all() -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        outputs.put_nowait(EngineDeadError())
        for future in list(replies.values()):
            if not future.done():
                future.set_exception(EngineDeadError())

    def watch() -> None:
        connection.wait(manager.sentinels())
        # Once vLLM has noticed too, it refuses new calls: then those that wait are the last. A
        # call that slipped in between is caught by the second round.
        for _ in range(2):
            _wait_until(lambda: resources.engine_dead)
            if loop is None:
                fail_all()
            elif not loop.is_closed():
                loop.call_soon_threadsafe(fail_all)
            time.sleep(_NOTICED_WITHIN_SECONDS / 10)

    # It holds no reference to the client, so that vLLM can end it by forgetting it.
    threading.Thread(target=watch, name="tapcheck-liveness", daemon=True).start()


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _NOTICED_WITHIN_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
