"""Diagnosis: the right name and evidence for each fault, and no name for what is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import perturbed, synthetic_capture

from tapcheck.capture import Capture, SiteRows
from tapcheck.checks.diagnosis import MAX_DIAGNOSES, Diagnosis, diagnose
from tapcheck.checks.equivalence import compare_captures
from tapcheck.checks.faults import FAULTS, Fault
from tapcheck.checks.faults.models import MODEL_FAULTS
from tapcheck.hf import HFBackend
from tapcheck.request import Request
from tapcheck.sites import parse_site

HEALTHY = synthetic_capture()
every_fault = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())


def diagnoses(
    actual: Capture,
    expected: Capture = HEALTHY,
    rtol: float | None = 1e-4,
    reference: Capture | None = None,
) -> tuple[Diagnosis, ...]:
    comparison = compare_captures(actual, expected, rtol=rtol, reference=reference)
    return diagnose(actual, expected, comparison, reference=reference)


def likeliest(actual: Capture, expected: Capture = HEALTHY, rtol: float = 1e-4) -> Diagnosis:
    found = diagnoses(actual, expected, rtol)
    assert found
    return found[0]


def replaced(site: str, values: torch.Tensor, healthy: Capture = HEALTHY) -> Capture:
    rows = SiteRows(healthy[site].columns, values)
    return replace(healthy, rows={**healthy.rows, parse_site(site): rows})


def in_bfloat16(wide: Capture, seed: int) -> Capture:
    """The capture as a run in bfloat16 would have it: a little off, differently for each seed."""
    noisy = perturbed(wide, 5e-3, seed=seed)
    rows = {site: SiteRows(got.columns, got.values.bfloat16()) for site, got in noisy.rows.items()}
    return replace(noisy, rows=rows)


# --- every fault is named -------------------------------------------------------------------------


@every_fault
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_fault_is_named(fault: Fault, dtype: torch.dtype) -> None:
    healthy = synthetic_capture(dtype)
    rtol = 1e-4 if dtype == torch.float32 else 1e-2
    assert likeliest(fault.inject(healthy), healthy, rtol).fault == fault.name


WIDE = synthetic_capture(lengths=((12, 6), (9, 5), (20, 4)), width=64)


@every_fault
def test_every_fault_is_named_by_the_noise_floor(fault: Fault) -> None:
    actual, expected = in_bfloat16(WIDE, 1), in_bfloat16(WIDE, 2)
    assert compare_captures(actual, expected, reference=WIDE).passed
    found = diagnoses(fault.inject(actual), expected, None, WIDE)
    assert [one.fault for one in found[:1]] == [fault.name]


@every_fault
def test_faults_are_named_in_rows_that_are_a_little_off(fault: Fault) -> None:
    healthy = synthetic_capture(lengths=((12, 6), (9, 5), (20, 4)), width=64)
    faulty = fault.inject(perturbed(healthy, 1e-5))
    assert likeliest(faulty, healthy).fault == fault.name


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(FAULTS)), st.integers(0, 1000))
def test_faults_are_named_whatever_the_values(name: str, seed: int) -> None:
    healthy = synthetic_capture(seed=seed, lengths=((9, 4), (6, 5), (12, 2)), width=32)
    assert likeliest(FAULTS[name].inject(healthy), healthy).fault == name


# Which other faults explain the same rows as well: nothing else may be named beside a fault.
BESIDE = {
    "double_start_token": {"shifted_rows"},
    "layer_off_by_one": {"overwritten_in_place", "wrong_site"},
    "last_layer_after_final_norm": {"post_norm_for_pre_norm"},
    "wrong_padding_side": {"stale_row", "shifted_rows"},
}


@every_fault
def test_no_fault_is_taken_for_another(fault: Fault) -> None:
    found = [one.fault for one in diagnoses(fault.inject(HEALTHY))]
    assert found[0] == fault.name
    assert set(found) <= {fault.name, *BESIDE.get(fault.name, ())}


def rolled_in_each_step(capture: Capture, by: int) -> Capture:
    """Every row of a step holds that of the row `by` before it in the batch, around its ends."""
    rows = {}
    for site, delivered in capture.rows.items():
        step = delivered.columns.step
        held = np.arange(len(step))
        for one in np.unique(step):
            mine = np.flatnonzero(step == one)
            held[mine] = np.roll(mine, by)
        rows[site] = SiteRows(delivered.columns, delivered.values[torch.from_numpy(held)])
    return replace(capture, rows=rows)


@pytest.mark.parametrize(("by", "side"), [(1, "before"), (-1, "after")])
def test_rows_offset_over_a_batch_of_requests_are_named(by: int, side: str) -> None:
    found = likeliest(rolled_in_each_step(HEALTHY, by))
    assert found.fault == "shifted_rows"
    held = "'a' at 0 holds 'c' at 6" if by > 0 else "'a' at 4 holds 'b' at 0"
    assert f"the row {side} it in the batch" in found.claim
    assert held in found.claim


def test_rows_of_one_step_in_a_random_order_are_not_an_offset_over_the_batch() -> None:
    rows = HEALTHY["resid_post.1"].values
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3))
    faulty = replaced("resid_post.1", rows[order])
    assert not any("in the batch" in one.claim for one in diagnoses(faulty))


# --- what is no fault is not named ----------------------------------------------------------------


@given(
    st.floats(1e-5, 0.95),
    st.integers(0, 1000),
    st.sampled_from([1e-6, 1e-3, 5e-2, 0.2]),
)
@settings(max_examples=60, deadline=None)
def test_noise_is_never_named(relative: float, seed: int, rtol: float) -> None:
    assert diagnoses(perturbed(HEALTHY, relative, seed), rtol=rtol) == ()


@given(st.integers(0, 1000), st.floats(5e-3, 0.1))
@settings(max_examples=30, deadline=None)
def test_a_noisy_pair_is_not_named_by_the_noise_floor(seed: int, relative: float) -> None:
    """Healthy, or with more noise than its dtype explains: neither is a fault that is known."""
    actual = in_bfloat16(perturbed(WIDE, relative, seed), seed)
    assert diagnoses(actual, in_bfloat16(WIDE, seed + 1), None, WIDE) == ()


def test_a_match_has_nothing_to_diagnose() -> None:
    assert diagnoses(HEALTHY) == ()


def test_two_mistakes_at_once_are_not_taken_for_one() -> None:
    values = HEALTHY["mlp_out.1"].values.clone()
    values[:10] *= 2
    values[10:] = 0
    assert diagnoses(replaced("mlp_out.1", values)) == ()


def test_two_mistakes_at_two_sites_are_both_named() -> None:
    dead = replaced("mlp_out.1", torch.zeros_like(HEALTHY["mlp_out.1"].values))
    both = replaced("attn_out.2", HEALTHY["attn_out.2"].values * 3, dead)
    found = diagnoses(both)
    assert {one.fault for one in found} == {"dead_tap", "scaled"}
    assert all("at 1 of 2 failing sites" in one.evidence for one in found)


def test_rows_of_another_model_are_not_explained() -> None:
    assert diagnoses(synthetic_capture(seed=7)) == ()


def test_sites_of_another_width_are_no_candidates() -> None:
    logits = SiteRows(HEALTHY["logits"].columns, torch.ones(23, 40))
    wide = replace(HEALTHY, rows={**HEALTHY.rows, parse_site("logits"): logits})
    generator = torch.Generator().manual_seed(5)
    faulty = replaced("final_norm", torch.randn(23, 16, generator=generator), wide)
    assert diagnoses(faulty, wide) == ()


def test_a_width_that_is_no_shards_is_not_explained() -> None:
    values = HEALTHY["mlp_out.1"].values
    assert diagnoses(replaced("mlp_out.1", values[:, :7].clone())) == ()
    assert diagnoses(replaced("mlp_out.1", values.flip(1)[:, :8].clone())) == ()


# --- what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("site", "source", "fault", "said"),
    [
        ("resid_post.0", "resid_post.1", "layer_off_by_one", "resid_post.1, not resid_post.0"),
        ("resid_post.1", "resid_post.0", "layer_off_by_one", "the layer is off by one"),
        ("mlp_out.0", "mlp_out.2", "layer_off_by_one", "the layer is off by 2"),
        ("resid_post.1", "resid_mid.1", "wrong_site", "the MLP's output is missing"),
        ("resid_mid.1", "resid_pre.1", "wrong_site", "attention's output is missing"),
        ("resid_post.1", "mlp_out.1", "missing_residual", "leaves out the residual add"),
        ("resid_mid.1", "attn_out.1", "missing_residual", "leaves out the residual add"),
        ("resid_mid.1", "resid_post.1", "overwritten_in_place", "copy rows when they are taken"),
        ("resid_post.2", "final_norm", "last_layer_after_final_norm", "after the norm"),
        ("final_norm", "resid_post.2", "pre_norm_for_post_norm", "what goes into the norm"),
        ("embed", "final_norm", "wrong_site", "final_norm, not embed"),
        ("attn_out.1", "mlp_out.1", "wrong_site", "mlp_out.1, not attn_out.1"),
    ],
)
def test_rows_of_another_site_are_recognised(site: str, source: str, fault: str, said: str) -> None:
    found = likeliest(replaced(site, HEALTHY[source].values))
    assert found.fault == fault
    assert said in str(found)
    assert "23 of 23 failing rows tried, exactly" in found.evidence
    assert found.error == 0


def test_a_scale_is_measured() -> None:
    found = likeliest(replaced("mlp_out.1", HEALTHY["mlp_out.1"].values * 0.25))
    assert (found.fault, "1 / sqrt(width), 0.25" in found.claim) == ("scaled_by_sqrt_width", True)
    found = likeliest(replaced("mlp_out.1", HEALTHY["mlp_out.1"].values * -3))
    assert (found.fault, "times -3" in found.claim) == ("scaled", True)


@pytest.mark.parametrize(
    ("late", "said"),
    [
        (range(8, 14), "late from position 8 (the first row of prefill chunk 3) on: each equals"),
        (range(6, 14), "late from position 6 on: each equals"),
        (range(12, 14), "late from position 12 (the first generated token) on: each equals"),
        (range(4, 8), "late in prefill chunk 2, positions 4 to 7: each equals"),
    ],
)
def test_a_shift_says_where_it_begins_and_what_chunk_does(late: range, said: str) -> None:
    """A prompt of twelve tokens was taken in three chunks of four."""
    healthy = synthetic_capture(lengths=((12, 3), (4, 2)))
    columns = healthy["mlp_out.1"].columns
    chunk = np.minimum(columns.position // 4, 2)
    step = np.where(columns.request == 0, columns.step + chunk, columns.step)
    healthy = replace(
        healthy,
        rows={
            site: SiteRows(replace(rows.columns, step=step), rows.values)
            for site, rows in healthy.rows.items()
        },
    )
    values = healthy["mlp_out.1"].values.clone()
    row_of = {
        (int(request), int(position)): at
        for at, (request, position) in enumerate(
            zip(columns.request, columns.position, strict=True)
        )
    }
    for position in late:
        values[row_of[0, position]] = healthy["mlp_out.1"].values[row_of[0, position - 1]]
    found = likeliest(replaced("mlp_out.1", values, healthy), healthy)
    assert found.fault == "shifted_rows"
    assert f"rows are one position {said}" in found.claim


def test_the_requests_whose_rows_were_exchanged_are_named() -> None:
    claim = likeliest(FAULTS["swapped_requests"].inject(HEALTHY)).claim
    assert "'a' holds those of 'b', and back" in claim
    claim = likeliest(FAULTS["stale_request"].inject(HEALTHY)).claim
    assert "'b' holds those of 'a', whose own rows" in claim


def test_a_row_that_is_never_written_is_told_from_a_model_that_overflows() -> None:
    alone = likeliest(FAULTS["nan_row"].inject(HEALTHY))
    assert "1 of 23 rows of mlp_out.1 hold NaN or Inf" in alone.claim
    assert "before it was written" in alone.way_out
    rows = {
        site: SiteRows(given.columns, torch.full_like(given.values, torch.inf))
        for site, given in HEALTHY.rows.items()
        if site > parse_site("attn_out.1")
    }
    overflown = likeliest(replace(HEALTHY, rows={**HEALTHY.rows, **rows}))
    assert overflown.fault == "nan_row"
    assert "the model's own output" in overflown.way_out
    assert "at 10 of 10 failing sites" in overflown.evidence


@pytest.mark.parametrize(
    ("change", "fault", "said"),
    [
        (lambda ids: ids[:1] + ids, "double_start_token", "its first token is there twice"),
        (lambda ids: (9, *ids), "extra_start_token", "an extra token stands before it"),
        (lambda ids: ids[1:], "extra_start_token", "its first token is left out"),
        (lambda ids: ids[::-1], "reversed_prompt", "it is reversed"),
    ],
)
def test_other_tokens_are_named_before_the_rows_they_give(
    change: object, fault: str, said: str
) -> None:
    assert callable(change)
    requests = tuple(
        replace(request, prompt_token_ids=change(request.prompt_token_ids))
        for request in HEALTHY.requests
    )
    found = likeliest(replace(FAULTS["scaled"].inject(HEALTHY), requests=requests))
    assert found.fault == fault
    assert said in found.claim
    assert "so in 3 of 3 requests" in found.evidence


def test_an_all_reduce_that_is_missing_is_told_from_a_tap_before_it() -> None:
    partial = FAULTS["sum_left_out"].inject(HEALTHY)
    assert "take rows after the all-reduce" in likeliest(partial).way_out
    broken = synthetic_capture(seed=3)
    after = {site: broken[site] for site in broken.sites if site > parse_site("attn_out.1")}
    found = likeliest(replace(partial, rows={**partial.rows, **after}))
    assert found.fault == "sum_left_out"
    assert "the all-reduce is missing" in found.way_out


def test_layernorm_is_recognised_as_well() -> None:
    healthy = synthetic_capture(lengths=((16, 0), (16, 0)), width=32)
    generator = torch.Generator().manual_seed(3)
    weight, bias = (torch.randn(32, generator=generator) for _ in range(2))
    values = torch.nn.functional.layer_norm(healthy["resid_mid.1"].values, (32,), weight, bias)
    assert likeliest(replaced("resid_mid.1", values, healthy), healthy).fault == (
        "post_norm_for_pre_norm"
    )


def test_float64_rows_are_explained_to_their_own_precision() -> None:
    healthy = synthetic_capture(torch.float64)
    found = likeliest(FAULTS["shifted_rows"].inject(healthy), healthy, rtol=1e-12)
    assert "previous position" in found.claim


def test_a_diagnosis_reads_as_one_sentence_and_there_are_few() -> None:
    found = diagnoses(FAULTS["layer_off_by_one"].inject(HEALTHY))
    assert 1 < len(found) <= MAX_DIAGNOSES
    first = found[0]
    assert str(first) == f"{first.claim} ({first.evidence}): {first.way_out}"
    assert "at 10 of 10 failing sites" in first.evidence


@pytest.mark.parametrize("order", [1, -1])
def test_other_requests_are_found_whatever_their_order(order: int) -> None:
    ids = [request.id for request in HEALTHY.requests][::order]
    faulty = FAULTS["swapped_requests"].inject(HEALTHY).select(requests=ids)
    assert likeliest(faulty).fault == "swapped_requests"


@pytest.mark.usefixtures("one_thread")
def test_a_window_that_the_capture_knows_of_settles_what_else_is_a_guess(
    model_zoo: Callable[[str], Path],
) -> None:
    requests = [Request("a", tuple(range(5, 95))), Request("b", tuple(range(200, 270)))]
    with HFBackend(model_zoo("mistral")) as backend:
        healthy = backend.capture(requests, backend.sites, max_new_tokens=2)
        faulty = {name: fault.inject_with(backend, healthy) for name, fault in MODEL_FAULTS.items()}
    known = replace(healthy, metadata={"engine": {"sliding_window": 64}})
    window, offset = "sliding_window_off", "wrong_position_offset"
    unknown_to = [one.fault for one in diagnoses(faulty[window], replace(healthy, metadata={}))]
    assert unknown_to == [window, offset]
    first = diagnoses(faulty[window], known)[0]
    assert first.fault == window
    assert "from position 64 on, attn_out.0 of request" in first.claim
    assert "which is the model's window, 64" in first.claim
    assert [one.fault for one in diagnoses(faulty[offset], known)] == [offset]
    # With nothing before it or after it, the first wrong site says nothing of where it begins.
    alone = faulty[offset].select(sites=["attn_out.0"])
    assert diagnoses(alone, healthy.select(sites=["attn_out.0"])) == ()
