"""Taps: the hooks that read each site where its layer's contract says that it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from tapcheck.contract import (
    LayerContract,
    ModelContract,
    Source,
    Tensors,
    call_tensors,
    stream_tensors,
)
from tapcheck.errors import SiteError
from tapcheck.sites import Site, all_sites

Put = Callable[[Site, Tensors], None]


LOGITS = Site("logits")


def tappable_sites(contract: ModelContract) -> tuple[Site, ...]:
    """Every site that a model, or a pipeline stage of it, has as a module, in execution order."""

    def has(site: Site) -> bool:
        where = contract if site.layer is None else contract.layers[site.layer]
        return getattr(where, site.point, None) is not None

    return tuple(site for site in all_sites(len(contract.layers)) if has(site))


def plan_taps(sites: Sequence[Site], contract: ModelContract) -> dict[Site, Source]:
    """Where each site is read; those of another pipeline stage are left out.

    `logits` has no module and isn't planned. Raises SiteError for a point that the architecture
    hasn't, with the reason.
    """
    plan: dict[Site, Source] = {}
    for site in sites:
        if site.layer is not None:
            layer = contract.layers[site.layer]
            if layer is not None:
                plan[site] = _layer_source(site, layer)
        elif (source := getattr(contract, site.point, None)) is not None:
            plan[site] = source
    return plan


def require_all(wanted: Sequence[Site], tapped: Collection[Site], model: str) -> None:
    """Raise SiteError unless every wanted site is tapped, by this model or one of its stages."""
    missing = [str(site) for site in wanted if site not in tapped]
    if missing:
        raise SiteError(f"{model} has no module whose output is {', '.join(missing)}")


def _layer_source(site: Site, contract: LayerContract) -> Source:
    source: Source | None = getattr(contract, site.point)
    if source is None:
        raise SiteError(
            f"site {str(site)!r}: this model has no {site.point}, because {contract.why_absent}"
        )
    return source


def attach(plan: dict[Site, Source], put: Put) -> list[RemovableHandle]:
    """Register one hook for each planned site, which calls `put(site, terms)`; remove by handle."""
    return [_hook(site, source, put) for site, source in plan.items()]


def _hook(site: Site, source: Source, put: Put) -> RemovableHandle:
    count = source.terms
    if source.at == "input":

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            put(site, call_tensors(args, kwargs)[:count])

        return source.module.register_forward_pre_hook(before, with_kwargs=True)

    def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        put(site, stream_tensors(output)[:count])

    return source.module.register_forward_hook(after)
