"""Hook mode, in a worker: forward hooks on the modules of an eager engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle

from tapcheck.anatomy import find_anatomy
from tapcheck.contract import ModelContract, observe, solve
from tapcheck.sites import Site
from tapcheck.taps import Put, attach, plan_taps, tappable_sites
from tapcheck.vllm.adapters import RunnerAdapter, find_embedding


def contract_of(adapter: RunnerAdapter, num_layers: int) -> ModelContract:
    """What the model's tensors mean, from one dummy forward."""
    model = adapter.model
    # With tied weights the last stage has the embedding's module too, and never runs it.
    embedding = find_embedding(model) if adapter.first_stage else None
    anatomy = find_anatomy(model, num_layers, embedding)
    return solve(anatomy, observe(anatomy, adapter.run_dummy_forward))


class HookTaps:
    """Taps any site while the engine runs."""

    def __init__(self, adapter: RunnerAdapter, num_layers: int) -> None:
        self._contract = contract_of(adapter, num_layers)
        self._handles: list[RemovableHandle] = []

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every site that the model, or this pipeline stage of it, has as a module."""
        return tappable_sites(self._contract)

    def attach(self, wanted: Sequence[Site], put: Put) -> list[Site]:
        """Call `put` for each wanted site that is in this worker; returns these."""
        plan = plan_taps(wanted, self._contract)
        self._handles = attach(plan, put)
        return list(plan)

    def detach(self) -> None:
        """Undo `attach`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def begin(self, rows: int) -> None:
        """Nothing is to be done before a forward pass."""

    def end(self, output: Any) -> None:
        """Nor after it: the hooks have read the sites."""
