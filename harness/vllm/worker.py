"""What runs inside vLLM's worker: a mix-in whose methods `collective_rpc` calls.

vLLM mixes the class into its own worker class, so every name here starts with `tapcheck_`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from tapcheck.contract import Tensors, as_rows
from tapcheck.errors import CaptureError, EngineError, TapcheckError
from tapcheck.handover import Sender
from tapcheck.layout import Repeat, StepLayout
from tapcheck.rowstore import RowStore
from tapcheck.selectors import parse_selectors
from tapcheck.sites import Site, parse_sites
from tapcheck.taps import LOGITS, Put
from tapcheck.transport import RowBatch, packed_parts
from tapcheck.vllm.adapters import RunnerAdapter, adapter_for, live_settings
from tapcheck.vllm.graph import GraphTaps
from tapcheck.vllm.hooks import HookTaps
from tapcheck.vllm.loading import plan_of, split_output
from tapcheck.vllm.protocol import encode_error, encode_result

R = TypeVar("R")


class Taps(Protocol):
    """How a mode reads sites; `begin` and `end` enclose every scheduled forward pass."""

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites that this worker can read, in execution order; all but `logits`."""
        ...

    def attach(self, wanted: Sequence[Site], put: Put) -> list[Site]:
        """Call `put` for each wanted site that is in this worker; returns these."""
        ...

    def detach(self) -> None:
        """Undo `attach`."""
        ...

    def begin(self, rows: int) -> None:
        """A forward pass of that many rows comes, of which some are selected."""
        ...

    def end(self, output: Any) -> None:
        """It has returned `output`."""
        ...


class WorkerTaps:
    """The taps of one worker: installed for a set of sites and selectors, drained by owner."""

    def __init__(self, adapter: RunnerAdapter, taps: Taps, num_layers: int) -> None:
        self.adapter = adapter
        self.num_layers = num_layers
        self._taps = taps
        self._store: RowStore | None = None
        self._failure: Exception | None = None
        self._taps_logits = False
        self.sender = Sender()

    @property
    def sites(self) -> list[str]:
        """Every site that can be installed, of this pipeline stage."""
        logits = [LOGITS] if self.adapter.last_stage else []
        return [str(site) for site in (*self._taps.sites, *logits)]

    def install(self, sites: list[str], select: list[int | str], max_bytes: int) -> list[str]:
        """Tap `sites` at the selected positions, in place of what was tapped before.

        Returns the sites that this worker has: the others are another pipeline stage's. More than
        `max_bytes` of rows that nobody drains end the capture with an error.
        """
        wanted = parse_sites(sites, self.num_layers)
        selectors = parse_selectors(select)
        self.uninstall()
        mine = self._taps.attach([site for site in wanted if site != LOGITS], self._put)
        self._taps_logits = LOGITS in wanted and self.adapter.last_stage
        mine += [LOGITS] if self._taps_logits else []
        self._store, self._failure = RowStore(mine, selectors, max_bytes), None
        self.adapter.watch(self._begin, self._end)
        return [str(site) for site in mine]

    def uninstall(self) -> None:
        """Remove every tap and forget every row."""
        self.adapter.unwatch()
        self._taps.detach()
        self._store = None

    def drain(self, owners: dict[str, int]) -> RowBatch:
        """The rows of these owners; raises what went wrong in a hook since the last install."""
        if self._failure is not None:
            raise self._failure
        if self._store is None:
            raise CaptureError("nothing is tapped in this worker: install taps before a drain")
        return self._store.drain(owners)

    def discard(self, owners: list[str]) -> int:
        """Forget the rows of these owners; returns how many owners still hold rows."""
        if self._store is None:
            return 0
        self._store.discard(owners)
        return len(self._store)

    # An exception in a forward pass would end the engine, and every request with it: the first
    # one is kept, ends the capture, and is raised by the next drain.
    def _fail(self, store: RowStore, error: Exception) -> None:
        self._failure = error
        store.clear()

    def _begin(self, step: StepLayout | Repeat) -> None:
        store = self._store
        if store is not None and self._failure is None:
            try:
                store.begin_step(step, self.adapter.device)
                if store.open:
                    self._taps.begin(step.total_rows)
            except Exception as error:
                self._fail(store, error)

    def _put(self, site: Site, terms: Tensors) -> None:
        store = self._store
        if store is not None:
            try:
                store.put(site, as_rows(terms))
            except Exception as error:
                self._fail(store, error)

    def _end(self, output: Any) -> None:
        store = self._store
        if store is not None and store.open:
            try:
                self._close_step(store, output)
            except Exception as error:
                self._fail(store, error)

    def _close_step(self, store: RowStore, output: Any) -> None:
        self._taps.end(output)
        if self._taps_logits:
            hidden, _ = split_output(output)
            logits = self.adapter.compute_logits(store.selected(hidden))
            if logits is None:
                raise CaptureError("this rank computes no logits, so site 'logits' has no rows")
            store.put_selected(LOGITS, logits)
        store.end_step()


