"""Each metamorphic check passes a healthy engine, fails a broken one, and knows an idle situation.

The engine is made up (see made_up_engine.py), and each variant of it breaks one property.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_engine import BLOCK, LOGITS, VOCABULARY, Engine, Run, row_of

from tapcheck.capture import Capture
from tapcheck.checks.metamorphic import (
    alone_equals_batched,
    capture_changes_nothing,
    cold_equals_warm_prefix,
    one_shot_equals_chunked,
    reordered,
    same_on_both,
)
from tapcheck.compatibility.verdict import CheckResult, status, unmet
from tapcheck.request import Request
from tapcheck.sites import Site

SITES = ["resid_post.0", "logits"]
REQUESTS = [
    Request("a", (1, 2, 3, 4, 5, 6, 7)),
    Request("b", (7, 8)),
    Request("c", (9, 1, 2, 3, 4)),
]


class LeaksItsNeighbour(Engine):
    """In a batch, the first row of a request is that of the request before it."""

    def row(self, run: Run, site: Site, position: int) -> torch.Tensor:
        if run.of > 1 and position == 0:
            return row_of(run.before.token_ids[:1], site)
        return super().row(run, site, position)


class DependsOnTheSlot(Engine):
    def row(self, run: Run, site: Site, position: int) -> torch.Tensor:
        return super().row(run, site, position) * (1 + 0.01 * run.slot)


class LosesARowInABatch(Engine):
    def delivered(self, run: Run, positions: list[int]) -> list[int]:
        return positions[:-1] if run.of > 1 and run.slot == 2 else positions


class ChoosesOtherTokensInABatch(Engine):
    """The rows are right, but the last token is not the one that they choose."""

    def token(self, slot: int, of: int, tokens: Sequence[int]) -> int:
        chosen = super().token(slot, of, tokens)
        return (chosen + 1) % VOCABULARY if of > 1 and len(tokens) == 10 else chosen


class GivesStaleRowsWhenWarm(Engine):
    """The first row computed after a cached prefix is the one before it."""

    def row(self, run: Run, site: Site, position: int) -> torch.Tensor:
        return super().row(run, site, position - bool(run.cached and position == run.cached))


class DeliversCachedRows(Engine):
    """Rows that it says were read from the cache, made up."""

    def delivered(self, run: Run, positions: list[int]) -> list[int]:
        return list(range(run.request.seen_length))


class ReadsTheCacheUnasked(Engine):
    """By default too, rows are missing where the cache has their positions."""

    def delivered(self, run: Run, positions: list[int]) -> list[int]:
        prompt = run.request.prompt_token_ids
        self.seen: set[tuple[int, ...]] = getattr(self, "seen", set())
        again = prompt in self.seen
        self.seen.add(prompt)
        return positions[1:] if again and not run.cached else positions


class ShiftsChunks(Engine):
    """Where a chunk begins, the row is that of the position before."""

    def row(self, run: Run, site: Site, position: int) -> torch.Tensor:
        return super().row(run, site, position - (position in run.chunk_starts))


class TapsChangeATokenAndItsRows(Engine):
    def token(self, slot: int, of: int, tokens: Sequence[int]) -> int:
        chosen = super().token(slot, of, tokens)
        return (chosen + 1) % VOCABULARY if self.tapped and len(tokens) == 9 else chosen


class TapsChangeALogprobsLastBit(Engine):
    def logprob(self, logits: torch.Tensor, token: int) -> float:
        exact = super().logprob(logits, token)
        return float(np.nextafter(exact, 0)) if self.tapped and token == 3 else exact


class Ties(Engine):
    """Tokens 0 and 1 are equally likely after every sequence; a batch takes the other one."""

    def row(self, run: Run, site: Site, position: int) -> torch.Tensor:
        row = super().row(run, site, position)
        return torch.cat([row.new_tensor([9.0, 9.0]), row[2:]]) if site == LOGITS else row

    def token(self, _slot: int, of: int, tokens: Sequence[int]) -> int:
        return int(of > 1 and len(tokens) == 8)


@pytest.fixture(autouse=True)
def sampling_params(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for vLLM, of which only SamplingParams is needed."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))


Check = Callable[..., CheckResult]
OF_ONE_ENGINE: list[Check] = [
    alone_equals_batched,
    reordered,
    cold_equals_warm_prefix,
    capture_changes_nothing,
]


def run(
    check: Check,
    engine: Engine,
    requests: Sequence[Request] = REQUESTS,
    sites: Sequence[str] = SITES,
    select: Sequence[int | str] = ("all",),
) -> CheckResult:
    return check(engine, requests, sites, select, max_new_tokens=4)


def captured(engine: Engine, requests: Sequence[Request] = REQUESTS) -> Capture:
    return engine.capture(requests, SITES, max_new_tokens=4)


def failing(result: CheckResult) -> set[str]:
    assert status(result) == "fail", result
    return {condition.metric for condition in unmet(result)}


# --- checks of one engine ------------------------------------------------------------------------


@pytest.mark.parametrize("check", OF_ONE_ENGINE)
def test_a_healthy_engine_passes(check: Check) -> None:
    result = run(check, Engine())
    assert status(result) == "pass", result
    assert result.name == check.__name__
    assert len(result.source_hash) == 64
    assert result.first_divergence is None


@pytest.mark.parametrize("check", OF_ONE_ENGINE)
@pytest.mark.parametrize("select", [["prompt[-1]"], ["generated[*]"], [6, "generated[-1]"]])
def test_a_healthy_engine_passes_at_some_positions(
    check: Check, select: Sequence[int | str]
) -> None:
    requests = [request for request in REQUESTS if request.prompt_length > 4]
    assert status(run(check, Engine(), requests, select=select)) == "pass"


@pytest.mark.parametrize(
    ("check", "engine", "metrics"),
    [
        (alone_equals_batched, LeaksItsNeighbour, {"failing_sites", "worst_relative_error"}),
        (alone_equals_batched, DependsOnTheSlot, {"failing_sites", "worst_relative_error"}),
        (alone_equals_batched, LosesARowInABatch, {"rows_compared", "ledger_problems"}),
        (alone_equals_batched, ChoosesOtherTokensInABatch, {"requests_parted"}),
        (reordered, LeaksItsNeighbour, {"failing_sites", "worst_relative_error"}),
        (reordered, DependsOnTheSlot, {"failing_sites", "worst_relative_error"}),
        (reordered, LosesARowInABatch, {"rows_compared", "ledger_problems"}),
        (
            cold_equals_warm_prefix,
            GivesStaleRowsWhenWarm,
            {"failing_sites", "worst_relative_error"},
        ),
        (cold_equals_warm_prefix, DeliversCachedRows, {"rows_compared", "ledger_problems"}),
        (cold_equals_warm_prefix, ReadsTheCacheUnasked, {"rows_compared", "ledger_problems"}),
        (capture_changes_nothing, TapsChangeALogprobsLastBit, {"logprobs_different"}),
        (
            capture_changes_nothing,
            TapsChangeATokenAndItsRows,
            {"tokens_different", "logprobs_different"},
        ),
    ],
)
def test_a_broken_engine_fails_and_the_first_divergence_is_named(
    check: Check, engine: type[Engine], metrics: set[str]
) -> None:
    result = run(check, engine())
    assert failing(result) == metrics
    assert result.first_divergence is not None
    assert result.first_divergence.startswith("request ")
    assert "did not arise" not in result.reason


@pytest.mark.parametrize("check", [alone_equals_batched, reordered])
def test_a_request_that_has_no_company_exercises_nothing(check: Check) -> None:
    result = run(check, Engine(), REQUESTS[:1])
    assert status(result) == "not exercised"
    assert result.reason.startswith("the situation did not arise: requests in one step: 1; ")
    assert result.metrics["most_requests_in_one_step"] == 1


def test_requests_that_never_shared_a_step_exercise_nothing() -> None:
    assert status(run(alone_equals_batched, Engine(budget=7), REQUESTS[:2])) == "pass"

    class OneAtATime(Engine):
        def _run(self, requests: Sequence[Request], *arguments: Any) -> list[Run]:
            runs = super()._run(requests, *arguments)
            return [replace(r, steps=[100 * r.slot + s for s in r.steps]) for r in runs]

    assert status(run(alone_equals_batched, OneAtATime())) == "not exercised"


@pytest.mark.parametrize(
    ("engine", "requests"),
    [
        (Engine(caching=False), REQUESTS),
        (Engine(), [request for request in REQUESTS if request.prompt_length <= BLOCK]),
    ],
)
def test_a_cache_that_was_not_read_exercises_nothing(
    engine: Engine, requests: list[Request]
) -> None:
    result = run(cold_equals_warm_prefix, engine, requests)
    assert status(result) == "not exercised"
    assert "no position was read from the prefix cache" in result.reason


def test_the_cold_run_is_cold_whatever_ran_before() -> None:
    engine = GivesStaleRowsWhenWarm()
    captured(engine)
    assert "failing_sites" in failing(run(cold_equals_warm_prefix, engine))


def test_a_failure_of_the_default_run_says_so() -> None:
    result = run(cold_equals_warm_prefix, ReadsTheCacheUnasked())
    assert result.reason.startswith("in the default run, captures differ in their rows: ")


def test_the_rows_of_a_warm_run_are_those_that_it_computed() -> None:
    result = run(cold_equals_warm_prefix, Engine())
    assert result.metrics["cached_positions"] == 8  # a block of each of the two long prompts
    assert result.metrics["rows_compared"] == 2 * (7 + 3 + 2 + 3 + 5 + 3 - 8)


def test_teacher_forced_requests_have_no_logprobs_to_compare() -> None:
    forced = [replace(request, generated_token_ids=(1, 2)) for request in REQUESTS]

    class Forced(Engine):
        def _output(self, run: Run) -> Any:
            output = SimpleNamespace(token_ids=[0], logprobs=None)
            return SimpleNamespace(request_id=run.request.id, outputs=[output])

    result = run(capture_changes_nothing, Forced(), forced)
    assert status(result) == "not exercised"
    assert "no logprob was compared" in result.reason


def test_a_difference_is_a_failure_even_where_the_situation_did_not_arise() -> None:
    class NeverTwiceTheSame(Engine):
        def row(self, run: Run, site: Site, position: int) -> torch.Tensor:
            return torch.randn(VOCABULARY)

    result = run(alone_equals_batched, NeverTwiceTheSame(), REQUESTS[:1])
    assert failing(result) >= {"failing_sites", "most_requests_in_one_step"}


# --- tokens that part ----------------------------------------------------------------------------


def test_tokens_that_part_name_both_and_the_position() -> None:
    result = run(alone_equals_batched, ChoosesOtherTokensInABatch())
    assert result.first_divergence == "request 'a', position 10"
    assert result.reason.startswith("the tokens part at request 'a', position 10: ")
    assert result.metrics["requests_parted"] == 1


def test_runs_that_part_at_a_tie_are_compared_up_to_it() -> None:
    result = run(alone_equals_batched, Ties())
    assert status(result) == "pass", result
    assert result.metrics["requests_parted_at_a_tie"] == 2  # one ends before it has 8 tokens
    assert result.metrics["rows_compared"] == 2 * (8 + (2 + 3) + 8)
    assert "requests compared up to a tie of two tokens: 2" in result.reason


def test_without_logits_nobody_can_tell_a_tie() -> None:
    result = run(alone_equals_batched, Ties(), sites=["resid_post.0"])
    assert failing(result) == {"requests_parted"}


def test_a_request_that_ends_early_in_one_run_is_no_tie() -> None:
    whole = captured(Engine())
    short = [replace(r, generated_token_ids=r.generated_token_ids[:2]) for r in whole.requests]
    result = same_on_both(whole, captured(Engine(), short))
    assert "requests_parted" in failing(result)


def test_other_prompts_are_no_parting_but_a_failure() -> None:
    other = [Request(request.id, request.prompt_token_ids[::-1]) for request in REQUESTS]
    assert "token_problems" in failing(same_on_both(captured(Engine()), captured(Engine(), other)))


# --- checks of two engines -----------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 2, 3, 5])
def test_chunks_of_a_healthy_engine_pass(budget: int) -> None:
    result = one_shot_equals_chunked(captured(Engine()), captured(Engine(budget)))
    assert status(result) == "pass", result
    assert result.metrics["unfinished_in_one_shot"] == 0
    assert result.metrics["unfinished_in_chunks"] > 0


@pytest.mark.parametrize("budget", [1, 2, 3, 5])
def test_a_shift_where_a_chunk_begins_fails(budget: int) -> None:
    result = one_shot_equals_chunked(captured(Engine()), captured(ShiftsChunks(budget)))
    assert failing(result) == {"failing_sites", "worst_relative_error"}
    assert result.first_divergence is not None
    assert "site resid_post.0" in result.first_divergence


@pytest.mark.parametrize(
    ("one_shot", "chunked"),
    [
        (Engine(), Engine()),
        (Engine(3), Engine(3)),
        (Engine(3), Engine()),
        (Engine(counting=False), Engine(3, counting=False)),
        (Engine(counting=False), Engine(3)),
    ],
)
def test_engines_that_don_t_differ_in_chunks_exercise_nothing(
    one_shot: Engine, chunked: Engine
) -> None:
    result = one_shot_equals_chunked(captured(one_shot), captured(chunked))
    assert status(result) == "not exercised"
    assert "steps that left a prompt unfinished" in result.reason


IN_PROCESS = {"topology": "in process", "tensor_parallel_size": 1, "runner": "v1"}


def test_two_engines_that_differ_in_a_setting_pass_and_the_reason_names_it() -> None:
    other = {**IN_PROCESS, "tensor_parallel_size": 2}
    result = same_on_both(captured(Engine(settings=IN_PROCESS)), captured(Engine(settings=other)))
    assert status(result) == "pass"
    assert result.reason.endswith("; settings that differ: tensor_parallel_size 1 and 2")
    assert result.metrics["settings_differing"] == 1


def test_two_engines_that_don_t_differ_exercise_nothing() -> None:
    engine = Engine(settings=IN_PROCESS)
    result = same_on_both(captured(engine), captured(engine))
    assert status(result) == "not exercised"
    assert "settings that differ: none" in result.reason


def test_two_engines_that_give_other_rows_fail() -> None:
    other = DependsOnTheSlot(settings={**IN_PROCESS, "topology": "subprocess"})
    result = same_on_both(captured(Engine(settings=IN_PROCESS)), captured(other))
    assert failing(result) == {"failing_sites", "worst_relative_error"}
    assert "settings that differ: topology in process and subprocess" in result.reason


def test_a_tolerance_of_the_caller_s_decides() -> None:
    other = DependsOnTheSlot(settings={"runner": "v2"})
    one = captured(Engine(settings={"runner": "v1"}))
    assert status(same_on_both(one, captured(other), rtol=0.05)) == "pass"
    assert status(same_on_both(one, captured(other), rtol=0.005)) == "fail"


# --- any requests --------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=4),
    budget=st.integers(1, 12),
)
def test_a_healthy_engine_never_fails(prompts: list[list[int]], budget: int) -> None:
    requests = [Request(str(at), tuple(prompt)) for at, prompt in enumerate(prompts)]
    for check in (alone_equals_batched, reordered, cold_equals_warm_prefix):
        result = run(check, Engine(budget), requests)
        assert status(result) in ("pass", "not exercised"), result
        exercised = len(requests) > 1
        if check is cold_equals_warm_prefix:
            exercised = max(map(len, prompts)) > BLOCK
        assert (status(result) == "pass") == exercised
    chunks = one_shot_equals_chunked(
        captured(Engine(), requests), captured(Engine(budget), requests)
    )
    assert status(chunks) in ("pass", "not exercised"), chunks
