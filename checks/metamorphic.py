"""Metamorphic checks: the same requests run in another way must give the same tokens and rows.

No second implementation is needed: an engine is held against itself. Checks of one engine take its
backend and run what they need. Checks of two engines take a capture from each, so that only one of
them need live at a time. A check whose situation didn't arise, and that found nothing wrong, is
`not exercised`. In float32 tokens must be equal. Where two runs part at a token that ties with the
one in its place, as they may in a narrow dtype, that request is compared up to there; it takes a
capture of the site `logits` to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
import torch

from tapcheck.backend import Backend
from tapcheck.capture import Capture, join
from tapcheck.checks.equivalence import compare_captures
from tapcheck.checks.measures import (
    Metrics,
    comparison_result,
    completed,
    count_situations,
    near_the_largest,
)
from tapcheck.compatibility.verdict import CheckResult, Condition, status, unmet
from tapcheck.request import Request
from tapcheck.sites import Site

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

    from tapcheck.vllm.backend import VLLMBackend

# How many of the likeliest tokens' logprobs must stay the same under capture.
LOGPROBS = 5


def alone_equals_batched(
    backend: Backend,
    requests: Sequence[Request],
    sites: Iterable[str | Site],
    select: Iterable[int | str] = ("all",),
    *,
    max_new_tokens: int = 16,
    rtol: float | None = None,
) -> CheckResult:
    """Each request by itself gives the tokens and rows that it gives among the others.

    Exercised when requests shared a forward pass. `rtol` is the largest relative error of a row,
    None for the dtype's fixed tolerance. Raises what the backend raises.
    """
    sites, select = list(sites), list(select)
    batched = backend.capture(requests, sites, select, max_new_tokens=max_new_tokens)
    alone = join(
        [backend.capture([r], sites, select, max_new_tokens=max_new_tokens) for r in requests]
    )
    return _judge(alone_equals_batched, batched, alone, rtol, _shared_steps(batched))


def reordered(
    backend: Backend,
    requests: Sequence[Request],
    sites: Iterable[str | Site],
    select: Iterable[int | str] = ("all",),
    *,
    max_new_tokens: int = 16,
    rtol: float | None = None,
) -> CheckResult:
    """The requests in reverse order give the same tokens and rows.

    Exercised when requests shared a forward pass. `rtol` as for `alone_equals_batched`.
    """
    sites, select = list(sites), list(select)
    forward = backend.capture(requests, sites, select, max_new_tokens=max_new_tokens)
    backward = backend.capture(requests[::-1], sites, select, max_new_tokens=max_new_tokens)
    return _judge(reordered, backward, forward, rtol, _shared_steps(forward, backward))


def cold_equals_warm_prefix(
    backend: VLLMBackend,
    requests: Sequence[Request],
    sites: Iterable[str | Site],
    select: Iterable[int | str] = ("all",),
    *,
    max_new_tokens: int = 16,
    rtol: float | None = None,
) -> CheckResult:
    """A filled prefix cache changes no token and no row, and costs rows only where it was read.

    Three runs: on an emptied cache; on the cache that this filled; and once more without reading
    it where a row would be missing, as is the default. Every row that the second run computed, and
    every row of the third, must equal the first's. Exercised when the second read the cache, which
    takes prompts longer than the engine's block size. `rtol` as for `alone_equals_batched`.
    """
    sites, select = list(sites), list(select)
    backend.reset_prefix_cache()
    cold, warm, default = (
        backend.capture(
            requests, sites, select, max_new_tokens=max_new_tokens, read_prefix_cache=reads
        )
        for reads in (False, True, False)
    )
    cached = warm.situations.get("cached_positions", 0)
    situation = _Situation(
        "" if cached else "no position was read from the prefix cache, which holds whole blocks",
        {"cached_positions": cached},
        (Condition("cached_positions", ">=", 1),),
    )
    by_default = _judge(cold_equals_warm_prefix, default, cold, rtol, situation)
    if status(by_default) == "fail":
        return replace(by_default, reason=f"in the default run, {by_default.reason}")
    return _judge(cold_equals_warm_prefix, warm, cold, rtol, situation)


def one_shot_equals_chunked(
    one_shot: Capture, chunked: Capture, *, rtol: float | None = None
) -> CheckResult:
    """Prompts taken over several steps give the tokens and rows that they give in one step.

    Two captures of the same requests: the second from an engine with a small
    `max_num_batched_tokens`. Exercised when it left prompts unfinished between steps, and the
    first did not. `rtol` as for `alone_equals_batched`.
    """
    counts = {
        f"unfinished_in_{name}": capture.situations["unfinished_prefills"]
        for name, capture in (("one_shot", one_shot), ("chunks", chunked))
        if "unfinished_prefills" in capture.situations  # not every backend counts
    }
    situation = _Situation(
        "steps that left a prompt unfinished: "
        f"{counts.get('unfinished_in_one_shot', 'uncounted')} in one shot, "
        f"{counts.get('unfinished_in_chunks', 'uncounted')} in chunks",
        counts,
        (Condition("unfinished_in_one_shot", "==", 0), Condition("unfinished_in_chunks", ">=", 1)),
    )
    return _judge(one_shot_equals_chunked, chunked, one_shot, rtol, situation)


def same_on_both(one: Capture, other: Capture, *, rtol: float | None = None) -> CheckResult:
    """Two engines that differ in their settings give the same tokens and rows.

    For captures of the same requests in process and in a subprocess, on one tensor-parallel rank
    and on two, in two modes. The reason names the settings that differ; where none does the check
    is not exercised. `rtol` as for `alone_equals_batched`.
    """
    mine, theirs = _settings(one), _settings(other)
    differing = [
        f"{name} {mine[name]} and {theirs[name]}"
        for name in mine
        if name in theirs and mine[name] != theirs[name]
    ]
    situation = _Situation(
        f"settings that differ: {', '.join(differing) or 'none'}",
        {"settings_differing": len(differing)},
        (Condition("settings_differing", ">=", 1),),
    )
    return _judge(same_on_both, other, one, rtol, situation)


def capture_changes_nothing(
    backend: VLLMBackend,
    requests: Sequence[Request],
    sites: Iterable[str | Site],
    select: Iterable[int | str] = ("all",),
    *,
    max_new_tokens: int = 16,
) -> CheckResult:
    """Capture has no observer effect: with and without taps, tokens and logprobs are equal.

    Both runs begin with an empty prefix cache. The logprobs of the chosen token and of the
    likeliest five must be equal bit for bit. Exercised when rows were captured and logprobs
    compared: teacher-forced requests have none.
    """
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_new_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=LOGPROBS,
    )
    select = list(select)
    backend.reset_prefix_cache()
    off = backend.generate_untapped(requests, select, sampling_params=params)
    backend.reset_prefix_cache()
    on: dict[str, CompletionOutput] = {}
    with backend.session(sites, select) as session:
        for request in requests:
            session.add_request(request, params)
        while session.unfinished:
            on |= {output.request_id: output.outputs[0] for output in session.step()}
        rows = len(session.collect())
    counts, first = _observe(
        [(request, on[request.id], o.outputs[0]) for request, o in zip(requests, off, strict=True)]
    )
    compared = counts["logprobs_compared"]
    situation = _Situation(
        "" if compared else "no logprob was compared, as teacher-forced requests have none",
        {"rows_captured": rows, **counts},
        (Condition("rows_captured", ">=", 1), Condition("logprobs_compared", ">=", 1)),
    )
    result = completed(
        capture_changes_nothing,
        f"{counts['tokens_different']:,} of {counts['tokens_compared']:,} tokens and "
        f"{counts['logprobs_different']:,} of {compared:,} logprobs change when {rows:,} rows "
        "are captured",
        situation.counts,
        Condition("tokens_different", "==", 0),
        Condition("logprobs_different", "==", 0),
        *situation.conditions,
        first=first,
    )
    return _if_arisen(result, situation)


@dataclass(frozen=True)
class _Situation:
    """What must have arisen for a check to mean anything: how often it did, and what suffices.

    `text` says so, where the rest of a result doesn't.
    """

    text: str
    counts: Metrics
    conditions: tuple[Condition, ...]


def _shared_steps(*captures: Capture) -> _Situation:
    """The situation that, in each of the captures, requests shared a forward pass."""
    most = min(count_situations(capture)["most_requests_in_one_step"] for capture in captures)
    return _Situation(
        f"requests in one step: {most}",
        {"most_requests_in_one_step": most},
        (Condition("most_requests_in_one_step", ">=", 2),),
    )


def _settings(capture: Capture) -> dict[str, object]:
    """What a capture says of the engine that made it."""
    beside = {name: capture.metadata.get(name) for name in ("backend", "mode", "dtype")}
    return {**beside, **capture.metadata.get("engine", {})}


def _judge(
    judge: Callable[..., CheckResult],
    actual: Capture,
    expected: Capture,
    rtol: float | None,
    situation: _Situation,
) -> CheckResult:
    """Compare two runs of the same requests, each up to where its tokens part at a tie."""
    partings = _partings(actual, expected)
    wrong = [parting for parting in partings.values() if not parting.tied]
    comparison = compare_captures(_before(actual, partings), _before(expected, partings), rtol=rtol)
    result = comparison_result(
        judge,
        comparison,
        Condition("requests_parted", "==", 0),
        *situation.conditions,
        metrics={
            "requests_parted": len(wrong),
            "requests_parted_at_a_tie": len(partings) - len(wrong),
            **situation.counts,
        },
    )
    if wrong and comparison.passed:
        place = f"request {wrong[0].request_id!r}, position {wrong[0].position}"
        mine, theirs = wrong[0].tokens
        reason = f"the tokens part at {place}: {mine} in one run, {theirs} in the other"
        result = replace(result, reason=reason, first_divergence=place)
    elif partings and not wrong:
        reason = f"{result.reason}; requests compared up to a tie of two tokens: {len(partings)}"
        result = replace(result, reason=reason)
    return _if_arisen(result, situation)


def _if_arisen(result: CheckResult, situation: _Situation) -> CheckResult:
    """The result with its situation told; `not exercised` where only the situation is lacking."""
    missing = set(unmet(result))
    if missing and missing <= set(situation.conditions):
        reason = f"the situation did not arise: {situation.text}; {result.reason}"
        return replace(result, outcome="not exercised", reason=reason)
    reasons = (result.reason, situation.text)
    return replace(result, reason="; ".join(reason for reason in reasons if reason))


@dataclass(frozen=True)
class _Parting:
    """Where a request's generated tokens part between two runs; before `position` they agree."""

    request_id: str
    position: int
    tokens: tuple[int | None, int | None]
    tied: bool


