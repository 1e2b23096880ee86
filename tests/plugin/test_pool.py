"""The engine pool: which engine is given, and that nothing of it is left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch

from tapcheck.checks import assert_captures_match
from tapcheck.errors import CaptureError, EngineError, ModelError, SelectorError, SiteError
from tapcheck.fixtures.guard import descendants, start_guard
from tapcheck.fixtures.pool import EnginePool
from tapcheck.vllm import backend as vllm_backend

FOREVER = [sys.executable, "-c", "import signal; signal.pause()"]


class FakeBackend:
    """Stands for VLLMBackend: starts a process where a real one would."""

    live: ClassVar[list[FakeBackend]]
    closes_its_process = True
    fails = False

    def __init__(self, model: str | Path, *, dtype: str, in_process: bool, **engine_args: Any):
        self.arguments = (str(model), dtype, in_process, engine_args)
        self.process = None if in_process else subprocess.Popen(FOREVER)
        if self.fails:
            raise KeyboardInterrupt
        self.live.append(self)

    def close(self) -> None:
        self.live.remove(self)
        if self.process is not None and self.closes_its_process:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> type[FakeBackend]:
    class Backend(FakeBackend):
        live: ClassVar[list[FakeBackend]] = []

    monkeypatch.setattr(vllm_backend, "VLLMBackend", Backend)
    monkeypatch.setattr("tapcheck.fixtures.pool._GRACE_SECONDS", 0.1)
    return Backend


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    pool = EnginePool()
    yield pool
    pool.close()


def test_the_same_arguments_get_the_same_engine(
    pool: EnginePool, backends: type[FakeBackend]
) -> None:
    first = pool.acquire("m", block_size=32, seed=1)
    assert pool.acquire(Path("m"), seed=1, block_size=32, dtype="float32") is first
    assert first.arguments == ("m", "float32", True, {"block_size": 32, "seed": 1})


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"},
        {"dtype": "bfloat16"},
        {"in_process": False},
        {"block_size": 64},
        {"seed": 1},
    ],
)
def test_any_other_argument_gets_another_engine_and_closes_the_first(
    pool: EnginePool, backends: type[FakeBackend], other: dict[str, Any]
) -> None:
    first: Any = pool.acquire("m", block_size=32)
    second: Any = pool.acquire(**{"model": "m", "block_size": 32, **other})
    assert second is not first
    assert backends.live == [second]


def test_after_closing_a_new_engine_is_started(
    pool: EnginePool, backends: type[FakeBackend]
) -> None:
    first = pool.acquire("m")
    pool.close()
    pool.close()
    assert backends.live == []
    assert pool.acquire("m") is not first


def test_closing_ends_the_engines_processes_and_the_guard(
    pool: EnginePool, backends: type[FakeBackend]
) -> None:
    before = set(psutil.Process().children(recursive=True))
    pool.acquire("m", in_process=False)
    assert len(set(psutil.Process().children(recursive=True)) - before) == 2
    assert pool.leaked_processes() == []
    pool.close()
    assert set(psutil.Process().children(recursive=True)) <= before
    assert pool.leaked_processes() == []


def test_a_process_that_an_engine_leaves_behind_is_killed_and_named(
    pool: EnginePool, backends: type[FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "closes_its_process", False)
    backend: Any = pool.acquire("m", in_process=False)
    with pytest.warns(ResourceWarning, match=rf"left behind were killed: {backend.process.pid}"):
        pool.close()
    assert not psutil.pid_exists(backend.process.pid)
    assert pool.leaked_processes() == []


def test_a_leak_is_seen(
    pool: EnginePool, backends: type[FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "closes_its_process", False)
    backend: Any = pool.acquire("m", in_process=False)
    with monkeypatch.context() as patch:
        patch.setattr("tapcheck.fixtures.pool.end", lambda *_: [])
        pool.close()
    assert [process.pid for process in pool.leaked_processes()] == [backend.process.pid]
    with pytest.warns(ResourceWarning, match="killed"):
        pool.close()


@pytest.mark.filterwarnings("ignore:processes that an engine left behind:ResourceWarning")
def test_an_engine_that_is_interrupted_while_it_starts_leaves_nothing(
    pool: EnginePool, backends: type[FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "fails", True)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(KeyboardInterrupt):
        pool.acquire("m", in_process=False)
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.parametrize(
    ("error", "handed_on"),
    [
        (ModelError, True),
        (SelectorError, True),
        (SiteError, True),
        (CaptureError, False),
        (RuntimeError, False),
        (KeyboardInterrupt, False),
    ],
)
def test_after_a_failed_capture_an_engine_is_handed_on_only_if_nothing_ran(
    pytester: pytest.Pytester,
    backends: type[FakeBackend],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    handed_on: bool,
) -> None:
    def capture(*_: object, **__: object) -> None:
        raise error("stopped")

    monkeypatch.setattr(backends, "capture", capture, raising=False)
    monkeypatch.setattr(backends, "sites", ("resid_post.0",), raising=False)
    monkeypatch.setattr("tapcheck.fixtures.captures._require_device", lambda _: None)
    pytester.makepyfile(
        f"""
        import pytest

        def test_it(engine_pool, vllm_capture):
            engine = engine_pool.acquire("m")
            with pytest.raises(BaseException, match="stopped"):
                vllm_capture("m")
            assert (engine_pool.acquire("m") is engine) is {handed_on}
        """
    )
    pytester.runpytest("--tapcheck-device=cpu").assert_outcomes(passed=1)


def test_processes_of_others_are_left_alone(pool: EnginePool, backends: type[FakeBackend]) -> None:
    earlier = subprocess.Popen(FOREVER)
    pool.acquire("m", in_process=False)
    later = subprocess.Popen(FOREVER)
    try:
        pool.close()
        assert earlier.poll() is None
        assert later.poll() is None
    finally:
        for process in (earlier, later):
            process.kill()
            process.wait()


@pytest.mark.parametrize("moment", ["while its engine starts", "when its engine is up"])
def test_a_guard_ends_the_engine_of_a_process_that_dies(
    run_python: Callable[[str], str], moment: str
) -> None:
    # Dies without a chance to clean up, as when a time limit fires.
    script = f"""
