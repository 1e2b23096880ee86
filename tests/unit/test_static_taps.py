"""Static taps in compiled models: what is read, and what is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tapcheck.contract import Source
from tapcheck.errors import CaptureError
from tapcheck.sites import Site
from tapcheck.static_taps import StaticTap

WIDTH, MOST = 8, 16
SITE = Site("resid_post", 0)


class Layer(nn.Module):
    """A layer as vLLM's are: it returns its output and the residual stream apart."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = hidden if residual is None else hidden + residual
        return torch.tanh(self.mlp(residual)), residual


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x + residual


def tap(module: nn.Module, at: str, terms: int, dtype: torch.dtype = torch.float32) -> StaticTap:
    return StaticTap(SITE, Source(module, at, terms), MOST, WIDTH, dtype)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().requires_grad_(False)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_forward_writes_the_taps_at_every_row_count(model: Model, backend: str) -> None:
    taps = [
        tap(model.layers[0], "output", 2),
        tap(model.layers[1], "input", 2),
        tap(model.layers[1].mlp, "output", 1),
        tap(model.layers[2].mlp, "input", 1),
    ]
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for rows in (5, 7, MOST, 2):
        x = torch.randn(rows, WIDTH)
        model(x)
        plain = [each.read(rows).clone() for each in taps]
        for each in taps:
            each.poison(rows)
        compiled(x)
        for each, expected in zip(taps, plain, strict=True):
            torch.testing.assert_close(each.read(rows), expected)
    assert not torch.equal(*(each.read(2) for each in taps[2:]))


def test_rows_that_no_forward_wrote_are_noticed(model: Model) -> None:
    noticing = tap(model.layers[0], "output", 2)
    model(torch.randn(3, WIDTH))
    with pytest.raises(CaptureError, match=r"resid_post\.0: 2 of 5 rows .* not written"):
        noticing.read(5)
    noticing.poison(3)
    nn.Sequential(*(layer.mlp for layer in model.layers))(torch.randn(3, WIDTH))  # leaves it out
    with pytest.raises(CaptureError, match="3 of 3 rows"):
        noticing.read(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_no_number_is_taken_for_a_row_that_was_not_written(
    dtype: torch.dtype, value: float
) -> None:
    module = nn.Identity()
    wrote = tap(module, "output", 1, dtype)
    module(torch.full((4, WIDTH), value, dtype=dtype))
    torch.testing.assert_close(
        wrote.read(4), torch.full((4, WIDTH), value, dtype=dtype), equal_nan=True
    )
    computed = torch.full((2, WIDTH), 0.0, dtype=dtype)
    module(computed / computed)  # NaN as the processor makes it
    assert wrote.read(2).isnan().all()


@pytest.mark.parametrize("at", ["input", "output"])
def test_a_tap_keeps_what_its_module_had_then_whatever_is_done_to_the_tensor_later(
    at: str,
) -> None:
    module = nn.Identity()
    kept = tap(module, at, 1)
    x = torch.ones(2, WIDTH)
    module(x).zero_()
    assert (kept.read(2) == 1).all()


def test_a_pass_with_more_rows_than_the_buffer_is_refused(model: Model) -> None:
    tap(model.layers[0], "output", 2)
    with pytest.raises(CaptureError, match="17 rows, more than the 16"):
        model(torch.randn(MOST + 1, WIDTH))


def test_taps_of_one_module_do_not_take_each_other_s_place(model: Model) -> None:
    layer = model.layers[1]
    both = tap(layer, "input", 2), tap(layer, "output", 2)
    seen: dict[str, torch.Tensor] = {}
    add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.add
    layer.register_forward_hook(
        lambda _m, args, out: seen.update(input=add(*args), output=add(*out))
    )
    model(torch.randn(4, WIDTH))
    for each, name in zip(both, ("input", "output"), strict=True):
        torch.testing.assert_close(each.read(4), seen[name])
