"""The figures of a report as inline SVG, drawn with matplotlib from the report's data.

Text and lines are drawn in the page's own colour, whatever that is; all colours of the data read on
a light and on a dark page.
"""

from __future__ import annotations

import html
import io
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tapcheck.checks.report.maps import FAILS, MISSING, NO_NUMBER, PASSES, STATES
from tapcheck.checks.report.raster import DECADES, cell_states, paint
from tapcheck.errors import TapcheckError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Site = Mapping[str, Any]

_INK = "#010203"  # replaced by currentColor: matplotlib knows no such colour
_WORST, _MEDIAN = "#e0531f", "#3f86d6"
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tapcheck",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": _INK,
    "text.parse_math": False,  # a request may be called $x$
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.linewidth": 0.8,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.unicode_minus": False,
}
# Pixels on the page.
_LETTER = 6.4
_MAP_WIDTH, _MAP_HEIGHT = 640, 420
_LARGEST_CELL, _SMALLEST_ROW, _LARGEST_ROW = 26, 5, 26


class ReportError(TapcheckError):
    """A report that can't be made here, or of these captures."""


def require_plots() -> None:
    """Raise ReportError unless matplotlib is there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ReportError(
            "an HTML report needs matplotlib: pip install 'tapcheck[report]', or ask for --json"
        ) from None


@dataclass(frozen=True)
class Plot:
    """One figure: inline SVG of this width in pixels, which says the same in words as its title."""

    svg: str
    width: int


@dataclass(frozen=True)
class _Box:
    """A figure with one plot of `width` x `height` pixels in it, and room around that."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int

    @contextmanager
    def drawn(self) -> Iterator[tuple[Figure, Axes]]:
        """The figure and its axes, within the style of all figures."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        across = self.left + self.width + self.right
        down = self.bottom + self.height + self.top
        with rc_context(_STYLE):
            figure = Figure(figsize=(across / 72, down / 72), dpi=72)
            place = (
                self.left / across,
                self.bottom / down,
                self.width / across,
                self.height / down,
            )
            figure.patch.set_visible(False)
            axes = figure.add_axes(place)
            axes.patch.set_visible(False)
            yield figure, axes


def heat_map(
    sites: Sequence[Site], maps: Mapping[str, Any], first: Mapping[str, Any] | None, title: str
) -> Plot:
    """Sites (those of one point, by layer) by tokens, the first divergence ringed if it is here."""
    columns, labels = maps["columns"], [_label(site) for site in sites]
    cell = min(_MAP_WIDTH / max(len(columns), 1), _LARGEST_CELL)
    row = min(max(_MAP_HEIGHT / len(sites), _SMALLEST_ROW), _LARGEST_ROW)
    left = 30 + round(_LETTER * max(map(len, labels)))
    width, height = max(round(cell * len(columns)), 1), round(row * len(sites))
    box = _Box(width, height, left, max(24, 330 - left - width), 24, 36)
    with box.drawn() as (figure, axes):
        ratio = [[math.nan if v is None else v for v in site["log10_ratio"]] for site in sites]
        states = cell_states([site["states"] for site in sites])
        image = paint(states, np.array(ratio), width, height)
        axes.imshow(
            image,
            extent=(0, len(columns), len(sites), 0),
            aspect="auto",
            interpolation="none",
        )
        _layer_ticks(axes, sites, labels, row)
        _token_ticks(axes, maps, cell)
        if first is not None:
            _ring(axes, sites, columns, maps["requests"], first)
        return _finished(figure, title)


def _label(site: Site) -> str:
    return site["site"] if site["layer"] is None else str(site["layer"])


def _layer_ticks(axes: Axes, sites: Sequence[Site], labels: Sequence[str], row: float) -> None:
    every = max(1, math.ceil(13 / row))
    at = range(0, len(sites), every)
    axes.set_yticks([place + 0.5 for place in at], [labels[place] for place in at])
    axes.tick_params(length=2, pad=3)
    if sites[0]["layer"] is not None:
        axes.set_ylabel("layer")
    for place, site in enumerate(sites):
        whole = site["passed"] and not set(site["states"]) & set(STATES[MISSING:])
        if not whole and row >= 7:
            axes.annotate(
                "\N{MULTIPLICATION SIGN}",
                (1, 1 - (place + 0.5) / len(sites)),
                xycoords="axes fraction",
                xytext=(5, 0),
                textcoords="offset points",
                va="center_baseline",
                fontsize=min(row, 12),
                color=_WORST,
                fontweight="bold",
            )


def _token_ticks(axes: Axes, maps: Mapping[str, Any], cell: float) -> None:
    """Positions below, requests above, a line between two requests and before generated tokens."""
    columns, requests = maps["columns"], maps["requests"]
    ticks: list[tuple[float, str]] = []
    for number, group in itertools.groupby(enumerate(columns), key=lambda each: each[1]["request"]):
        mine = list(group)
        start, stop = mine[0][0], mine[-1][0] + 1
        request, room = requests[number], cell * (stop - start)
        digits = len(str(mine[-1][1]["first"]))
        every = max(1, math.ceil(_LETTER * (digits + 1.5) / cell))
        if room > _LETTER * digits:
            # None so near to the next request that it would touch that one's first.
            ticks += [
                (at + 0.5, str(column["first"]))
                for at, column in mine[::every]
                if at == start or stop - at >= every
            ]
        if start:
            axes.axvline(start, color=_INK, linewidth=1)
        name = _shortened(request["id"], int(room / _LETTER))
        if name:
            axes.annotate(
                name,
                (start, 0),
                xytext=(0, 5),
                textcoords="offset points",
                annotation_clip=False,
            )
        generated = [
            at for at, column in mine if column["first"] >= (request["prompt_length"] or math.inf)
        ]
        if generated and generated[0] > start:
            axes.axvline(generated[0], color=_INK, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.set_xticks([at for at, _ in ticks], [text for _, text in ticks])
    axes.set_xlabel("position")


def _shortened(name: str, letters: int) -> str:
    plain = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name
    )
    if len(plain) <= letters:
        return plain
    return f"{plain[: letters - 1]}\N{HORIZONTAL ELLIPSIS}" if letters > 1 else ""


def _ring(
    axes: Axes,
    sites: Sequence[Site],
    columns: Sequence[Mapping[str, int]],
    requests: Sequence[Mapping[str, Any]],
    first: Mapping[str, Any],
) -> None:
    """A ring around the first wrong row, if it is on this map."""
    rows = [place for place, site in enumerate(sites) if site["site"] == first["site"]]
    at = [
        place
        for place, column in enumerate(columns)
        if requests[column["request"]]["id"] == first["request_id"]
        and column["first"] <= first["position"] <= column["last"]
    ]
    if rows and at:
        style: Any = {"marker": "o", "markersize": 17, "fillstyle": "none", "clip_on": False}
        x, y = at[0] + 0.5, rows[0] + 0.5
        axes.plot(x, y, **style, markeredgecolor=_INK, markeredgewidth=2.2)


def growth(sites: Sequence[Site], limits: tuple[float, float], title: str) -> Plot:
    """Median and worst error of one point, layer by layer, with what is allowed."""
    from matplotlib.ticker import MaxNLocator

    layers = [site["layer"] for site in sites]
    series = {
        name: [site[key] for site in sites]
        for name, key in (
            ("worst row", "worst_relative_error"),
            ("median row", "median_relative_error"),
            ("allowed, median row", "median_allowed"),
        )
    }
    styles: Any = {
        "worst row": {"color": _WORST, "marker": "o", "linewidth": 1.6},
        "median row": {"color": _MEDIAN, "marker": "s", "linewidth": 1.6},
        "allowed, median row": {"color": _INK, "linestyle": (0, (4, 2)), "linewidth": 1.2},
    }
    low, high = limits
    with _Box(300, 170, 56, 14, 36, 36).drawn() as (figure, axes):
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        axes.margins(x=0.04)
        for name, values in series.items():
            shown = [math.nan if value is None else max(value, low) for value in values]
            axes.plot(layers, shown, label=name, markersize=3, **styles[name])
        failing = [site for site in sites if not site["passed"]]
        if failing:
            heights = [min(site["worst_relative_error"] or high, high) for site in failing]
            style: Any = {"marker": "x", "markersize": 8, "markeredgewidth": 2, "clip_on": False}
            axes.plot(
                [site["layer"] for site in failing],
                heights,
                color=_WORST,
                linestyle="none",
                label="site fails",
                **style,
            )
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("layer")
        axes.set_ylabel("relative error")
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"1e{round(math.log10(value))}")
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(-0.12, 1.0),
            ncols=2,
            frameon=False,
            fontsize=9,
            borderaxespad=0,
            columnspacing=1.2,
            labelspacing=0.2,
        )
        return _finished(figure, title)


def growth_limits(sites: Sequence[Site]) -> tuple[float, float]:
    """One scale for the errors of all points, which shows what is allowed too."""
    keys = ("worst_relative_error", "median_relative_error", "median_allowed")
    found = [site[key] for site in sites for key in keys if site[key]]
    low, high = min(found, default=1e-6), max(found, default=1.0)
    return 10 ** (math.floor(math.log10(low)) - 0.2), 10 ** (math.ceil(math.log10(high)) + 0.2)


def legend(title: str) -> Plot:
    """The colours of the maps, by how far a row is from its limit."""
    steps = np.linspace(-DECADES, DECADES, 241)
    states = np.where(steps > 0, FAILS, PASSES)[None]
    with _Box(296, 14, 26, 26, 6, 24).drawn() as (figure, axes):
        axes.imshow(
            paint(states, steps[None], 296, 14),
            extent=(-DECADES, DECADES, 1, 0),
            aspect="auto",
            interpolation="none",
        )
        texts = ["1/1000", "1/100", "1/10", "the limit", "x10", "x100", "x1000"]
        axes.set_xticks(np.arange(-DECADES, DECADES + 1), texts)
        axes.set_yticks([])
        axes.tick_params(length=3, pad=3)
        return _finished(figure, title)


def swatch(kind: str) -> Plot:
    """A patch of the texture of cells that are `missing` or have `no number`."""
    state = {"missing": MISSING, "no number": NO_NUMBER}[kind]
    with _Box(28, 14, 1, 1, 1, 1).drawn() as (figure, axes):
        image = paint(np.array([[state]]), np.zeros((1, 1)), 28, 14)
        axes.imshow(image, extent=(0, 1, 1, 0), aspect="auto", interpolation="none")
        axes.set_axis_off()
        return _finished(figure, kind)


def _finished(figure: Figure, title: str) -> Plot:
    """The figure as an SVG element to stand in a page: no prolog, no fixed size, no fixed ink."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    file = io.StringIO()
    canvas: Any = FigureCanvasSVG(figure)
    canvas.print_svg(file, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    # Sizes, ids of groups and a style for the whole page go; what is drawn stays.
    body = re.sub(r"<defs>\s*<style.*?</defs>|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    body = re.sub("<[^>]*>", lambda tag: _in_page(tag[0]), body[body.index("<svg") :])
    box = re.search(r'viewBox="[^"]*"', body)
    assert box is not None
    width = round(figure.get_figwidth() * 72)
    opening = f'<svg {box[0]} role="img" style="width: {width}px">'
    return Plot(f"{opening}<title>{html.escape(title)}</title>{body.split('>', 1)[1]}", width)


def _in_page(tag: str) -> str:
    """A tag of matplotlib's with the page's ink and font, and pixels that a browser may smooth."""
    tag = tag.replace(_INK, "currentColor").replace("'DejaVu Sans'", "system-ui")
    tag = tag.replace("image-rendering:crisp-edges;image-rendering:pixelated", "")
    return tag
