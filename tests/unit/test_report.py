from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_pairs import EMPTY, HEALTHY, PAIRS
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from synthetic import perturbed, synthetic_capture, synthetic_requests

from tapcheck.capture import Capture, SiteRows
from tapcheck.checks.equivalence import compare_captures
from tapcheck.checks.faults import FAULTS
from tapcheck.checks.report import (
    ReportError,
    report_data,
    require_plots,
    write_html,
    write_json,
)
from tapcheck.checks.report.data import SCHEMA
from tapcheck.checks.report.maps import MOST_COLUMNS, MOST_REQUESTS
from tapcheck.checks.report.page import render_html
from tapcheck.checks.report.raster import cell_states, paint
from tapcheck.sites import Site

SCHEMA_OF_REPORTS = json.loads(SCHEMA.read_text(encoding="utf-8"))


def data_of(actual: Capture, expected: Capture, **how: Any) -> dict[str, Any]:
    comparison = compare_captures(actual, expected, **how)
    return report_data(comparison, actual, expected, how.get("reference"))


def violations(data: dict[str, Any]) -> list[str]:
    found = Draft202012Validator(SCHEMA_OF_REPORTS).iter_errors(data)
    return [f"{error.json_path}: {error.message}" for error in found]


class Page(HTMLParser):
    """The tags of a page, with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def values(self, *names: str) -> list[str]:
        return [value or "" for _, attrs in self.tags for n, value in attrs.items() if n in names]


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA_OF_REPORTS)


@pytest.mark.parametrize("name", PAIRS)
def test_the_data_of_every_outcome_satisfy_the_schema(name: str) -> None:
    data = data_of(*PAIRS[name])
    assert violations(data) == []
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert (data["verdict"] == "pass") == compare_captures(*PAIRS[name]).passed
    assert (data["verdict"] == "pass") == (name in ("passing", "exact"))


def test_the_schema_refuses_what_is_no_report() -> None:
    data = data_of(HEALTHY, HEALTHY)
    assert violations({**data, "verdict": "maybe"})
    assert violations({**data, "first_divergence": {"site": "embed"}})
    assert violations({name: value for name, value in data.items() if name != "maps"})


def test_a_reference_and_floors_are_reported() -> None:
    wide = synthetic_capture(torch.float64)
    expected, actual = perturbed(HEALTHY, 1e-3), perturbed(HEALTHY, 1.2e-3, seed=2)
    data = data_of(actual, expected, reference=wide)
    assert violations(data) == []
    assert data["verdict"] == "pass"
    assert set(data["captures"]) == {"actual", "expected", "reference"}
    floors = [site["floor"] for site in data["sites"]]
    assert all(floor["median_ratio"] == pytest.approx(1.2, rel=0.01) for floor in floors)
    assert all(site["rtol"] is None for site in data["sites"])


def test_the_map_shows_each_row_at_its_place() -> None:
    actual = FAULTS["nan_row"].inject(FAULTS["lost_row"].inject(perturbed(HEALTHY, 1e-3)))
    comparison = compare_captures(actual, HEALTHY, rtol=1e-2)
    maps = report_data(comparison, actual, HEALTHY)["maps"]
    where = {
        (maps["requests"][column["request"]]["id"], column["first"]): at
        for at, column in enumerate(maps["columns"])
    }
    assert len(where) == sum(request.seen_length for request in HEALTHY.requests)
    cells = {site["site"]: site for site in maps["sites"]}
    (lost,) = comparison.ledger.entries
    assert cells[str(lost.site)]["states"][where[lost.request_id, lost.position]] == "M"
    (wrong,) = comparison.failing_sites
    assert wrong.first is not None
    assert (
        cells[str(wrong.site)]["states"][where[wrong.first.request_id, wrong.first.position]] == "X"
    )
    letters = "".join(site["states"] for site in maps["sites"])
    assert (letters.count("M"), letters.count("X"), letters.count("F")) == (1, 1, 0)
    numbers = [
        value for site in maps["sites"] for value in site["log10_ratio"] if value is not None
    ]
    assert len(numbers) == len(letters) - 2
    assert numbers == [pytest.approx(-1, abs=0.01)] * len(numbers)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=6),
    st.integers(0, 10**6),
)
def test_a_failing_row_fails_its_column_and_no_other(
    lengths: list[tuple[int, int]], choice: int
) -> None:
    expected = synthetic_capture(lengths=lengths, num_layers=1, width=4, sites=["resid_post.0"])
    site = Site("resid_post", 0)
    rows = expected[site]
    at = choice % len(rows)
    values = rows.values.clone()
    values[at] *= 2
    actual = replace(expected, rows={site: SiteRows(rows.columns, values)})
    maps = data_of(actual, expected)["maps"]
    (cells,) = maps["sites"]
    (failing,) = [index for index, state in enumerate(cells["states"]) if state == "F"]
    column = maps["columns"][failing]
    request = expected.requests[int(rows.columns.request[at])]
    assert maps["requests"][column["request"]]["id"] == request.id
    assert column["first"] <= rows.columns.position[at] <= column["last"]
    assert cells["log10_ratio"][failing] == pytest.approx(math.log10(1 / 5e-5), abs=0.01)


def test_positions_that_are_not_due_are_blank() -> None:
    requests = synthetic_requests()
    last = HEALTHY.select(sites=["embed"], select=["prompt[-1]"])
    both = replace(HEALTHY, rows={**last.rows, Site("logits"): HEALTHY["logits"]})
    maps = data_of(both, both)["maps"]
    cells = {site["site"]: site["states"] for site in maps["sites"]}
    assert set(cells["logits"]) == {"."}
    assert cells["embed"].count(".") == len(requests)
    assert set(cells["embed"]) == {".", " "}


def test_a_long_comparison_is_binned_said_to_be_and_of_bounded_size() -> None:
    expected = synthetic_capture(lengths=((1400, 0), (500, 101)), num_layers=32, width=4)
    actual = perturbed(expected, 1e-4)  # every row fails: nothing of a map is empty
    data = data_of(actual, expected)
    assert violations(data) == []
    assert data["maps"]["tokens_per_column"] == 6
    assert len(data["maps"]["columns"]) <= MOST_COLUMNS + 2
    page = render_html(data)
    assert len(page) < 3_000_000
    assert len(json.dumps(data)) < 3_000_000
    assert "A column is up to 6 neighbouring tokens" in page


def test_of_many_requests_the_worst_are_shown() -> None:
    lengths = [(2, 0)] * (MOST_REQUESTS + 5)
    expected = synthetic_capture(lengths=lengths, num_layers=1, width=4)
    site = Site("resid_post", 0)
    rows = expected[site]
    values = rows.values.clone()
    values[-1] *= 2  # of the last request
    actual = replace(expected, rows={**expected.rows, site: SiteRows(rows.columns, values)})
    data = data_of(actual, expected)
    shown = [request["id"] for request in data["maps"]["requests"]]
    assert len(shown) == MOST_REQUESTS
    assert shown[-1] == expected.requests[-1].id
    assert f"the worst {MOST_REQUESTS} of {MOST_REQUESTS + 5} requests are shown" in render_html(
        data
    )


def test_ledger_entries_are_capped_and_counted() -> None:
    data = data_of(EMPTY, HEALTHY)
    assert data["ledger"]["problems"]["missing"] == len(HEALTHY) > len(data["ledger"]["shown"])
    more = len(HEALTHY) - len(data["ledger"]["shown"])
    assert f"and {more} rows more" in render_html(data)


@pytest.mark.parametrize("name", ["passing", "empty", "half empty", "other widths", "nan_row"])
def test_the_page_needs_nothing_but_itself(name: str) -> None:
    page = Page(render_html(data_of(*PAIRS[name])))
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "form"}
    for value in page.values("src", "href", "xlink:href", "action", "data"):
        assert value.startswith(("data:image/png;base64,", "#")), value
    text = render_html(data_of(*PAIRS[name]))
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)


def test_the_page_says_what_is_wrong_and_why_in_that_order() -> None:
    data = data_of(FAULTS["swapped_requests"].inject(HEALTHY), HEALTHY)
    text = " ".join(Page(render_html(data)).text.split())
    first = data["first_divergence"]
    expected_order = [
        "Verdict: fail",
        data["headline"],
        data["diagnoses"][0]["claim"],
        "First divergence",
        f"request {first['request_id']}, position {first['position']}",
        "Errors by layer and token",
        "Errors over the layers",
        "Sites that fail",
        "The captures",
    ]
    places = [text.find(each) for each in expected_order]
    assert -1 not in places
    assert places == sorted(places)


def test_every_figure_says_in_words_what_it_shows_and_shares_no_id() -> None:
    page = Page(render_html(data_of(*PAIRS["shifted_rows"])))
    figures = [attrs for tag, attrs in page.tags if tag == "svg"]
    titles = [tag for tag, _ in page.tags if tag == "title"]
    assert len(figures) > 10
    assert len(titles) == len(figures) + 1
    assert all(attrs["role"] == "img" for attrs in figures)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    referred = {v[1:] for v in page.values("href", "xlink:href") if v.startswith("#")}
    referred |= set(re.findall(r"url\(#([^)]*)\)", " ".join(page.values("clip-path", "style"))))
    assert referred <= set(ids)
    headers = [attrs for tag, attrs in page.tags if tag == "th"]
    assert headers
    assert all(attrs.get("scope") in ("col", "row") for attrs in headers)


HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "$\\frac{$",
    "a\x00\n{{7*7}}",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_from_a_capture_are_text_and_nothing_else(name: str) -> None:
    small = HEALTHY.select(sites=["resid_pre.1", "mlp_out.1", "resid_post.1"])
    requests = (replace(small.requests[0], id=name), *small.requests[1:])
    metadata = {"model": name, "engine": {name: name}, "environment": {"os": name}}
    healthy = replace(small, requests=requests, metadata=metadata)
    lost = healthy.select(requests=[request.id for request in requests[1:]])
    for actual in (FAULTS["shifted_rows"].inject(healthy), lost):
        page = Page(render_html(data_of(actual, healthy)))
        assert not {tag for tag, _ in page.tags} & {"script", "img"}
        assert not page.values("onerror")
        assert name in page.text


def test_an_id_that_no_file_can_hold_costs_a_letter_and_no_report(tmp_path: Path) -> None:
    small = HEALTHY.select(sites=["resid_post.1"])
    healthy = replace(
        small, requests=(replace(small.requests[0], id="x\ud800"), *small.requests[1:])
    )
    broken = FAULTS["shifted_rows"].inject(healthy)
    data = data_of(broken, healthy)
    write_json(tmp_path / "report.json", data)
    write_html(tmp_path / "report.html", data)
    assert "x?" in Page((tmp_path / "report.html").read_text(encoding="utf-8")).text


def test_the_same_data_give_the_same_page() -> None:
    data = data_of(*PAIRS["one_shard"])
    assert render_html(data) == render_html(json.loads(json.dumps(data)))


def test_the_page_reads_on_a_light_and_on_a_dark_screen() -> None:
    page = render_html(data_of(*PAIRS["passing"]))
    assert "prefers-color-scheme: dark" in page
    assert "currentColor" in page
    figures = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    assert not re.search(r"#(000000|ffffff|010203)", figures)


def test_what_fails_differs_from_what_passes_by_more_than_its_colour() -> None:
    states = cell_states([".FMX "])
    image = paint(states, np.full((1, 5), 0.5), 100, 20)
    cells = np.split(image, 5, axis=1)
    colours = [len(np.unique(cell.reshape(-1, 4), axis=0)) for cell in cells]
    assert colours == [1, 2, 2, 3, 1]
    assert cells[4].max() == 0


@pytest.mark.parametrize("write", [write_html, write_json])
def test_a_report_appears_whole_or_not_at_all(
    write: Callable[[Path, dict[str, Any]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "report"
    target.write_text("before", encoding="utf-8")
    small = HEALTHY.select(sites=["resid_post.1"])
    data = data_of(small, small)
    with monkeypatch.context() as broken:
        broken.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("the disk is full")))
        with pytest.raises(OSError, match="the disk is full"):
            write(target, data)
    assert target.read_text(encoding="utf-8") == "before"
    assert list(tmp_path.iterdir()) == [target]
    write(target, data)
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_text(encoding="utf-8") != "before"


def test_numbers_that_are_none_never_reach_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "report", {"worst_ratio": math.nan})
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ReportError, match=r"pip install 'tapcheck\[report\]'"):
        require_plots()
