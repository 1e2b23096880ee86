"""What a scheduler does to requests, each on the real engine: every row due, once, and right.

Each test counts its situation and fails when it did not arise; values are judged against a
teacher-forced Transformers run of the same tokens. test_runner_v2.py runs some of these tests, one
for each situation, under model runner V2.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tapcheck.capture import Capture
from tapcheck.checks import assert_captures_match
from tapcheck.checks.comparison import Comparison
from tapcheck.checks.ledger import compare_ledger
from tapcheck.fixtures.pool import EnginePool
from tapcheck.request import Request
from tapcheck.vllm.backend import VLLMBackend

pytestmark = pytest.mark.engine

SITES = ["embed", "resid_mid.0", "resid_post.1", "mlp_out.2", "resid_post.3", "logits"]
Judge = Callable[..., Comparison]


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids in which no two positions look alike to the model."""
    return tuple((seed * 131 + at * at * 7 + at * 37 + 11) % 512 for at in range(length))


@pytest.fixture(scope="session")
def judge(
    hf_capture: Callable[..., Capture], llama: Path, require_runner: Callable[[Capture], None]
) -> Judge:
    """Judge a capture: complete by the ledger, and equal to Transformers' on the same tokens."""

    def check(actual: Capture, select: list[int | str] | None = None) -> Comparison:
        require_runner(actual)
        select = select or ["all"]
        ledger = compare_ledger(actual, requests=actual.requests, sites=SITES, select=select)
        assert ledger.complete, ledger.entries[:3]
        assert ledger.due == ledger.delivered
        expected = hf_capture(llama, actual.requests, sites=SITES, select=select)
        return assert_captures_match(actual, expected, rtol=1e-5)

    return check


def held(engine: VLLMBackend) -> int:
    """How many requests the worker still follows."""
    (reply,) = engine._call("tapcheck_discard", "[]")
    return int(reply.removeprefix('{"ok": ').removesuffix("}"))


@pytest.mark.parametrize("chunk", [8, 16, 17])
def test_chunked_prefill(engine_pool: EnginePool, llama: Path, judge: Judge, chunk: int) -> None:
    engine = engine_pool.acquire(
        llama, block_size=32, max_num_batched_tokens=chunk, max_num_seqs=4, max_model_len=256
    )
    lengths = (3 * chunk + 1, 2 * chunk, 5, 4 * chunk - 1)  # the first ends in a chunk of one token
    requests = [Request(f"r{n}", prompt(n, n)) for n in lengths]
    actual = engine.capture(requests, SITES, max_new_tokens=4)
    alone = engine.capture(requests[:1], SITES, max_new_tokens=2)
    assert actual.situations["unfinished_prefills"] >= 4
    assert actual.situations["mixed_passes"] > 0
    assert alone.situations["unfinished_prefills"] == 3
    judge(actual)
    judge(alone)


def test_prefix_caching_computes_what_a_selector_needs(engine: VLLMBackend, judge: Judge) -> None:
    shared = prompt(96, 3)
    first = engine.capture([Request("first", (*shared, 7))], SITES, max_new_tokens=3)
    again = engine.capture(
        [Request("same", (*shared, 7)), Request("other", (*shared, 8, 9))], SITES, max_new_tokens=3
    )
    assert first.situations["cached_positions"] == again.situations["cached_positions"] == 0
    judge(again)


def test_prefix_caching_is_read_where_no_selector_needs_the_prompt(
    engine: VLLMBackend, judge: Judge
) -> None:
    requests = [Request("r", (*prompt(96, 4), 7))]
    engine.capture(requests, SITES, ["generated[*]"], max_new_tokens=5)
    warm = engine.capture(requests, SITES, ["generated[*]", "prompt[-1]"], max_new_tokens=5)
    assert warm.situations["cached_positions"] == 96
    judge(warm, ["generated[*]", "prompt[-1]"])


def test_prefix_caching_on_request_lists_the_cached_positions(
    engine: VLLMBackend, judge: Judge
) -> None:
    shared = prompt(70, 5)
    engine.capture([Request("first", shared)], SITES, max_new_tokens=2)
    requests = [Request("same", shared), Request("other", (*shared[:64], 8, 9))]
    warm = engine.capture(requests, SITES, max_new_tokens=4, read_prefix_cache=True)
    assert warm.metadata["cached"] == {"same": ((0, 64),), "other": ((0, 64),)}
    assert sorted(set(warm["embed"].columns.position.tolist())) == [*range(64, 73)]
    comparison = judge(warm)
    assert [(c.request_id, c.start, c.stop) for c in comparison.ledger.cached] == [
        ("same", 0, 64),
        ("other", 0, 64),
    ]


