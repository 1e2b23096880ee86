"""A decoder's parts are found by structure, or refused by name."""

from __future__ import annotations

import pytest
import tiny_decoders as tiny
import torch
from torch import nn

from tapcheck.anatomy import find_anatomy
from tapcheck.errors import SiteError


def layer(**children: nn.Module) -> nn.Module:
    made = nn.Module()
    for name, child in children.items():
        made.add_module(name, child)
    return made


def plain() -> nn.Module:
    return layer(input_layernorm=tiny.Norm(), self_attn=tiny.Attention(), mlp=tiny.Mlp())


def nested(path: str, module: nn.Module) -> nn.Module:
    """A tree with `module` at `path`."""
    for name in reversed(path.split(".")):
        module = layer(**{name: module})
    return module


@pytest.mark.parametrize("attention", ["attn", "self_attn", "attention", "self_attention"])
@pytest.mark.parametrize("mlp", ["mlp", "feed_forward", "block_sparse_moe", "ffn", "fc2"])
def test_parts_are_found_under_the_names_that_architectures_use(attention: str, mlp: str) -> None:
    parts = {attention: tiny.Attention(), mlp: tiny.Mlp()}
    model = nested("model.layers", nn.ModuleList([layer(ln_1=nn.LayerNorm(4), **parts)]))
    (found,) = find_anatomy(model, 1, None).layers
    assert found is not None
    assert found.attention is parts[attention]
    assert found.mlp is parts[mlp]
    assert [name for name, _ in found.norms] == ["ln_1"]


@pytest.mark.parametrize(
    "path", ["layers", "model.layers", "model.decoder.layers", "transformer.h", "gpt_neox.layers"]
)
def test_layers_are_found_wherever_they_are_kept(path: str) -> None:
    layers = [plain(), plain()]
    found = find_anatomy(nested(path, nn.ModuleList(layers)), 2, None).layers
    assert [parts.layer if parts else None for parts in found] == layers


def test_a_list_inside_a_layer_is_not_taken_for_the_layers() -> None:
    def with_experts() -> nn.Module:
        moe = layer(experts=nn.ModuleList([tiny.Mlp(), tiny.Mlp()]))
        return layer(self_attn=tiny.Attention(), mlp=moe)

    layers = [with_experts(), with_experts()]
    found = find_anatomy(nested("model.decoder.layers", nn.ModuleList(layers)), 2, None).layers
    assert [parts.layer if parts else None for parts in found] == layers


def test_dropouts_named_after_a_sublayer_are_not_taken_for_it() -> None:
    """phi3 and gpt_neox have them."""
    attention, mlp = tiny.Attention(), tiny.Mlp()
    one = layer(
        post_attention_dropout=nn.Dropout(), resid_mlp_dropout=nn.Dropout(), attn=attention, mlp=mlp
    )
    (found,) = find_anatomy(nested("layers", nn.ModuleList([one])), 1, None).layers
    assert found is not None
    assert (found.attention, found.mlp) == (attention, mlp)


def test_norms_named_after_a_sublayer_are_norms() -> None:
    """llama4's `attention_norm`, falcon's `ln_attn` and `ln_mlp`."""

    class Scale(nn.Module):
        pass

    one = layer(attention_norm=tiny.Norm(), ln_attn=nn.LayerNorm(4), ffn_norm=Scale(), ln_2=Scale())
    one.add_module("attn", tiny.Attention())
    one.add_module("mlp", tiny.Mlp())
    (found,) = find_anatomy(nested("layers", nn.ModuleList([one])), 1, None).layers
    assert found is not None
    assert [name for name, _ in found.norms] == ["attention_norm", "ln_attn", "ffn_norm", "ln_2"]


def test_norms_outside_the_layers_are_kept_apart_from_those_inside() -> None:
    inner = layer(layers=nn.ModuleList([plain()]), norm=tiny.Norm())
    model = layer(embed_norm=nn.LayerNorm(4), model=inner)
    found = find_anatomy(model, 1, None)
    assert list(found.norms) == [model.embed_norm, inner.norm]


def test_a_placeholder_of_another_pipeline_stage_has_no_parts() -> None:
    model = nested("layers", nn.ModuleList([nn.Identity(), plain()]))
    first, second = find_anatomy(model, 2, None).layers
    assert first is None
    assert second is not None


def test_the_embedding_is_the_one_given() -> None:
    embed = nn.Embedding(4, 4)
    model = nested("layers", nn.ModuleList([plain()]))
    assert find_anatomy(model, 1, embed).embed is embed


@pytest.mark.parametrize("count", [1, 3])
def test_a_model_without_that_many_layers_is_refused(count: int) -> None:
    model = nested("model.layers", nn.ModuleList([plain(), plain()]))
    with pytest.raises(SiteError, match=rf"Module has no list of {count} decoder layers"):
        find_anatomy(model, count, None)


def test_a_model_without_any_list_of_layers_is_refused() -> None:
    with pytest.raises(SiteError, match="Linear has no list of 2 decoder layers"):
        find_anatomy(nn.Linear(2, 2), 2, None)


@pytest.mark.parametrize(
    ("children", "message"),
    [
        (("mixer", "mlp"), r"layers\.0 .* has 0 children that look like its attention"),
        (("attn", "block"), r"layers\.0 .* has 0 children that look like its MLP"),
        (("attn", "cross_attn", "mlp"), "has 2 children that look like its attention"),
        (("attn", "mlp", "shared_mlp"), r"2 .* its MLP \(its children are attn, mlp, shared_mlp\)"),
    ],
)
def test_a_layer_whose_parts_can_t_be_told_is_refused_by_name(
    children: tuple[str, ...], message: str
) -> None:
    one = layer(**{name: nn.Linear(2, 2) for name in children})
    with pytest.raises(SiteError, match=message):
        find_anatomy(nested("layers", nn.ModuleList([one])), 1, None)


def test_finding_runs_nothing() -> None:
    class Untouchable(tiny.Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("the model ran")

    model = nested("layers", nn.ModuleList([layer(attn=tiny.Attention(), mlp=Untouchable())]))
    assert len(find_anatomy(model, 1, None).layers) == 1
