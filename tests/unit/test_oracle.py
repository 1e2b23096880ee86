"""The oracle's own checks pass on sound models, and each fails when the oracle is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, OPTConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from tapcheck import hf
from tapcheck.capture import Capture, SiteRows
from tapcheck.checks import assert_captures_match
from tapcheck.checks.oracle import (
    attention_is_the_model_s_own,
    dtype_is_as_requested,
    judge_oracle,
    last_layer_is_before_the_final_norm,
    layers_are_unique,
    padding_changes_nothing,
)
from tapcheck.compatibility.verdict import CheckResult, status, unmet
from tapcheck.errors import CaptureError
from tapcheck.hf import HFBackend
from tapcheck.request import Request
from tapcheck.sites import Site

pytestmark = pytest.mark.usefixtures("one_thread")

Zoo = Callable[[str], Path]
Check = Callable[[HFBackend, Sequence[Request]], CheckResult]
Rows = dict[Site, SiteRows]

REQUESTS = [
    Request("a", (5, 9, 200, 33, 44, 71, 118, 3)),
    Request("b", (150,)),
    Request("c", (61, 8, 24), (199, 35, 7)),
]
ROWS = 8 + 1 + 5
LAST = Site("resid_post", 3)
FINAL_NORM = Site("final_norm")


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma2", "qwen2"])
def backend(request: pytest.FixtureRequest, model_zoo: Zoo) -> Iterator[HFBackend]:
    with HFBackend(model_zoo(request.param)) as made:
        yield made


@pytest.fixture(scope="module")
def llama(model_zoo: Zoo) -> Iterator[HFBackend]:
    with HFBackend(model_zoo("llama")) as made:
        yield made


def passing(result: CheckResult) -> CheckResult:
    assert status(result) == "pass", result
    return result


def failing(result: CheckResult) -> set[str]:
    assert status(result) == "fail", result
    return {condition.metric for condition in unmet(result)}


def not_exercised(result: CheckResult) -> str:
    assert status(result) == "not exercised", result
    return result.reason


@pytest.fixture
def altering(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Callable[[Rows], Mapping[Any, Any]]], None]:
    """A function that has every HF capture's rows replaced by what another function says."""

    def alter(change: Callable[[Rows], Mapping[Any, Any]]) -> None:
        capture = HFBackend.capture

        def altered(self: HFBackend, *args: Any, **kwargs: Any) -> Capture:
            found = capture(self, *args, **kwargs)
            return replace(found, rows={**found.rows, **change(dict(found.rows))})

        monkeypatch.setattr(HFBackend, "capture", altered)

    return alter


Alter = Callable[[Callable[[Rows], Mapping[Any, Any]]], None]


# --- sound models --------------------------------------------------------------------------------


def test_padding_changes_nothing(backend: HFBackend) -> None:
    result = passing(padding_changes_nothing(backend, REQUESTS))
    assert result.metrics["padding_rows"] == 7  # of the two that generate
    assert result.metrics["rows_compared"] == len(backend.sites) * (8 + 3 + 1 + 3 + 5)


def test_the_last_layer_is_before_the_final_norm(backend: HFBackend) -> None:
    result = passing(last_layer_is_before_the_final_norm(backend, REQUESTS))
    assert result.metrics["rows_told_apart"] == ROWS
    assert result.metrics["rows_compared"] == 2 * ROWS


def test_layers_are_unique(backend: HFBackend) -> None:
    result = passing(layers_are_unique(backend, REQUESTS))
    assert (result.metrics["layers_matched"], result.metrics["rows"]) == (4, ROWS)
    assert result.metrics["worst_error"] < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_is_as_requested(model_zoo: Zoo, dtype: str) -> None:
    with HFBackend(model_zoo("llama"), dtype=dtype) as backend:
        result = passing(dtype_is_as_requested(backend, REQUESTS))
    assert result.metrics["rows_compared"] == ROWS


