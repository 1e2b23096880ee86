"""What goes wrong while an engine runs: a clear error, no hang, and the next run works."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tapcheck.errors import CaptureError, EngineError
from tapcheck.fixtures.pool import EnginePool
from tapcheck.request import Request
from tapcheck.sites import all_sites
from tapcheck.vllm.backend import VLLMBackend

pytestmark = pytest.mark.engine

REQUESTS = [Request(f"r{n}", tuple(range(1, n + 1))) for n in (3, 20, 33)]


@pytest.fixture(params=["in process", "in a subprocess"])
def either(engine_pool: EnginePool, llama: Path, request: pytest.FixtureRequest) -> VLLMBackend:
    """An engine of this process, then one with its core in a subprocess."""
    if request.param == "in process":
        return engine_pool.acquire(llama, block_size=32, max_num_batched_tokens=64)
    return engine_pool.acquire(llama, in_process=False)


def test_the_reply_after_a_failed_call_belongs_to_the_call_after(either: VLLMBackend) -> None:
    assert len(either.capture(REQUESTS, ["resid_post.1"], max_new_tokens=2)) == 56 + 3
    for _ in range(2):
        with pytest.raises(EngineError, match="did not answer tapcheck"):
            either._call("tapcheck_nothing_of_this_name")
    assert either.sites == all_sites(4)
    assert len(either.capture(REQUESTS, ["resid_post.1"], max_new_tokens=3)) == 56 + 6


def test_a_killed_engine_core_is_a_clear_error_and_the_next_engine_works(
    engine_pool: EnginePool, llama: Path
) -> None:
    engine = engine_pool.acquire(llama, in_process=False)
    core = next(p for p in psutil.Process().children() if "EngineCore" in " ".join(p.cmdline()))

    def killed_midway() -> None:
        with engine.session(["resid_post.1"]) as session:
            for request in REQUESTS:
                session.add_request(request, max_new_tokens=900)
            session.step()
            os.kill(core.pid, signal.SIGKILL)
            while session.unfinished:
                session.step()

    with pytest.raises(EngineError, match=r"the engine failed: EngineDeadError.*start another"):
        killed_midway()
    with pytest.raises(EngineError, match="its process has ended"):
        engine.capture(REQUESTS, ["resid_post.1"])
    engine_pool.close()
    assert not engine_pool.leaked_processes()
    after = engine_pool.acquire(llama, block_size=32, max_num_batched_tokens=64)
    assert len(after.capture(REQUESTS, ["resid_post.1"], max_new_tokens=2)) == 56 + 3
    assert threading.active_count() < 50  # vLLM's own included: none is left for each engine


@pytest.fixture
def stingy(either: VLLMBackend) -> Iterator[VLLMBackend]:
    """A shared engine, of which a worker may hold 100 kB of rows."""
    attached = VLLMBackend.attach(either._llm, max_buffer_bytes=100_000)
    yield attached
    attached.close()
    either._installed = None  # the shared backend taps anew


def test_rows_that_nobody_collects_end_the_capture_and_not_the_machines_memory(
    stingy: VLLMBackend,
) -> None:
    """The error is raised in a hook of the worker, in either process, and told by the drain."""
    with stingy.session(["resid_post.1"]) as session:
        for number in range(4):  # 33 kB each, and nobody collects
            session.add_request(Request(str(number), tuple(range(1, 31))), max_new_tokens=4)
            while session.unfinished:
                session.step()
        too_much = (
            r"rows of 3 requests that nobody drained take 0\.09.* MiB, over the limit of 0\.0954"
        )
        with pytest.raises(CaptureError, match=too_much):
            session.collect()
    assert stingy._call("tapcheck_discard", "[]") == ['{"ok": 0}']
    with stingy.session(["resid_post.1"]) as session:
        for number in range(8):  # collected in time, any number is served
            session.add_request(Request(str(number), tuple(range(1, 31))), max_new_tokens=4)
            while session.unfinished:
                session.step()
            assert len(session.collect()) == 33


def test_leaving_a_session_early_aborts_what_runs(engine: VLLMBackend) -> None:
    with engine.session(["resid_post.1"]) as session:
        for request in REQUESTS:
            session.add_request(request, max_new_tokens=50)
        session.step()
    assert not engine._llm.llm_engine.has_unfinished_requests()
    assert engine._call("tapcheck_discard", "[]") == ['{"ok": 0}']


def test_an_error_inside_a_session_aborts_what_runs(engine: VLLMBackend) -> None:
    def fails() -> None:
        with engine.session(["resid_post.1"]) as session:
            session.add_request(REQUESTS[0])
            session.step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not engine._llm.llm_engine.has_unfinished_requests()
    assert len(engine.capture(REQUESTS, ["resid_post.1"], max_new_tokens=2)) == 56 + 3


def test_what_a_session_refuses_names_the_request(engine: VLLMBackend) -> None:
    with engine.session(["resid_post.1"]) as session:
        with pytest.raises(CaptureError, match="no request has ended"):
            session.collect()
        session.add_request(REQUESTS[0], max_new_tokens=2)
        with pytest.raises(CaptureError, match="request id 'r3' is in use"):
            session.add_request(REQUESTS[0])
        with pytest.raises(KeyError, match="no request 'nobody'"):
            session.abort_request("nobody")
        with pytest.raises(CaptureError, match="request 'long' needs 1036 positions"):
            session.add_request(Request("long", (1,) * 1020))
