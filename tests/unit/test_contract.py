"""What a layer's tensors mean, for every convention met in the two engines' model sources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_decoders as tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_decoders import Decoder
from torch import nn

from tapcheck.anatomy import find_anatomy
from tapcheck.contract import LayerContract, observe, solve
from tapcheck.errors import SiteError
from tapcheck.layout import Segment, StepLayout
from tapcheck.rowstore import RowStore
from tapcheck.selectors import parse_selectors
from tapcheck.sites import Site, all_sites, parse_site
from tapcheck.taps import attach, plan_taps

LAYERS = 3
TOKENS = torch.tensor([5, 9, 33, 44, 7, 61, 2, 50, 21])
# The arithmetic by hand is the model's own, in the same dtype: only the order of sums may differ.
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
DTYPES = list(CLOSE)

SERIAL = [
    tiny.Layer,
    tiny.ThenNone,
    tiny.Fused,
    tiny.FusedThree,
    tiny.FinishedSerial,
    tiny.ThreeElements,
    tiny.FourElements,
    tiny.Sandwich,
    tiny.FusedSandwich,
    tiny.PostNorm,
]
PARALLEL = [tiny.Parallel, tiny.FinishedParallel]


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def decoder(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder([make() for _ in range(LAYERS)], dtype)


def contracts_of(model: Decoder) -> tuple[LayerContract | None, ...]:
    anatomy = find_anatomy(model, LAYERS, model.embed)
    return solve(anatomy, observe(anatomy, lambda: model(TOKENS))).layers


def tapped(model: Decoder, sites: list[Site]) -> dict[Site, torch.Tensor]:
    """The rows of one forward pass over TOKENS, by way of taps and a row store."""
    anatomy = find_anatomy(model, LAYERS, model.embed)
    contract = solve(anatomy, observe(anatomy, lambda: model(TOKENS)))
    store = RowStore(sites, parse_selectors(["all"]))
    handles = attach(plan_taps(sites, contract), store.put)
    rows = len(TOKENS)
    store.begin_step(StepLayout(0, (Segment("1", 0, rows, rows),), rows), TOKENS.device)
    model(TOKENS)
    store.end_step()
    for handle in handles:
        handle.remove()
    return dict(store.drain({"1": rows}).values)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = one.float(), other.float()
    return float(((one - other).norm(dim=-1) / other.norm(dim=-1)).max())


# --- every convention, against arithmetic by hand ------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [*SERIAL, *PARALLEL, tiny.Scaled])
def test_every_site_holds_what_arithmetic_by_hand_gives(
    make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    model = decoder(make, dtype)
    expected = {parse_site(name): rows for name, rows in model.by_hand(TOKENS).items()}
    rows = tapped(model, sorted(expected))
    assert set(rows) == set(expected)
    for site, values in expected.items():
        assert rows[site].dtype == dtype
        assert distance(rows[site], values) < CLOSE[dtype], site


@pytest.mark.parametrize("make", [*SERIAL, *PARALLEL])
def test_both_dtypes_lead_to_the_same_reading(make: Callable[[], nn.Module]) -> None:
    def readings(dtype: torch.dtype) -> list[tuple[str, str, int] | None]:
        model = decoder(make, dtype)
        names = {module: name for name, module in model.named_modules()}
        return [
            source and (names[source.module], source.at, source.terms)
            for contract in contracts_of(model)
            if contract is not None
            for source in (
                contract.resid_pre,
                contract.attn_out,
                contract.resid_mid,
                contract.mlp_out,
                contract.resid_post,
            )
        ]

    assert readings(torch.float32) == readings(torch.bfloat16)


@pytest.mark.parametrize("make", SERIAL)
def test_a_serial_layer_has_every_point(make: Callable[[], nn.Module]) -> None:
    expected = {site for site in all_sites(LAYERS) if site.point != "logits"}
    assert set(map(parse_site, decoder(make).by_hand(TOKENS))) == expected


@pytest.mark.parametrize("make", PARALLEL)
def test_a_parallel_layer_has_no_resid_mid_and_says_why(make: Callable[[], nn.Module]) -> None:
    model = decoder(make)
    with pytest.raises(SiteError, match=r"no resid_mid, because its attention and MLP .* parallel"):
        tapped(model, [Site("resid_mid", 1)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("point", ["attn_out", "resid_mid", "mlp_out"])
def test_a_scaled_layer_has_no_sublayer_points_and_says_why(point: str, dtype: torch.dtype) -> None:
    model = decoder(tiny.Scaled, dtype)
    reason = rf"'{point}.1': this model has no {point}, because layer 1 \(Scaled\) does not add"
    with pytest.raises(SiteError, match=reason):
        tapped(model, [Site(point, 1)])


@settings(max_examples=30)
@given(st.floats(0.05, 2).filter(lambda m: abs(m - 1) > 1e-4) | st.just(1.0))
def test_a_multiplier_is_noticed_however_near_to_1(multiplier: float) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        model = decoder(tiny.Scaled)
        for layer in model.layers:
            layer.multiplier = multiplier
        has_points = {c is not None and c.attn_out is not None for c in contracts_of(model)}
    assert has_points == {multiplier == 1.0}


# --- what can't be decided -----------------------------------------------------------------------


def test_two_outputs_of_a_layer_that_doesn_t_add_up_are_refused() -> None:
    model = decoder(tiny.ScaledTwo)
    with pytest.raises(SiteError, match=r"returns 2 tensors: whether .* can't be decided"):
        contracts_of(model)


def test_two_outputs_that_read_both_ways_are_refused() -> None:
    model = decoder(tiny.FinishedBesideZeros)
    with pytest.raises(SiteError, match=r"layer 0 \(FinishedBesideZeros\).*can't tell which"):
        contracts_of(model)


def test_a_layer_that_runs_twice_is_refused() -> None:
    shared = tiny.Layer()
    with pytest.raises(SiteError, match="layer 0: its Layer ran 3 times in one forward pass"):
        contracts_of(Decoder([shared] * LAYERS))


def test_a_layer_that_doesn_t_run_is_refused() -> None:
    model = decoder(tiny.Layer)
    model.layers[1].forward = lambda h: h
    with pytest.raises(SiteError, match="layer 1: its Attention ran 0 times"):
        contracts_of(model)


def test_a_layer_that_returns_no_tensor_is_refused() -> None:
    class Boxed(tiny.Layer):
        def forward(self, h: torch.Tensor) -> Any:
            return {"hidden_states": super().forward(h)}

    model = decoder(Boxed)
    model.forward = lambda tokens: [  # type: ignore[method-assign, assignment]
        layer(model.embed(tokens)) for layer in model.layers
    ]
    with pytest.raises(SiteError, match="layer 0: no tensor goes in and out of its Boxed"):
        contracts_of(model)


# --- the probe -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quiet", ["self_attn", "mlp", "embed"])
def test_a_term_that_vanishes_in_the_stream_is_still_found(quiet: str, dtype: torch.dtype) -> None:
    model = decoder(tiny.Fused, dtype)
    for name, parameter in model.named_parameters():
        if quiet in name:
            parameter.mul_(1e-6)
    for contract in contracts_of(model):
        assert contract is not None
        assert contract.attn_out is not None
        assert contract.mlp_out is not None
        assert contract.resid_post.terms == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 64.0], ids=["", "scaled embedding"])
@pytest.mark.parametrize("weight", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("make", [tiny.Sandwich, tiny.FusedSandwich, tiny.PostNorm])
def test_a_norm_after_a_sublayer_is_noticed_whatever_its_weights(
    make: Callable[[], tiny.Layer], weight: float, scale: float, dtype: torch.dtype
) -> None:
    model = decoder(make, dtype)
    model.embedding_scale = scale
    for module in model.modules():
        if isinstance(module, tiny.Norm):
            module.weight.fill_(weight)
    for contract, layer in zip(contracts_of(model), model.layers, strict=True):
        assert contract is not None
        assert contract.attn_out is not None
        assert contract.mlp_out is not None
        assert contract.attn_out.module is layer.post_attention_layernorm
        assert contract.mlp_out.module is layer.post_feedforward_layernorm


def test_no_two_terms_of_the_probe_are_alike() -> None:
    model = decoder(tiny.Layer)
    anatomy = find_anatomy(model, LAYERS, model.embed)
    probe = observe(anatomy, lambda: model(TOKENS))
    terms = [call.outputs[0] for call in probe.calls if call.kind in ("attention", "mlp")]
    terms.append(next(call.inputs[0] for call in probe.calls if call.kind == "layer"))
    assert len(terms) == 2 * LAYERS + 1
    for index, one in enumerate(terms):
        assert all(distance(one, other) > 0.5 for other in terms[:index])


def test_every_probe_draws_the_same_numbers() -> None:
    """Tensor-parallel ranks must read their layers alike."""
    model = decoder(tiny.Layer)
    anatomy = find_anatomy(model, LAYERS, model.embed)
    one, other = (observe(anatomy, lambda: model(TOKENS)) for _ in range(2))
    for a, b in zip(one.calls, other.calls, strict=True):
        assert torch.equal(a.outputs[0], b.outputs[0])


def hooks_of(model: nn.Module) -> list[object]:
    return [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]


def test_a_probe_leaves_no_hook_behind_even_when_it_fails() -> None:
    model = decoder(tiny.Layer)
    anatomy = find_anatomy(model, LAYERS, model.embed)
    seen: list[int] = []

    def fail() -> None:
        seen.append(len(hooks_of(model)))
        raise RuntimeError("no forward today")

    with pytest.raises(RuntimeError, match="no forward today"):
        observe(anatomy, fail)
    observe(anatomy, lambda: model(TOKENS))
    assert seen[0] > 0
    assert not hooks_of(model)


def test_a_probe_changes_nothing_of_what_the_model_computes() -> None:
    model = decoder(tiny.Fused)
    before = model(TOKENS).clone()
    contracts_of(model)
    assert torch.equal(model(TOKENS), before)


# --- the final norm ------------------------------------------------------------------------------


class WithEmbeddingNorm(Decoder):
    def __init__(self, layers: list[Any], final: bool) -> None:
        super().__init__(layers)
        self.embed_norm = tiny.Norm()
        self.final = final

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed_norm(self.embed(tokens))
        for layer in self.layers:
            h = layer(h)
        return self.norm(h) if self.final else h


@pytest.mark.parametrize("final", [True, False])
def test_a_norm_on_the_embedding_is_not_the_final_norm(final: bool) -> None:
    model = WithEmbeddingNorm([tiny.Layer() for _ in range(LAYERS)], final)
    anatomy = find_anatomy(model, LAYERS, model.embed)
    source = solve(anatomy, observe(anatomy, lambda: model(TOKENS))).final_norm
    assert (source and source.module) is (model.norm if final else None)


def test_sites_of_another_pipeline_stage_are_left_out() -> None:
    class Elsewhere(nn.Identity):
        fused = False

    model = Decoder([tiny.Layer(), Elsewhere(), tiny.Layer()])
    anatomy = find_anatomy(model, LAYERS, model.embed)
    contract = solve(anatomy, observe(anatomy, lambda: model(TOKENS)))
    sites = [Site("resid_post", layer) for layer in range(LAYERS)]
    assert set(plan_taps(sites, contract)) == {sites[0], sites[2]}


class Embedding(Decoder):
    """A decoder that multiplies its embedding, or adds to it, before the first layer."""

    factor, addend = 1.0, 0.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens) * self.factor + self.addend
        for layer in self.layers:
            h = layer(h)
        return h


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("factor", "addend", "scaled"),
    [(1.0, 0.0, False), (8.0, 0.0, True), (0.25, 0.0, True), (8.0, 0.5, False), (1.0, 0.1, False)],
)
def test_an_embedding_that_is_scaled_after_its_module_is_read_where_it_enters_the_layers(
    factor: float, addend: float, scaled: bool, dtype: torch.dtype
) -> None:
    """Implementations of one model scale it inside the module or after it."""
    model = Embedding([tiny.Layer() for _ in range(LAYERS)], dtype)
    model.factor, model.addend = factor, addend
    embed = Site("embed")
    expected = model.embed(TOKENS) * (factor if scaled else 1.0)
    assert torch.equal(tapped(model, [embed])[embed], expected)
