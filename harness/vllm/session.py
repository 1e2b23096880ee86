"""Requests that join, run and leave a tapped engine, step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tapcheck.capture import Capture
from tapcheck.errors import CaptureError, EngineError
from tapcheck.request import Request
from tapcheck.runs import Plan, assemble, finished, prompt_to_run
from tapcheck.transport import RowBatch
from tapcheck.vllm.protocol import engine_errors
from tapcheck.vllm.sampling import captured, most_new_tokens, one_for_each

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

Check = Callable[[Sequence[Request], Sequence[int]], None]
Drain = Callable[[Mapping[str, Request]], RowBatch]
Discard = Callable[[list[str]], None]


class Session:
    """A capture under way: add requests, step the engine, collect what has ended.

    Made by `VLLMBackend.session`. Requests may join between any two steps; a request id may be
    used again once the request that had it was collected or aborted.
    """

    def __init__(
        self,
        engine: Any,
        plan: Plan,
        keys: Iterator[str],
        check: Check,
        drain: Drain,
        discard: Discard,
        metadata: Mapping[str, Any],
        *,
        read_prefix_cache: bool,
    ) -> None:
        self._engine = engine  # vllm's LLMEngine
        self._plan = plan
        self._keys = keys
        self._check = check
        self._drain = drain
        self._discard = discard
        self._metadata = metadata
        self._read_prefix_cache = read_prefix_cache
        self._running: dict[str, Request] = {}  # by owner, and so are the next two
        self._exact: dict[str, int] = {}  # how many tokens those must generate that none stops
        self._ended: dict[str, Request] = {}

    @property
    def unfinished(self) -> list[str]:
        """The ids of the requests that wait or run."""
        return [request.id for request in self._running.values()]

    def add_request(
        self,
        request: Request,
        sampling_params: SamplingParams | None = None,
        *,
        max_new_tokens: int = 16,
    ) -> None:
        """Queue a request; without `sampling_params` it is decoded greedily past any stop token.

        Raises CaptureError for one that doesn't fit the engine, whose id is in use, or whose
        parameters sample more than once.
        """
        self._queue([request], [sampling_params], max_new_tokens)

    def _queue(
        self,
        requests: Sequence[Request],
        each: Sequence[SamplingParams | None],
        max_new_tokens: int,
    ) -> None:
        """Queue requests with the parameters of each, once all are sure to fit."""
        taken = {request.id for request in (*self._running.values(), *self._ended.values())}
        for request in requests:
            if isinstance(request, Request) and request.id in taken:
                raise CaptureError(
                    f"request id {request.id!r} is in use: collect or abort the request that has "
                    "it, or give this one another id"
                )
        new_tokens = [most_new_tokens(params, max_new_tokens) for params in each]
        self._check(requests, new_tokens)
        for request, wanted, most in zip(requests, each, new_tokens, strict=True):
            owner = next(self._keys)
            params = captured(
                request,
                owner,
                most,
                wanted,
                plan=self._plan,
                speculative=self._metadata["engine"]["speculative"],
                read_prefix_cache=self._read_prefix_cache,
            )
            prompt = {"type": "token", "prompt_token_ids": list(prompt_to_run(request))}
            with engine_errors():
                self._engine.add_request(owner, prompt, params)
            self._running[owner] = request
            if wanted is None:
                self._exact[owner] = most

    def step(self) -> list[RequestOutput]:
        """Run the engine once; returns vLLM's outputs of the requests that ended, by caller's id.

        Raises EngineError when the engine fails, as when its process was killed.
        """
        with engine_errors():
            outputs = self._engine.step()
        ended = []
        for output in outputs:
            request = self._running.get(output.request_id)
            if request is not None and output.finished:
                owner = output.request_id
                tokens = output.outputs[0].token_ids
                self._ended[owner] = finished(request, tokens, self._exact.pop(owner, None))
                del self._running[owner]
                output.request_id = request.id
                ended.append(output)
        return ended

    def run(
        self,
        requests: Sequence[Request],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_new_tokens: int = 16,
    ) -> list[RequestOutput]:
        """Queue requests and step until none is left; returns what `step` did, of all that ended.

        `sampling_params` are for all requests, or one for each. Raises as `add_request` and `step`.
        """
        self._queue(requests, one_for_each(sampling_params, requests), max_new_tokens)
        ended = []
        while self._running:
            ended += self.step()
        return ended

    def abort_request(self, request_id: str) -> None:
        """End a waiting or running request and forget its rows; raises KeyError for no such id."""
        owner = next((o for o, r in self._running.items() if r.id == request_id), None)
        if owner is None:
            raise KeyError(f"no request {request_id!r} is waiting or running")
        del self._running[owner]
        self._exact.pop(owner, None)
        with engine_errors():
            self._engine.abort_request([owner])
        self._discard([owner])

    def collect(self) -> Capture:
        """The capture of the requests that ended since the last collect, in the order of joining.

        Raises CaptureError, and forgets them, when a row that is due was not delivered.
        """
        runs = {owner: self._ended.pop(owner) for owner in sorted(self._ended, key=_joined)}
        if not runs:
            raise CaptureError("no request has ended since the last collect: step the engine first")
        batch = self._drain(runs)
        return assemble(
            runs, self._plan, batch, self._metadata, allow_cached=self._read_prefix_cache
        )

    def abandon(self) -> None:
        """Abort what runs and forget every row; says nothing when the engine is gone."""
        owners = [*self._running, *self._ended]
        self._running, self._exact, self._ended = {}, {}, {}
        if not owners:
            return
        with contextlib.suppress(Exception):
            self._engine.abort_request(owners)
        with contextlib.suppress(EngineError):
            self._discard(owners)


def _joined(owner: str) -> int:
    return int(owner.rsplit("/", 1)[1])
