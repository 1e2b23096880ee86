"""The search for the settings that a failing check depends on; no engine runs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapcheck.checks.bisect import (
    SETTINGS,
    Change,
    Settings,
    Subject,
    changes_to_try,
    checks_of_one_engine,
    job_under,
    smallest_changes,
)
from tapcheck.checks.jobs import check_names

SUBJECT = Subject("tiny-llama", "folder", "cpu", "equivalence", rtol=1e-5)

# Up to five changes, two of which may be of one setting.
CHANGES = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 2)).map(lambda change: (change,)),
    unique=True,
    max_size=5,
)


def one_of_each_setting(changes: list[Change]) -> list[Change]:
    """Every combination that changes no setting twice, however large."""
    every = itertools.chain.from_iterable(
        itertools.combinations(changes, size) for size in range(1, len(changes) + 1)
    )
    joined = [tuple(itertools.chain(*chosen)) for chosen in every]
    return [change for change in joined if len(dict(change)) == len(change)]


@given(CHANGES, st.integers(1, 5), st.randoms(use_true_random=False))
def test_what_is_found_is_all_that_is_green_and_smallest(
    changes: list[Change], most: int, random: Any
) -> None:
    every = one_of_each_setting(changes)
    green = {change for change in every if random.random() < 0.15}
    tried: list[Change] = []

    def passes(change: Change) -> bool:
        tried.append(change)
        return change in green

    found = smallest_changes(changes, passes, most)
    smallest = min((len(change) for change in green if len(change) <= most), default=None)
    assert found == [change for change in every if change in green and len(change) == smallest]
    assert len(set(tried)) == len(tried)
    assert [len(change) for change in tried] == sorted(len(change) for change in tried)
    assert all(len(change) <= (len(found[0]) if found else most) for change in tried)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mode": "graph"},
        {"enforce_eager": False},
        {"runner": "v2", "dtype": "bfloat16", "tensor_parallel_size": 2, "block_size": 32},
        {"attention_backend": "TRITON_ATTN", "enable_prefix_caching": False},
    ],
)
def test_each_change_is_of_one_setting_to_what_it_is_not(device: str, settings: Settings) -> None:
    changes = changes_to_try(settings, device)
    assert len(set(changes)) == len(changes)
    for ((name, value),) in changes:
        assert settings.get(name, "absent") != value
    changed = {name for ((name, _),) in changes}
    always = {"mode", "runner", "enable_prefix_caching", "enable_chunked_prefill", "dtype"}
    assert always <= changed
    assert settings.keys() - {"enforce_eager"} <= changed
    assert ("enforce_eager" in changed) is (settings.get("enforce_eager") is False)
    assert ((("mode", "hook"),) in changes) is (settings.get("mode") == "graph")


def test_only_what_is_named_is_changed() -> None:
    settings = {"dtype": "bfloat16", "block_size": 32}
    only = changes_to_try(settings, "cpu", ["dtype", "block_size"])
    assert only == [(("dtype", "float32"),), (("block_size", None),)]


def test_on_a_gpu_attention_backends_and_ranks_are_tried_too() -> None:
    changed = [change for (change,) in changes_to_try({}, "cuda")]
    assert ("attention_backend", "FLASHINFER") in changed
    assert ("tensor_parallel_size", 2) in changed
    names = {name for name, _ in changed}
    assert names == set(SETTINGS) - {"enforce_eager"}


@pytest.mark.parametrize("check", checks_of_one_engine())
def test_a_job_owes_the_check_it_is_made_for(check: str) -> None:
    job = job_under(Subject("m", "folder", "cpu", check), {})
    assert check in [name.partition("[")[0] for name in check_names(job)]


def test_a_job_has_the_settings_and_nothing_else() -> None:
    settings = {"dtype": "bfloat16", "runner": "v2", "enable_prefix_caching": False, "x": None}
    job = job_under(SUBJECT, settings)
    assert (job.dtype, job.mode, job.topology) == ("bfloat16", "hook", "in_process")
    assert job.engine == {"enable_prefix_caching": False}
    assert job.rtol is None  # the tolerance was for float32
    plain = job_under(SUBJECT, {})
    assert (plain.dtype, plain.rtol, plain.engine) == ("float32", 1e-5, {})


def test_graph_mode_is_never_eager() -> None:
    job = job_under(SUBJECT, {"mode": "graph", "enforce_eager": True})
    assert (job.mode, job.engine) == ("graph", {})


@pytest.mark.parametrize("check", ["selftest", "equivalance"])
def test_a_check_that_no_engine_owes_is_an_error(check: str) -> None:
    with pytest.raises(LookupError):
        job_under(Subject("m", "folder", "cpu", check), {})