@pytest.mark.parametrize("model", ["llama", "gpt2", "qwen2"])
def test_the_attention_is_the_model_s_own(model_zoo: Zoo, model: str) -> None:
    with HFBackend(model_zoo(model)) as backend:
        result = passing(attention_is_the_model_s_own(backend, REQUESTS))
    assert result.metrics["rows_compared"] == 6 * ROWS


def test_all_are_judged_once(llama: HFBackend) -> None:
    results = list(judge_oracle(llama, REQUESTS))
    assert [result.name for result in results] == [
        "padding_changes_nothing",
        "last_layer_is_before_the_final_norm",
        "layers_are_unique",
        "attention_is_the_model_s_own",
        "dtype_is_as_requested",
    ]
    assert {status(result) for result in results} == {"pass"}


# --- padding -------------------------------------------------------------------------------------


def forced(requests: Sequence[Request]) -> list[Request]:
    return [replace(r, generated_token_ids=r.generated_token_ids or (7, 8)) for r in requests]


def without(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Have teacher-forced batches run without these arguments."""
    arguments_of = hf._Batch._forward_arguments

    def fewer(batch: Any) -> dict[str, Any]:
        return {k: v for k, v in arguments_of(batch).items() if k not in arguments}

    monkeypatch.setattr(hf._Batch, "_forward_arguments", fewer)


def test_padding_that_is_attended_to_fails(
    backend: HFBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "attention_mask", "position_ids")
    result = padding_changes_nothing(backend, REQUESTS)
    assert failing(result) == {"failing_sites", "worst_relative_error"}
    assert result.reason.startswith("teacher-forced, 7 padding rows")


def test_padding_that_counts_as_positions_fails_where_these_are_absolute(
    model_zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "position_ids")
    with HFBackend(model_zoo("gpt2")) as gpt2:
        assert "failing_sites" in failing(padding_changes_nothing(gpt2, forced(REQUESTS)))


def test_padding_that_is_attended_to_while_generating_fails(
    backend: HFBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = hf._Batch._generate

    def unmasked(batch: Any, max_new_tokens: int) -> list[list[int]]:
        batch._mask = torch.ones_like(batch._mask)
        return generate(batch, max_new_tokens)

    monkeypatch.setattr(hf._Batch, "_generate", unmasked)
    result = padding_changes_nothing(backend, REQUESTS)
    assert "failing_sites" in failing(result)
    assert result.reason.startswith("as given")


def test_without_padding_nothing_was_exercised(model_zoo: Zoo, llama: HFBackend) -> None:
    alike = [Request("a", (1, 2, 3)), Request("b", (4, 5, 6))]
    assert "unequal lengths" in not_exercised(padding_changes_nothing(llama, alike))
    with HFBackend(model_zoo("llama"), batch_size=1) as one_by_one:
        assert "batch_size" in not_exercised(padding_changes_nothing(one_by_one, REQUESTS))


def test_rows_that_differ_fail_though_there_was_no_padding(
    llama: HFBackend, altering: Alter
) -> None:
    """A batch of two that gives other rows than each alone."""

    def doubled(rows: Rows) -> Rows:
        found = rows[LAST]
        factor = len(np.unique(found.columns.request))
        return {LAST: SiteRows(found.columns, found.values * factor)}

    altering(doubled)
    alike = [Request("a", (1, 2, 3)), Request("b", (4, 5, 6))]
    assert {"failing_sites", "padding_rows"} <= failing(padding_changes_nothing(llama, alike))


# --- layers --------------------------------------------------------------------------------------


def test_layers_that_are_off_by_one_fail(llama: HFBackend, altering: Alter) -> None:
    altering(
        lambda rows: {
            site: rows[Site("resid_post", max(site.layer - 1, 0))]
            for site in rows
            if site.layer is not None and site.point == "resid_post"
        }
    )
    result = layers_are_unique(llama, REQUESTS)
    assert failing(result) == {"layers_matched", "worst_error", "worst_nearness"}
    assert result.metrics["layers_matched"] == 1
    assert result.first_divergence == "site resid_post.1"
    assert "0 from what layer 0 returns" in result.reason


def test_the_final_norm_taken_for_the_last_layer_fails(llama: HFBackend, altering: Alter) -> None:
    altering(lambda rows: {LAST: rows[FINAL_NORM]} if FINAL_NORM in rows else {})
    result = last_layer_is_before_the_final_norm(llama, REQUESTS)
    assert failing(result) == {"failing_sites", "worst_relative_error"}
    assert result.first_divergence == "request 'a', site resid_post.3, position 0"
    result = layers_are_unique(llama, REQUESTS)
    assert "layers_matched" in failing(result)
    assert "0 from what the final norm returns" in result.reason


def test_the_last_layer_taken_for_the_final_norm_fails(llama: HFBackend, altering: Alter) -> None:
    altering(lambda rows: {FINAL_NORM: rows[LAST]} if LAST in rows else {})
    result = last_layer_is_before_the_final_norm(llama, REQUESTS)
    assert failing(result) == {"failing_sites", "worst_relative_error"}
    assert result.first_divergence == "request 'a', site final_norm, position 0"


@pytest.mark.parametrize("check", [last_layer_is_before_the_final_norm, layers_are_unique])
def test_a_lost_row_fails(check: Check, llama: HFBackend, altering: Alter) -> None:
    altering(lambda rows: {LAST: rows[LAST].take(np.arange(1, len(rows[LAST])))})
    assert failing(check(llama, REQUESTS))


@pytest.mark.parametrize("check", [last_layer_is_before_the_final_norm, layers_are_unique])
def test_a_nan_fails(check: Check, llama: HFBackend, altering: Alter) -> None:
    def broken(rows: Rows) -> Rows:
        values = rows[LAST].values.clone()
        values[0, 5] = torch.nan
        return {LAST: SiteRows(rows[LAST].columns, values)}

    altering(broken)
    assert failing(check(llama, REQUESTS))


def test_two_layers_that_can_t_be_told_apart_fail(model_zoo: Zoo, tmp_path: Path) -> None:
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(model_zoo("llama"))
    with torch.no_grad():
        model.model.layers[2].self_attn.o_proj.weight.zero_()
        model.model.layers[2].mlp.down_proj.weight.zero_()
    model.save_pretrained(tmp_path)
    with HFBackend(tmp_path) as backend:
        result = layers_are_unique(backend, REQUESTS)
    assert failing(result) == {"layers_matched", "worst_nearness"}
    assert result.metrics["layers_matched"] == 2


def test_without_a_final_norm_there_is_one_meaning(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "ffn_dim": 64,
        "word_embed_proj_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    auto: Any = AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(OPTConfig(**sizes, do_layer_norm_before=False))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    with HFBackend(tmp_path) as backend:
        reason = not_exercised(last_layer_is_before_the_final_norm(backend, REQUESTS))
        assert reason == "no norm follows the last layer"
        passing(layers_are_unique(backend, REQUESTS))
        passing(padding_changes_nothing(backend, REQUESTS))


# --- attention -----------------------------------------------------------------------------------


def test_an_attention_that_leaves_out_the_soft_cap_fails(model_zoo: Zoo) -> None:
    with HFBackend(model_zoo("gemma2")) as gemma2:
        try:
            gemma2.model.set_attn_implementation("sdpa")
        except ValueError as refused:
            pytest.skip(f"this Transformers has no such attention for gemma2: {refused}")
        assert "failing_sites" in failing(attention_is_the_model_s_own(gemma2, REQUESTS))
        gemma2.model.set_attn_implementation("eager")
        passing(attention_is_the_model_s_own(gemma2, REQUESTS))


# --- dtype ---------------------------------------------------------------------------------------


def test_a_model_in_another_dtype_fails(model_zoo: Zoo) -> None:
    with HFBackend(model_zoo("llama")) as backend:
        backend.model.to(torch.bfloat16)
        result = dtype_is_as_requested(backend, REQUESTS)
    assert failing(result) == {"sites_in_another_dtype", "nearness"}
    assert result.reason.startswith("resid_post.0 is bfloat16, and float32 was asked for")


def test_a_model_in_another_dtype_fails_though_its_rows_are_widened(
    model_zoo: Zoo, altering: Alter
) -> None:
    altering(
        lambda rows: {s: SiteRows(found.columns, found.values.float()) for s, found in rows.items()}
    )
    with HFBackend(model_zoo("llama")) as backend:
        backend.model.to(torch.bfloat16)
        result = dtype_is_as_requested(backend, REQUESTS)
    assert failing(result) == {"nearness"}


def test_rows_that_were_narrowed_fail(model_zoo: Zoo, altering: Alter) -> None:
    altering(
        lambda rows: {s: SiteRows(found.columns, found.values.half()) for s, found in rows.items()}
    )
    with HFBackend(model_zoo("llama")) as backend:
        assert "sites_in_another_dtype" in failing(dtype_is_as_requested(backend, REQUESTS))


def test_weights_that_were_rounded_on_the_way_fail(model_zoo: Zoo) -> None:
    with HFBackend(model_zoo("llama")) as backend:
        backend.model.to(torch.bfloat16).to(torch.float32)
        assert failing(dtype_is_as_requested(backend, REQUESTS)) == {"nearness"}


# --- a model that records no hidden states -------------------------------------------------------


class SilentConfig(LlamaConfig):
    model_type = "silent"


class SilentForCausalLM(LlamaForCausalLM):
    """Llama, whose output has logits and a cache and nothing else."""

    config_class = SilentConfig

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("output_hidden_states", None)
        output = super().forward(*args, **kwargs)
        return CausalLMOutputWithPast(logits=output.logits, past_key_values=output.past_key_values)


class StrictForCausalLM(SilentForCausalLM):
    """The same, which can't even be asked for hidden states."""

    def forward(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        use_cache: Any = None,
    ) -> Any:
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
        )


