from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from synthetic import perturbed, synthetic_capture

from tapcheck.capture import Capture
from tapcheck.checks.equivalence import compare_captures
from tapcheck.checks.faults import FAULTS
from tapcheck.checks.message import explain

HEALTHY = synthetic_capture()


def message(actual: Capture, expected: Capture = HEALTHY, rtol: float | None = None) -> str:
    return explain(compare_captures(actual, expected, rtol=rtol))


def without(capture: Capture, request: int, first: int, last: int) -> Capture:
    """The capture without a request's positions from `first` to `last`, at every site."""
    columns = capture["embed"].columns
    lost = (columns.request == request) & (columns.position >= first) & (columns.position <= last)
    kept = np.flatnonzero(~lost)
    return replace(capture, rows={site: rows.take(kept) for site, rows in capture.rows.items()})


def test_a_match_is_one_line() -> None:
    assert message(HEALTHY) == (
        "captures match: 414 rows at 18 sites, worst relative error 0, allowed 5e-05"
    )


def test_the_first_line_names_the_first_wrong_row_and_by_how_much() -> None:
    first = message(FAULTS["dead_tap"].inject(HEALTHY)).splitlines()[0]
    assert first == (
        "captures differ: request 'a', site mlp_out.1, position 0 is the first wrong row: "
        "the relative error is 1, 5e-05 is allowed"
    )


def test_the_evidence_gives_every_number_of_the_first_divergence() -> None:
    text = message(FAULTS["scaled"].inject(HEALTHY))
    assert "relative L2 error      0.02, allowed 5e-05" in text
    assert "cosine                 0.99999" in text
    assert "norm, actual/expected  1.02" in text
    assert "at feature 0: actual 2.6597216, expected 2.6075702" in text
    assert "mlp_out.1" in text
    assert "23 of 23" in text


def test_the_tolerance_that_is_printed_passes_when_typed_back() -> None:
    noisy = perturbed(HEALTHY, 0.0123456)
    (line,) = [line for line in message(noisy).splitlines() if "rtol=" in line]
    rtol = float(line.split("rtol=")[1])
    assert compare_captures(noisy, HEALTHY, rtol=rtol).passed
    assert rtol == pytest.approx(0.0123456, rel=1e-3)


def test_missing_rows_are_counted_and_grouped_as_ranges() -> None:
    text = message(without(HEALTHY, 1, 2, 5))
    assert text.splitlines()[0] == (
        "captures differ in their rows: request 'b', site embed, position 2 is missing: "
        "the last row of the prompt (72 problems with 414 rows due)"
    )
    assert "rows: 414 due, 342 delivered, 72 missing" in text
    assert (
        "missing: request 'b', sites embed, resid_pre.0, attn_out.0 and 15 more, positions 2-5: "
        in text
    )
    assert "none (the rows are not those due)" in text


def test_requests_that_lost_the_same_positions_share_a_line() -> None:
    text = message(without(without(HEALTHY, 0, 1, 2), 2, 1, 2))
    assert text.count("missing: requests 'a', 'c', sites embed") == 1


def test_tokens_come_first_and_hide_nothing_else() -> None:
    request = replace(HEALTHY.requests[0], prompt_token_ids=(9, 1, 2, 3, 4))
    faulty = FAULTS["lost_row"].inject(FAULTS["dead_tap"].inject(HEALTHY))
    lines = message(replace(faulty, requests=(request, *HEALTHY.requests[1:]))).splitlines()
    assert lines[0] == (
        "captures differ in their tokens: request 'a', position 0: token id 9, expected 0 "
        "(in the prompt)"
    )
    order = [
        next(at for at, line in enumerate(lines) if line.startswith(start))
        for start in (
            "tokens:",
            "rows:",
            "first divergence",
            "smallest tolerance",
            "what to try next",
        )
    ]
    assert order == sorted(order)
    assert "token ids differ, the rows are not those due" in lines[-2]


def test_nan_is_named_with_its_feature() -> None:
    text = message(FAULTS["nan_row"].inject(HEALTHY))
    assert "position 3 is the first wrong row: 16 NaN and 0 Inf, the first at feature 0" in text
    assert "none (NaN or Inf)" in text


def test_widths_are_named_when_no_value_can_be_compared() -> None:
    narrow = {site: replace(rows, values=rows.values[:, :4]) for site, rows in HEALTHY.rows.items()}
    text = message(replace(HEALTHY, rows=narrow))
    assert text.splitlines()[0] == (
        "captures differ: site embed has rows of width 4, expected 16: no value could be compared"
    )
    assert "none (widths differ)" in text


def test_both_dtypes_are_named_where_they_differ() -> None:
    assert "(bfloat16 against float32)" in message(synthetic_capture(torch.bfloat16), rtol=1e-4)


def test_a_failure_that_nothing_explains_says_so() -> None:
    last = message(perturbed(HEALTHY, 0.3)).splitlines()[-1]
    assert "no shift, swap, other layer, residual mistake or scale" in last


@pytest.mark.parametrize("seed", range(3))
def test_a_huge_failure_stays_readable(seed: int) -> None:
    expected = synthetic_capture(lengths=[(3, 4)] * 26, num_layers=12, width=4)
    actual = synthetic_capture(lengths=[(3, 4)] * 26, num_layers=12, width=4, seed=seed + 1)
    requests = tuple(
        replace(request, prompt_token_ids=(*request.prompt_token_ids[:2], 9_999))
        for request in actual.requests
    )
    scattered = {
        site: rows.take(np.flatnonzero((np.arange(len(rows)) * (at + 3)) % 7 != seed))
        for at, (site, rows) in enumerate(actual.rows.items())
    }
    lines = message(Capture(requests, scattered), expected).splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) < 400
