"""Captures inside a real vLLM engine in this process, against Transformers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tapcheck.capture import Capture
from tapcheck.checks import assert_captures_match
from tapcheck.checks.ledger import compare_ledger
from tapcheck.errors import CaptureError, SelectorError, SiteError
from tapcheck.request import Request
from tapcheck.sites import all_sites
from tapcheck.vllm.backend import VLLMBackend

pytestmark = pytest.mark.engine

SITES = ["embed", "resid_pre.1", "attn_out.2", "resid_mid.0", "mlp_out.3", "resid_post.3",
         "final_norm", "logits"]  # fmt: skip


@pytest.fixture(scope="session")
def reference(hf_capture: Callable[..., Capture], llama: Path) -> Callable[..., Capture]:
    """Transformers' capture of finished requests."""
    return lambda requests, sites, **options: hf_capture(llama, requests, sites=sites, **options)


def test_every_point_of_every_layer_equals_transformers(
    tiny_model: Path, capture_pair: Callable[..., tuple[Capture, Capture]], requests: list[Request]
) -> None:
    actual, expected = capture_pair(tiny_model, prompts=requests, max_new_tokens=8)
    assert actual.sites == all_sites(4)
    comparison = assert_captures_match(actual, expected, rtol=1e-5)
    assert comparison.rows_compared == comparison.rows_due == len(actual)


@pytest.mark.parametrize(
    "ids", [["1", "10", "a", "a-0"], ["req-1", "req-1-0", "req", "r"], ["é", " ", "a/b", "0"]]
)
def test_rows_come_back_under_the_callers_ids(
    engine: VLLMBackend, reference: Callable[..., Capture], ids: list[str]
) -> None:
    requests = [Request(name, tuple(range(5 + i, 9 + 2 * i))) for i, name in enumerate(ids)]
    actual = engine.capture(requests, ["resid_post.0"], max_new_tokens=3)
    assert [request.id for request in actual.requests] == ids
    assert_captures_match(actual, reference(actual.requests, ["resid_post.0"]))


@pytest.mark.parametrize(
    ("select", "positions"),
    [
        (["prompt[-1]"], [4]),
        (["generated[*]"], [5, 6, 7, 8, 9]),
        (["generated[-1]"], [9]),
        (["generated[-2:]", 0], [0, 8, 9]),
        (["prompt[-1]+1", "prompt[-1]"], [4, 5]),
        (["all/3"], [0, 3, 6, 9]),
    ],
)
def test_selectors_select_the_same_positions_as_on_transformers(
    engine: VLLMBackend,
    reference: Callable[..., Capture],
    select: list[int | str],
    positions: list[int],
) -> None:
    requests = [Request("r", (5, 9, 200, 33, 44))]
    actual = engine.capture(requests, ["resid_post.2"], select, max_new_tokens=6)
    assert actual["resid_post.2"].columns.position.tolist() == positions
    assert_captures_match(actual, reference(actual.requests, ["resid_post.2"], select=select))


def test_selecting_the_last_generated_token_is_an_error_and_the_next_run_works(
    engine: VLLMBackend,
) -> None:
    requests = [Request("r", (5, 9))]
    with pytest.raises(SelectorError, match="'r'"):
        engine.capture(requests, ["resid_post.0"], [4], max_new_tokens=3)
    assert len(engine.capture(requests, ["resid_post.0"], [3], max_new_tokens=3)) == 1


def test_a_teacher_forced_request_keeps_its_tokens_and_its_rows(
    engine: VLLMBackend, reference: Callable[..., Capture]
) -> None:
    forced = [Request("f", (5, 9, 200), (7, 7, 7, 1))]
    actual = engine.capture(forced, SITES)
    assert list(actual.requests) == forced
    assert actual["logits"].columns.position.tolist() == [0, 1, 2, 3, 4, 5]
    assert_captures_match(actual, reference(forced, SITES))