def _answers(method: Callable[..., R]) -> Callable[..., tuple[int, R | str]]:
    """Reply with the number of the call, and turn an exception into a reply.

    Raised through vLLM it would lose its class and message, and leave the replies of other ranks
    in the queue for the next call.
    """

    @functools.wraps(method)
    def answer(worker: Any, call: int, *arguments: str) -> tuple[int, R | str]:
        try:
            return call, method(worker, *arguments)
        except Exception as error:
            return call, encode_error(error)

    return answer


class TapcheckWorkerExtension:
    """Mixed into vLLM's worker by `worker_extension_cls`; called through `collective_rpc`.

    The first argument of every call is its number, which the reply gives back.
    """

    tapcheck_taps: WorkerTaps

    @_answers
    def tapcheck_describe(self) -> str:
        """The live engine's settings, as JSON; raises what kept graph mode from its taps."""
        graph = _graph_taps(self)
        told = None
        if graph is not None:
            told = {"sites": list(map(str, graph.sites)), "buffer_bytes": graph.buffer_bytes}
        return encode_result({**live_settings(self), "graph": told})

    @_answers
    def tapcheck_sites(self, num_layers: str) -> str:
        """The sites that the model has, as a JSON list."""
        return encode_result(_taps(self, int(num_layers)).sites)

    @_answers
    def tapcheck_install(self, arguments: str) -> str:
        """Install taps; `arguments` is JSON: num_layers, and what WorkerTaps.install takes.

        Replies with the sites that this worker has.
        """
        wanted = json.loads(arguments)
        return encode_result(_taps(self, wanted.pop("num_layers")).install(**wanted))

    @_answers
    def tapcheck_drain(self, owners: str) -> RowBatch:
        """The rows of `owners` (JSON: owner to seen length), by reference: for one process."""
        return self.tapcheck_taps.drain(json.loads(owners))

    @_answers
    def tapcheck_drain_packed(self, owners: str) -> bytes | str:
        """The rows of `owners` (JSON: owner to seen length): for another process.

        As packed bytes or, as JSON, the handle of the shared memory that holds them.
        """
        batch = self.tapcheck_taps.drain(json.loads(owners))
        sent = self.tapcheck_taps.sender.send(packed_parts(batch))
        return sent if isinstance(sent, bytes) else encode_result(sent)

    @_answers
    def tapcheck_resend(self) -> bytes:
        """The packed bytes of the last drain, for a client that can't reach shared memory."""
        return self.tapcheck_taps.sender.resend()

    @_answers
    def tapcheck_discard(self, owners: str) -> str:
        """Forget the rows of `owners`, a JSON list; replies how many owners still hold rows."""
        return encode_result(self.tapcheck_taps.discard(json.loads(owners)))

    @_answers
    def tapcheck_uninstall(self) -> str:
        """Remove every hook."""
        if "tapcheck_taps" in self.__dict__:
            self.tapcheck_taps.uninstall()
        return encode_result(None)


def _taps(worker: Any, num_layers: int) -> WorkerTaps:
    """The worker's taps, made when they are first needed."""
    taps: WorkerTaps | None = vars(worker).get("tapcheck_taps")
    if taps is None:
        graph = _graph_taps(worker)
        _refuse_untappable(worker, compiled=graph is not None)
        adapter = adapter_for(worker)
        taps = WorkerTaps(adapter, graph or HookTaps(adapter, num_layers), num_layers)
        worker.tapcheck_taps = taps
    return taps


def _graph_taps(worker: Any) -> GraphTaps | None:
    """What was placed in the worker before its model was compiled; None in hook mode."""
    placed: GraphTaps | TapcheckError | None = vars(worker).get("tapcheck_graph")
    if isinstance(placed, TapcheckError):
        raise placed
    if placed is None and plan_of(worker) is not None:
        raise EngineError(
            "this engine was started for graph mode, but tapcheck's vLLM plugin did not run in its "
            "worker: VLLM_PLUGINS leaves it out, or tapcheck isn't installed there"
        )
    return placed


def _refuse_untappable(worker: Any, compiled: bool) -> None:
    """Refuse, by the live engine's settings, what would lose or duplicate rows."""
    settings = live_settings(worker)
    if not settings["enforce_eager"] and not compiled:
        raise EngineError(
            "this engine was started without enforce_eager=True: its forward is compiled, so hooks "
            "never fire and a capture would be empty. Start it with enforce_eager=True, or for "
            "graph mode with graph_layers or graph_taps"
        )
    if settings["speculative"] and settings["async_scheduling"]:
        raise EngineError(
            "this engine decodes speculatively and schedules asynchronously: where a step's rows "
            "begin is then known on the device only. Start it with async_scheduling=False"
        )
    if settings["microbatched"]:
        raise EngineError(
            "this engine splits each step into microbatches, so a hook sees half a step. Start it "
            "with enable_dbo=False"
        )
    if settings["data_parallel_size"] > 1:
        raise EngineError(
            "this engine runs data parallel, so each worker has other requests, whose rows "
            "can't be merged yet. Start it with data_parallel_size=1"
        )
