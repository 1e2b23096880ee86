"""Taps broken in the running engine: each must be caught against Transformers, and named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tapcheck.checks.equivalence import compare_captures
from tapcheck.hf import HFBackend
from tapcheck.request import Request
from tapcheck.rowstore import RowStore
from tapcheck.sites import Site
from tapcheck.vllm.backend import VLLMBackend

pytestmark = pytest.mark.engine

Terms = Sequence[torch.Tensor]
Put = Callable[[RowStore, Site, Terms], None]
PUT = RowStore.put


def into_one_buffer(store: RowStore, site: Site, terms: Terms) -> None:
    """Hands out a buffer that the next step fills again, as a replayed graph does."""
    if store.open:
        rows = store.selected(sum(terms[1:], terms[0]))
        buffers = vars(store).setdefault("buffers", {})
        buffer = buffers.setdefault(site, torch.empty(64, rows.shape[-1]))
        store.put_selected(site, buffer[: len(rows)].copy_(rows))


def without_the_residual(store: RowStore, site: Site, terms: Terms) -> None:
    PUT(store, site, terms[:1])


def residual_twice(store: RowStore, site: Site, terms: Terms) -> None:
    PUT(store, site, [*terms, *terms[1:]])


def one_row_late(store: RowStore, site: Site, terms: Terms) -> None:
    PUT(store, site, [term.roll(1, dims=0) for term in terms])


def half_of_the_features(store: RowStore, site: Site, terms: Terms) -> None:
    """What a tap has before the ranks' parts are gathered."""
    shard = torch.arange(terms[0].shape[-1]) < terms[0].shape[-1] // 2
    PUT(store, site, [term * shard for term in terms])


def twice_as_large(store: RowStore, site: Site, terms: Terms) -> None:
    PUT(store, site, [2 * term for term in terms])


def buffer_of_the_first_row(store: RowStore, site: Site, terms: Terms) -> None:
    PUT(store, site, [term[:1].expand_as(term) for term in terms])


def never_written(store: RowStore, site: Site, terms: Terms) -> None:
    PUT(store, site, [torch.zeros_like(term) for term in terms])


@pytest.mark.parametrize(
    ("broken", "points", "fault"),
    [
        (into_one_buffer, ["resid_post"], "constant_tap"),
        (without_the_residual, ["resid_mid", "mlp_out", "resid_post"], "missing_residual"),
        (residual_twice, ["resid_mid", "mlp_out", "resid_post"], "doubled_residual"),
        (one_row_late, ["resid_post"], "shifted_rows"),
        (half_of_the_features, ["resid_post"], "one_shard"),
        (twice_as_large, ["resid_post"], "scaled"),
        (buffer_of_the_first_row, ["resid_post"], "constant_tap"),
        (never_written, ["resid_post"], "dead_tap"),
    ],
)  # fmt: skip
def test_a_tap_that_is_broken_in_the_engine_is_caught_and_named(
    broken: Put,
    points: list[str],
    fault: str,
    engine: VLLMBackend,
    llama: Path,
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = [f"{point}.{layer}" for point in points for layer in (1, 2)]
    one = requests[-1:]
    with monkeypatch.context() as patch:
        patch.setattr(RowStore, "put", broken)
        faulty = engine.capture(one, wanted, max_new_tokens=4)
    with HFBackend(llama) as hf:
        expected = hf.capture(faulty.requests, wanted)
    comparison = compare_captures(faulty, expected)
    assert not comparison.passed
    assert comparison.diagnoses[0].fault == fault
    healthy = engine.capture(one, wanted, max_new_tokens=4)
    assert compare_captures(healthy, expected).passed
