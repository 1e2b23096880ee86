"""The vLLM backend over vLLM's `AsyncLLM`: captures that run concurrently."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from tapcheck.capture import Capture
from tapcheck.errors import EngineError, first_line
from tapcheck.handover import HandoverError, Receiver
from tapcheck.models import layer_count, load_config, require_vocabulary
from tapcheck.request import Request
from tapcheck.runs import (
    Plan,
    assemble,
    check_requests,
    finished,
    make_plan,
    owner_keys,
    prompt_to_run,
)
from tapcheck.sites import Site
from tapcheck.taps import require_all
from tapcheck.transport import RowBatch
from tapcheck.vllm.backend import DEFAULT_MAX_BUFFER_BYTES
from tapcheck.vllm.engine import (
    capture_metadata,
    engine_arguments,
    engine_environment,
    make_graph,
)
from tapcheck.vllm.liveness import wake_those_waiting_when_it_dies
from tapcheck.vllm.protocol import (
    decode,
    drain_arguments,
    engine_errors,
    in_step,
    received,
    sites_of_all,
    unreachable,
)
from tapcheck.vllm.sampling import captured, most_new_tokens, one_for_each

if TYPE_CHECKING:
    from vllm import SamplingParams

T = TypeVar("T")


class AsyncVLLMBackend:
    """Captures inside vLLM's `AsyncLLM`, whose engine core always runs in a subprocess.

    Any number of `capture` calls may run at once on one event loop; those that ask for other
    sites or selectors than the ones in flight wait for them, and those asked for later wait
    behind. Start it with `await AsyncVLLMBackend.start(model)`.
    """

    name = "vllm"

    def __init__(
        self, engine: Any, model: str, metadata: Mapping[str, Any], max_buffer_bytes: int
    ) -> None:
        self._engine: Any = engine
        self._max_buffer_bytes = max_buffer_bytes
        self._calls = itertools.count()
        self._model = model
        self._config = load_config(model)
        self.metadata = metadata
        self._keys = owner_keys()
        self._receiver = Receiver()
        self._installed: Plan | None = None
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._turn = asyncio.Lock()
        self._drains = asyncio.Lock()

    @classmethod
    async def start(
        cls,
        model: str | Path,
        *,
        dtype: str = "float32",
        max_buffer_bytes: int = DEFAULT_MAX_BUFFER_BYTES,
        graph_layers: Iterable[int] | None = None,
        graph_taps: Iterable[str | Site] = (),
        **engine_args: Any,
    ) -> AsyncVLLMBackend:
        """Start an engine; arguments and errors as for `VLLMBackend`."""
        graph = make_graph(graph_layers, graph_taps, layer_count(load_config(model)))
        arguments = engine_arguments(model, dtype, False, graph, engine_args)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            with engine_environment(False, graph):
                engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except Exception as error:
            reason = first_line(error)
            raise EngineError(f"vLLM did not start {str(model)!r}: {reason}") from error
        try:
            wake_those_waiting_when_it_dies(engine.engine_core)
            settings = decode((await _ask(engine, "tapcheck_describe", -1))[0])
            metadata = capture_metadata(str(model), dtype, False, settings)
            return cls(engine, str(model), metadata, max_buffer_bytes)
        except BaseException:
            engine.shutdown()
            raise

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return layer_count(self._config)

    async def capture(
        self,
        requests: Sequence[Request],
        sites: Iterable[str | Site],
        select: Iterable[int | str] = ("all",),
        *,
        max_new_tokens: int = 16,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        read_prefix_cache: bool = False,
    ) -> Capture:
        """Run `requests` concurrently and capture `sites`; see `VLLMBackend.capture`.

        Request ids need to be unique within one call only.
        """
        each = one_for_each(sampling_params, requests)
        new_tokens = [most_new_tokens(wanted, max_new_tokens) for wanted in each]
        check_requests(requests, new_tokens, self.metadata["engine"]["max_model_len"])
        require_vocabulary(self._model, self._config, requests)
        plan = make_plan(sites, select, self.num_layers)
        metadata = {**self.metadata, "select": plan.select}
        owners = {next(self._keys): request for request in requests}
        params = [
            captured(
                request,
                owner,
                most,
                wanted,
                plan=plan,
                speculative=self.metadata["engine"]["speculative"],
                read_prefix_cache=read_prefix_cache,
            )
            for (owner, request), wanted, most in zip(owners.items(), each, new_tokens, strict=True)
        ]
        exact = max_new_tokens if sampling_params is None else None
        async with self._tapped(plan):
            try:
                generated = await _all_or_none(
                    self._generate(owner, request, wanted)
                    for (owner, request), wanted in zip(owners.items(), params, strict=True)
                )
                runs = {
                    owner: finished(request, tokens, exact)
                    for (owner, request), tokens in zip(owners.items(), generated, strict=True)
                }
                batch = await self._drain(runs)
                return assemble(runs, plan, batch, metadata, allow_cached=read_prefix_cache)
            except BaseException:
                self._installed = None  # whatever went wrong: the next capture taps anew
                await _to_the_end(self._discard(list(owners)))
                raise

    async def _generate(self, owner: str, request: Request, params: SamplingParams) -> list[int]:
        prompt = {"prompt_token_ids": list(prompt_to_run(request))}
        tokens: list[int] = []
        with engine_errors():
            async for output in self._engine.generate(prompt, params, request_id=owner):
                tokens = list(output.outputs[0].token_ids)
        return tokens

    @contextlib.asynccontextmanager
    async def _tapped(self, plan: Plan) -> AsyncIterator[None]:
        """Hold the engine tapped by `plan`: installed anew when no capture is in flight."""
        # The lock is first come, first served, and held while waiting for the engine to be idle:
        # so captures of the installed plan can't keep one of another plan waiting for ever.
        async with self._turn:
            if plan != self._installed:
                await self._idle.wait()
                self._installed = None
                arguments = plan.install_arguments(self.num_layers, self._max_buffer_bytes)
                replies = await self._call("tapcheck_install", arguments)
                tapped = sites_of_all(replies, self.num_layers)
                require_all(plan.sites, tapped, self.metadata["engine"]["architecture"])
                self._installed = plan
            self._in_flight += 1
            self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _drain(self, runs: Mapping[str, Request]) -> RowBatch:
        async with self._drains:
            replies = await self._call("tapcheck_drain_packed", drain_arguments(runs))
            try:
                return received(replies, self._receiver, runs)
            except HandoverError:  # other processes, but not of this machine
                return received(await self._call("tapcheck_resend"), self._receiver, runs)

    async def _discard(self, owners: list[str]) -> None:
        with contextlib.suppress(EngineError):  # what led here is what the caller must see
            await self._call("tapcheck_discard", json.dumps(owners))

    async def _call(self, method: str, *arguments: str) -> list[Any]:
        if self._engine is None:
            raise EngineError("this backend was closed: make a new one")
        return await _ask(self._engine, method, next(self._calls), *arguments)

    def close(self) -> None:
        """End the engine's processes."""
        engine, self._engine = self._engine, None
        self._receiver.close()
        if engine is not None:
            engine.shutdown()

    async def __aenter__(self) -> AsyncVLLMBackend:
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()


async def _ask(engine: Any, method: str, call: int, *arguments: str) -> list[Any]:
    try:
        replies: list[Any] = await engine.collective_rpc(method, args=(call, *arguments))
    except Exception as error:
        raise EngineError(unreachable(error)) from error
    return in_step(method, call, replies)


async def _all_or_none(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Every result, in order; after an error or a cancellation nothing runs on behind it."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        return [task.result() for task in tasks]
    except BaseException:
        for task in tasks:
            task.cancel()
        await _to_the_end(asyncio.gather(*tasks, return_exceptions=True))
        raise


async def _to_the_end(work: Awaitable[object]) -> None:
    """Await `work` until it is done, even if the caller is cancelled (again) meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
