"""Concurrent captures over AsyncLLM, with the engine core in a subprocess."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tapcheck.capture import Capture, join
from tapcheck.checks import assert_captures_match
from tapcheck.checks.ledger import compare_ledger
from tapcheck.errors import CaptureError, SelectorError
from tapcheck.fixtures.pool import EnginePool
from tapcheck.request import Request
from tapcheck.vllm.async_backend import AsyncVLLMBackend

pytestmark = pytest.mark.engine

LAYERS = [f"resid_post.{layer}" for layer in range(4)]
SIXTEEN = [Request(f"r{i}", tuple((i * 31 + j * 7) % 512 for j in range(3 + i))) for i in range(16)]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One event loop for the module: an AsyncLLM belongs to the loop that it was made in."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.run_until_complete(asyncio.sleep(0))  # lets the engine's cancelled tasks end
    loop.close()


@pytest.fixture(scope="module")
def backend(
    loop: asyncio.AbstractEventLoop, llama: Path, engine_pool: EnginePool
) -> Iterator[AsyncVLLMBackend]:
    engine_pool.close()  # two engines on two cores would only wait for each other
    before = set(psutil.Process().children(recursive=True))
    backend = loop.run_until_complete(AsyncVLLMBackend.start(llama, max_num_batched_tokens=128))
    yield backend
    backend.close()
    started = set(psutil.Process().children(recursive=True)) - before
    # Python's own resource tracker ends with this process.
    engines = {process for process in started if "resource_tracker" not in _command(process)}
    _, alive = psutil.wait_procs(engines, timeout=20)
    assert not [_command(process) for process in alive if process.is_running()]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_sixteen_concurrent_requests_lose_no_row_in_ten_runs(
    loop: asyncio.AbstractEventLoop, backend: AsyncVLLMBackend
) -> None:
    for _ in range(10):
        capture = loop.run_until_complete(
            backend.capture(SIXTEEN, LAYERS, ["generated[*]"], max_new_tokens=64)
        )
        assert len(capture) == 16 * 63 * 4
        ledger = compare_ledger(capture, requests=SIXTEEN, sites=LAYERS, select=["generated[*]"])
        assert ledger.complete


def test_captures_in_flight_together_each_get_their_own_rows(
    loop: asyncio.AbstractEventLoop,
    backend: AsyncVLLMBackend,
    hf_capture: Callable[..., Capture],
    llama: Path,
) -> None:
    async def all_at_once() -> list[Capture]:
        calls = (
            backend.capture([request], LAYERS, max_new_tokens=5 + index)
            for index, request in enumerate(SIXTEEN[:6])
        )
        return list(await asyncio.gather(*calls))

    captures = loop.run_until_complete(all_at_once())
    actual = join(captures)
    steps = [set(capture["resid_post.0"].columns.step.tolist()) for capture in captures]
    assert steps[0] & steps[1], "the captures did not share a step: nothing was put to the test"
    assert_captures_match(actual, hf_capture(llama, actual.requests, sites=LAYERS))


def test_captures_of_other_sites_wait_for_those_in_flight(
    loop: asyncio.AbstractEventLoop, backend: AsyncVLLMBackend
) -> None:
    async def both() -> list[Capture]:
        return list(
            await asyncio.gather(
                backend.capture(SIXTEEN[:2], ["resid_post.0"], max_new_tokens=8),
                backend.capture(SIXTEEN[2:4], ["mlp_out.1", "logits"], max_new_tokens=3),
                backend.capture(SIXTEEN[:2], ["resid_post.0"], max_new_tokens=8),
            )
        )

    first, other, again = loop.run_until_complete(both())
    assert first == again
    assert [str(site) for site in other.sites] == ["mlp_out.1", "logits"]


def test_ids_may_repeat_between_calls_in_flight(
    loop: asyncio.AbstractEventLoop, backend: AsyncVLLMBackend
) -> None:
    async def twins() -> list[Capture]:
        return list(
            await asyncio.gather(
                *(
                    backend.capture([Request("same", prompt)], ["resid_post.1"])
                    for prompt in [(1, 2, 3), (4, 5, 6, 7)]
                )
            )
        )

    one, other = loop.run_until_complete(twins())
    assert (len(one), len(other)) == (3 + 15, 4 + 15)
    assert one.requests[0].prompt_token_ids == (1, 2, 3)


def test_a_cancelled_capture_leaves_no_rows_and_the_next_works(
    loop: asyncio.AbstractEventLoop, backend: AsyncVLLMBackend
) -> None:
    async def give_up() -> str:
        task = asyncio.ensure_future(backend.capture(SIXTEEN, LAYERS, ["all"], max_new_tokens=512))
        await backend.capture(SIXTEEN[:1], LAYERS, ["all"], max_new_tokens=2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # What was scheduled before the abort arrived may still run one step.
        await backend.capture(SIXTEEN[:1], LAYERS, ["all"], max_new_tokens=2)
        reply: str = (await backend._call("tapcheck_discard", "[]"))[0]
        return reply

    assert loop.run_until_complete(give_up()) == '{"ok": 0}'
    assert (
        len(loop.run_until_complete(backend.capture(SIXTEEN[:2], LAYERS))) == (3 + 15 + 4 + 15) * 4
    )


def test_an_error_at_request_end_is_the_callers_and_leaves_the_engine_usable(
    loop: asyncio.AbstractEventLoop, backend: AsyncVLLMBackend
) -> None:
    with pytest.raises(SelectorError, match="'r0'"):
        loop.run_until_complete(backend.capture(SIXTEEN[:1], LAYERS, [400], max_new_tokens=2))
    with pytest.raises(CaptureError, match="no request was given"):
        loop.run_until_complete(backend.capture([], LAYERS))
    assert (
        len(loop.run_until_complete(backend.capture(SIXTEEN[:1], LAYERS, max_new_tokens=2)))
        == 4 * 4
    )
