"""Requests that end by themselves: at an end-of-sequence token, a stop string, or their length."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tapcheck.capture import Capture
from tapcheck.checks import assert_captures_match
from tapcheck.errors import CaptureError
from tapcheck.fixtures.pool import EnginePool
from tapcheck.request import Request
from tapcheck.vllm.backend import VLLMBackend

pytestmark = pytest.mark.engine

SITES = ["embed", "resid_post.1", "resid_post.3"]
REQUESTS = [Request("a", (5, 9, 200, 33)), Request("b", (150, 12)), Request("c", (61, 8, 24))]
LENGTH = 16


@dataclass(frozen=True)
class Speaker:
    """An engine whose model has a tokenizer, and where its greedy runs are to stop.

    Request a generates the end-of-sequence token as its fifth, request b the stop string's token
    as its seventh, and request c neither.
    """

    engine: VLLMBackend
    stop: str


@pytest.fixture(scope="module")
def speaker(
    llama: Path,
    hf_capture: Callable[..., Capture],
    engine_pool: EnginePool,
    tmp_path_factory: pytest.TempPathFactory,
) -> Speaker:
    free = hf_capture(llama, REQUESTS, sites=["embed"], max_new_tokens=LENGTH).requests
    a, b, c = (request.generated_token_ids for request in free)
    end, stop = a[4], b[6]
    assert end not in (*a[:4], *b, *c)
    assert stop not in (*a[:5], *b[:6], *c)
    folder = tmp_path_factory.mktemp("speaker") / "model"
    shutil.copytree(llama, folder)
    save_tokenizer(folder, end)
    engine = engine_pool.acquire(folder, block_size=32, skip_tokenizer_init=False)
    return Speaker(engine, word(stop))


def word(token: int) -> str:
    """The text of a token; none begins another."""
    return f"<{token}>"


def save_tokenizer(folder: Path, end: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word(token): token for token in range(512)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=word(0)))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=word(end)).save_pretrained(folder)


@pytest.mark.parametrize("select", ["all", "generated[-1]"])
def test_every_row_is_there_however_a_request_ends(
    speaker: Speaker,
    hf_capture: Callable[..., Capture],
    llama: Path,
    require_runner: Callable[[Capture], None],
    select: str,
) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=LENGTH, stop=[speaker.stop])
    with speaker.engine.session(SITES, [select]) as session:
        for request in REQUESTS:
            session.add_request(request, params)
        reasons = {}
        while session.unfinished:
            for output in session.step():
                reasons[output.request_id] = (
                    output.outputs[0].finish_reason,
                    output.outputs[0].stop_reason,
                )
        actual = session.collect()
    require_runner(actual)
    assert reasons == {"a": ("stop", None), "b": ("stop", speaker.stop), "c": ("length", None)}
    assert [len(request.generated_token_ids) for request in actual.requests] == [5, 7, LENGTH]
    expected = hf_capture(llama, actual.requests, sites=SITES, select=[select])
    assert_captures_match(actual, expected, rtol=1e-5)
    assert speaker.engine._call("tapcheck_discard", "[]") == ['{"ok": 0}']


def test_sampling_several_times_under_one_name_is_refused(speaker: Speaker) -> None:
    from vllm import SamplingParams

    with pytest.raises(CaptureError, match="'a' asks for n=2 samples"):
        speaker.engine.capture(REQUESTS[:1], SITES, sampling_params=SamplingParams(n=2))


def test_sampling_params_are_one_for_all_or_one_for_each(speaker: Speaker) -> None:
    from vllm import SamplingParams

    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 5, 3)]
    actual = speaker.engine.capture(REQUESTS, SITES, sampling_params=params)
    assert [len(request.generated_token_ids) for request in actual.requests] == [2, 5, 3]
    with pytest.raises(CaptureError, match="2 sampling_params were given for 3 requests"):
        speaker.engine.capture(REQUESTS, SITES, sampling_params=params[:2])
