"""A report as one HTML page that needs nothing else: no network, no script."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tapcheck.checks.report.plots import (
    Plot,
    growth,
    growth_limits,
    heat_map,
    legend,
    require_plots,
    swatch,
)
from tapcheck.compatibility.files import write_whole
from tapcheck.compatibility.templates import templates

MOST_SITE_LINES = 100


@dataclass(frozen=True)
class _Figure:
    """A plot with its heading, as the page shows it."""

    heading: str
    svg: Markup


def write_html(path: str | Path, data: Mapping[str, Any]) -> None:
    """Write the report as an HTML page to `path`, whole or not at all.

    Raises ReportError where matplotlib is not installed.
    """
    write_whole(Path(path), render_html(data))


def render_html(data: Mapping[str, Any]) -> str:
    """The page of a report's data. Raises ReportError where matplotlib is not installed."""
    require_plots()
    environment = templates(Path(__file__).parent)
    environment.filters["number"] = number
    failing = [site for site in data["sites"] if not site["passed"]]
    page = environment.get_template("report.html").render(
        data=data,
        advice=_advice(data["message"]),
        first=data["first_divergence"],
        failing=failing[:MOST_SITE_LINES],
        failing_in_all=len(failing),
        floors=any(site["floor"] for site in failing),
        facts=_facts(data),
        settings=_side_by_side(data["captures"], "settings"),
        machines=_side_by_side(data["captures"], "environment"),
        **_figures(data),
    )
    # An id may hold half of a surrogate pair, which no file in UTF-8 can.
    return page.encode("utf-8", "replace").decode("utf-8")


def number(value: Any) -> str:
    """Counts in full, measurements to three digits, what is no number as such."""
    if value is None:
        return "not finite"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _advice(message: str) -> str | None:
    """What the message says to try next."""
    found = re.search(r"^what to try next: (.*)$", message, flags=re.MULTILINE)
    return found[1] if found else None


def _facts(data: Mapping[str, Any]) -> dict[str, str]:
    sites = len(data["sites"])
    tolerances = dict.fromkeys(site["rtol"] for site in data["sites"])
    return {
        "rows compared": f"{data['rows_compared']:,} of {data['rows_due']:,} due",
        "sites": f"{sites}, of which {sum(not each['passed'] for each in data['sites'])} fail",
        "worst relative error": number(data["worst_relative_error"]),
        "worst error / allowed": number(data["worst_ratio"]),
        "judged by": ", ".join(
            "the noise floor" if rtol is None else f"rtol {rtol:.3g}" for rtol in tolerances
        ),
    }


def _figures(data: Mapping[str, Any]) -> dict[str, Any]:
    """The plots of the page, each with ids of its own."""
    count = itertools.count()

    def placed(plot: Plot) -> Markup:
        return Markup(_with_own_ids(plot.svg, f"f{next(count)}-"))

    lost = [entry for entry in data["ledger"]["shown"] if entry["kind"] == "missing"]
    first = data["first_divergence"] or next(iter(lost), None)
    cells = {site["site"]: site for site in data["maps"]["sites"]}
    summaries = {site["site"]: site for site in data["sites"]}
    maps, growths = [], []
    limits = growth_limits(data["sites"])
    for point, sites in _by_point(cells, summaries).items():
        if data["maps"]["columns"]:
            plot = heat_map(sites, data["maps"], first, _map_title(point, sites, first))
            maps.append(_Figure(point, placed(plot)))
        layered = [site for site in sites if site["site"] in summaries and site["rows"]]
        if layered and layered[0]["layer"] is not None:
            plot = growth(layered, limits, _growth_title(point, layered))
            growths.append(_Figure(point, placed(plot)))
    return {
        "maps": maps,
        "marked": first is not None,
        "growths": growths,
        "legend": placed(legend("colours from a thousandth of the limit to a thousand times it")),
        "swatches": {kind: placed(swatch(kind)) for kind in ("missing", "no number")},
        "map_note": _map_note(data["maps"]),
    }


def _by_point(
    cells: Mapping[str, Mapping[str, Any]], summaries: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """The sites with cells, by point; those that have no layer share one entry, which is last."""
    points: dict[str, list[dict[str, Any]]] = {}
    outside: list[dict[str, Any]] = []
    for name, cell in cells.items():
        point, _, layer = name.partition(".")
        lost = {"layer": int(layer) if layer else None, "passed": False}
        site = {**lost, **summaries.get(name, {}), **cell}
        (points.setdefault(point, []) if layer else outside).append(site)
    return points | ({"outside the layers": outside} if outside else {})


def _map_title(
    point: str, sites: Sequence[Mapping[str, Any]], first: Mapping[str, Any] | None
) -> str:
    states = "".join(site["states"] for site in sites)
    told = [f"{point}: {sum(not site['passed'] for site in sites)} of {len(sites)} sites fail"]
    for letter, what in (("F", "failing"), ("X", "without a number"), ("M", "missing")):
        if letter in states:
            told.append(f"{states.count(letter):,} of {len(states):,} cells {what}")
    if first is not None and any(site["site"] == first["site"] for site in sites):
        told.append(
            f"the first wrong row is at {first['site']}, request {first['request_id']}, "
            f"position {first['position']}"
        )
    return "; ".join(told)


def _growth_title(point: str, sites: Sequence[Mapping[str, Any]]) -> str:
    first, last = sites[0], sites[-1]
    return (
        f"{point}: worst relative error {number(first['worst_relative_error'])} at layer "
        f"{first['layer']}, {number(last['worst_relative_error'])} at layer {last['layer']}"
    )


def _map_note(maps: Mapping[str, Any]) -> str:
    width, shown = maps["tokens_per_column"], len(maps["requests"])
    note = "A column is one token"
    if width > 1:
        note = (
            f"A column is up to {width} neighbouring tokens of a request, the worst of which shows"
        )
    if shown < maps["requests_in_all"]:
        note += f"; the worst {shown} of {maps['requests_in_all']} requests are shown"
    return note


def _side_by_side(captures: Mapping[str, Any], part: str) -> list[dict[str, Any]]:
    """A line for each setting: its name, each capture's value, and whether they differ."""
    names = dict.fromkeys(name for capture in captures.values() for name in capture[part])
    lines = []
    for name in names:
        told = {role: capture[part].get(name) for role, capture in captures.items()}
        shown = {role: "none" if value is None else str(value) for role, value in told.items()}
        lines.append({"name": name, "values": shown, "differs": len(set(shown.values())) > 1})
    return lines


def _with_own_ids(svg: str, prefix: str) -> str:
    """The SVG with ids that no other figure of the page has; text is left as it is."""

    def renamed(tag: re.Match[str]) -> str:
        return re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}", tag[0])

    return re.sub("<[^>]*>", renamed, svg)