def test_requests_that_nobody_captures_leave_no_rows(engine: VLLMBackend) -> None:
    from vllm import SamplingParams

    engine.capture([Request("r", (5, 9))], ["resid_post.0"])
    engine._llm.generate(
        [{"prompt_token_ids": [1, 2, 3]}],
        SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    assert engine._call("tapcheck_discard", "[]") == ['{"ok": 0}']


def test_sites_may_change_from_one_capture_to_the_next(engine: VLLMBackend) -> None:
    requests = [Request("r", (5, 9, 7))]
    first = engine.capture(requests, ["resid_post.0"])
    engine.capture(requests, ["mlp_out.1", "logits"])
    assert engine.capture(requests, ["resid_post.0"]) == first


def test_one_tensor_is_never_another_sites_memory(engine: VLLMBackend) -> None:
    capture = engine.capture([Request("r", (5, 9, 7))], all_sites(4))
    for layer in range(3):
        assert torch.equal(
            capture[f"resid_post.{layer}"].values, capture[f"resid_pre.{layer + 1}"].values
        )
    # What a layer adds differs from what it reads: nothing was overwritten after it was taken.
    assert not torch.equal(capture["mlp_out.1"].values, capture["resid_mid.1"].values)


def test_a_failure_inside_a_hook_is_raised_once_and_the_next_capture_works(
    engine: VLLMBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tapcheck.rowstore import RowStore

    requests = [Request("r", (5, 9, 7))]
    engine.capture(requests, ["resid_post.0"])
    with monkeypatch.context() as patch:

        def broken(*_arguments: object) -> None:
            raise RuntimeError("no memory left for rows")

        patch.setattr(RowStore, "put", broken)
        with pytest.raises(CaptureError, match="RuntimeError: no memory left for rows"):
            engine.capture(requests, ["resid_post.0"])
    capture = engine.capture(requests, ["resid_post.0"], max_new_tokens=4)
    assert compare_ledger(
        capture, requests=requests, sites=["resid_post.0"], select=["all"]
    ).complete


def test_a_hook_that_never_fires_is_an_error_that_names_the_site(
    engine: VLLMBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tapcheck.vllm.hooks.attach", lambda _plan, _put: [])
    with pytest.raises(CaptureError, match=r"ran without mlp_out\.0"):
        engine.capture([Request("r", (5, 9, 7))], ["mlp_out.0"])


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ("resid_post.4", r"the model has 4 layers, so the last is resid_post\.3"),
        ("resid_pots.1", "did you mean 'resid_post'"),
        ("logits.2", "logits has no layer"),
        ("mlp_out", "mlp_out needs a layer"),
    ],
)
def test_a_bad_site_is_refused_before_anything_runs(
    engine: VLLMBackend, site: str, message: str
) -> None:
    with pytest.raises(SiteError, match=message):
        engine.capture([Request("r", (5,))], [site])


def test_two_requests_of_one_id_are_refused(engine: VLLMBackend) -> None:
    with pytest.raises(CaptureError, match="'r' stands for two requests"):
        engine.capture([Request("r", (5,)), Request("r", (6,))], ["embed"])


def test_a_token_outside_the_vocabulary_is_refused_by_request_and_position(
    engine: VLLMBackend,
) -> None:
    with pytest.raises(ValueError, match="request 'r', position 1: token id 512 is outside"):
        engine.capture([Request("r", (5, 512))], ["embed"])


def test_metadata_says_what_the_live_engine_runs(engine: VLLMBackend) -> None:
    metadata = engine.capture([Request("r", (5,))], ["embed"]).metadata
    assert metadata["engine"]["runner"] == "v1"
    assert metadata["engine"]["enforce_eager"] is True
    assert metadata["engine"]["engine_dtype"] == "float32"
    assert metadata["engine"]["block_size"] == 32
    assert metadata["engine"]["architecture"] == "LlamaForCausalLM"
    assert metadata["environment"]["vllm_distribution"]


def test_the_sites_of_an_engine_are_those_of_its_model(engine: VLLMBackend) -> None:
    assert engine.sites == all_sites(4)


def test_a_prompt_that_does_not_fit_is_refused_and_the_next_capture_works(
    engine: VLLMBackend,
) -> None:
    with pytest.raises(CaptureError, match=r"request 'long' needs 1036 .*max_model_len=1024"):
        engine.capture([Request("long", (1,) * 1020)], ["embed"], max_new_tokens=16)
    assert len(engine.capture([Request("r", (5,))], ["embed"], max_new_tokens=2)) == 2


def test_an_interrupted_capture_leaves_no_request_behind_and_the_next_works(
    engine: VLLMBackend, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine._llm.llm_engine
    step, steps = core.step, iter(range(3))

    def interrupted() -> Any:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(core, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.capture(requests, SITES, max_new_tokens=8)
    assert not core.has_unfinished_requests()
    assert len(engine.capture(requests[:2], ["embed"], max_new_tokens=3)) == 3 + 4
    assert engine._call("tapcheck_discard", "[]") == ['{"ok": 0}']


def test_captures_from_several_threads_each_get_their_own_rows(
    engine: VLLMBackend, reference: Callable[..., Capture], requests: list[Request]
) -> None:
    with ThreadPoolExecutor(3) as pool:
        parts = list(
            pool.map(
                lambda request: engine.capture([request], [f"resid_post.{len(request.id) % 4}"]),
                [Request("x" * (i + 1), r.prompt_token_ids) for i, r in enumerate(requests[:6])],
            )
        )
    for part in parts:
        assert_captures_match(part, reference(part.requests, part.sites))
