"""The checks of the main job: what each runs, measures and requires.

To add a check: measure it from the two captures in a function that returns a CheckResult, call it
in `judge_engine`, and name it in `checks/jobs.py`. The metamorphic ones are in
`checks/metamorphic.py`, and are called in `judge_itself`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tapcheck.capture import Capture
from tapcheck.checks.equivalence import compare_captures
from tapcheck.checks.identities import identities_hold
from tapcheck.checks.jobs import HOOK_EQUALS_GRAPH, SELFTEST, Job
from tapcheck.checks.ledger import compare_ledger
from tapcheck.checks.measures import (
    comparison_result,
    completed,
    count_situations,
)
from tapcheck.checks.memory import free_memory, memory_for
from tapcheck.checks.message import where
from tapcheck.checks.metamorphic import (
    alone_equals_batched,
    capture_changes_nothing,
    cold_equals_warm_prefix,
    one_shot_equals_chunked,
    reordered,
    same_on_both,
)
from tapcheck.checks.noise_floor import PERTURBATIONS, REFERENCE_DTYPES
from tapcheck.checks.oracle import judge_oracle
from tapcheck.checks.outputs import (
    greedy_tokens,
    kl_divergence,
    limits_by_noise,
    top_k_logprobs,
)
from tapcheck.checks.report import write_bundle
from tapcheck.checks.selftest import run_selftest
from tapcheck.compatibility.rows import EngineSettings
from tapcheck.compatibility.verdict import CheckResult, Condition
from tapcheck.hf import HFBackend
from tapcheck.models import load_config
from tapcheck.request import Request
from tapcheck.sites import Site
from tapcheck.vllm.backend import VLLMBackend

# Eight concurrent requests of different lengths, so that they join, decode and leave together.
PROMPT_LENGTHS = (1, 2, 5, 9, 16, 23, 33, 48)
NEW_TOKENS = 12
_MODEL_LEN = 512  # more than any of them needs
# Fewer tokens in a step than the prompts have together, so that some are taken in chunks.
_CHUNK = 64
# New tokens of the metamorphic checks, which run each request about ten times.
_FEW_TOKENS = 6


@dataclass(frozen=True)
class Finding:
    """What a job found: results, the engine that ran, and how often each situation arose."""

    results: tuple[CheckResult, ...]
    settings: tuple[EngineSettings, ...]
    situations: dict[str, int]


def run_job(job: Job) -> Finding:
    """Run one job; raises what goes wrong outside the checks themselves."""
    if job.topology is None:
        return judge_the_judge(job)
    if job.metamorphic:
        return judge_itself(job)
    reference = _reference(job)
    requests = make_requests(reference.vocabulary_size)
    sites = reference.sites
    in_process = job.topology == "in_process"
    arguments = _engine_arguments(job, sites)
    with VLLMBackend(job.path, dtype=job.dtype, in_process=in_process, **arguments) as engine:
        actual = engine.capture(requests, sites, max_new_tokens=NEW_TOKENS)
    expected = reference.capture(actual.requests, sites)
    floor, lacking = _noise_floor(job, actual.requests, sites)
    results = tuple(judge_engine(job, requests, actual, expected, floor, lacking))
    situations = count_situations(actual) | actual.situations
    return Finding(results, (_engine_settings(job, actual),), situations)


@dataclass(frozen=True, eq=False)
class NoiseFloor:
    """What `tapcheck.checks.noise_floor` judges by: a wider reference, and repeats."""

    reference: Capture
    repeats: Sequence[Capture]


def _noise_floor(
    job: Job, requests: Sequence[Request], sites: Sequence[Site]
) -> tuple[NoiseFloor | None, str]:
    """The noise floor of a job, or None and why there is none, if that needs saying.

    A job with a tolerance of its own needs none.
    """
    if job.rtol is not None:
        return None, ""
    wider = REFERENCE_DTYPES[job.dtype]
    needed, free = memory_for(job.path, wider), free_memory(job.device)
    if needed > free:
        return None, (
            f"no {wider} reference fits in memory ({needed / 2**30:.1f} GiB needed, "
            f"{free / 2**30:.1f} GiB free), so the fixed tolerance of {job.dtype} judged"
        )
    with HFBackend(job.path, dtype=wider, device=job.device) as engine:
        reference = engine.capture(requests, sites)
    narrow = _reference(job)
    repeats = [narrow.capture(requests, sites, perturb=seed) for seed in PERTURBATIONS]
    return NoiseFloor(reference, repeats), ""


@functools.lru_cache(maxsize=1)
def _loaded(path: str, dtype: str, device: str) -> HFBackend:
    return HFBackend(path, dtype=dtype, device=device)


def _reference(job: Job) -> HFBackend:
    """The Transformers model of a job; jobs of one model follow each other and share it."""
    return _loaded(job.path, job.dtype, job.device)


def _engine_arguments(job: Job, sites: Sequence[Site]) -> dict[str, Any]:
    """What the engine is started with: by default a small one, with room for Transformers' copy."""
    longest = getattr(load_config(job.path).get_text_config(), "max_position_embeddings", None)
    arguments: dict[str, Any] = {"max_model_len": min(longest or _MODEL_LEN, _MODEL_LEN)}
    if job.device == "cuda":
        arguments["gpu_memory_utilization"] = 0.5
    if job.mode == "graph":
        arguments["graph_taps"] = sites
    return arguments | dict(job.engine)


