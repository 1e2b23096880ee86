"""Injected faults: each changes a capture, is caught, and leaves what it was given alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import synthetic_capture

from tapcheck.capture import Capture
from tapcheck.checks.equivalence import compare_captures
from tapcheck.checks.faults import FAULTS, Fault, narrowed, transposed
from tapcheck.checks.faults.models import MODEL_FAULTS, ModelFault, sliding_window
from tapcheck.checks.message import explain
from tapcheck.errors import CaptureError
from tapcheck.hf import HFBackend
from tapcheck.request import Request

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

every_fault = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
every_model_fault = pytest.mark.parametrize("fault", MODEL_FAULTS.values(), ids=MODEL_FAULTS.keys())


@pytest.mark.parametrize("dtype", DTYPES)
@every_fault
def test_every_fault_is_caught_and_placed(fault: Fault, dtype: torch.dtype) -> None:
    healthy = synthetic_capture(dtype)
    assert compare_captures(healthy, synthetic_capture(dtype)).passed
    rtol = 1e-3 if dtype == torch.float32 else 1e-2
    comparison = compare_captures(fault.inject(healthy), healthy, rtol=rtol)
    assert not comparison.passed
    if fault.name in ("double_start_token", "half_width"):  # of no row: of tokens, of a site
        return
    first_line = explain(comparison).splitlines()[0]
    assert re.search(r"request '[abc]', site [a-z_]+(\.\d)?, position \d", first_line)


@pytest.mark.parametrize("dtype", DTYPES)
@every_fault
def test_fixed_tolerances_catch_every_fault_but_two_in_bfloat16(
    fault: Fault, dtype: torch.dtype
) -> None:
    """There a 2 % scale and a float8 on the way hide: it takes the noise floor to see them."""
    healthy = synthetic_capture(dtype)
    missed = compare_captures(fault.inject(healthy), healthy).passed
    hidden = fault.name in ("scaled", "narrowed_dtype") and dtype == torch.bfloat16
    assert missed == hidden


@every_fault
def test_injecting_is_deterministic_and_leaves_the_capture_alone(fault: Fault) -> None:
    healthy = synthetic_capture()
    faulty = fault.inject(healthy)
    assert healthy == synthetic_capture()
    assert faulty != healthy
    assert faulty == fault.inject(synthetic_capture())


@every_fault
def test_a_capture_without_rows_has_nothing_to_break(fault: Fault) -> None:
    empty = Capture(synthetic_capture().requests, {})
    with pytest.raises(CaptureError, match=f"fault '{fault.name}' can't be injected"):
        fault.inject(empty)


@pytest.mark.parametrize(
    ("name", "lengths", "sites"),
    [
        ("swapped_requests", [(5, 0)], ["resid_post.0"]),
        ("stale_request", [(5, 0)], ["resid_post.0"]),
        ("wrong_padding_side", [(5, 0), (5, 3)], ["resid_post.0"]),
        ("reversed_prompt", [(1, 0), (1, 4)], ["resid_post.0"]),
        ("layer_off_by_one", [(5, 0)], ["resid_post.0", "resid_post.2"]),
        ("wrong_site", [(5, 0)], ["mlp_out.0", "attn_out.1"]),
        ("missing_residual", [(5, 0)], ["resid_post.0", "resid_post.2"]),
        ("doubled_residual", [(5, 0)], ["resid_mid.0"]),
        ("overwritten_in_place", [(5, 0)], ["resid_pre.0", "resid_post.1"]),
        ("pre_norm_for_post_norm", [(5, 0)], ["final_norm", "resid_mid.2"]),
        ("post_norm_for_pre_norm", [(5, 0)], ["mlp_out.0"]),
        ("last_layer_after_final_norm", [(5, 0)], ["final_norm"]),
        ("sum_left_out", [(5, 0)], ["resid_mid.0"]),
        ("transposed_heads", [(5, 0)], ["mlp_out.0"]),
        ("transposed_heads", [(1, 4)], ["attn_out.0"]),
        ("shifted_rows", [(1, 0), (1, 0)], ["resid_post.0"]),
        ("stale_row", [(1, 0), (1, 0)], ["resid_post.0"]),
        ("constant_tap", [(1, 0)], ["resid_post.0"]),
    ],
)
def test_a_capture_that_lacks_what_a_fault_needs_is_refused(
    name: str, lengths: list[tuple[int, int]], sites: list[str]
) -> None:
    with pytest.raises(CaptureError, match=f"fault '{name}' can't be injected.*lacks"):
        FAULTS[name].inject(synthetic_capture(lengths=lengths, sites=sites))


def test_a_fault_that_would_change_nothing_is_refused() -> None:
    dead = FAULTS["dead_tap"].inject(synthetic_capture(sites=["resid_post.0"]))
    with pytest.raises(CaptureError, match="can't be injected"):
        FAULTS["dead_tap"].inject(dead)


def test_every_fault_says_what_it_is() -> None:
    both = {**FAULTS, **MODEL_FAULTS}
    assert len(both) == len(FAULTS) + len(MODEL_FAULTS)
    assert all(fault.name == name for name, fault in both.items())
    assert all(fault.description.endswith(".") for fault in both.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_narrowed_fits_the_narrower_dtype(dtype: torch.dtype) -> None:
    values = synthetic_capture(dtype)["resid_post.1"].values * 1000
    found = narrowed(values)
    assert found.dtype == dtype
    assert bool(found.isfinite().all())
    assert torch.equal(narrowed(found), found)
    assert not torch.equal(found, values)


@given(st.integers(1, 9), st.sampled_from([1, 2, 4]), st.integers(1, 5))
def test_transposing_twice_gives_the_rows_back(rows: int, heads: int, dim: int) -> None:
    values = torch.arange(rows * heads * dim, dtype=torch.float32).reshape(rows, heads * dim)
    once = transposed(values, heads)
    assert torch.equal(once.view(heads, rows, dim).transpose(0, 1), values.view(rows, heads, dim))


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 3))
def test_a_swap_undone_is_the_healthy_capture(one: int, other: int, more: int) -> None:
    healthy = synthetic_capture(lengths=((one, more), (other, more)), num_layers=1, width=4)
    swap = FAULTS["swapped_requests"].inject
    assert swap(swap(healthy)) == healthy


# --- faults of what the model computes ------------------------------------------------------------


@pytest.fixture(scope="module")
def windowed(model_zoo: Callable[[str], Path]) -> Iterator[HFBackend]:
    with HFBackend(model_zoo("mistral")) as backend:
        yield backend


@pytest.fixture(scope="module")
def healthy(windowed: HFBackend) -> Capture:
    prompts = (tuple(range(5, 15)), tuple(range(100, 180)))
    requests = [Request(str(len(prompt)), prompt) for prompt in prompts]
    return windowed.capture(requests, ["embed", "attn_out.0", "resid_post.3"], max_new_tokens=2)


@pytest.mark.usefixtures("one_thread")
@every_model_fault
def test_a_model_fault_is_caught_and_leaves_the_backend_alone(
    fault: ModelFault, windowed: HFBackend, healthy: Capture
) -> None:
    faulty = fault.inject_with(windowed, healthy)
    assert not compare_captures(faulty, healthy).passed
    assert faulty.requests == healthy.requests
    for site in healthy.sites:
        assert np.array_equal(faulty[site].columns.position, healthy[site].columns.position)
    again = windowed.capture(healthy.requests, healthy.sites)
    assert compare_captures(again, healthy).passed
    assert faulty == fault.inject_with(windowed, healthy)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "first"),
    [("wrong_position_offset", 40), ("sliding_window_off", 64), ("extra_start_token", 0)],
)
def test_a_model_fault_begins_where_it_should(
    name: str, first: int, windowed: HFBackend, healthy: Capture
) -> None:
    assert sliding_window(windowed) == 64
    faulty = MODEL_FAULTS[name].inject_with(windowed, healthy)
    found = compare_captures(faulty, healthy).first_divergence
    assert found is not None
    assert (str(found.site), found.position) == ("attn_out.0", first)


@pytest.mark.usefixtures("one_thread")
def test_a_model_fault_is_refused_where_it_has_no_place(
    windowed: HFBackend, healthy: Capture, model_zoo: Callable[[str], Path]
) -> None:
    short = healthy.select(requests=["10"])
    with pytest.raises(CaptureError, match="more tokens than the window, 64"):
        MODEL_FAULTS["sliding_window_off"].inject_with(windowed, short)
    one = Capture((Request("10", tuple(range(5, 15))),), short.rows)
    with pytest.raises(CaptureError, match="the tokens that each request generated"):
        MODEL_FAULTS["extra_start_token"].inject_with(windowed, one)
    with (
        HFBackend(model_zoo("llama")) as plain,
        pytest.raises(CaptureError, match="no sliding window"),
    ):
        MODEL_FAULTS["sliding_window_off"].inject_with(plain, healthy)
