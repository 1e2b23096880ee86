"""Static taps that a CUDA graph replays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tapcheck.contract import Source
from tapcheck.errors import CaptureError
from tapcheck.sites import Site
from tapcheck.static_taps import StaticTap

pytestmark = pytest.mark.gpu

ROWS, WIDTH = 8, 64


def test_each_replay_writes_the_tap_anew_and_equals_the_eager_pass() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).cuda().requires_grad_(False)
    tap = StaticTap(Site("mlp_out", 0), Source(model[0], "output", 1), ROWS, WIDTH, torch.float32)
    fed = torch.randn(ROWS, WIDTH, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        model(fed)  # as CUDA graphs want it, before they record
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(fed)
    taken = []
    for _ in range(3):
        fed.normal_()
        tap.poison(ROWS)
        with pytest.raises(CaptureError, match="not written"):
            tap.read(ROWS)
        graph.replay()
        taken.append(tap.read(ROWS).clone())
        torch.testing.assert_close(taken[-1], nn.functional.linear(fed, *model[0].parameters()))
    assert not torch.equal(taken[0], taken[1])