def make_requests(vocabulary: int) -> list[Request]:
    """The requests of every engine job: fixed random token ids, no two prompts alike."""
    generator = torch.Generator().manual_seed(0)
    return [
        Request(f"r{i}", tuple(torch.randint(vocabulary, (n,), generator=generator).tolist()))
        for i, n in enumerate(PROMPT_LENGTHS)
    ]


def judge_engine(
    job: Job,
    requests: list[Request],
    actual: Capture,
    expected: Capture,
    floor: NoiseFloor | None = None,
    note: str = "",
) -> Iterator[CheckResult]:
    """Every check of one engine's capture against Transformers' on the same tokens.

    Without a `floor` tolerances are fixed; `note` joins the verdict.
    """
    limits = None if floor is None else limits_by_noise(expected, floor.reference, floor.repeats)
    judges: dict[str, Callable[[], CheckResult]] = {
        "ledger": lambda: check_ledger(requests, expected.sites, actual),
        "equivalence": lambda: check_equivalence(
            actual, expected, job.rtol, floor=floor, note=note, bundle=job.bundle
        ),
        "tokens": lambda: greedy_tokens(actual, expected, new_tokens=NEW_TOKENS),
        "top_k_logprobs": lambda: top_k_logprobs(actual, expected, limits=limits),
        "kl_divergence": lambda: kl_divergence(actual, expected, limits=limits),
        "identities": lambda: identities_hold(actual),
    }
    for check, judge in judges.items():
        yield _timed(f"{check}[{job.model},{job.topology}]", judge)


def judge_the_judge(job: Job) -> Finding:
    """Whether faults are caught, and Transformers' captures are right to hold others against."""
    reference = _reference(job)
    results = [_timed(SELFTEST, lambda: check_the_checker(job.model, job.path))]
    requests = make_requests(reference.vocabulary_size)[2:6]
    started = time.monotonic()
    for result in judge_oracle(reference, requests):
        ended = time.monotonic()
        named = f"{result.name}[{job.model}]"
        results.append(replace(result, name=named, seconds=round(ended - started, 3)))
        started = ended
    return Finding(tuple(results), (), {})


def judge_itself(job: Job) -> Finding:
    """Every metamorphic check: on one engine, then with a second that takes prompts in chunks.

    And, of a compiled engine, with an eager one.
    """
    arguments, rtol = _engine_arguments(job, _reference(job).sites), job.rtol
    new: dict[str, Any] = {"max_new_tokens": _FEW_TOKENS}
    with VLLMBackend(job.path, dtype=job.dtype, **arguments) as engine:
        requests = _with_one_beyond_a_block(job, engine.metadata["engine"])
        run = (requests, engine.sites)
        judges: dict[str, Callable[[], CheckResult]] = {
            "capture_changes_nothing": lambda: capture_changes_nothing(engine, *run, **new),
            "alone_equals_batched": lambda: alone_equals_batched(engine, *run, **new, rtol=rtol),
            "reordered": lambda: reordered(engine, *run, **new, rtol=rtol),
            "cold_equals_warm_prefix": lambda: cold_equals_warm_prefix(
                engine, *run, **new, rtol=rtol
            ),
        }
        results = {check: _timed(f"{check}[{job.model}]", judge) for check, judge in judges.items()}
        one_shot = engine.capture(*run, **new)
    in_chunks = {"max_num_batched_tokens": _CHUNK} | arguments
    with VLLMBackend(job.path, dtype=job.dtype, **in_chunks) as engine:
        chunked = engine.capture(*run, **new)
    check = "one_shot_equals_chunked"
    results[check] = _timed(
        f"{check}[{job.model}]", lambda: one_shot_equals_chunked(one_shot, chunked, rtol=rtol)
    )
    if job.mode == "graph":
        arguments.pop("graph_taps")
        with VLLMBackend(job.path, dtype=job.dtype, **arguments) as engine:
            hooked = engine.capture(one_shot.requests, one_shot.sites)
        results[HOOK_EQUALS_GRAPH] = _timed(
            f"{HOOK_EQUALS_GRAPH}[{job.model}]", lambda: same_on_both(hooked, one_shot, rtol=rtol)
        )
    situations = {
        "cached_positions": int(results["cold_equals_warm_prefix"].metrics["cached_positions"]),
        "unfinished_prefills": chunked.situations["unfinished_prefills"],
    }
    settings = tuple(_engine_settings(job, capture) for capture in (one_shot, chunked))
    return Finding(tuple(results.values()), settings, situations)


