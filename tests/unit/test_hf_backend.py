"""The Transformers backend on tiny models: padding, positions, points, dtypes, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tapcheck.backend import Backend
from tapcheck.capture import Capture
from tapcheck.checks import compare_captures
from tapcheck.errors import CaptureError, EngineError, ModelError, SelectorError, SiteError
from tapcheck.hf import HFBackend
from tapcheck.request import Request
from tapcheck.sites import Site, all_sites

pytestmark = pytest.mark.usefixtures("one_thread")

EMBED = Site("embed")
Zoo = Callable[[str], Path]

PROMPTS = ((5, 9, 200, 33, 44, 71, 118, 3), (150,), (61, 8, 24, 199, 35))
REQUESTS = [Request(name, ids) for name, ids in zip("abc", PROMPTS, strict=True)]
LAYERS = 4
# A batch of another shape sums in another order; padding counted as positions is off by 1e-1.
CLOSE = 2e-5


@pytest.fixture(scope="module")
def llama(model_zoo: Zoo) -> Iterator[HFBackend]:
    with HFBackend(model_zoo("llama")) as backend:
        yield backend


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def backend(request: pytest.FixtureRequest, model_zoo: Zoo) -> Iterator[HFBackend]:
    """A model with rotary positions, and one with absolute ones."""
    with HFBackend(model_zoo(request.param)) as made:
        yield made


@pytest.fixture(scope="module")
def generated(backend: HFBackend) -> Capture:
    """Three requests of different lengths generated together: two are padded."""
    return backend.capture(REQUESTS, backend.sites, max_new_tokens=4)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest relative error of any row."""
    one, other = one.double(), other.double()
    return float(((one - other).norm(dim=-1) / other.norm(dim=-1)).max())


def rows_of(capture: Capture, request_id: str, site: str) -> torch.Tensor:
    """All rows of a request at a site by position, checked to be every position seen once."""
    part = capture.select(requests=[request_id])[site]
    assert part.columns.position.tolist() == list(range(capture.request(request_id).seen_length))
    return part.values


def assert_same_rows(one: Capture, other: Capture, request_ids: Sequence[str]) -> None:
    assert one.sites == other.sites
    for request_id in request_ids:
        for site in map(str, one.sites):
            actual = rows_of(one, request_id, site)
            assert distance(actual, rows_of(other, request_id, site)) < CLOSE, (request_id, site)


def test_it_is_a_backend(llama: HFBackend) -> None:
    assert isinstance(llama, Backend)
    assert (llama.name, llama.num_layers, llama.vocabulary_size) == ("hf", LAYERS, 512)
    assert llama.sites == all_sites(LAYERS)


# --- batches -----------------------------------------------------------------------------------


def test_a_left_padded_batch_equals_each_request_alone(
    backend: HFBackend, generated: Capture
) -> None:
    for request in REQUESTS:
        alone = backend.capture([request], backend.sites, max_new_tokens=4)
        assert alone.requests == generated.select(requests=[request.id]).requests
        assert_same_rows(generated.select(requests=[request.id]), alone, [request.id])


def test_generated_rows_equal_teacher_forced_ones(backend: HFBackend, generated: Capture) -> None:
    forced = backend.capture(generated.requests, backend.sites)
    assert forced.requests == generated.requests
    assert_same_rows(generated, forced, "abc")


def test_a_teacher_forced_padded_batch_equals_each_request_alone(
    backend: HFBackend, generated: Capture
) -> None:
    together = backend.capture(generated.requests, backend.sites)
    for request in generated.requests:
        alone = backend.capture([request], backend.sites)
        assert_same_rows(together.select(requests=[request.id]), alone, [request.id])


def test_padding_is_never_captured(backend: HFBackend, generated: Capture) -> None:
    seen = sum(request.seen_length for request in generated.requests)
    assert seen == sum(map(len, PROMPTS)) + 3 * len(PROMPTS)
    assert {len(generated[site]) for site in generated.sites} == {seen}
    assert len(generated) == seen * len(backend.sites)


def test_every_position_has_its_own_token_in_the_embedding(llama: HFBackend) -> None:
    capture = llama.capture(REQUESTS, ["embed"], max_new_tokens=4)
    table = llama.model.get_input_embeddings().weight
    for request in capture.requests:
        tokens = torch.tensor(request.token_ids[: request.seen_length])
        assert torch.equal(rows_of(capture, request.id, "embed"), table[tokens])


