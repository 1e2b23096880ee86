"""What runs inside vLLM's worker: a mix-in whose methods `collective_rpc` calls.

vLLM mixes the class into its own worker class, so every name here starts with `tapcheck_`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from tapcheck.anatomy import find_anatomy
from tapcheck.contract import ModelContract, Tensors, observe, solve
from tapcheck.errors import CaptureError, EngineError
from tapcheck.handover import Sender
from tapcheck.layout import Repeat, StepLayout
from tapcheck.rowstore import RowStore
from tapcheck.selectors import parse_selectors
from tapcheck.sites import Site, parse_sites
from tapcheck.taps import LOGITS, attach, plan_taps, tappable_sites
from tapcheck.transport import RowBatch, packed_parts
from tapcheck.vllm.adapters import RunnerAdapter, adapter_for, find_embedding, live_settings
from tapcheck.vllm.protocol import encode_error, encode_result

R = TypeVar("R")


class WorkerTaps:
    """The taps of one worker: installed for a set of sites and selectors, drained by owner."""

    def __init__(self, adapter: RunnerAdapter, num_layers: int) -> None:
        self.adapter = adapter
        self.num_layers = num_layers
        self._store: RowStore | None = None
        self._handles: list[RemovableHandle] = []
        self._failure: Exception | None = None
        self._taps_logits = False
        self.sender = Sender()

    @functools.cached_property
    def _contract(self) -> ModelContract:
        """What the model's tensors mean, from one dummy forward."""
        model = self.adapter.model
        # With tied weights the last stage has the embedding's module too, and never runs it.
        embedding = find_embedding(model) if self.adapter.first_stage else None
        anatomy = find_anatomy(model, self.num_layers, embedding)
        return solve(anatomy, observe(anatomy, self.adapter.run_dummy_forward))

    @property
    def sites(self) -> list[str]:
        """Every site that the model, or this pipeline stage of it, has."""
        sites = tappable_sites(self._contract)
        return [str(site) for site in (*sites, *([LOGITS] if self.adapter.last_stage else []))]

    def install(self, sites: list[str], select: list[int | str], max_bytes: int) -> list[str]:
        """Tap `sites` at the selected positions, in place of what was tapped before.

        Returns the sites that this worker has: the others are another pipeline stage's. More than
        `max_bytes` of rows that nobody drains end the capture with an error.
        """
        wanted = parse_sites(sites, self.num_layers)
        plan = plan_taps(wanted, self._contract)
        mine = [s for s in wanted if s in plan or (s == LOGITS and self.adapter.last_stage)]
        store = RowStore(mine, parse_selectors(select), max_bytes)
        self.uninstall()
        self._store, self._failure = store, None
        self._taps_logits = LOGITS in mine
        self._handles = attach(plan, self._put)
        self.adapter.watch(self._begin, self._end)
        return [str(site) for site in mine]

    def uninstall(self) -> None:
        """Remove every hook and forget every row."""
        self.adapter.unwatch()
        for handle in self._handles:
            handle.remove()
        self._handles, self._store = [], None

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
            except Exception as error:
                self._fail(store, error)

    def _put(self, site: Site, terms: Tensors) -> None:
        store = self._store
        if store is not None:
            try:
                store.put(site, terms)
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
        if self._taps_logits:
            hidden = output if isinstance(output, torch.Tensor) else output[0]
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
        """The live engine's settings, as JSON."""
        return encode_result(live_settings(self))

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
        _refuse_untappable(worker)
        taps = worker.tapcheck_taps = WorkerTaps(adapter_for(worker), num_layers)
    return taps


def _refuse_untappable(worker: Any) -> None:
    """Refuse, by the live engine's settings, what would lose or duplicate rows in hook mode."""
    settings = live_settings(worker)
    if not settings["enforce_eager"]:
        raise EngineError(
            "this engine was started without enforce_eager=True: its forward is compiled, so hooks "
            "never fire and a capture would be empty. Start it with enforce_eager=True"
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
            "this engine runs data parallel, so each worker has other requests, which hook mode "
            "can't merge yet. Start it with data_parallel_size=1"
        )