def _partings(actual: Capture, expected: Capture) -> dict[str, _Parting]:
    """Where each request parts that does, by id; one in which the prompt differs is left alone."""
    runs = {request.id: request for request in expected.requests}
    found = {}
    for mine in actual.requests:
        theirs = runs.get(mine.id)
        if theirs is None or mine.prompt_token_ids != theirs.prompt_token_ids:
            continue
        tokens = enumerate(zip_longest(mine.generated_token_ids, theirs.generated_token_ids))
        parting = next(((nth, pair) for nth, pair in tokens if pair[0] != pair[1]), None)
        if parting is not None:
            nth, (token, other) = parting
            position = mine.prompt_length + nth
            tied = None not in (token, other) and _ties(expected, mine.id, position, token)
            found[mine.id] = _Parting(mine.id, position, (token, other), tied)
    return found


def _ties(capture: Capture, request_id: str, position: int, token: int) -> bool:
    """Whether the capture's logits show that `token` was as good a choice at `position`."""
    try:
        logits = capture.row(request_id, "logits", position - 1)
    except KeyError:  # not captured: nobody can tell
        return False
    return bool(near_the_largest(logits[None], torch.tensor([token]))[0])


def _before(capture: Capture, partings: Mapping[str, _Parting]) -> Capture:
    """The capture without the tokens and rows from which on requests part."""
    if not partings:
        return capture
    ends = [partings[r.id].position if r.id in partings else None for r in capture.requests]
    requests = [
        request
        if end is None
        else replace(
            request, generated_token_ids=request.generated_token_ids[: end - request.prompt_length]
        )
        for request, end in zip(capture.requests, ends, strict=True)
    ]
    limit = np.array([np.iinfo(np.int64).max if end is None else end for end in ends])
    rows = {
        site: rows.take(np.flatnonzero(rows.columns.position < limit[rows.columns.request]))
        for site, rows in capture.rows.items()
    }
    return replace(capture, requests=tuple(requests), rows=rows)


_Outputs = Sequence[tuple[Request, "CompletionOutput", "CompletionOutput"]]


def _observe(outputs: _Outputs) -> tuple[Mapping[str, int], str | None]:
    """Tokens and logprobs compared and different, and the first token at which either is."""
    counts = dict.fromkeys(
        ("tokens_compared", "tokens_different", "logprobs_compared", "logprobs_different"), 0
    )
    first = None
    for request, on, off in outputs:
        steps = zip_longest(on.token_ids, off.token_ids, on.logprobs or (), off.logprobs or ())
        for nth, (token, other, *logprobs) in enumerate(steps):
            mine, theirs = (
                {token: found.logprob for token, found in (entry or {}).items()}
                for entry in logprobs
            )
            different = sum(mine.get(key) != theirs.get(key) for key in mine | theirs)
            counts["tokens_compared"] += 1
            counts["tokens_different"] += token != other
            counts["logprobs_compared"] += len(mine | theirs)
            counts["logprobs_different"] += different
            if first is None and (token != other or different):
                first = f"request {request.id!r}, position {request.prompt_length + nth}"
    return counts, first