def _with_one_beyond_a_block(job: Job, engine: Mapping[str, Any]) -> list[Request]:
    """The usual requests, and one of which the prefix cache can hold a block, if it fits."""
    vocabulary = int(load_config(job.path).get_text_config().vocab_size)
    length = min(engine["block_size"] + 2, engine["max_model_len"] - _FEW_TOKENS)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(vocabulary, (length,), generator=generator).tolist()
    return [*make_requests(vocabulary), Request("beyond", tuple(prompt))]


def _timed(name: str, judge: Callable[[], CheckResult]) -> CheckResult:
    """The result of a check under its full name, with the seconds that it took."""
    started = time.monotonic()
    return replace(judge(), name=name, seconds=round(time.monotonic() - started, 3))


def check_ledger(
    requests: Sequence[Request], sites: Sequence[Site], actual: Capture
) -> CheckResult:
    """Every row that the requests make due was delivered once, in order, and no other was.

    All requests must have shared a forward pass: without that, ownership was never put to a test.
    """
    ledger = compare_ledger(actual, requests=requests, sites=sites, select=["all"])
    shared = count_situations(actual)["most_requests_in_one_step"]
    problems = ledger.entries
    reason = f"{ledger.delivered} of {ledger.due} rows delivered, {shared} requests in one step"
    if problems:
        reason = f"{len(problems)} rows wrong; the first: {problems[0].reason}"
    return completed(
        check_ledger,
        reason,
        {
            "rows_due": ledger.due,
            "rows_delivered": ledger.delivered,
            "rows_wrong": len(problems),
            "requests": len(requests),
            "most_requests_in_one_step": shared,
        },
        Condition("rows_due", ">=", 1),
        Condition("rows_delivered", "==", "rows_due"),
        Condition("rows_wrong", "==", 0),
        Condition("most_requests_in_one_step", "==", "requests"),
        first=where(problems[0]) if problems else None,
    )


def check_equivalence(
    actual: Capture,
    expected: Capture,
    rtol: float | None = None,
    *,
    floor: NoiseFloor | None = None,
    note: str = "",
    bundle: str | None = None,
) -> CheckResult:
    """Every row equals Transformers' row of the same request, site and position.

    Within `rtol`, or what the dtype costs Transformers by the noise `floor`.
    """
    judge: dict[str, Any] = {"rtol": rtol}
    if floor is not None:
        judge |= {"reference": floor.reference, "repeats": floor.repeats}
    comparison = compare_captures(actual, expected, **judge)
    if bundle is not None and not comparison.passed:
        write_bundle(bundle, actual, expected, comparison, **judge)
    return comparison_result(check_equivalence, comparison, note=note)


def check_the_checker(model: str, path: str) -> CheckResult:
    """Every injected fault is caught in a real capture, in float32 and by the noise floor.

    And a healthy capture is not. The largest number over its limit of the healthy captures and of
    the weakest fault, both in bfloat16, say how much room there is between the two.
    """
    found = run_selftest({model: path}, ("float32",), healthy=1)
    narrow = run_selftest({model: path}, ("bfloat16",), healthy=1)
    both = found + narrow
    reason = both.report().splitlines()[-1]
    if both.missed:
        reason += f"; missed: {', '.join(f'{one.fault} in {one.dtype}' for one in both.missed)}"
    return completed(
        check_the_checker,
        reason,
        {
            "faults_injected": len(both.injections),
            "faults_caught": both.caught,
            "faults_named": both.named,
            "healthy": len(both.healthy),
            "false_alarms": len(both.false_alarms),
            "largest_healthy_excess": max(narrow.healthy),
            "weakest_fault_excess": narrow.weakest,
        },
        Condition("faults_injected", ">=", 1),
        Condition("faults_caught", "==", "faults_injected"),
        Condition("healthy", ">=", 1),
        Condition("false_alarms", "==", 0),
        Condition("largest_healthy_excess", "<=", 1),
        Condition("weakest_fault_excess", ">=", 1),
    )


def _engine_settings(job: Job, capture: Capture) -> EngineSettings:
    live = capture.metadata["engine"]
    assert job.topology is not None
    return EngineSettings(
        model=job.model,
        revision=None,
        dtype=job.dtype,
        engine_dtype=live["engine_dtype"],
        quantization=live["quantization"],
        tensor_parallel_size=live["tensor_parallel_size"],
        pipeline_parallel_size=live["pipeline_parallel_size"],
        runner=live["runner"],
        mode=capture.metadata["mode"],
        topology=job.topology,
        attention_backend=live["attention_backend"],
        block_size=live["block_size"],
        model_impl=live["model_impl"],
    )
