"""Concurrent captures over AsyncLLM, with the engine core in a subprocess."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tapcheck.capture import Capture, join
from tapcheck.checks import assert_captures_match
from tapcheck.checks.ledger import compare_ledger
from tapcheck.errors import CaptureError, EngineError, SelectorError
from tapcheck.fixtures.pool import EnginePool
from tapcheck.request import Request
from tapcheck.vllm.async_backend import AsyncVLLMBackend

if TYPE_CHECKING:
    from vllm import SamplingParams

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


def test_a_capture_of_other_sites_gets_its_turn_while_others_keep_coming(
    loop: asyncio.AbstractEventLoop, backend: AsyncVLLMBackend
) -> None:
    rounds = 30
    ended: list[str] = []

    async def ask_until_other_is_served(length: int) -> None:
        for _ in range(rounds):
            await backend.capture(SIXTEEN[:1], ["resid_post.0"], max_new_tokens=length)
            if "other" in ended:
                return
            ended.append("same")

    async def contend() -> None:
        # Different lengths, so that one stream is always in flight when the other asks again.
        streams = [asyncio.ensure_future(ask_until_other_is_served(n)) for n in (5, 8, 13)]
        await backend.capture(SIXTEEN[:1], ["resid_post.0"], max_new_tokens=24)
        ended.clear()
        await backend.capture(SIXTEEN[1:2], ["mlp_out.1"], max_new_tokens=2)
        ended.append("other")
        await asyncio.gather(*streams)

    loop.run_until_complete(contend())
    # Only what was in flight, one capture of each stream at most, may end before it.
    assert ended.count("same") <= 3
    assert ended[-1] == "other"


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
        await asyncio.sleep(0)  # the task now cleans up: a second cancellation must not cut it off
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


def test_a_failing_request_ends_those_beside_it_before_other_taps_are_installed(
    loop: asyncio.AbstractEventLoop, backend: AsyncVLLMBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = backend._generate
    cancelled: list[str] = []

    async def second_fails(owner: str, request: Request, params: SamplingParams) -> list[int]:
        if request.id == "r1":
            params.max_tokens = 3
            await generate(owner, request, params)  # by then the one beside it runs too
            raise RuntimeError("the second request broke")
        try:
            return await generate(owner, request, params)
        except asyncio.CancelledError:
            cancelled.append(request.id)
            raise

    with monkeypatch.context() as patch:
        patch.setattr(backend, "_generate", second_fails)
        with pytest.raises(RuntimeError, match="the second request broke"):
            loop.run_until_complete(backend.capture(SIXTEEN[:2], LAYERS, max_new_tokens=400))
    assert cancelled == ["r0"]

    async def other_plan() -> tuple[Capture, list[str]]:
        capture = await backend.capture(SIXTEEN[2:3], ["mlp_out.1"], max_new_tokens=4)
        return capture, await backend._call("tapcheck_discard", "[]")

    capture, replies = loop.run_until_complete(other_plan())
    assert len(capture) == 5 + 3
    assert replies == ['{"ok": 0}']


def test_a_discard_that_fails_does_not_hide_what_went_wrong(
    loop: asyncio.AbstractEventLoop, backend: AsyncVLLMBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = backend._call
    refused: list[str] = []

    async def no_discard(method: str, argument: str) -> list[str]:
        if method == "tapcheck_discard":
            refused.append(method)
            raise EngineError("the engine is gone")
        return await call(method, argument)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "_call", no_discard)
        with pytest.raises(SelectorError, match="'r0'"):
            loop.run_until_complete(backend.capture(SIXTEEN[:1], LAYERS, [400], max_new_tokens=2))
    assert refused


def test_taps_that_another_client_removed_are_installed_anew_after_the_error(
    loop: asyncio.AbstractEventLoop, backend: AsyncVLLMBackend
) -> None:
    async def capture() -> Capture:
        return await backend.capture(SIXTEEN[:1], LAYERS, max_new_tokens=2)

    expected = loop.run_until_complete(capture())
    loop.run_until_complete(backend._engine.collective_rpc("tapcheck_uninstall", args=(0,)))
    with pytest.raises(CaptureError):
        loop.run_until_complete(capture())
    assert loop.run_until_complete(capture()) == expected


def test_an_engine_that_does_not_start_is_an_engine_error(
    loop: asyncio.AbstractEventLoop, llama: Path
) -> None:
    with pytest.raises(EngineError, match=r"vLLM did not start .*no_such_argument"):
        loop.run_until_complete(AsyncVLLMBackend.start(llama, no_such_argument=1))


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


def test_a_killed_engine_core_fails_every_capture_in_flight(
    loop: asyncio.AbstractEventLoop, backend: AsyncVLLMBackend
) -> None:
    """The last test of this module: no engine is left after it."""

    async def killed_midway() -> list[Capture | BaseException]:
        captures = [
            asyncio.ensure_future(backend.capture([request], LAYERS, max_new_tokens=900))
            for request in SIXTEEN[:4]
        ]
        await asyncio.sleep(0.3)
        processes = psutil.Process().children()
        next(p for p in processes if "EngineCore" in _command(p)).kill()
        return await asyncio.gather(*captures, return_exceptions=True)

    for error in loop.run_until_complete(killed_midway()):
        assert isinstance(error, EngineError)
        assert "start another" in str(error)
    with pytest.raises(EngineError, match="its process has ended"):
        loop.run_until_complete(backend.capture(SIXTEEN[:1], LAYERS))
