from __future__ import annotations

import re

import pytest
import torch
from synthetic import synthetic_capture

from tapcheck.capture import Capture
from tapcheck.checks.equivalence import compare_captures
from tapcheck.checks.faults import FAULTS, Fault
from tapcheck.checks.message import explain
from tapcheck.errors import CaptureError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# What the message must suggest, where the numbers can tell.
SUGGESTIONS = {
    "swapped_requests": "rows of other requests",
    "layer_off_by_one": "layer index that is off by one",
    "missing_residual": "leaves out the residual add",
    "doubled_residual": "adds the residual twice",
    "shifted_rows": "previous position",
    "dead_tap": "all zeros",
    "scaled": "times 1.02",
    "stale_row": "previous position",
}

every_fault = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
every_fault_and_dtype = pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        pytest.param(fault, dtype, id=f"{fault.name}-{dtype}")
        for fault in FAULTS.values()
        for dtype in DTYPES
        if fault.name != "narrowed_dtype" or dtype == torch.float32
    ],
)


@every_fault_and_dtype
def test_every_fault_is_caught_and_placed(fault: Fault, dtype: torch.dtype) -> None:
    healthy = synthetic_capture(dtype)
    assert compare_captures(healthy, synthetic_capture(dtype)).passed
    rtol = None if fault.name == "narrowed_dtype" else 1e-2
    comparison = compare_captures(fault.inject(healthy), healthy, rtol=rtol)
    assert not comparison.passed
    first_line = explain(comparison).splitlines()[0]
    assert re.search(r"request '[abc]', site [a-z_]+(\.\d)?, position \d", first_line)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SUGGESTIONS)
def test_the_message_says_what_the_rows_equal_instead(name: str, dtype: torch.dtype) -> None:
    healthy = synthetic_capture(dtype)
    message = explain(compare_captures(FAULTS[name].inject(healthy), healthy, rtol=1e-2))
    assert SUGGESTIONS[name] in message.splitlines()[-1]


@every_fault_and_dtype
def test_fixed_tolerances_catch_every_fault_but_a_scale_in_bfloat16(
    fault: Fault, dtype: torch.dtype
) -> None:
    healthy = synthetic_capture(dtype)
    missed = compare_captures(fault.inject(healthy), healthy).passed
    assert missed == (fault.name == "scaled" and dtype == torch.bfloat16)


@every_fault
def test_injecting_is_deterministic_and_leaves_the_capture_alone(fault: Fault) -> None:
    healthy = synthetic_capture()
    faulty = fault.inject(healthy)
    assert healthy == synthetic_capture()
    assert faulty != healthy
    assert faulty == fault.inject(synthetic_capture())


@pytest.mark.parametrize("site", ["resid_pre.1", "resid_post.0"])
def test_a_missing_residual_needs_no_mlp_out(site: str) -> None:
    healthy = synthetic_capture(sites=[site, "resid_post.1"])
    faulty = FAULTS["missing_residual"].inject(healthy)
    message = explain(compare_captures(faulty, healthy))
    assert "site resid_post.1, position 0" in message.splitlines()[0]
    assert "leaves out the residual add" in message.splitlines()[-1]


@every_fault
def test_a_capture_without_rows_has_nothing_to_break(fault: Fault) -> None:
    empty = Capture(synthetic_capture().requests, {})
    with pytest.raises(CaptureError, match=f"fault '{fault.name}' can't be injected"):
        fault.inject(empty)


@pytest.mark.parametrize(
    ("name", "lengths", "sites"),
    [
        ("swapped_requests", [(5, 0)], ["resid_post.0"]),
        ("layer_off_by_one", [(5, 0)], ["resid_post.0", "resid_post.2"]),
        ("missing_residual", [(5, 0)], ["resid_post.0", "resid_post.2"]),
        ("doubled_residual", [(5, 0)], ["resid_mid.0"]),
        ("shifted_rows", [(1, 0), (1, 0)], ["resid_post.0"]),
        ("stale_row", [(1, 0), (1, 0)], ["resid_post.0"]),
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
    assert all(fault.name == name for name, fault in FAULTS.items())
    assert all(fault.description.endswith(".") for fault in FAULTS.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_narrow_dtype_has_nothing_to_narrow(dtype: torch.dtype) -> None:
    with pytest.raises(CaptureError, match="lacks a float32 site"):
        FAULTS["narrowed_dtype"].inject(synthetic_capture(dtype))
