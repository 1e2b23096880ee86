"""Points and sites: what is tapped, and at which layer.

Point names are TransformerLens' hook names where it has one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tapcheck.errors import SiteError

# Points in execution order inside a forward pass; the index is the order.
LAYER_POINTS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
POINTS = ("embed", *LAYER_POINTS, "final_norm", "logits")
ALIASES = {"residual_stream": "resid_post"}

_SITE = re.compile(r"(?P<point>[A-Za-z_]+)(?:\.(?P<layer>-?\w+))?")


@dataclass(frozen=True)
class Site:
    """A point at a layer: `resid_post.6`; `layer` is None for `embed`, `final_norm`, `logits`."""

    point: str
    layer: int | None = None

    def __str__(self) -> str:
        return self.point if self.layer is None else f"{self.point}.{self.layer}"

    @property
    def order(self) -> tuple[int, int]:
        """A sort key: execution order within one forward pass."""
        if self.layer is None:
            return (-1, 0) if self.point == "embed" else (1 << 30, POINTS.index(self.point))
        return (self.layer, POINTS.index(self.point))

    def __lt__(self, other: Site) -> bool:
        return self.order < other.order


def parse_site(text: str | Site) -> Site:
    """Read `resid_post.6` or `final_norm`; raises SiteError that names the nearest right name."""
    if isinstance(text, Site):
        return text
    match = _SITE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise SiteError(
            f"site {text!r} is not a site: write POINT.LAYER, such as resid_post.0, "
            "or embed, final_norm or logits"
        )
    point, layer = match["point"], match["layer"]
    point = ALIASES.get(point, point)
    if point not in POINTS:
        near = difflib.get_close_matches(point, [*POINTS, *ALIASES], n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise SiteError(
            f"unknown point {point!r} in site {text!r}: {hint}points are {', '.join(POINTS)}"
        )
    if point not in LAYER_POINTS:
        if layer is not None:
            raise SiteError(f"site {text!r}: {point} has no layer; write {point!r}")
        return Site(point)
    if layer is None:
        raise SiteError(f"site {text!r}: {point} needs a layer, such as {point + '.0'!r}")
    if not (layer.isascii() and layer.isdecimal() and len(layer) < 10):
        raise SiteError(f"site {text!r}: the layer is an index from 0, not {layer!r}")
    return Site(point, int(layer))


def parse_sites(texts: Iterable[str | Site], num_layers: int) -> tuple[Site, ...]:
    """Read sites for a model of `num_layers` layers: distinct, in execution order.

    Raises SiteError for an unknown site, a layer beyond the last, or no site at all.
    """
    if isinstance(texts, str):
        raise SiteError(f"sites come in a list: write [{texts!r}] for this one alone")
    sites = sorted({parse_site(text) for text in texts})
    if not sites:
        raise SiteError("no site was named: name at least one, such as resid_post.0")
    for site in sites:
        if site.layer is not None and site.layer >= num_layers:
            raise SiteError(
                f"site {str(site)!r}: the model has {num_layers} layers, so the last is "
                f"{site.point}.{num_layers - 1}"
            )
    return tuple(sites)


def all_sites(num_layers: int) -> tuple[Site, ...]:
    """Every site of a model of `num_layers` layers, in execution order."""
    layers = [Site(point, layer) for layer in range(num_layers) for point in LAYER_POINTS]
    return tuple(sorted([Site("embed"), *layers, Site("final_norm"), Site("logits")]))
