"""The identities of the residual stream: they hold in healthy captures, and name what breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from strategies import dtypes
from synthetic import synthetic_capture

from tapcheck.capture import Capture, SiteRows
from tapcheck.checks.identities import identities_hold
from tapcheck.checks.tolerances import ToleranceError
from tapcheck.compatibility.verdict import CheckResult, status
from tapcheck.hf import HFBackend
from tapcheck.request import Request
from tapcheck.sites import Site, parse_site

REQUESTS = [Request("a", (5, 9, 30, 33, 44), (1, 7, 3)), Request("b", (50, 12))]
ROWS = 7 + 4  # every token but the last that is generated

PARALLEL = {
    "gpt_neox": ("GPTNeoXConfig", {"use_parallel_residual": True}),
    "cohere": ("CohereConfig", {}),
}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Four layers, of which three have a next one: for each the stream's identity, and its sums. gpt2
# adds its position embeddings to what `embed` gives.
IDENTITIES = {"llama": 3 + 8 + 1, "gemma2": 3 + 8 + 1, "gpt2": 3 + 8, "gpt_neox": 3 + 4 + 1,
              "cohere": 3 + 4 + 1}  # fmt: skip

Values = Callable[[Capture], torch.Tensor]


def build_parallel(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    config_class, settings = PARALLEL[name]
    config = getattr(transformers, config_class)(**SMALL | settings)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def changed(capture: Capture, site: str, values: torch.Tensor) -> Capture:
    """The capture with other values at one site."""
    at = parse_site(site)
    columns = capture.rows[at].columns
    return replace(capture, rows={**capture.rows, at: SiteRows(columns, values)})


def without(capture: Capture, *sites: str) -> Capture:
    gone = {parse_site(site) for site in sites}
    return replace(capture, rows={s: r for s, r in capture.rows.items() if s not in gone})


def taken(capture: Capture, site: str, index: list[int]) -> Capture:
    """The capture with only these rows of one site, in this order."""
    at = parse_site(site)
    rows = capture.rows[at].take(np.array(index, np.int64))
    return replace(capture, rows={**capture.rows, at: rows})


def judged(capture: Capture, expected: str, rtol: float | None = None) -> CheckResult:
    result = identities_hold(capture, rtol=rtol)
    assert status(result) == expected, result.reason
    return result


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", IDENTITIES)
def test_they_hold_in_transformers(
    name: str, dtype: str, model_zoo: Callable[[str], Path], tmp_path: Path
) -> None:
    model = build_parallel(name, tmp_path) if name in PARALLEL else model_zoo(name)
    with HFBackend(model, dtype=dtype) as backend:
        capture = backend.capture(REQUESTS, backend.sites, max_new_tokens=3)
    metrics = judged(capture, "pass").metrics
    assert metrics["identities"] == IDENTITIES[name]
    assert metrics["rows_checked"] == metrics["rows_telling"] == IDENTITIES[name] * ROWS
    assert metrics["rows_unmatched"] == 0
    assert metrics["worst_error_in_eps"] < 0.6
    for site in ("attn_out.1", "mlp_out.2", "resid_pre.3", "resid_post.3"):
        shifted = capture[site].values.roll(1, 0)
        assert site in judged(changed(capture, site, shifted), "fail").reason


@given(
    dtype=dtypes,
    layers=st.integers(1, 4),
    width=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    parallel=st.booleans(),
)
def test_they_hold_in_made_up_captures(
    dtype: torch.dtype, layers: int, width: int, seed: int, parallel: bool
) -> None:
    capture = synthetic_capture(dtype, num_layers=layers, width=width, seed=seed)
    mids = [f"resid_mid.{layer}" for layer in range(layers)] if parallel else []
    metrics = judged(without(capture, *mids), "pass").metrics
    sums = 1 if parallel else 2
    assert metrics["identities"] == 1 + layers * sums + layers - 1
    assert metrics["sites"] == 1 + layers * (4 + (not parallel))
    assert metrics["rows_checked"] == metrics["identities"] * len(capture["resid_pre.0"])


@given(
    dtype=dtypes,
    point=st.sampled_from(["resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"]),
    layer=st.integers(0, 2),
    row=st.integers(0, 21),
    seed=st.integers(0, 10**6),
)
def test_one_row_that_changed_is_found_and_named(
    dtype: torch.dtype, point: str, layer: int, row: int, seed: int
) -> None:
    capture = synthetic_capture(dtype, seed=seed)
    site = Site(point, layer)
    rows = capture.rows[site]
    row %= len(rows)
    values = rows.values.clone()
    values[row] = values[row] * 1.5 + 0.5
    result = judged(changed(capture, str(site), values), "fail")
    first = {"attn_out": Site("resid_mid", layer), "mlp_out": Site("resid_post", layer)}
    owner = capture.requests[rows.columns.request[row]]
    position = rows.columns.position[row]
    where = f"request {owner.id!r}, site {first.get(point, site)}, position {position}"
    assert result.first_divergence == where
    assert where in result.reason
    # At both ends of the model a stream is in one identity, or two; what is added is in one.
    assert 1 <= result.metrics["rows_broken"] == result.metrics["identities_broken"] <= 3


BREAKS: dict[str, tuple[str, Values, str]] = {
    "missing residual": (
        "resid_post.1",
        lambda capture: capture["mlp_out.1"].values,
        "resid_post.1 == resid_mid.1 + mlp_out.1",
    ),
    "missing residual in between": (
        "resid_mid.1",
        lambda capture: capture["attn_out.1"].values,
        "resid_mid.1 == resid_pre.1 + attn_out.1",
    ),
    "doubled residual": (
        "resid_post.2",
        lambda capture: capture["resid_post.2"].values + capture["resid_mid.2"].values,
        "resid_post.2 == resid_mid.2 + mlp_out.2",
    ),
    "layer off by one": (
        "resid_post.0",
        lambda capture: capture["resid_post.1"].values,
        "resid_post.0 == resid_mid.0 + mlp_out.0",
    ),
    "stream of the layer before": (
        "resid_pre.2",
        lambda capture: capture["resid_pre.1"].values,
        "resid_pre.2 == resid_post.1",
    ),
    "attention before its norm": (
        "attn_out.2",
        lambda capture: 3 * capture["attn_out.2"].values,
        "resid_mid.2 == resid_pre.2 + attn_out.2",
    ),
    "a dead tap": (
        "mlp_out.0",
        lambda capture: torch.zeros_like(capture["mlp_out.0"].values),
        "resid_post.0 == resid_mid.0 + mlp_out.0",
    ),
    "another width": (
        "attn_out.0",
        lambda capture: capture["attn_out.0"].values[:, :8],
        "resid_mid.0 == resid_pre.0 + attn_out.0",
    ),
    "infinity": (
        "resid_mid.1",
        lambda capture: torch.full_like(capture["resid_mid.1"].values, torch.inf),
        "resid_mid.1 == resid_pre.1 + attn_out.1",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BREAKS)
def test_what_breaks_an_identity_is_found_and_the_identity_named(
    name: str, dtype: torch.dtype
) -> None:
    capture = synthetic_capture(dtype)
    site, values, identity = BREAKS[name]
    result = judged(changed(capture, site, values(capture)), "fail")
    assert f"the first is {identity} in" in result.reason
    assert result.first_divergence is not None
    assert "the widths differ" in result.reason or name != "another width"


def test_a_stream_that_is_wrong_on_both_sides_of_a_border_is_not_what_was_added_up() -> None:
    capture = synthetic_capture()
    wrong = capture["resid_post.0"].values * 2
    both = changed(changed(capture, "resid_post.0", wrong), "resid_pre.1", wrong)
    assert judged(both, "fail").metrics["identities_broken"] == 2
    border = [parse_site("resid_post.0"), parse_site("resid_pre.1")]
    alone = replace(both, rows={site: both.rows[site] for site in border})
    assert judged(alone, "pass").metrics["identities"] == 1  # which is all that these two can tell


def test_a_parallel_layer_adds_both_at_once() -> None:
    serial = synthetic_capture(num_layers=1)
    parallel = without(serial, "resid_mid.0")
    assert judged(parallel, "pass").metrics["identities"] == 2
    twice = changed(parallel, "mlp_out.0", serial["mlp_out.0"].values * 2)
    reason = judged(twice, "fail").reason
    assert "resid_post.0 == resid_pre.0 + attn_out.0 + mlp_out.0" in reason


@pytest.mark.parametrize(
    "sites", [["resid_post.0"], ["resid_mid.1", "logits"], ["resid_pre.0", "resid_post.0"]]
)
def test_without_the_sites_of_an_identity_nothing_was_exercised(sites: list[str]) -> None:
    result = judged(synthetic_capture(sites=sites), "not exercised")
    assert "no identity could be checked" in result.reason
    assert result.metrics["identities"] == 0


def test_zeros_add_up_and_tell_nothing() -> None:
    capture = synthetic_capture()
    zeros = {s: SiteRows(r.columns, torch.zeros_like(r.values)) for s, r in capture.rows.items()}
    result = judged(replace(capture, rows=zeros), "not exercised")
    assert result.metrics["rows_telling"] == 0
    assert "a term is zero" in result.reason


def test_a_term_below_the_rounding_is_counted_as_telling_nothing() -> None:
    capture = synthetic_capture(torch.bfloat16, num_layers=1)
    rows = len(capture["resid_pre.0"])
    small = changed(capture, "attn_out.0", capture["attn_out.0"].values * 1e-4)
    small = changed(small, "resid_mid.0", capture["resid_pre.0"].values)
    small = changed(
        small, "resid_post.0", small["resid_mid.0"].values + capture["mlp_out.0"].values
    )
    result = judged(small, "pass")
    assert result.metrics["rows_telling"] == result.metrics["rows_checked"] - rows
    assert f"in {rows} rows a term is zero, or so small" in result.reason


def test_rows_are_matched_by_request_and_position_whatever_their_order() -> None:
    capture = synthetic_capture()
    count = len(capture["attn_out.1"])
    assert judged(taken(capture, "attn_out.1", list(range(count))[::-1]), "pass")
    twice = taken(capture, "attn_out.1", [*range(count), 0])
    assert judged(twice, "pass").metrics["rows_unmatched"] == 0


def test_rows_that_a_site_lacks_are_counted_and_not_judged() -> None:
    capture = synthetic_capture()
    count = len(capture["attn_out.1"])
    result = judged(taken(capture, "attn_out.1", list(range(2, count))), "pass")
    assert result.metrics["rows_unmatched"] == 2
    assert result.metrics["rows_checked"] == 9 * count - 2
    assert "2 rows are not judged" in result.reason
    none = judged(taken(capture, "attn_out.1", []), "pass")
    assert none.metrics["identities"] == 8


def test_an_embedding_that_is_multiplied_is_still_what_enters() -> None:
    capture = synthetic_capture()
    scaled = changed(capture, "embed", capture["embed"].values / 16)
    result = judged(scaled, "pass")
    assert result.metrics["embedding_scale"] == pytest.approx(16)
    values = scaled["embed"].values.clone()
    values[3] += 1
    reason = judged(changed(scaled, "embed", values), "fail").reason
    assert "resid_pre.0 == 16 * embed in 1 of" in reason


def test_an_embedding_that_something_is_added_to_is_left_out_and_said_so() -> None:
    capture = synthetic_capture()
    values = capture["embed"].values
    positions = changed(capture, "embed", values + torch.randn_like(values))
    result = judged(positions, "pass")
    assert result.metrics["identities"] == 8
    assert "embed is not judged" in result.reason


def test_the_allowance_is_that_of_the_roundings() -> None:
    capture = synthetic_capture(num_layers=1, sites=["resid_pre.0", "attn_out.0", "resid_mid.0"])
    eps = torch.finfo(torch.float32).eps
    values = capture["resid_mid.0"].values
    for factor, expected in ((1.0, "pass"), (2.0, "fail")):
        moved = changed(capture, "resid_mid.0", values * (1 + factor * eps))
        # The sum is mostly the largest tensor; make sure that it is.
        large = changed(moved, "attn_out.0", (moved["resid_mid.0"].values * 0.25).contiguous())
        exact = values - large["attn_out.0"].values
        judged(changed(large, "resid_pre.0", exact), expected)


def test_a_tolerance_may_be_given() -> None:
    capture = synthetic_capture()
    values = capture["mlp_out.1"].values
    off = changed(capture, "mlp_out.1", values * 1.001)
    judged(off, "fail")
    judged(off, "pass", rtol=1e-2)
    judged(capture, "fail", rtol=0.0)
    with pytest.raises(ToleranceError, match="rtol=2"):
        identities_hold(capture, rtol=2)