def test_requests_come_back_in_the_order_given_whatever_the_batches(model_zoo: Zoo) -> None:
    requests = [
        Request(str(i), tuple(range(1, 2 + i % 3)), (7, 8, 9) if i % 2 else ()) for i in range(5)
    ]
    with HFBackend(model_zoo("llama"), batch_size=2) as pairs:
        captured = pairs.capture(requests, ["resid_post.3", "logits"], max_new_tokens=3)
    with HFBackend(model_zoo("llama"), batch_size=8) as whole:
        expected = whole.capture(requests, ["resid_post.3", "logits"], max_new_tokens=3)
    assert [request.id for request in captured.requests] == list("01234")
    assert captured.requests == expected.requests
    assert captured.requests[1] == requests[1]
    assert [len(r.generated_token_ids) for r in captured.requests] == [3] * 5
    assert_same_rows(captured, expected, list("01234"))


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(0, 511), min_size=1, max_size=9), min_size=1, max_size=4))
def test_rows_don_t_depend_on_who_else_is_in_the_batch(
    llama: HFBackend, prompts: list[list[int]]
) -> None:
    requests = [Request(str(i), tuple(ids)) for i, ids in enumerate(prompts)]
    together = llama.capture(requests, ["resid_post.3"], max_new_tokens=1)
    alone = llama.capture([requests[-1]], ["resid_post.3"], max_new_tokens=1)
    last = requests[-1].id
    assert_same_rows(together.select(requests=[last]), alone, [last])


# --- what each point is --------------------------------------------------------------------------


@pytest.mark.parametrize("layer", range(LAYERS))
def test_the_residual_stream_adds_up(generated: Capture, layer: int) -> None:
    def at(point: str) -> torch.Tensor:
        return generated[f"{point}.{layer}"].values

    assert distance(at("resid_pre") + at("attn_out"), at("resid_mid")) < 1e-6
    assert distance(at("resid_mid") + at("mlp_out"), at("resid_post")) < 1e-6
    if layer + 1 < LAYERS:
        assert torch.equal(at("resid_post"), generated[f"resid_pre.{layer + 1}"].values)


def test_rows_are_those_of_transformers_own_hidden_states(
    backend: HFBackend, generated: Capture
) -> None:
    for request in generated.requests:
        tokens = torch.tensor([request.token_ids[: request.seen_length]])
        with torch.no_grad():
            output = backend.model(input_ids=tokens, output_hidden_states=True, use_cache=False)
        assert len(output.hidden_states) == LAYERS + 1
        for layer in range(LAYERS - 1):
            rows = rows_of(generated, request.id, f"resid_post.{layer}")
            assert distance(rows, output.hidden_states[layer + 1][0]) < CLOSE
        # Transformers' last entry is after the final norm; resid_post of the last layer isn't.
        last, final = (rows_of(generated, request.id, s) for s in ("resid_post.3", "final_norm"))
        assert distance(final, output.hidden_states[-1][0]) < CLOSE
        assert distance(last, output.hidden_states[-1][0]) > 0.1
        assert distance(rows_of(generated, request.id, "logits"), output.logits[0]) < CLOSE