import os, subprocess
import tapcheck.fixtures.pool, tapcheck.vllm.backend
from tapcheck.fixtures.pool import EnginePool

class Backend:
    def __init__(self, model, **arguments):
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen({FOREVER!r}, stdout=quiet, stderr=quiet)
        print(self.process.pid, flush=True)
        if {moment!r} == "while its engine starts":
            wait_for_a_look_by_the_guard()
            os._exit(0)

def wait_for_a_look_by_the_guard():
    import psutil
    [guard] = [p for p in psutil.Process().children() if "tapcheck.fixtures.guard" in p.cmdline()]
    looks = guard.num_ctx_switches().voluntary
    while guard.num_ctx_switches().voluntary < looks + 2:
        pass

tapcheck.vllm.backend.VLLMBackend = Backend
EnginePool().acquire("m", in_process=False)
os._exit(0)
"""
    pid = int(run_python(script))
    alive = [process for process in psutil.process_iter() if process.pid == pid]
    _, alive = psutil.wait_procs(alive, timeout=30)
    assert alive == []


def test_a_guard_that_cannot_start_is_an_error_that_says_why() -> None:
    with pytest.raises(EngineError, match=r"guards the engine did not start: (?s:.)*NoSuchProcess"):
        start_guard(2**30, [])


MEMORY = """
import gc, torch
from tapcheck.fixtures.pool import EnginePool
from tapcheck.request import Request

def live_bytes():
    gc.unfreeze()  # vLLM hides what a live engine has from the collector
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    storages = [t.untyped_storage() for t in tensors if t.layout == torch.strided]
    return sum({store._cdata: store.nbytes() for store in storages}.values())

pool = EnginePool()
for model in MODELS:
    pool.acquire(model).capture([Request("r", (5, 9))], ["resid_post.0"])
    live = live_bytes()
    pool.close()
    print("bytes", live, live_bytes(), pool.leaked_processes())
"""


@pytest.mark.engine
def test_memory_is_given_back(
    engine_pool: EnginePool, model_zoo: Callable[[str], Path], run_python: Callable[[str], str]
) -> None:
    engine_pool.close()
    models = [str(model_zoo(name)) for name in ("llama", "gpt2", "llama")]
    printed = run_python(MEMORY.replace("MODELS", repr(models)))
    lines = [line.split() for line in printed.splitlines() if line.startswith("bytes ")]
    assert len(lines) == 3
    for _, live, left, *leaked in lines:
        assert int(live) > 2**29  # the KV cache alone has 1 GiB
        assert int(left) < 2**20
        assert leaked == ["[]"]


@pytest.mark.gpu
@pytest.mark.engine
def test_gpu_memory_is_given_back(
    engine_pool: EnginePool, model_zoo: Callable[[str], Path]
) -> None:
    engine_pool.close()
    before = torch.cuda.memory_reserved()
    for name in ("llama", "gpt2"):
        engine_pool.acquire(model_zoo(name), gpu_memory_utilization=0.3)
        assert torch.cuda.memory_reserved() > before + 2**29
        engine_pool.close()
        assert torch.cuda.memory_reserved() < before + 2**26


@pytest.mark.engine
def test_captures_of_both_engines_match(tiny_model: Path, capture_pair: Any) -> None:
    actual, expected = capture_pair(tiny_model)
    comparison = assert_captures_match(actual, expected)
    assert comparison.rows_compared > 500
    assert actual.requests == expected.requests


@pytest.mark.engine
@pytest.mark.slow
def test_an_engine_in_a_subprocess_ends_with_its_processes(
    engine_pool: EnginePool, vllm_capture: Any, model_zoo: Callable[[str], Path]
) -> None:
    engine_pool.close()
    before = descendants(psutil.Process())
    vllm_capture(model_zoo("llama"), sites=["resid_post.0"], in_process=False)
    assert len(descendants(psutil.Process()) - before) >= 2  # the engine core and a worker
    engine_pool.close()
    assert descendants(psutil.Process()) <= before
    assert engine_pool.leaked_processes() == []