@pytest.fixture(params=[SilentForCausalLM, StrictForCausalLM])
def silent(request: pytest.FixtureRequest, model_zoo: Zoo, tmp_path: Path) -> Iterator[HFBackend]:
    """Tiny llama's weights in a model of those classes."""
    auto: Any = AutoModelForCausalLM
    AutoConfig.register("silent", SilentConfig, exist_ok=True)
    auto.register(SilentConfig, request.param, exist_ok=True)
    given = auto.from_pretrained(model_zoo("llama"))
    settings = {k: v for k, v in given.config.to_dict().items() if k != "model_type"}
    model: Any = request.param(SilentConfig(**settings))
    model.load_state_dict(given.state_dict())
    model.save_pretrained(tmp_path)
    with HFBackend(tmp_path) as backend:
        yield backend


def test_hooks_need_no_hidden_states(silent: HFBackend, llama: HFBackend) -> None:
    assert silent.sites == llama.sites
    requests = forced(REQUESTS)
    expected = llama.capture(requests, llama.sites)
    assert_captures_match(silent.capture(requests, silent.sites), expected, rtol=1e-5)


def test_without_hidden_states_the_other_checks_still_judge(silent: HFBackend) -> None:
    results = {result.name: result for result in judge_oracle(silent, forced(REQUESTS))}
    for check in (last_layer_is_before_the_final_norm, layers_are_unique):
        assert "records no hidden states" in not_exercised(results.pop(check.__name__))
    assert [status(result) for result in results.values()] == ["pass"] * 3
    assert results["attention_is_the_model_s_own"].metrics["sites"] == 1  # the logits


def test_no_request_is_an_error(llama: HFBackend) -> None:
    for check in (layers_are_unique, padding_changes_nothing):
        with pytest.raises(CaptureError, match="no request"):
            check(llama, [])
