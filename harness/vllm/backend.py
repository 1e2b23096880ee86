"""The vLLM backend over vLLM's `LLM`."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tapcheck.capture import Capture
from tapcheck.errors import EngineError, first_line
from tapcheck.handover import HandoverError, Receiver
from tapcheck.models import layer_count, load_config, require_vocabulary
from tapcheck.request import Request
from tapcheck.runs import Plan, check_requests, make_plan, owner_keys
from tapcheck.selectors import parse_selectors
from tapcheck.sites import Site
from tapcheck.taps import require_all
from tapcheck.transport import RowBatch
from tapcheck.vllm.engine import (
    Graph,
    capture_metadata,
    engine_arguments,
    engine_environment,
    make_graph,
    release_engine_memory,
    require_tested_vllm,
)
from tapcheck.vllm.liveness import wake_those_waiting_when_it_dies
from tapcheck.vllm.protocol import (
    decode,
    drain_arguments,
    in_step,
    received,
    sites_of_all,
    unreachable,
)
from tapcheck.vllm.session import Discard, Session

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


# How many bytes of rows a worker holds for requests that nobody collects, unless told otherwise.
DEFAULT_MAX_BUFFER_BYTES = 4 << 30


class VLLMBackend:
    """Captures inside vLLM, in an engine that it starts itself.

    The engine is eager, and any site can be captured by forward hooks, unless `graph_layers` or
    `graph_taps` is given: then it is compiled, and the taps are part of the compiled forward.
    `graph_layers` names the layers whose `resid_post` comes out as auxiliary output, for models
    with vLLM's EAGLE-3 interface; `graph_taps` names other sites, each copied through a buffer of
    max_num_batched_tokens rows. No other site can be captured then, but for `logits`.

    `in_process=True` runs the engine core in this process (a new engine takes seconds);
    `in_process=False` runs it in a subprocess, as vLLM does by default. `engine_args` go to
    `vllm.LLM`. A worker that holds more than `max_buffer_bytes` of rows, because nobody collects
    them, ends the capture with an error. Raises ModelError, EngineError, UnsupportedVersionError
    or KnownIssueError before the engine is built.
    """

    name = "vllm"
    _llm: Any = None
    _owns_engine = True
    _in_process = False

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "float32",
        in_process: bool = True,
        max_buffer_bytes: int = DEFAULT_MAX_BUFFER_BYTES,
        graph_layers: Iterable[int] | None = None,
        graph_taps: Iterable[str | Site] = (),
        **engine_args: Any,
    ) -> None:
        graph = make_graph(graph_layers, graph_taps, layer_count(load_config(model)))
        arguments = engine_arguments(model, dtype, in_process, graph, engine_args)
        # No local variable for the engine: an exception that vLLM logs keeps this frame alive.
        try:
            self._use(
                _start(arguments, in_process, graph),
                str(model),
                dtype,
                in_process,
                max_buffer_bytes,
            )
        except BaseException:
            self.close()
            raise

    @classmethod
    def attach(cls, llm: Any, *, max_buffer_bytes: int = DEFAULT_MAX_BUFFER_BYTES) -> VLLMBackend:
        """Capture from a `vllm.LLM` of your own; closing the backend leaves it running.

        It must have been started with `worker_extension_cls` set to
        "tapcheck.vllm.worker.TapcheckWorkerExtension", or with TAPCHECK_ATTACH=1 in the
        environment, and with enforce_eager=True.
        """
        require_tested_vllm()
        backend = cls.__new__(cls)
        config = llm.llm_engine.vllm_config.model_config
        in_process = type(llm.llm_engine.engine_core).__name__ == "InprocClient"
        dtype = str(config.dtype).removeprefix("torch.")
        backend._use(llm, str(config.model), dtype, in_process, max_buffer_bytes)
        backend._owns_engine = False
        return backend

    def _use(
        self, llm: Any, model: str, dtype: str, in_process: bool, max_buffer_bytes: int
    ) -> None:
        self._receiver = Receiver()
        self._llm = llm
        wake_those_waiting_when_it_dies(llm.llm_engine.engine_core)
        self._max_buffer_bytes = max_buffer_bytes
        self._calls = itertools.count()
        self._in_process = in_process
        self._one_at_a_time = threading.Lock()
        self._keys = owner_keys()
        self._installed: Plan | None = None
        self._model = model
        self._config = load_config(model)
        settings = decode(self._call("tapcheck_describe")[0])
        # With more ranks the workers are processes of their own, wherever the core is.
        self._by_reference = in_process and settings["workers"] == 1
        self.metadata: Mapping[str, Any] = capture_metadata(model, dtype, in_process, settings)

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return layer_count(self._config)

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every site that this model has, in execution order."""
        return sites_of_all(self._call("tapcheck_sites", str(self.num_layers)), self.num_layers)

    def capture(
        self,
        requests: Sequence[Request],
        sites: Iterable[str | Site],
        select: Iterable[int | str] = ("all",),
        *,
        max_new_tokens: int = 16,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        read_prefix_cache: bool = False,
    ) -> Capture:
        """Run `requests` as one batch and capture `sites` at the selected positions.

        See `Backend.capture`. `sampling_params`, one for all requests or one for each, take the
        place of `max_new_tokens` greedy tokens; a request may then end early, at a stop token or
        string. A request whose selected positions vLLM's prefix cache may hold doesn't read the
        cache, unless `read_prefix_cache`: then the capture has no rows there, and lists these
        positions under `metadata["cached"]`. Raises CaptureError rather than return a capture
        with a gap.
        """
        with self.session(sites, select, read_prefix_cache=read_prefix_cache) as session:
            session.run(requests, sampling_params, max_new_tokens=max_new_tokens)
            return session.collect()

    @contextlib.contextmanager
    def session(
        self,
        sites: Iterable[str | Site],
        select: Iterable[int | str] = ("all",),
        *,
        read_prefix_cache: bool = False,
    ) -> Iterator[Session]:
        """A context in which requests join, run and leave step by step; see `Session`.

        One session or capture runs at a time; others wait. What still runs when the context ends
        is aborted, and rows that nobody collected are forgotten. Arguments as for `capture`.
        """
        plan = make_plan(sites, select, self.num_layers)
        with self._one_at_a_time:
            self._install(plan)
            with self._running(plan, read_prefix_cache, self._discard) as session:
                yield session

    def generate_untapped(
        self,
        requests: Sequence[Request],
        select: Iterable[int | str] = ("all",),
        *,
        max_new_tokens: int = 16,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Run `requests` as a capture of these selectors does, with no tap installed.

        Returns vLLM's outputs, by the caller's ids and in the order of `requests`. Arguments and
        errors as for `capture`: beside it, this shows what capture costs or changes.
        """
        with self._one_at_a_time:
            self._uninstall()
            plan = Plan((), parse_selectors(select))
            with self._running(plan, False, lambda _owners: None) as session:
                ended = session.run(requests, sampling_params, max_new_tokens=max_new_tokens)
        outputs = {output.request_id: output for output in ended}
        return [outputs[request.id] for request in requests]

    def reset_prefix_cache(self) -> None:
        """Empty vLLM's prefix cache, so that the next request computes every position itself.

        Raises EngineError while requests of an engine of your own run in it.
        """
        with self._one_at_a_time:
            if not self._engine().reset_prefix_cache():
                raise EngineError(
                    "vLLM did not empty its prefix cache: requests are running, which hold blocks "
                    "of it. Let them end first"
                )

    @contextlib.contextmanager
    def _running(self, plan: Plan, read_prefix_cache: bool, discard: Discard) -> Iterator[Session]:
        """A session of this plan, whose taps are in place, and its end."""
        session = Session(
            self._engine(),
            plan,
            self._keys,
            self._check,
            self._drain,
            discard,
            {**self.metadata, "select": plan.select},
            read_prefix_cache=read_prefix_cache,
        )
        try:
            yield session
        except BaseException:
            self._installed = None  # whatever went wrong: the next capture taps anew
            raise
        finally:
            session.abandon()

    def _engine(self) -> Any:
        """vLLM's LLMEngine; raises EngineError when the backend was closed."""
        if self._llm is None:
            raise EngineError("this backend was closed: make a new one")
        return self._llm.llm_engine

    def _check(self, requests: Sequence[Request], new_tokens: Sequence[int]) -> None:
        """Raise CaptureError for requests that this engine can't run."""
        check_requests(requests, new_tokens, self.metadata["engine"]["max_model_len"])
        require_vocabulary(self._model, self._config, requests)

    def _install(self, plan: Plan) -> None:
        if plan == self._installed:
            return
        self._installed = None
        arguments = plan.install_arguments(self.num_layers, self._max_buffer_bytes)
        tapped = sites_of_all(self._call("tapcheck_install", arguments), self.num_layers)
        require_all(plan.sites, tapped, self.metadata["engine"]["architecture"])
        self._installed = plan

    def _uninstall(self) -> None:
        self._installed = None
        for reply in self._call("tapcheck_uninstall"):
            decode(reply)

    def _drain(self, runs: Mapping[str, Request]) -> RowBatch:
        try:
            return self._drained(runs)
        except BaseException:
            self._installed = None  # the taps may have failed: the next capture taps anew
            raise

    def _drained(self, runs: Mapping[str, Request]) -> RowBatch:
        owners = drain_arguments(runs)
        if self._by_reference:
            (reply,) = self._call("tapcheck_drain", owners)
            batch: RowBatch = decode(reply) if isinstance(reply, str) else reply
            return batch
        replies = self._call("tapcheck_drain_packed", owners)
        try:
            return received(replies, self._receiver, runs)
        except HandoverError:  # other processes, but not of this machine
            return received(self._call("tapcheck_resend"), self._receiver, runs)

    def _discard(self, owners: list[str]) -> None:
        for reply in self._call("tapcheck_discard", json.dumps(owners)):
            decode(reply)

    def _call(self, method: str, *arguments: str) -> list[Any]:
        self._engine()
        call = next(self._calls)
        try:
            replies: list[Any] = self._llm.collective_rpc(method, args=(call, *arguments))
        except Exception as error:
            raise EngineError(unreachable(error)) from error
        return in_step(method, call, replies)

    def close(self) -> None:
        """End the engine and its processes and give back its memory."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        self._receiver.close()
        if not self._owns_engine:
            llm.collective_rpc("tapcheck_uninstall", args=(next(self._calls),))
            return
        llm.llm_engine.engine_core.shutdown()
        del llm
        if self._in_process:
            release_engine_memory()

    def __enter__(self) -> VLLMBackend:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()


def _start(arguments: dict[str, Any], in_process: bool, graph: Graph | None) -> Any:
    from vllm import LLM

    try:
        with engine_environment(in_process, graph):
            return LLM(**arguments)
    except Exception as error:
        model, reason = arguments["model"], first_line(error)
        raise EngineError(f"vLLM did not start {model!r}: {reason}") from error