def test_rows_are_those_of_hooks_registered_by_hand(llama: HFBackend) -> None:
    request = Request("a", PROMPTS[0], (1, 2, 3))
    capture = llama.capture([request], llama.sites)
    decoder = llama.model.model
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[[Any, Any, Any], None]:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            tensor = output if isinstance(output, torch.Tensor) else output[0]
            seen[name] = tensor[0].clone()

        return hook

    handles = [
        decoder.embed_tokens.register_forward_hook(keep("embed")),
        decoder.norm.register_forward_hook(keep("final_norm")),
        llama.model.lm_head.register_forward_hook(keep("logits")),
    ]
    for i, layer in enumerate(decoder.layers):
        handles += [
            layer.self_attn.register_forward_hook(keep(f"attn_out.{i}")),
            layer.mlp.register_forward_hook(keep(f"mlp_out.{i}")),
            layer.register_forward_hook(keep(f"resid_post.{i}")),
            layer.input_layernorm.register_forward_pre_hook(
                lambda m, args, i=i: seen.__setitem__(f"resid_pre.{i}", args[0][0].clone())
            ),
            layer.post_attention_layernorm.register_forward_pre_hook(
                lambda m, args, i=i: seen.__setitem__(f"resid_mid.{i}", args[0][0].clone())
            ),
        ]
    try:
        with torch.no_grad():
            llama.model(input_ids=torch.tensor([[*PROMPTS[0], 1, 2]]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    assert set(seen) == set(map(str, llama.sites))
    for site, expected in seen.items():
        assert torch.equal(rows_of(capture, "a", site), expected), site


def test_logits_while_generating_are_those_of_every_position(
    backend: HFBackend, generated: Capture
) -> None:
    for request in generated.requests:
        logits = rows_of(generated, request.id, "logits")
        assert logits.shape == (request.seen_length, backend.vocabulary_size)
        chosen = logits[request.prompt_length - 1 :].argmax(-1).tolist()
        assert tuple(chosen) == request.generated_token_ids


def test_steps_say_which_forward_pass_a_row_came_from(llama: HFBackend) -> None:
    capture = llama.capture(REQUESTS, ["resid_post.0"], max_new_tokens=3)
    columns = capture["resid_post.0"].columns
    lengths = np.array([request.prompt_length for request in capture.requests])
    generated_at = columns.position - lengths[columns.request] + 1
    assert columns.step.tolist() == np.maximum(generated_at, 0).tolist()


# --- generation ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opinionated(model_zoo: Zoo, tmp_path_factory: pytest.TempPathFactory, llama: HFBackend) -> Path:
    """The llama with a generation config that penalises, samples, and ends at once."""
    folder = tmp_path_factory.mktemp("models") / "opinionated"
    shutil.copytree(model_zoo("llama"), folder)
    plain = llama.capture(REQUESTS, ["embed"], max_new_tokens=6)
    ends = [request.generated_token_ids[0] for request in plain.requests]
    settings = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "eos_token_id": ends}
    settings |= {"do_sample": True, "temperature": 9.0, "max_new_tokens": 2, "bos_token_id": 1}
    settings |= {"suppress_tokens": ends}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": ends}))
    return folder


def test_the_checkpoint_s_own_generation_config_changes_nothing(
    opinionated: Path, llama: HFBackend
) -> None:
    plain = llama.capture(REQUESTS, ["logits"], max_new_tokens=6)
    with HFBackend(opinionated) as backend:
        assert backend.capture(REQUESTS, ["logits"], max_new_tokens=6) == plain


def test_generation_goes_on_past_the_end_of_sequence_token(opinionated: Path) -> None:
    with HFBackend(opinionated) as backend:
        ends = backend.config.eos_token_id
        capture = backend.capture(REQUESTS, ["embed"], max_new_tokens=6)
    for request in capture.requests:
        assert request.generated_token_ids[0] in ends
        assert len(request.generated_token_ids) == 6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_asked_for_is_the_dtype_captured(model_zoo: Zoo, dtype: str) -> None:
    with HFBackend(model_zoo("llama"), dtype=dtype) as backend:
        capture = backend.capture(REQUESTS[:1], backend.sites, max_new_tokens=2)
    assert {rows.values.dtype for rows in capture.rows.values()} == {getattr(torch, dtype)}
    assert capture.metadata["dtype"] == dtype
    assert all(torch.isfinite(rows.values).all() for rows in capture.rows.values())


# --- selectors and metadata -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (["prompt[-1]"], {"a": [7], "b": [0], "c": [4]}),
        (["generated[-1:]"], {"a": [10], "b": [3], "c": [7]}),
        (["generated[-1]"], {"a": [10], "b": [3], "c": [7]}),
        (["prompt[-1]+1", 0], {"a": [0, 8], "b": [0, 1], "c": [0, 5]}),
        (["generated[*]/2"], {"a": [8, 10], "b": [1, 3], "c": [5, 7]}),
    ],
)
def test_selected_rows_are_those_of_the_whole_capture(
    llama: HFBackend, select: list[int | str], expected: dict[str, list[int]]
) -> None:
    whole = llama.capture(REQUESTS, ["resid_post.1", "logits"], max_new_tokens=4)
    capture = llama.capture(REQUESTS, ["resid_post.1", "logits"], select, max_new_tokens=4)
    for site in capture.sites:
        columns = capture[site].columns
        for index, request in enumerate(capture.requests):
            mine = columns.position[columns.request == index]
            assert mine.tolist() == expected[request.id]
    assert capture == whole.select(select=select)


