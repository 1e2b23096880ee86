"""Captures made up for tests: a residual stream that is consistent, without a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from tapcheck.capture import Capture, Columns, SiteRows
from tapcheck.request import Request
from tapcheck.sites import Site, all_sites, parse_sites

LENGTHS = ((5, 4), (3, 6), (7, 0))


def synthetic_requests(lengths: Sequence[tuple[int, int]] = LENGTHS) -> tuple[Request, ...]:
    """Requests a, b, ... of (prompt, generated) lengths, with token ids of their own."""
    return tuple(
        Request(
            chr(ord("a") + at),
            tuple(range(100 * at, 100 * at + prompt)),
            tuple(range(100 * at + 50, 100 * at + 50 + generated)),
        )
        for at, (prompt, generated) in enumerate(lengths)
    )


def synthetic_capture(
    dtype: torch.dtype = torch.float32,
    *,
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    num_layers: int = 3,
    width: int = 16,
    sites: Iterable[str] | None = None,
    seed: int = 0,
) -> Capture:
    """A capture of every position that a forward pass sees, at every site unless `sites` says.

    Rows come as an engine delivers them: all prompts in step 0, then one row of each request that
    still generates in each step. resid_mid = resid_pre + attn_out, resid_post = resid_mid +
    mlp_out, and resid_pre is the resid_post before it, all in `dtype`.
    """
    requests = synthetic_requests(lengths)
    rows = sorted(
        (max(0, position - request.prompt_length + 1), at, position)
        for at, request in enumerate(requests)
        for position in range(request.seen_length)
    )
    step, owner, position = np.array(rows, np.int64).reshape(-1, 3).T.copy()
    columns = Columns(owner, position, step, 1_000 * step, 10**18 + 1_000 * step)
    wanted = all_sites(num_layers) if sites is None else parse_sites(sites, num_layers)
    values = _values(len(rows), num_layers, width, dtype, seed)
    return Capture(requests, {site: SiteRows(columns, values[site]) for site in wanted})


def perturbed(capture: Capture, relative_error: float, seed: int = 1) -> Capture:
    """The capture with noise: every row as far from the original as `relative_error` says."""
    generator = torch.Generator().manual_seed(seed)
    rows = {}
    for site, original in capture.rows.items():
        values = original.values.double()
        noise = torch.randn(values.shape, generator=generator, dtype=torch.float64)
        noise *= relative_error * values.norm(dim=1, keepdim=True) / noise.norm(dim=1, keepdim=True)
        rows[site] = SiteRows(original.columns, (values + noise).to(original.values.dtype))
    return replace(capture, rows=rows)


def _values(
    rows: int, num_layers: int, width: int, dtype: torch.dtype, seed: int
) -> dict[Site, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(rows, width, generator=generator)).to(dtype)

    stream = noise()
    values = {Site("embed"): stream}
    for layer in range(num_layers):
        attention, mlp = noise(0.7), noise(0.7)
        middle = stream + attention
        values[Site("resid_pre", layer)] = stream
        values[Site("attn_out", layer)] = attention
        values[Site("resid_mid", layer)] = middle
        values[Site("mlp_out", layer)] = mlp
        stream = middle + mlp
        values[Site("resid_post", layer)] = stream
    values[Site("final_norm")] = stream / stream.norm(dim=1, keepdim=True)
    values[Site("logits")] = noise(3.0)
    return values