@pytest.mark.parametrize("read_prefix_cache", [False, True])
def test_preemption_with_recomputation(
    engine_pool: EnginePool, llama: Path, judge: Judge, read_prefix_cache: bool
) -> None:
    engine = engine_pool.acquire(
        llama, block_size=32, num_gpu_blocks_override=9, max_num_batched_tokens=64,
        max_model_len=256,
    )  # fmt: skip
    requests = [Request(f"r{i}", prompt(40 + i, 10 + i)) for i in range(4)]
    actual = engine.capture(requests, SITES, max_new_tokens=60, read_prefix_cache=read_prefix_cache)
    assert actual.situations["preemptions"] > 0
    assert actual.situations["recomputed_rows"] > 0
    judge(actual)


def test_ngram_speculation_with_accepted_and_rejected_drafts(
    speculating: VLLMBackend, judge: Judge
) -> None:
    requests = [Request(f"r{i}", prompt(9, i) * 2) for i in range(4)]
    actual = speculating.capture(requests, SITES, max_new_tokens=40)
    assert actual.situations["accepted_drafts"] > 0
    assert actual.situations["rejected_drafts"] > 0
    judge(actual)


def test_a_request_that_ends_inside_its_accepted_drafts(
    speculating: VLLMBackend, judge: Judge
) -> None:
    requests = [Request(f"r{i}", prompt(9, i) * 2) for i in range(4)]
    greedy = speculating.capture(requests, ["embed"], max_new_tokens=40)
    from vllm import SamplingParams

    for cut in (31, 32, 33, 34):  # whatever the number of drafts, some end inside them
        params = [
            SamplingParams(
                temperature=0, max_tokens=40, detokenize=False,
                stop_token_ids=[request.generated_token_ids[cut]],
            )
            for request in greedy.requests
        ]  # fmt: skip
        actual = speculating.capture(requests, SITES, sampling_params=params)
        assert any(len(r.generated_token_ids) < 40 for r in actual.requests)
        judge(actual)
        assert held(speculating) == 0


@pytest.fixture
def speculating(engine_pool: EnginePool, llama: Path) -> VLLMBackend:
    config = {"method": "ngram", "num_speculative_tokens": 3,
              "prompt_lookup_max": 3, "prompt_lookup_min": 1}  # fmt: skip
    return engine_pool.acquire(
        llama, block_size=32, max_num_batched_tokens=64, speculative_config=config
    )


def test_requests_that_join_and_leave_every_step(engine: VLLMBackend, judge: Judge) -> None:
    with engine.session(SITES) as session:
        for at in range(12):
            request = Request(str(at), prompt(1 + 5 * at % 23, at))
            session.add_request(request, max_new_tokens=1 + at % 4)
            session.step()
        while session.unfinished:
            session.step()
        actual = session.collect()
    assert len({len(part) for part in actual.split().values()}) > 4
    assert actual.situations["mixed_passes"] > 0
    judge(actual)
    assert held(engine) == 0


def test_an_id_may_be_used_again_once_its_request_was_collected(
    engine: VLLMBackend, judge: Judge
) -> None:
    with engine.session(SITES) as session:
        for length in (5, 1, 9):
            session.add_request(Request("again", prompt(length, length)), max_new_tokens=3)
            while session.unfinished:
                session.step()
            actual = session.collect()
            assert actual.requests[0].prompt_length == length
            judge(actual)


@pytest.mark.parametrize("new_tokens", [1, 2])
def test_prompts_of_one_token_and_one_new_token(
    engine: VLLMBackend, judge: Judge, new_tokens: int
) -> None:
    requests = [Request(str(token), (token,)) for token in (1, 10, 100)]
    judge(engine.capture(requests, SITES, max_new_tokens=new_tokens))


