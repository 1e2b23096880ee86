"""What only model runner V2's adapter reads; test_runner_v2.py runs it under that runner."""

from __future__ import annotations

from typing import Any

import pytest
from test_adapter_contract import Witness

from tapcheck.errors import EngineError
from tapcheck.request import Request
from tapcheck.vllm.adapters import OWNER, adapter_for
from tapcheck.vllm.backend import VLLMBackend

pytestmark = pytest.mark.engine


def test_rows_are_told_in_the_order_that_the_runner_gives_them(engine: VLLMBackend) -> None:
    """It sorts requests by their number of rows; the scheduler lists those that run first."""
    asked: list[list[int]] = []
    with Witness(engine) as witness:
        schedule = witness.core.scheduler.schedule

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            asked.append(list(output.num_scheduled_tokens.values()))
            return output

        witness.core.scheduler.schedule = scheduled
        try:
            requests = [Request(f"r{rows}", (rows,) * rows) for rows in (40, 9, 5, 30, 2)]
            engine.capture(requests, ["embed"], max_new_tokens=3)
        finally:
            del witness.core.scheduler.schedule
    passes = [counts for counts in asked if counts]
    told = [[segment.rows for segment in layout.segments] for layout in witness.layouts]
    assert witness.adapter.runner == "v2"
    assert told == [sorted(counts) for counts in passes]
    assert any(told_here != counts for told_here, counts in zip(told, passes, strict=True))
    for layout, (fed, positions) in zip(witness.layouts, witness.calls, strict=True):
        row = 0
        for segment in layout.segments:
            assert positions[row] == segment.start
            if segment.start < segment.prompt_length:
                assert fed[row] == segment.prompt_length  # each prompt repeats its own length
            row += segment.rows


def test_a_request_that_arrived_before_the_watch_is_nobodys(engine: VLLMBackend) -> None:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=4, ignore_eos=True, detokenize=False, extra_args={OWNER: "early"}
    )
    core = engine._llm.llm_engine
    witness = Witness(engine)
    core.add_request("early", {"type": "token", "prompt_token_ids": [1, 2, 3]}, params)
    core.step()
    with witness:
        while core.has_unfinished_requests():
            core.step()
    assert witness.layouts
    assert {s.owner for layout in witness.layouts for s in layout.segments} == {None}


@pytest.mark.parametrize(
    ("attribute", "way_out"),
    [
        ("pcp_manager", "prefill_context_parallel_size=1"),
        ("adaptive_verification", "without adaptive verification"),
    ],
)
def test_what_moves_rows_out_of_sight_is_refused(
    engine: VLLMBackend, monkeypatch: pytest.MonkeyPatch, attribute: str, way_out: str
) -> None:
    witness = Witness(engine)
    worker = witness.core.model_executor.driver_worker.worker
    monkeypatch.setattr(witness.runner, attribute, object())  # raises if there is no such thing
    with pytest.raises(EngineError, match=way_out):
        adapter_for(worker)