def test_metadata_says_what_ran(llama: HFBackend) -> None:
    capture = llama.capture(REQUESTS, ["embed"], ["prompt[*]"], max_new_tokens=2)
    said = capture.metadata
    assert (said["backend"], said["mode"], said["dtype"]) == ("hf", "hook", "float32")
    assert said["select"] == ["prompt[*]"]
    assert said["engine"]["architecture"] == "LlamaForCausalLM"
    assert said["environment"]["torch"] == torch.__version__


# --- refusals ------------------------------------------------------------------------------------


def test_a_folder_that_doesn_t_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        HFBackend(tmp_path / "nowhere")


def test_a_folder_without_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        HFBackend(tmp_path)


def test_a_folder_without_weights_is_an_error(model_zoo: Zoo, tmp_path: Path) -> None:
    shutil.copy(model_zoo("llama") / "config.json", tmp_path)
    with pytest.raises(ModelError, match="can't load"):
        HFBackend(tmp_path)


def test_truncated_weights_are_an_error(model_zoo: Zoo, tmp_path: Path) -> None:
    shutil.copytree(model_zoo("llama"), tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ModelError, match="can't load"):
        HFBackend(tmp_path)


def test_weights_that_transformers_would_make_up_are_an_error(
    model_zoo: Zoo, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(model_zoo("llama"), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"without 1 of its weights.*layers\.1\.mlp\.up_proj"):
        HFBackend(tmp_path)


def test_an_encoder_decoder_is_an_error(tmp_path: Path) -> None:
    transformers.T5Config(vocab_size=32, d_model=32, num_layers=2).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="can't load"):
        HFBackend(tmp_path)


@pytest.mark.parametrize("dtype", ["auto", "int8", "fp32"])
def test_other_dtypes_are_refused(model_zoo: Zoo, dtype: str) -> None:
    with pytest.raises(ModelError, match="say one of float32, bfloat16, float16, float64"):
        HFBackend(model_zoo("llama"), dtype=dtype)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_float64_is_what_float32_is_a_rounding_of(model_zoo: Zoo, architecture: str) -> None:
    """Requests of different lengths, which run alone: padded, gemma2's rows would be NaN."""
    requests = [Request("a", (5, 9, 20, 4, 7)), Request("b", (7, 8, 9)), Request("c", (3,))]
    captures = []
    for dtype in ("float64", "float32"):
        with HFBackend(model_zoo(architecture), dtype=dtype) as backend:
            captures.append(backend.capture(requests, backend.sites, max_new_tokens=3))
    wide, narrow = captures
    assert {rows.values.dtype for rows in wide.rows.values()} == {torch.float64}
    comparison = compare_captures(narrow, wide, rtol=1e-5)
    assert comparison.passed
    assert comparison.worst_relative_error > 1e-8  # it isn't float32 widened


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_perturbed_run_has_embeddings_a_rounding_off_and_the_next_run_has_none(
    model_zoo: Zoo, dtype: str
) -> None:
    requests = [Request("a", (5, 9, 20), (4,)), Request("b", (7, 8), (9,))]
    with HFBackend(model_zoo("llama"), dtype=dtype) as backend:
        plain = backend.capture(requests, backend.sites)
        one, again, other = (
            backend.capture(requests, backend.sites, perturb=seed) for seed in (1, 1, 2)
        )
        assert backend.capture(requests, backend.sites) == plain
    assert one == again != other
    eps = torch.finfo(plain.rows[EMBED].values.dtype).eps
    moved = one.rows[EMBED].values.double() / plain.rows[EMBED].values.double() - 1
    assert moved.abs().max() <= eps
    assert (moved > 0).float().mean() == pytest.approx(0.5, abs=0.2)
    assert (moved != 0).float().mean() > 0.9
    assert not compare_captures(one, plain, rtol=eps / 100).passed


def test_a_perturbed_run_is_of_requests_that_are_done(model_zoo: Zoo) -> None:
    with (
        HFBackend(model_zoo("llama")) as backend,
        pytest.raises(CaptureError, match="might generate other tokens"),
    ):
        backend.capture([Request("a", (1, 2))], ["embed"], perturb=1)


@pytest.mark.parametrize("device", ["warp-drive", "cuda:63"])
def test_a_device_that_isn_t_there_is_an_error(model_zoo: Zoo, device: str) -> None:
    with pytest.raises(EngineError, match=f"device '{device}' can't be used"):
        HFBackend(model_zoo("llama"), device=device)


def test_a_batch_size_below_one_is_an_error(model_zoo: Zoo) -> None:
    with pytest.raises(CaptureError, match="batch_size is 0"):
        HFBackend(model_zoo("llama"), batch_size=0)


