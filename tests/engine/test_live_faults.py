"""Taps broken in the running engine: each must be caught against Transformers, and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapcheck.checks.equivalence import compare_captures
from tapcheck.checks.faults.live import LIVE_FAULTS, broken_taps
from tapcheck.errors import CaptureError
from tapcheck.hf import HFBackend
from tapcheck.request import Request
from tapcheck.rowstore import RowStore
from tapcheck.vllm.backend import VLLMBackend

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", list(LIVE_FAULTS))
def test_a_tap_that_is_broken_in_the_engine_is_caught_and_named(
    name: str, engine: VLLMBackend, llama: Path, requests: list[Request]
) -> None:
    wanted = [f"{point}.{layer}" for point in LIVE_FAULTS[name].points for layer in (1, 2)]
    one = requests[-1:]
    with broken_taps(name) as fault:
        faulty = engine.capture(one, wanted, max_new_tokens=4)
    with HFBackend(llama) as hf:
        expected = hf.capture(faulty.requests, wanted)
    comparison = compare_captures(faulty, expected)
    assert not comparison.passed
    assert comparison.diagnoses[0].fault == fault.named
    healthy = engine.capture(one, wanted, max_new_tokens=4)
    assert compare_captures(healthy, expected).passed


def test_a_wrong_row_offset_over_a_batch_of_requests_is_named(
    engine: VLLMBackend, llama: Path, requests: list[Request]
) -> None:
    with broken_taps("wrong_row_offset") as fault:
        faulty = engine.capture(requests, ["resid_post.1", "resid_post.2"], max_new_tokens=4)
    with HFBackend(llama) as hf:
        expected = hf.capture(faulty.requests, faulty.sites)
    likeliest = compare_captures(faulty, expected).diagnoses[0]
    assert likeliest.fault == fault.named
    assert "the row before it in the batch" in likeliest.claim


def test_one_fault_at_a_time_and_taps_are_sound_again_after_an_error() -> None:
    sound = RowStore.put
    with pytest.raises(CaptureError, match="no live fault 'nothing': there are residual_left_out"):
        broken_taps("nothing").__enter__()
    with (
        pytest.raises(CaptureError, match="one live fault at a time"),
        broken_taps("never_written"),
        broken_taps("never_written"),
    ):
        pass
    assert RowStore.put is sound


def test_every_live_fault_says_what_it_does_and_what_it_is_named() -> None:
    from tapcheck.checks.faults import FAULTS

    assert len(LIVE_FAULTS) == 8
    assert all(fault.description and fault.named in FAULTS for fault in LIVE_FAULTS.values())
