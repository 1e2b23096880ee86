"""The vLLM backend in hook mode, over vLLM's `AsyncLLM`: captures that run concurrently."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tapcheck.capture import Capture
from tapcheck.errors import EngineError
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
    tokens_to_generate,
)
from tapcheck.sites import Site
from tapcheck.transport import RowBatch
from tapcheck.vllm.backend import read_batches, unreachable
from tapcheck.vllm.engine import capture_metadata, engine_arguments, engine_environment
from tapcheck.vllm.protocol import decode
from tapcheck.vllm.sampling import greedy


class AsyncVLLMBackend:
    """Captures inside vLLM's `AsyncLLM`, whose engine core always runs in a subprocess.

    Any number of `capture` calls may run at once on one event loop; those that ask for other
    sites or selectors than the ones in flight wait for them. Start it with
    `await AsyncVLLMBackend.start(model)`.
    """

    name = "vllm"

    def __init__(self, engine: Any, model: str, metadata: Mapping[str, Any]) -> None:
        self._engine: Any = engine
        self._model = model
        self._config = load_config(model)
        self.metadata = metadata
        self._keys = owner_keys()
        self._installed: Plan | None = None
        self._in_flight = 0
        self._idle = asyncio.Condition()
        self._drains = asyncio.Lock()

    @classmethod
    async def start(
        cls, model: str | Path, *, dtype: str = "float32", **engine_args: Any
    ) -> AsyncVLLMBackend:
        """Start an engine; arguments and errors as for `VLLMBackend`."""
        arguments = engine_arguments(model, dtype, False, engine_args)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        with engine_environment(in_process=False):
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        try:
            settings = decode((await engine.collective_rpc("tapcheck_describe"))[0])
            return cls(engine, str(model), capture_metadata(str(model), dtype, False, settings))
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
    ) -> Capture:
        """Run `requests` concurrently and capture `sites`; see `Backend.capture`.

        Request ids need to be unique within one call only.
        """
        check_requests(requests, max_new_tokens)
        require_vocabulary(self._model, self._config, requests)
        plan = make_plan(sites, select, self.num_layers)
        owners = {next(self._keys): request for request in requests}
        async with self._tapped(plan):
            try:
                generated = await asyncio.gather(
                    *(self._generate(o, r, max_new_tokens) for o, r in owners.items())
                )
                runs = {
                    owner: finished(request, tokens)
                    for (owner, request), tokens in zip(owners.items(), generated, strict=True)
                }
                batch = await self._drain({o: run.seen_length for o, run in runs.items()})
            except BaseException:
                await self._call("tapcheck_discard", json.dumps(list(owners)))
                raise
        metadata = {**self.metadata, "select": plan.select, "max_new_tokens": max_new_tokens}
        return assemble(runs, plan, batch, metadata)

    async def _generate(self, owner: str, request: Request, max_new_tokens: int) -> list[int]:
        prompt = {"prompt_token_ids": list(prompt_to_run(request))}
        sampling = greedy(tokens_to_generate(request, max_new_tokens), owner)
        tokens: list[int] = []
        async for output in self._engine.generate(prompt, sampling, request_id=owner):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    @contextlib.asynccontextmanager
    async def _tapped(self, plan: Plan) -> AsyncIterator[None]:
        """Hold the engine tapped by `plan`: installed anew when no capture is in flight."""
        async with self._idle:
            await self._idle.wait_for(lambda: plan == self._installed or not self._in_flight)
            if plan != self._installed:
                self._installed = None
                arguments = plan.install_arguments(self.num_layers)
                for reply in await self._call("tapcheck_install", arguments):
                    decode(reply)
                self._installed = plan
            self._in_flight += 1
        try:
            yield
        finally:
            async with self._idle:
                self._in_flight -= 1
                self._idle.notify_all()

    async def _drain(self, lengths: Mapping[str, int]) -> RowBatch:
        async with self._drains:
            try:
                return read_batches(await self._call("tapcheck_drain_packed", json.dumps(lengths)))
            except BaseException:
                self._installed = None  # a broken tap is installed anew by the next capture
                raise

    async def _call(self, method: str, argument: str) -> list[Any]:
        if self._engine is None:
            raise EngineError("this backend was closed: make a new one")
        try:
            replies: list[Any] = await self._engine.collective_rpc(method, args=(argument,))
        except Exception as error:
            raise EngineError(unreachable(error)) from error
        return replies

    def close(self) -> None:
        """End the engine's processes."""
        engine, self._engine = self._engine, None
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