def test_a_request_whose_only_row_comes_from_its_last_step(
    engine: VLLMBackend, judge: Judge
) -> None:
    requests = [Request("a", prompt(7)), Request("b", prompt(40, 1))]
    actual = engine.capture(requests, SITES, ["generated[-1]"], max_new_tokens=6)
    assert actual["embed"].columns.position.tolist() == [11, 44]
    judge(actual, ["generated[-1]"])


@pytest.mark.parametrize("select", ["generated[-3:]", "generated[-1]", "all/7", "prompt[-2:]"])
def test_selectors_that_need_the_end_on_requests_that_end_apart(
    engine: VLLMBackend, judge: Judge, select: str
) -> None:
    from vllm import SamplingParams

    requests = [Request(f"r{n}", prompt(n, n)) for n in (3, 20, 33)]
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        for n in (4, 9, 6)
    ]
    actual = engine.capture(requests, SITES, [select], sampling_params=params)
    assert [len(r.generated_token_ids) for r in actual.requests] == [4, 9, 6]
    judge(actual, [select])


def test_a_teacher_forced_request_is_selected_by_its_own_prompt(
    engine: VLLMBackend, judge: Judge
) -> None:
    forced = [Request("f", prompt(5), prompt(6, 1)), Request("g", prompt(3, 2), (7,))]
    actual = engine.capture(forced, SITES, ["generated[*]", "prompt[-1]"])
    assert actual["embed"].columns.position.tolist() == [4, 5, 6, 7, 8, 9, 2]
    judge(actual, ["generated[*]", "prompt[-1]"])


@pytest.mark.parametrize("when", ["waiting", "in mid-prefill", "in mid-decode"])
def test_an_aborted_request_leaves_nothing_and_takes_nothing_from_the_others(
    engine_pool: EnginePool, llama: Path, judge: Judge, when: str
) -> None:
    engine = engine_pool.acquire(
        llama, block_size=32, max_num_batched_tokens=16, max_num_seqs=2, max_model_len=256
    )
    with engine.session(SITES) as session:
        session.add_request(Request("kept", prompt(12)), max_new_tokens=9)
        if when == "waiting":
            session.add_request(Request("second", prompt(3, 1)), max_new_tokens=9)
        session.add_request(Request("gone", prompt(40, 2)), max_new_tokens=9)
        for _ in range({"waiting": 2, "in mid-prefill": 2, "in mid-decode": 6}[when]):
            session.step()
        scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
        (request,) = (r for r in scheduler.requests.values() if r.num_prompt_tokens == 40)
        computed = request.num_computed_tokens
        assert {"waiting": computed == 0, "in mid-prefill": 0 < computed < 40,
                "in mid-decode": computed > 40}[when], computed  # fmt: skip
        session.abort_request("gone")
        assert "gone" not in session.unfinished
        while session.unfinished:
            session.step()
        actual = session.collect()
    judge(actual)
    assert held(engine) == 0
    assert not scheduler.requests


def test_everything_at_once(
    engine_pool: EnginePool, llama: Path, judge: Judge, layouts: Callable[..., Any]
) -> None:
    """Shared prefixes, small chunks, preemption, unequal lengths, staggered ends, moved slots."""
    engine = engine_pool.acquire(
        llama, block_size=32, num_gpu_blocks_override=12, max_num_batched_tokens=24,
        max_num_seqs=6, max_model_len=256,
    )  # fmt: skip
    shared = prompt(64, 30)
    with layouts() as seen, engine.session(SITES, read_prefix_cache=True) as session:
        for at in range(10):
            own = prompt(1 + 9 * at % 41, 31 + at)
            request = Request(f"r{at}", (*shared, *own) if at % 2 else own)
            session.add_request(request, max_new_tokens=10 + 7 * at % 40)
            for _ in range(at % 3 * 4):
                session.step()
        while session.unfinished:
            session.step()
        actual = session.collect()
    counts = actual.situations
    for situation in ("unfinished_prefills", "mixed_passes", "cached_positions", "preemptions",
                      "recomputed_rows"):  # fmt: skip
        assert counts[situation] > 0, f"{situation} did not arise"
    slots: dict[str | None, set[int]] = {}
    for layout in seen:
        for slot, segment in enumerate(layout.segments):
            slots.setdefault(segment.owner, set()).add(slot)
    assert max(map(len, slots.values())) > 1, "no slot was freed and condensed"
    judge(actual)
    assert held(engine) == 0
