"""Graph mode, in a worker: taps that are part of the compiled forward.

They are placed once the weights are loaded, before the model is compiled: the residual stream
after a layer comes out as an auxiliary output (vLLM's EAGLE-3 interface), any other site through a
static tap. What they return is compared with forward hooks in an uncompiled dummy pass.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tapcheck.contract import ModelContract, Tensors
from tapcheck.errors import EngineError, SiteError, TapcheckError
from tapcheck.sites import Site, parse_sites
from tapcheck.static_taps import StaticTap
from tapcheck.taps import Put, attach, plan_taps
from tapcheck.vllm.adapters import RunnerAdapter, adapter_for
from tapcheck.vllm.hooks import contract_of
from tapcheck.vllm.loading import (
    ask_for_aux_outputs,
    aux_outputs_in_use,
    has_aux_outputs,
    most_rows,
    never_compile,
    split_output,
    uncompiled,
)

_log = logging.getLogger("tapcheck.vllm.graph")

# The taps sum what hooks sum, so they differ by a rounding at most; another layer differs by far.
_MOST_APART = 1e-2


class GraphTaps:
    """Reads the sites that were fixed when the engine was started, after each forward pass.

    layers: those whose residual stream is an auxiliary output, ascending. static: the other sites.
    """

    def __init__(self, layers: Sequence[int], static: Mapping[Site, StaticTap]) -> None:
        self._aux = [Site("resid_post", layer) for layer in layers]
        self._static = static
        self._wanted: set[Site] = set()
        self._put: Put | None = None

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites that are part of the compiled forward."""
        return tuple(sorted({*self._aux, *self._static}))

    @property
    def buffer_bytes(self) -> int:
        """How much memory the static taps' buffers take."""
        return sum(tap.buffer.nbytes for tap in self._static.values())

    def attach(self, wanted: Sequence[Site], put: Put) -> list[Site]:
        """Call `put` for each wanted site; raises SiteError for one that isn't in the graph."""
        absent = [str(site) for site in wanted if site not in self.sites]
        if absent:
            fixed = ", ".join(map(str, self.sites)) or "none"
            raise SiteError(
                f"this engine is compiled, and {', '.join(absent)} is not among the sites that "
                f"were fixed when it was started ({fixed}): start it with graph_layers for "
                "resid_post and graph_taps for other sites, or in hook mode"
            )
        self._wanted, self._put = set(wanted), put
        return list(wanted)

    def detach(self) -> None:
        """Undo `attach`; what is compiled stays so."""
        self._wanted, self._put = set(), None

    def begin(self, rows: int) -> None:
        """Mark the rows of the next forward pass as not written."""
        for site, tap in self._static.items():
            if site in self._wanted:
                tap.poison(rows)

    def end(self, output: Any) -> None:
        """Hand over what the forward pass returned and wrote, given the model's output."""
        if self._put is None:
            return
        for site, stream in self._read(output).items():
            self._put(site, (stream,))

    def _read(self, output: Any) -> dict[Site, torch.Tensor]:
        hidden, aux = split_output(output)
        if len(aux) != len(self._aux):
            raise EngineError(
                f"the forward returned {len(aux)} auxiliary outputs where {len(self._aux)} were "
                "asked for: it was compiled without them, or the model leaves them out"
            )
        read = {
            site: stream
            for site, stream in zip(self._aux, aux, strict=True)
            if site in self._wanted
        }
        for site, tap in self._static.items():
            if site in self._wanted:
                read[site] = tap.read(len(hidden))
        return read


def place(worker: Any, plan: Mapping[str, Any]) -> None:
    """Place the taps of `plan` in a worker that has loaded its weights.

    An error is kept for the first call that reaches the worker: raised here it would end as "the
    engine did not start", its message in another process's log. Nothing is compiled then.
    """
    try:
        worker.tapcheck_graph = _placed(
            worker,
            plan["num_layers"],
            plan["layers"],
            parse_sites(plan["taps"], plan["num_layers"]) if plan["taps"] else (),
        )
    except TapcheckError as error:
        worker.tapcheck_graph = error
        never_compile(worker.model_runner.model)


