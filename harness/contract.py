"""What a decoder layer's tensors mean, decided by what one forward pass shows.

Engines disagree: a layer returns the finished residual stream, or a sublayer's output beside the
stream that it is still to be added to, or the stream beside something that must not be added. A
probe forward records what goes in and out of every layer, attention, MLP and norm; the meaning is
the one reading under which the residual stream's own identities hold:

    resid_mid == resid_pre + attn_out        resid_post == resid_mid + mlp_out

(or, where attention and MLP run in parallel, resid_post == resid_pre + attn_out + mlp_out).
During the probe the embedding's and every sublayer's output is replaced by random numbers of its
own, so that no term is zero, outsized or equal to another, and a wrong reading is wrong by far. A
pipeline stage without embedding gets them for what enters its first layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tapcheck.anatomy import Anatomy, LayerParts
from tapcheck.errors import SiteError

# An identity holds when its error (the median over rows) is both below this part of its smallest
# term, since a wrong reading leaves a whole term, and below this many roundings of its largest,
# since a right one leaves only these (a scaled term can be nearer than the first bound).
_PART_OF_SMALLEST = 0.2
_ROUNDINGS_OF_LARGEST = 2.0

# Gemma multiplies its embedding by the root of its width, after it: starting low keeps what is
# added later above the rounding of the stream.
_EMBEDDING_STD = 1 / 16

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Source:
    """Where a point is read: a module's input or output, and which of its stream tensors to sum."""

    module: nn.Module
    at: str  # "input" or "output"
    terms: int


@dataclass(frozen=True)
class LayerContract:
    """Where each point of one layer is read; a point that the layer hasn't is None."""

    resid_pre: Source
    attn_out: Source | None
    resid_mid: Source | None
    mlp_out: Source | None
    resid_post: Source
    why_absent: str = ""


@dataclass(frozen=True)
class ModelContract:
    """Where a model's points are read: `layers` has None for another pipeline stage's layers.

    `embed` and `final_norm` are None where the model, or this stage of it, has none.
    """

    embed: Source | None
    layers: tuple[LayerContract | None, ...]
    final_norm: Source | None


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module during the probe; tensors are copies."""

    module: nn.Module
    kind: str  # "layer", "attention", "mlp" or "norm"
    inputs: Tensors
    outputs: Tensors


@dataclass
class Probe:
    """What the probe forward showed: calls in the order in which they ended.

    `embedded` are the numbers that took the place of the embedding's output.
    """

    calls: list[Call] = field(default_factory=list)
    embedded: torch.Tensor | None = None
    entered: dict[int, Tensors] = field(default_factory=dict)


def stream_tensors(values: Any) -> Tensors:
    """The leading tensors of a call's arguments or result that have the residual stream's shape.

    At most two: the first float tensor, and the next if it has the same shape. None at all where
    the values are neither a tensor nor a tuple or list with one.
    """
    if isinstance(values, torch.Tensor):
        return (values,)
    if not isinstance(values, (tuple, list)):
        return ()
    first = None
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            if first is None:
                first = value
            elif value.shape == first.shape:
                return first, value
    return () if first is None else (first,)


def as_rows(terms: Tensors) -> Tensors:
    """The tensors as [rows, width]: vLLM runs Transformers' own classes as a batch of one."""
    if terms[0].dim() == 2:
        return terms
    return tuple(term.flatten(0, -2) for term in terms)


def call_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensors:
    """The stream tensors of a module's arguments, positional ones first."""
    if not kwargs:
        return stream_tensors(args)
    named = [kwargs[name] for name in ("hidden_states", "residual") if name in kwargs]
    return stream_tensors((*args, *(named or kwargs.values())))


