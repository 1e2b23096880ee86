"""Finding a decoder's parts by structure, in Transformers' and in vLLM's module trees alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from tapcheck.errors import SiteError

# What a decoder layer's children are called, in lower case, across both engines' model sources.
_ATTENTION = ("attn", "attention")
_MLP = ("mlp", "feed_forward", "feedforward", "ffn", "moe", "fc2")
_NORM = ("norm", "ln_")


@dataclass(frozen=True)
class LayerParts:
    """One decoder layer: its attention and MLP, and the norms that are its direct children."""

    layer: nn.Module
    attention: nn.Module
    mlp: nn.Module
    norms: tuple[tuple[str, nn.Module], ...]


@dataclass(frozen=True)
class Anatomy:
    """A decoder-only model's parts; a layer on another pipeline stage is None.

    norms: norms outside the layers, in definition order; which one is final shows when it runs.
    """

    embed: nn.Module | None
    layers: tuple[LayerParts | None, ...]
    norms: tuple[nn.Module, ...]


def find_anatomy(model: nn.Module, num_layers: int, embed: nn.Module | None) -> Anatomy:
    """Find the parts of `model`, whose config says that it has `num_layers` decoder layers.

    Raises SiteError, with what was looked for, when the tree has no such layers.
    """
    name, layers = _find_layers(model, num_layers)
    inside = {id(module) for module in layers.modules()}
    norms = [
        module
        for path, module in model.named_modules()
        if id(module) not in inside and _is_norm(path.rpartition(".")[2], module)
    ]
    parts = tuple(_layer_parts(f"{name}.{i}", layer) for i, layer in enumerate(layers))
    return Anatomy(embed, parts, tuple(norms))


def _find_layers(model: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if not found:
        raise SiteError(
            f"{type(model).__name__} has no list of {num_layers} decoder layers: tapcheck finds "
            "layers as the nn.ModuleList whose length is the config's num_hidden_layers"
        )
    # The outermost: lists inside a layer (experts, say) can have the same length by chance.
    return min(found, key=lambda item: item[0].count("."))


def _layer_parts(path: str, layer: nn.Module) -> LayerParts | None:
    children = list(layer.named_children())
    if not children:  # vLLM's placeholder for a layer of another pipeline stage
        return None
    norms = tuple((name, child) for name, child in children if _is_norm(name, child))
    others = [
        (name, child)
        for name, child in children
        if not _is_norm(name, child) and not isinstance(child, nn.Dropout)
    ]
    return LayerParts(
        layer=layer,
        attention=_one(path, layer, others, _ATTENTION, "attention"),
        mlp=_one(path, layer, others, _MLP, "MLP"),
        norms=norms,
    )


def _one(
    path: str,
    layer: nn.Module,
    children: Sequence[tuple[str, nn.Module]],
    words: tuple[str, ...],
    what: str,
) -> nn.Module:
    found = [child for name, child in children if any(word in name.lower() for word in words)]
    if len(found) != 1:
        names = ", ".join(name for name, _ in children)
        raise SiteError(
            f"{path} ({type(layer).__name__}) has {len(found)} children that look like its {what} "
            f"(its children are {names}): this architecture can't be tapped yet; tapcheck.anatomy "
            "is the place to teach it"
        )
    return found[0]


def _is_norm(name: str, module: nn.Module) -> bool:
    if any(True for _ in module.children()):  # a norm has none; a model named after one has
        return False
    return "norm" in type(module).__name__.lower() or any(word in name.lower() for word in _NORM)
