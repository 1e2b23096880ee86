"""Each check of the suite passes a healthy capture and fails when it should."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic import synthetic_capture

from tapcheck.capture import Capture, SiteRows
from tapcheck.checks import suite
from tapcheck.checks.faults import FAULTS, Fault
from tapcheck.checks.jobs import SELFTEST, TOPOLOGIES, Job, check_names, plan_jobs
from tapcheck.checks.measures import count_situations
from tapcheck.checks.outputs import greedy_tokens
from tapcheck.checks.selftest import Injection, SelfTest
from tapcheck.checks.suite import (
    check_equivalence,
    check_ledger,
    check_the_checker,
    judge_engine,
    make_requests,
)
from tapcheck.compatibility.verdict import CheckResult, status, unmet
from tapcheck.request import Request
from tapcheck.sites import Site

LENGTHS = ((5, 4), (3, 4), (7, 4))
NEW = 4
LOGITS = Site("logits")


def healthy(dtype: torch.dtype = torch.float32) -> Capture:
    """A capture whose generated tokens are those that its own logits choose."""
    capture = synthetic_capture(dtype, lengths=LENGTHS, width=64)
    rows = capture.rows[LOGITS]
    requests = []
    for index, request in enumerate(capture.requests):
        at = rows.columns.request == index
        order = np.argsort(rows.columns.position[at])
        logits = rows.values[torch.from_numpy(np.flatnonzero(at)[order])]
        chosen = logits[request.prompt_length - 1 :].argmax(-1).tolist()
        requests.append(replace(request, generated_token_ids=tuple(chosen)))
    return replace(capture, requests=tuple(requests))


def asked(capture: Capture) -> list[Request]:
    """The requests as they were before anything was generated."""
    return [replace(request, generated_token_ids=()) for request in capture.requests]


def ledger(actual: Capture, capture: Capture | None = None) -> CheckResult:
    whole = capture or healthy()
    return check_ledger(asked(whole), whole.sites, actual)


def without(capture: Capture, keep: Callable[[SiteRows], np.ndarray], *sites: Site) -> Capture:
    """The capture with only the rows that `keep` says, at `sites` or at all."""
    rows = {
        site: rows.take(np.flatnonzero(keep(rows))) if site in (sites or capture.sites) else rows
        for site, rows in capture.rows.items()
    }
    return replace(capture, rows=rows)


def failing(result: CheckResult) -> set[str]:
    assert status(result) == "fail"
    return {condition.metric for condition in unmet(result)}


def retoken(capture: Capture, index: int, tokens: Iterable[int]) -> Capture:
    requests = list(capture.requests)
    requests[index] = replace(requests[index], generated_token_ids=tuple(tokens))
    return replace(capture, requests=tuple(requests))


# --- healthy captures ----------------------------------------------------------------------------


def test_every_check_passes_a_healthy_capture() -> None:
    job = Job("tiny", "unused", "float32", "cpu", "in_process")
    capture = healthy()
    results = list(judge_engine(job, asked(capture), capture, capture))
    # The suite's own number of new tokens isn't this capture's.
    results[2] = replace(greedy_tokens(capture, capture, new_tokens=NEW), name=results[2].name)
    assert tuple(result.name for result in results) == check_names(job)
    assert [status(result) for result in results] == ["pass"] * 6
    assert {len(result.source_hash) for result in results} == {64}


# --- the noise floor -----------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "wider"), [("float32", "float64"), ("bfloat16", "float32")])
def test_the_noise_floor_is_of_a_wider_dtype_and_repeats(
    model_zoo: Callable[[str], Path], dtype: str, wider: str
) -> None:
    job = Job("tiny", str(model_zoo("llama")), dtype, "cpu", "in_process")
    requests = [Request("a", (5, 9, 20), (4,)), Request("b", (7,), (8, 9))]
    floor, lacking = suite._noise_floor(job, requests, [LOGITS])
    assert floor is not None
    assert not lacking
    captures = (floor.reference, *floor.repeats)
    dtypes = [str(capture[LOGITS].values.dtype) for capture in captures]
    assert dtypes == [f"torch.{name}" for name in (wider, dtype, dtype, dtype)]
    assert all(one != other for one, other in itertools.combinations(floor.repeats, 2))


def test_where_no_reference_fits_in_memory_the_verdict_says_so(
    model_zoo: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "free_memory", lambda _device: 1000)
    job = Job("tiny", str(model_zoo("llama")), "float32", "cpu", "in_process")
    floor, lacking = suite._noise_floor(job, [], [])
    assert floor is None
    assert lacking.startswith("no float64 reference fits in memory (0.0 GiB needed")
    capture = healthy()
    results = list(judge_engine(job, asked(capture), capture, capture, floor, lacking))
    assert results[1].reason.endswith("so the fixed tolerance of float32 judged")


def test_a_job_with_a_tolerance_of_its_own_needs_no_noise_floor() -> None:
    job = Job("tiny", "unused", "bfloat16", "cpu", "in_process", rtol=1e-2)
    assert suite._noise_floor(job, [], []) == (None, "")


# --- ledger --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["lost_row", "duplicated_row"])
def test_the_ledger_fails_on_lost_and_duplicated_rows(fault: str) -> None:
    result = ledger(FAULTS[fault].inject(healthy()))
    assert failing(result) == {"rows_delivered", "rows_wrong"}
    assert result.metrics["rows_wrong"] == 1
    assert result.first_divergence is not None
    assert "request " in result.first_divergence
    assert "site " in result.first_divergence


def test_the_ledger_fails_on_a_site_that_was_never_captured() -> None:
    capture = healthy()
    rows = {site: rows for site, rows in capture.rows.items() if site != LOGITS}
    result = ledger(replace(capture, rows=rows))
    assert failing(result) == {"rows_delivered", "rows_wrong"}
    assert "the site was not captured at all" in result.reason


def test_the_ledger_fails_on_a_request_that_was_never_captured() -> None:
    result = ledger(healthy().select(requests=["a", "c"]))
    assert {"rows_delivered", "rows_wrong"} <= failing(result)
    assert "the request is not in the capture" in result.reason


def test_the_ledger_fails_where_rows_come_out_of_order() -> None:
    capture = healthy()
    rows = capture.rows[LOGITS]
    backwards = rows.take(np.arange(len(rows))[::-1].copy())
    result = ledger(replace(capture, rows={**capture.rows, LOGITS: backwards}))
    assert failing(result) == {"rows_wrong"}


def test_the_ledger_fails_where_as_many_rows_are_due_but_others_came() -> None:
    capture = healthy()
    rows = capture.rows[LOGITS]
    position = np.where(rows.columns.position == 4, 99, rows.columns.position)
    moved = SiteRows(replace(rows.columns, position=position), rows.values)
    assert failing(ledger(replace(capture, rows={**capture.rows, LOGITS: moved}))) == {"rows_wrong"}


def test_the_ledger_fails_when_fewer_requests_than_asked_shared_a_forward_pass() -> None:
    capture = healthy()
    rows = {
        site: SiteRows(
            replace(rows.columns, step=rows.columns.step + 100 * rows.columns.request), rows.values
        )
        for site, rows in capture.rows.items()
    }
    result = ledger(replace(capture, rows=rows))
    assert failing(result) == {"most_requests_in_one_step"}
    assert result.metrics["most_requests_in_one_step"] == 1
    assert result.metrics["rows_delivered"] == result.metrics["rows_due"] > 0


def test_the_ledger_fails_when_nothing_is_due() -> None:
    capture = healthy()
    result = check_ledger([], capture.sites, replace(capture, requests=capture.requests))
    assert "rows_due" in failing(result)


# --- equivalence ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.name)
def test_equivalence_fails_on_every_fault(fault: Fault) -> None:
    capture = healthy()
    result = check_equivalence(fault.inject(capture), capture)
    assert failing(result)
    assert "captures match" not in result.reason


def test_equivalence_fails_on_swapped_requests_and_names_the_first_row() -> None:
    capture = healthy()
    result = check_equivalence(FAULTS["swapped_requests"].inject(capture), capture)
    assert {"failing_sites", "worst_relative_error"} <= failing(result)
    assert result.first_divergence == "request 'a', site embed, position 0"
    assert result.metrics["worst_relative_error"] > 0.1


def test_equivalence_fails_on_other_tokens() -> None:
    capture = healthy()
    generated = capture.requests[0].generated_token_ids
    result = check_equivalence(retoken(capture, 0, (*generated[:-1], 63)), capture)
    assert "token_problems" in failing(result)


def test_equivalence_fails_when_no_row_was_compared() -> None:
    capture = healthy()
    nothing = without(capture, lambda rows: np.zeros(len(rows), bool))
    assert "rows_compared" in failing(check_equivalence(nothing, nothing))


# --- situations ----------------------------------------------------------------------------------


def test_situations_are_counted_from_the_rows_steps() -> None:
    capture = healthy()
    assert count_situations(capture) == {
        "requests": 3,
        "steps": 4,
        "most_requests_in_one_step": 3,
        "steps_mixing_prefill_and_decode": 0,
        "prompt_rows": 15,
        "generated_rows": 9,
    }


def test_a_step_that_mixes_prefill_and_decode_is_counted() -> None:
    capture = healthy()
    rows = {}
    for site, given in capture.rows.items():
        columns = given.columns
        late = np.where(columns.request == 2, columns.step + 1, columns.step)
        rows[site] = SiteRows(replace(columns, step=late), given.values)
    found = count_situations(replace(capture, rows=rows))
    assert (found["steps"], found["steps_mixing_prefill_and_decode"]) == (5, 1)


# --- the checker's own test ----------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
def test_the_checker_catches_every_fault_in_a_real_capture(
    model_zoo: Callable[[str], Path],
) -> None:
    result = check_the_checker("tiny", str(model_zoo("llama")))
    assert status(result) == "pass", result.reason
    assert result.metrics["faults_caught"] == result.metrics["faults_named"] >= 40
    assert result.metrics["healthy"] == 2
    assert result.metrics["largest_healthy_excess"] < 0.7
    assert result.metrics["weakest_fault_excess"] > 1.1


MISSED = Injection("m", "float32", "scaled", "capture", False, None, None, None)


@pytest.mark.parametrize(
    ("found", "unmet_metrics", "said"),
    [
        (SelfTest((MISSED,), (0.5,)), {"faults_caught", "weakest_fault_excess"}, "missed: scaled"),
        (
            SelfTest((replace(MISSED, caught=True, excess=2.0),), (1.5,), ("m: condemned",)),
            {"false_alarms", "largest_healthy_excess"},
            "1 of 1 healthy captures condemned",
        ),
    ],
)
def test_a_checker_that_misses_a_fault_or_condemns_what_is_healthy_fails_and_says_so(
    found: SelfTest, unmet_metrics: set[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = iter([SelfTest(), found])
    monkeypatch.setattr(suite, "run_selftest", lambda *_args, **_settings: next(each))
    result = check_the_checker("m", "unused")
    assert failing(result) == unmet_metrics
    assert said in result.reason


# --- jobs ----------------------------------------------------------------------------------------


def test_jobs_judge_the_checker_then_every_engine_then_the_first_model_by_itself() -> None:
    jobs = plan_jobs({"a": "one", "b": "two"}, "bfloat16", "cuda")
    assert jobs[0] == Job("a", "one", "float32", "cpu", None)
    *engines, itself = jobs[1:]
    assert [(job.model, job.topology) for job in engines] == [
        (model, topology) for model in "ab" for topology in TOPOLOGIES
    ]
    assert [job.metamorphic for job in jobs] == [False] * 5 + [True]
    assert itself == Job("a", "one", "bfloat16", "cuda", "in_process", metamorphic=True)
    assert {(job.dtype, job.device) for job in jobs[1:]} == {("bfloat16", "cuda")}
    names = [name for job in jobs for name in check_names(job)]
    assert names[0] == SELFTEST
    assert len(set(names)) == len(names) == 6 + 4 * 6 + 5


def test_the_suite_s_requests_are_always_the_same_and_no_two_alike() -> None:
    requests = make_requests(512)
    assert requests == make_requests(512)
    assert len({request.prompt_token_ids for request in requests}) == len(requests) == 8
    assert len({request.prompt_length for request in requests}) == 8
    assert all(0 <= token < 512 for request in requests for token in request.token_ids)
