"""What a runner adapter reads of vLLM, by behaviour: each test fails if a read moves meaning.

The forward pass itself is the witness: its input ids and positions say what every row is. Run for
model runner V1, and by test_runner_v2.py for V2.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from pathlib import Path
from typing import Any

import pytest

from tapcheck.compatibility.environment import collect_environment
from tapcheck.compatibility.errors import KnownIssueError
from tapcheck.compatibility.known_issues import environment_terms, matching_issues
from tapcheck.fixtures.pool import EnginePool
from tapcheck.layout import Repeat, StepLayout
from tapcheck.request import Request
from tapcheck.vllm.adapters import OWNER, adapter_for, find_embedding
from tapcheck.vllm.backend import VLLMBackend

pytestmark = pytest.mark.engine


class Witness:
    """Layouts as the adapter announces them, beside what the model was really called with."""

    def __init__(self, engine: VLLMBackend) -> None:
        engine.capture([Request("first", (1,))], ["embed"])  # installs the taps, under this watch
        self.core: Any = engine._llm.llm_engine.engine_core.engine_core
        worker = self.core.model_executor.driver_worker.worker
        self.runner: Any = worker.model_runner
        self.adapter = adapter_for(worker)
        self.announced: list[StepLayout | Repeat] = []
        self.calls: list[tuple[list[int], list[int]]] = []
        self.ended = 0

    @property
    def layouts(self) -> list[StepLayout]:
        return [at.layout if isinstance(at, Repeat) else at for at in self.announced]

    def __enter__(self) -> Witness:
        self.adapter.watch(self.announced.append, self._end)
        self._handle = self.adapter.model.register_forward_pre_hook(self._see, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()
        self.adapter.unwatch()

    def _see(self, _model: object, _args: object, kwargs: dict[str, Any]) -> None:
        self.calls.append((kwargs["input_ids"].tolist(), kwargs["positions"].tolist()))

    def _end(self, _output: object) -> None:
        self.ended += 1


def test_owner_position_and_order_of_every_row_are_those_of_the_forward_pass(
    engine: VLLMBackend, requests: list[Request]
) -> None:
    with Witness(engine) as witness:
        capture = engine.capture(requests, ["embed"], max_new_tokens=9)
    tokens = {request.token_ids: 0 for request in capture.requests}
    by_owner: dict[str, dict[int, int]] = {}
    assert len(witness.layouts) == len(witness.calls) == witness.ended > 5
    for layout, (input_ids, positions) in zip(witness.layouts, witness.calls, strict=True):
        assert layout.total_rows == len(input_ids)
        row = 0
        for segment in layout.segments:
            assert segment.owner is not None
            expected = list(range(segment.start, segment.start + segment.rows))
            assert positions[row : row + segment.rows] == expected
            seen = by_owner.setdefault(segment.owner, {})
            seen |= dict(zip(expected, input_ids[row : row + segment.rows], strict=True))
            row += segment.rows
    for seen in by_owner.values():
        fed = tuple(seen[position] for position in range(len(seen)))
        matching = [ids for ids in tokens if ids[:-1] == fed]
        assert len(matching) == 1, f"an owner's rows are not one request's tokens: {fed}"
        tokens[matching[0]] += 1
    assert set(tokens.values()) == {1}
    # once all decode together a pass is told of as a repeat, and those say what the others do
    assert sum(isinstance(each, Repeat) for each in witness.announced) >= 4


def test_prompt_lengths_are_those_of_the_prompts(
    engine: VLLMBackend, requests: list[Request]
) -> None:
    with Witness(engine) as witness:
        engine.capture(requests, ["embed"], max_new_tokens=3)
    lengths: dict[str | None, set[int]] = {}
    for layout in witness.layouts:
        for segment in layout.segments:
            lengths.setdefault(segment.owner, set()).add(segment.prompt_length)
    assert all(len(seen) == 1 for seen in lengths.values())
    assert sorted(seen.pop() for seen in lengths.values()) == sorted(
        request.prompt_length for request in requests
    )


def test_a_request_without_an_owner_is_announced_as_nobodys(engine: VLLMBackend) -> None:
    from vllm import SamplingParams

    with Witness(engine) as witness:
        engine._llm.generate(
            [{"prompt_token_ids": [1, 2, 3]}],
            SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
    owners = {segment.owner for layout in witness.layouts for segment in layout.segments}
    assert owners == {None}


def test_a_dummy_forward_runs_the_model_and_announces_nothing(engine: VLLMBackend) -> None:
    with Witness(engine) as witness:
        witness.adapter.run_dummy_forward()
    assert len(witness.calls) == 1
    assert len(witness.calls[0][0]) > 1
    assert not witness.layouts
    assert not witness.ended


def test_unwatch_leaves_the_runner_as_it_was(engine: VLLMBackend) -> None:
    witness = Witness(engine)

    def shadowing() -> dict[str, object]:
        return {name: it for name, it in vars(witness.runner).items() if inspect.isfunction(it)}

    before = shadowing()
    hooks = list(witness.adapter.model._forward_pre_hooks)
    with witness:
        assert shadowing()["execute_model"] is not before["execute_model"]
    assert shadowing() == before
    assert list(witness.adapter.model._forward_pre_hooks) == hooks
    engine._call("tapcheck_uninstall")
    engine._installed = None
    assert not {"execute_model", "prepare_inputs", "_model_forward"} & shadowing().keys()
    assert not witness.adapter.model._forward_pre_hooks


def test_the_embedding_is_the_one_that_input_ids_pass_through(engine: VLLMBackend) -> None:
    seen: list[list[int]] = []
    with Witness(engine) as witness:
        embedding = find_embedding(witness.adapter.model)
        assert embedding is not None
        handle = embedding.register_forward_pre_hook(
            lambda _module, args: seen.append(args[0].tolist())
        )
        witness.adapter.run_dummy_forward()
        handle.remove()
    assert seen == [witness.calls[0][0]]


def test_logits_of_hidden_rows_are_those_that_the_sampler_chose_from(
    engine: VLLMBackend, requests: list[Request]
) -> None:
    capture = engine.capture(requests, ["logits"], max_new_tokens=4)
    for request in capture.requests:
        for offset, token in enumerate(request.generated_token_ids):
            row = capture.row(request.id, "logits", request.prompt_length - 1 + offset)
            assert int(row.argmax()) == token


def test_draft_rows_are_those_whose_token_the_sampler_had_still_to_accept(
    engine_pool: EnginePool, llama: Path
) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3,
              "prompt_lookup_max": 3, "prompt_lookup_min": 1}  # fmt: skip
    start = functools.partial(
        engine_pool.acquire,
        llama, block_size=32, max_num_batched_tokens=64, speculative_config=config,
    )  # fmt: skip
    here = environment_terms(collect_environment("cpu"))
    if matching_issues(here | {"speculative_method": "ngram"}):  # there are no drafts to look at
        with pytest.raises(KnownIssueError, match="ngram"):
            start()
        return
    engine = start()
    with Witness(engine) as witness:
        capture = engine.capture([Request("r", (5, 9, 200) * 4)], ["embed"], max_new_tokens=40)
    tokens = capture.requests[0].token_ids
    fates = {True: 0, False: 0}
    steps = list(zip(witness.layouts, witness.calls, strict=True))
    for (layout, (fed, _)), (following, _) in itertools.pairwise(steps):
        (segment,), (after,) = layout.segments, following.segments
        first_draft = segment.start + segment.rows - segment.drafts
        for position, token in enumerate(fed[: segment.rows], segment.start):
            if position < first_draft:
                assert token == tokens[position]
            else:
                drafted = fed[first_draft - segment.start : position + 1 - segment.start]
                right = tokens[first_draft : position + 1] == tuple(drafted)
                assert (position < after.start) == right
                fates[right] += 1
    assert all(fates.values()), f"accepted and rejected drafts: {fates}"


def test_a_resumed_request_is_one_that_the_scheduler_preempted(
    engine_pool: EnginePool, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_pool.acquire(
        llama, block_size=32, num_gpu_blocks_override=9, max_num_batched_tokens=64,
        max_model_len=256,
    )  # fmt: skip
    preempted: list[int] = []
    with Witness(engine) as witness:
        scheduler = witness.core.scheduler
        preempt = scheduler._preempt_request

        def counted(request: Any, *arguments: Any, **options: Any) -> Any:
            preempted.append(request.num_prompt_tokens)
            return preempt(request, *arguments, **options)

        monkeypatch.setattr(scheduler, "_preempt_request", counted)
        requests = [Request(str(i), tuple(range(1, 41 + i))) for i in range(4)]
        engine.capture(requests, ["embed"], max_new_tokens=60)
    resumed = [s.prompt_length for layout in witness.layouts for s in layout.segments if s.resumed]
    assert preempted
    assert sorted(resumed) == sorted(preempted)


def test_owners_do_not_depend_on_the_ids_that_vllm_is_given(engine: VLLMBackend) -> None:
    from vllm import SamplingParams

    ids = ["1", "10", "a", "a-0", "req-1", "req-1-0"]
    core = engine._llm.llm_engine
    with Witness(engine) as witness:
        for number, name in enumerate(ids):
            params = SamplingParams(
                max_tokens=3, ignore_eos=True, detokenize=False, extra_args={OWNER: f"of {name}"}
            )
            core.add_request(name, {"type": "token", "prompt_token_ids": [number + 1] * 4}, params)
        while core.has_unfinished_requests():
            core.step()
    for layout, (fed, _) in zip(witness.layouts, witness.calls, strict=True):
        row = 0
        for segment in layout.segments:
            if segment.start == 0:
                owner = segment.owner or ""
                assert fed[row] == ids.index(owner.removeprefix("of ")) + 1
            row += segment.rows
    assert {s.owner for layout in witness.layouts for s in layout.segments} == {
        f"of {name}" for name in ids
    }


def test_an_idle_step_announces_nothing(engine: VLLMBackend) -> None:
    with Witness(engine) as witness:
        witness.core.execute_dummy_batch()
        engine._llm.llm_engine.step()
    assert not witness.layouts