def observe(anatomy: Anatomy, run_forward: Callable[[], object]) -> Probe:
    """Run one forward pass with random embedding and sublayer outputs, and record it."""
    probe = Probe()
    handles = []
    seeds = itertools.count()  # no two alike, and the same on every rank

    def replace(_module: nn.Module, _args: object, output: Any) -> Any:
        return _noise(output, next(seeds), 1.0)

    def embed(_module: nn.Module, _args: object, output: Any) -> Any:
        noise = _noise(output, next(seeds), _EMBEDDING_STD)
        probe.embedded = next(iter(_copies(stream_tensors(noise))), None)
        return noise

    kinds: dict[nn.Module, str] = dict.fromkeys(anatomy.norms, "norm")
    for parts in filter(None, anatomy.layers):
        kinds |= {parts.layer: "layer", parts.attention: "attention", parts.mlp: "mlp"}
        kinds |= {norm: "norm" for _, norm in parts.norms}

    def enter(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        stream = {
            id(tensor): _noise(tensor, next(seeds), 1.0) for tensor in call_tensors(args, kwargs)
        }
        return (
            tuple(stream.get(id(value), value) for value in args),
            {name: stream.get(id(value), value) for name, value in kwargs.items()},
        )

    layers = [parts.layer for parts in anatomy.layers if parts is not None]
    if anatomy.embed is not None:
        handles.append(anatomy.embed.register_forward_hook(embed))
    elif layers:
        handles.append(layers[0].register_forward_pre_hook(enter, with_kwargs=True))
    for module, kind in kinds.items():
        if kind in ("attention", "mlp"):
            handles.append(module.register_forward_hook(replace))
        handles.append(
            module.register_forward_pre_hook(
                lambda m, args, kwargs: probe.entered.__setitem__(
                    id(m), _copies(call_tensors(args, kwargs))
                ),
                with_kwargs=True,
            )
        )
        handles.append(
            module.register_forward_hook(
                lambda m, _args, out, kind=kind: probe.calls.append(
                    Call(m, kind, probe.entered.pop(id(m)), _copies(stream_tensors(out)))
                )
            )
        )
    try:
        run_forward()
    finally:
        for handle in handles:
            handle.remove()
    return probe


def _copies(tensors: Tensors) -> Tensors:
    return tuple(tensor.detach().clone() for tensor in tensors)


def _noise(output: Any, seed: int, std: float) -> Any:
    """`output` with its first tensor replaced by normal numbers, from row to row larger.

    A norm after rows of one size, and of the size that it gives them, would go unnoticed.
    """
    if isinstance(output, tuple | list) and output:
        return (_noise(output[0], seed, std), *output[1:])
    if not isinstance(output, torch.Tensor):
        return output
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(output.shape, generator=generator, dtype=torch.float32)
    noise *= torch.linspace(std, 4 * std, output.shape[-2])[:, None]
    return noise.to(output.dtype).to(output.device)


def solve(anatomy: Anatomy, probe: Probe) -> ModelContract:
    """Where each point is read; raises SiteError if that is undecidable."""
    contracts = tuple(
        None if parts is None else _solve_layer(index, parts, probe)
        for index, parts in enumerate(anatomy.layers)
    )
    outside = {id(norm) for norm in anatomy.norms}
    last_layer = max((at for at, call in enumerate(probe.calls) if call.kind == "layer"), default=0)
    # A norm before the layers belongs to the embedding.
    after = [call for call in probe.calls[last_layer:] if id(call.module) in outside]
    final = Source(after[-1].module, "output", 1) if after else None
    return ModelContract(_solve_embedding(anatomy, probe, contracts), contracts, final)


def _solve_embedding(
    anatomy: Anatomy, probe: Probe, layers: Sequence[LayerContract | None]
) -> Source | None:
    """The embedding's output or, where the model scales it afterwards, what enters the layers.

    Some implementations of one model scale it inside the module and some after it.
    """
    if anatomy.embed is None:
        return None
    plain = Source(anatomy.embed, "output", 1)
    first, parts = layers[0], anatomy.layers[0]
    if probe.embedded is None or first is None or parts is None or first.resid_pre.terms != 1:
        return plain
    entering = _the_call(probe, parts.layer, 0).inputs[0]
    before, after = (t.double().reshape(-1, t.shape[-1]) for t in (probe.embedded, entering))
    if before.shape != after.shape:
        return plain
    scale = (after * before).sum() / (before * before).sum()
    left = (after - scale * before).norm() / after.norm()
    roundings = _ROUNDINGS_OF_LARGEST * torch.finfo(entering.dtype).eps
    scaled = bool(left <= roundings) and bool((scale - 1).abs() > roundings)
    return first.resid_pre if scaled else plain


@dataclass(frozen=True, eq=False)
class _Reading:
    """What a source held during the probe: `value` is [rows, width] in float32 or wider."""

    source: Source
    value: torch.Tensor
    rounding: float  # relative, of the coarsest dtype that was read


@dataclass(frozen=True)
class _Fit:
    """How well terms add up to a sum: `error` is relative to the smallest term."""

    error: float
    holds: bool


def _solve_layer(index: int, parts: LayerParts, probe: Probe) -> LayerContract:
    layer = _the_call(probe, parts.layer, index)
    attention = _the_call(probe, parts.attention, index)
    mlp = _the_call(probe, parts.mlp, index)
    norms = {id(norm) for _, norm in parts.norms}
    start, end = probe.calls.index(attention), probe.calls.index(mlp)
    between = [call for call in probe.calls[start:end] if id(call.module) in norms]
    stop = probe.calls.index(layer)
    after = [call for call in probe.calls[end:stop] if id(call.module) in norms]
    solutions: list[tuple[_Fit, LayerContract]] = []
    for terms in range(1, len(layer.outputs) + 1):
        pre = _reading(layer, "input", min(terms, len(layer.inputs)))
        post = _reading(layer, "output", terms)
        for attn, out in itertools.product(_outputs(attention, between), _outputs(mlp, after)):
            for mid in _mids(mlp, between):
                fits = _fit(mid, pre, attn), _fit(post, mid, out)
                fit = _Fit(max(f.error for f in fits), all(f.holds for f in fits))
                solutions.append((fit, _contract(pre, attn, mid, out, post)))
            parallel = _fit(post, pre, attn, out)
            solutions.append((parallel, _contract(pre, attn, None, out, post)))
    solutions.sort(key=lambda solution: solution[0].error)
    holding = [contract for fit, contract in solutions if fit.holds]
    if holding:
        return _unique(index, parts, holding)
    return _residual_only(index, parts, layer, solutions[0][0].error)


def _unique(index: int, parts: LayerParts, holding: Sequence[LayerContract]) -> LayerContract:
    """The one reading that holds; a serial one also holds as a sum of both, so it comes first."""
    found = [contract for contract in holding if contract.resid_mid is not None] or holding
    streams = {contract.resid_post.terms for contract in found}
    if len(streams) > 1:
        raise SiteError(
            f"layer {index} ({type(parts.layer).__name__}): its output can be read as a finished "
            "residual stream and as two parts to be summed, and the probe can't tell which"
        )
    return found[0]


def _residual_only(index: int, parts: LayerParts, layer: Call, best_error: float) -> LayerContract:
    """A layer whose sublayers don't add up: with one output tensor the stream is still known."""
    name = type(parts.layer).__name__
    why = (
        f"layer {index} ({name}) does not add its attention's or MLP's output to the residual "
        f"stream as it is (the nearest identity is off by {best_error:.0%} of the term)"
    )
    if len(layer.outputs) > 1:
        raise SiteError(
            f"{why}, and it returns {len(layer.outputs)} tensors: whether they are to be summed "
            "can't be decided"
        )
    pre, post = _reading(layer, "input", 1), _reading(layer, "output", 1)
    return LayerContract(pre.source, None, None, None, post.source, why)


def _contract(
    pre: _Reading, attn: _Reading, mid: _Reading | None, out: _Reading, post: _Reading
) -> LayerContract:
    absent = "" if mid else "its attention and MLP read the same input and run in parallel"
    return LayerContract(
        pre.source, attn.source, mid.source if mid else None, out.source, post.source, absent
    )


def _the_call(probe: Probe, module: nn.Module, index: int) -> Call:
    calls = [call for call in probe.calls if call.module is module]
    if len(calls) != 1:
        raise SiteError(
            f"layer {index}: its {type(module).__name__} ran {len(calls)} times in one forward "
            "pass, so its rows can't be told apart"
        )
    call = calls[0]
    if not call.outputs or (call.kind == "layer" and not call.inputs):
        raise SiteError(
            f"layer {index}: no tensor goes in and out of its {type(module).__name__} as such or "
            "in a tuple, so the residual stream can't be read there"
        )
    return call


def _reading(call: Call, at: str, terms: int) -> _Reading:
    tensors = (call.inputs if at == "input" else call.outputs)[:terms]
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    total = sum((tensor.to(wide) for tensor in tensors[1:]), tensors[0].to(wide))
    rounding = max(torch.finfo(tensor.dtype).eps for tensor in tensors)
    source = Source(call.module, at, len(tensors))
    return _Reading(source, total.reshape(-1, total.shape[-1]), rounding)


def _outputs(sublayer: Call, norms: Sequence[Call]) -> Iterator[_Reading]:
    """What a sublayer may add to the stream: its output, or that after the norm that follows it."""
    yield _reading(sublayer, "output", 1)
    for norm in norms[:1]:
        if len(norm.inputs) == 1:
            yield _reading(norm, "output", 1)


def _mids(mlp: Call, norms: Sequence[Call]) -> Iterator[_Reading]:
    """Where the stream between the sublayers may be read: the MLP's norm's input, or the MLP's."""
    for norm in norms[-1:]:
        for terms in range(1, len(norm.inputs) + 1):
            yield _reading(norm, "input", terms)
    if mlp.inputs:
        yield _reading(mlp, "input", 1)


def _fit(total: _Reading, *terms: _Reading) -> _Fit:
    """How well `terms` add up to `total`, by the median over rows."""
    readings = (total, *terms)
    if len({reading.value.shape for reading in readings}) > 1:
        return _Fit(float("inf"), False)
    error = (sum(term.value for term in terms) - total.value).norm(dim=-1)
    norms = torch.stack([reading.value.norm(dim=-1) for reading in readings])
    relative = error / norms[1:].amin(dim=0).clamp_min(1e-30)
    roundings = error / norms.amax(dim=0).clamp_min(1e-30)
    rounding = max(reading.rounding for reading in readings)
    return _Fit(
        float(relative.median()),
        float(relative.median()) < _PART_OF_SMALLEST
        and float(roundings.median()) < _ROUNDINGS_OF_LARGEST * rounding,
    )
