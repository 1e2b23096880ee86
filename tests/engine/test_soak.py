"""scripts/soak.py: passes on a healthy harness, and fails on each way in which it can be unwell."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapcheck.capture import Capture, SiteRows
from tapcheck.fixtures.pool import EnginePool
from tapcheck.hf import HFBackend
from tapcheck.request import Request
from tapcheck.rowstore import RowStore
from tapcheck.sites import Site
from tapcheck.transport import RowBatch
from tapcheck.vllm.worker import WorkerTaps

pytestmark = pytest.mark.engine

SCRIPTS = Path(__file__).parents[2] / "scripts"
SEED = 6  # its first six runs, on two engines, meet every situation

Soak = Callable[..., tuple[int, list[str], dict[str, Any]]]


@pytest.fixture
def soak(
    engine_pool: EnginePool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Soak:
    """Run it in this process; returns its exit code, the lines it printed, and its last as JSON."""
    monkeypatch.syspath_prepend(SCRIPTS)
    script = importlib.import_module("soak")
    engine_pool.close()  # the soak starts engines of its own

    def run(*arguments: str) -> tuple[int, list[str], dict[str, Any]]:
        capsys.readouterr()
        code = script.main(["--seed", str(SEED), *arguments])
        *lines, last = capsys.readouterr().out.splitlines()
        return code, lines, json.loads(last)

    return run


def test_a_healthy_harness_passes_and_every_situation_arises(soak: Soak) -> None:
    code, lines, result = soak("--runs", "6")
    assert code == 0, lines
    assert result["runs"] == 6
    assert result["rows_due"] == result["rows_delivered"] > 1000
    assert result["lost"] == result["duplicated"] == result["misnamed"] == 0
    assert 0 < result["worst_relative_error"] < 1e-5
    assert result["situations"]["preemptions"] > 0


def test_a_soak_in_which_a_situation_did_not_arise_fails(soak: Soak) -> None:
    code, lines, result = soak("--runs", "1")
    assert code == 1
    assert result["lost"] == result["misnamed"] == 0
    assert lines[-1].startswith("did not arise: ")


def without_its_last_row(batch: RowBatch) -> RowBatch:
    keep = np.arange(len(batch.columns) - 1)
    values = {site: rows[:-1] for site, rows in batch.values.items()}
    return replace(batch, columns=batch.columns.take(keep), values=values)


def with_rows_exchanged(batch: RowBatch) -> RowBatch:
    return replace(batch, values={site: rows.flip(0) for site, rows in batch.values.items()})


@pytest.mark.parametrize(
    ("fault", "count", "said"),
    [
        (without_its_last_row, "lost", "selected rows were not delivered"),
        (with_rows_exchanged, "misnamed", "has relative error"),
    ],
)
def test_rows_that_the_worker_delivers_wrongly_fail_the_run_by_number(
    soak: Soak,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[RowBatch], RowBatch],
    count: str,
    said: str,
) -> None:
    drain = WorkerTaps.drain

    def faulty(taps: WorkerTaps, owners: dict[str, int]) -> RowBatch:
        return fault(drain(taps, owners))

    monkeypatch.setattr(WorkerTaps, "drain", faulty)
    code, lines, result = soak("--runs", "6")
    assert code == 1
    assert result[count] > 0
    assert lines[0].startswith("run 0 failed, on an engine with {'block_size': 32")
    assert any(said in line for line in lines)
    assert lines[-1].endswith(f"python scripts/soak.py --seed {SEED} --only 0")


def test_rows_that_the_store_keeps_after_a_run_fail_it(
    soak: Soak, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowStore, "_release", lambda _store, _chunk, _rows: None)
    code, lines, result = soak("--only", "1")
    assert code == 1
    assert result["lost"] == result["misnamed"] == 0
    assert any(line.startswith("left behind: ") and "bytes in the row" in line for line in lines)
    assert lines[-1].endswith("--only 0")


@pytest.mark.parametrize(
    ("taken", "counts"),
    [
        ([0, 1, 2, 3, 4, 5], (0, 0, 0)),
        ([0, 1, 2, 3, 4], (1, 0, 0)),
        ([0, 1, 2, 3, 4, 5, 5], (0, 1, 0)),
        ([0, 1, 2, 5, 3, 4], (0, 0, 3)),
    ],
)
def test_the_judge_counts_rows_lost_duplicated_and_misnamed(
    monkeypatch: pytest.MonkeyPatch, llama: Path, taken: list[int], counts: tuple[int, int, int]
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    soak = importlib.import_module("soak")
    site = Site("resid_post", 2)
    requests = [Request("a", (5, 6, 7), (8,)), Request("a-0", (9, 10, 11), (12,))]
    with HFBackend(llama) as hf:
        healthy = hf.capture(requests, [site])
        rows = healthy[site].take(np.array(taken))
        if len(taken) == 6:  # all there: what moves is the values alone
            rows = SiteRows(healthy[site].columns, rows.values)
        told = {"situations": {r.id: {"preemptions": 0} for r in requests}, "cached": {}}
        ended = {r.id: soak.Ended(r, forced=True, cached=0) for r in requests}
        parcel = soak.Parcel(ended, Capture(healthy.requests, {site: rows}, told))
        scenario = soak.Scenario((site,), ("all",), False, 1, ())
        tally = soak.Tally()
        soak.Judge(hf, scenario, [parcel]).judge(tally)
    assert (tally.lost, tally.duplicated, tally.misnamed) == counts
    assert (tally.rows_due, tally.rows_delivered) == (6, len(taken))
    assert bool(tally.problems) is (sum(counts) > 0)


def test_memory_growth_is_judged_over_the_second_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    rss_growth = importlib.import_module("soak").rss_growth
    assert rss_growth([700.0, 800.0, 900.0]) is None
    assert rss_growth([100.0, 700.0, *[900.0] * 6]) == 0
    assert rss_growth([700.0 + 10 * engine for engine in range(40)]) == 200