def _placed(
    worker: Any, num_layers: int, layers: Sequence[int], static: Sequence[Site]
) -> GraphTaps:
    adapter = adapter_for(worker)
    if layers and aux_outputs_in_use(worker):
        raise EngineError(
            "this engine's speculative decoding takes the auxiliary outputs by which graph mode "
            "reads resid_post: name the layers under graph_taps instead, or leave out the "
            "speculative method"
        )
    if layers and not has_aux_outputs(adapter.model):
        raise EngineError(
            f"{type(adapter.model).__name__} has no auxiliary outputs (vLLM's EAGLE-3 interface): "
            f"use graph_taps=[{', '.join(repr(f'resid_post.{layer}') for layer in layers)}], "
            "which needs no such interface"
        )
    with uncompiled(adapter.model), torch.inference_mode():
        contract = contract_of(adapter, num_layers)
        sites = [*(Site("resid_post", layer) for layer in layers), *static]
        seen, _ = _dummy_pass(adapter, contract, sites)
        if layers:
            ask_for_aux_outputs(worker, layers)
        rows = most_rows(worker)
        taps = {
            site: StaticTap(site, source, rows, seen[site].shape[-1], seen[site].dtype)
            for site, source in plan_taps(static, contract).items()
        }
        graph = GraphTaps(layers, taps)
        _require_right(graph, adapter, contract, sites)
    if taps:
        size = graph.buffer_bytes / (1 << 20)
        _log.info("the buffers of %d static taps, %d rows each: %.3g MiB", len(taps), rows, size)
    return graph


def _dummy_pass(
    adapter: RunnerAdapter, contract: ModelContract, sites: Sequence[Site]
) -> tuple[dict[Site, torch.Tensor], Any]:
    """What hooks read in a dummy pass, and what the model returned."""
    seen: dict[Site, torch.Tensor] = {}
    returned: list[Any] = []

    def put(site: Site, terms: Tensors) -> None:
        seen[site] = functools.reduce(torch.add, terms).clone()

    handles = attach(plan_taps(sites, contract), put)
    handles.append(adapter.model.register_forward_hook(lambda _m, _a, out: returned.append(out)))
    try:
        adapter.run_dummy_forward()
    finally:
        for handle in handles:
            handle.remove()
    return seen, returned[-1]


def _require_right(
    graph: GraphTaps, adapter: RunnerAdapter, contract: ModelContract, sites: Sequence[Site]
) -> None:
    """Raise EngineError unless the taps read what hooks read in the same dummy pass."""
    read: dict[Site, torch.Tensor] = {}
    graph.attach(sites, lambda site, terms: read.__setitem__(site, terms[0]))
    expected, output = _dummy_pass(adapter, contract, sites)
    graph.end(output)
    graph.detach()
    for site in sites:
        apart = relative_distance(read[site], expected[site])
        if not apart <= _MOST_APART:  # NaN is too far as well
            raise EngineError(
                f"site {site}: what graph mode reads is {apart:.1g} (relative) from what a "
                f"hook on the module reads, so {type(adapter.model).__name__} does not give the "
                "residual stream after that layer as an auxiliary output. Use graph_taps=["
                f"{str(site)!r}]"
            )


def relative_distance(read: torch.Tensor, expected: torch.Tensor) -> float:
    """Of two reads [rows, width] of one dummy pass: 0 where all is alike, NaN and infinity too.

    Attention leaves its output as the memory was found in a dummy pass: values may be of any size,
    more than a float32 norm can hold, or none that is finite.
    """
    read, expected = read.double(), expected.double()
    alike = (read == expected) | (read.isnan() & expected.isnan())
    difference = (read - expected).masked_fill(alike, 0).norm()
    if difference == 0:
        return 0.0
    return float(difference / expected.nan_to_num(0, 0, 0).norm())