@pytest.mark.parametrize("token", [512, -1])
def test_a_token_out_of_vocabulary_is_an_error_that_names_it(llama: HFBackend, token: int) -> None:
    with pytest.raises(ModelError, match=f"request 'x', position 2: token id {token} is outside"):
        llama.capture([Request("x", (1, 2), (token,))], ["embed"])


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ("resid_post.4", "the model has 4 layers, so the last is resid_post.3"),
        ("resid_pots.1", "did you mean 'resid_post'"),
    ],
)
def test_a_site_that_isn_t_there_is_an_error(llama: HFBackend, site: str, message: str) -> None:
    with pytest.raises(SiteError, match=message):
        llama.capture(REQUESTS, [site])


@pytest.mark.parametrize(
    ("requests", "options", "message"),
    [
        ([], {}, "no request was given"),
        ([REQUESTS[0], REQUESTS[0]], {}, "stands for two requests"),
        ([[1, 2, 3]], {}, "is no Request"),
        (REQUESTS, {"max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_requests_that_can_t_run_are_an_error(
    llama: HFBackend, requests: Any, options: dict[str, int], message: str
) -> None:
    with pytest.raises(CaptureError, match=message):
        llama.capture(requests, ["embed"], **options)


def test_a_position_that_no_forward_pass_sees_is_an_error(llama: HFBackend) -> None:
    with pytest.raises(SelectorError, match="last generated token"):
        llama.capture(REQUESTS, ["embed"], ["generated[3]"], max_new_tokens=4)


def test_an_error_leaves_no_hook_behind(llama: HFBackend) -> None:
    with pytest.raises(SelectorError):
        llama.capture(REQUESTS, llama.sites, ["generated[3]"], max_new_tokens=4)
    assert not [
        module
        for module in llama.model.modules()
        if module._forward_hooks or module._forward_pre_hooks
    ]


def test_a_closed_backend_says_so(model_zoo: Zoo) -> None:
    backend = HFBackend(model_zoo("llama"))
    backend.close()
    backend.close()
    with pytest.raises(EngineError, match="closed: make a new one"):
        backend.capture(REQUESTS, ["embed"])
    with pytest.raises(EngineError, match="closed: make a new one"):
        _ = backend.sites


def test_captures_from_several_threads_each_get_their_own_rows(
    model_zoo: Callable[[str], Path],
) -> None:
    forced = [Request(str(i), (5 + i, 9, 200), (7, i, 8, 1)) for i in range(6)]
    with HFBackend(model_zoo("llama")) as backend:
        alone = [backend.capture([request], ["resid_post.1"]) for request in forced]
        with ThreadPoolExecutor(6) as pool:
            together = list(pool.map(lambda r: backend.capture([r], ["resid_post.1"]), forced))
    assert together == alone


def test_a_soft_cap_on_attention_scores_is_not_dropped(model_zoo: Zoo) -> None:
    """Transformers 5.19's default attention drops gemma2's, which moves logits by 3e-3."""
    with HFBackend(model_zoo("gemma2")) as backend:
        capture = backend.capture(REQUESTS, ["logits"], max_new_tokens=1)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        model_zoo("gemma2"), attn_implementation="eager"
    )
    for request in REQUESTS:
        with torch.no_grad():
            logits = plain(torch.tensor([request.prompt_token_ids])).logits[0, -1]
        row = capture.row(request.id, "logits", request.prompt_length - 1)
        torch.testing.assert_close(row, logits, rtol=CLOSE, atol=CLOSE)
    assert capture.metadata["engine"]["attention_implementation"] == "eager"


def test_a_model_whose_forward_names_no_position_ids_is_given_them(llama: HFBackend) -> None:
    """Without them the padding of a batch would count as positions."""
    expected = llama.capture([*REQUESTS], ["resid_post.3"], max_new_tokens=3)
    model = llama.model
    named = model.forward

    def forward(input_ids: Any = None, attention_mask: Any = None, **others: Any) -> Any:
        assert "position_ids" in others
        return named(input_ids=input_ids, attention_mask=attention_mask, **others)

    model.forward = forward
    try:
        forced = llama.capture(expected.requests, ["resid_post.3"])
    finally:
        del model.forward
    torch.testing.assert_close(
        forced.row("b", "resid_post.3", 0),
        expected.row("b", "resid_post.3", 0),
        rtol=CLOSE,
        atol=CLOSE,
    )
