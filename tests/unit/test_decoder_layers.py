"""The scan of decoder layers' sources: on snippets of every kind, and on the installed vLLM."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from textwrap import dedent, indent

import pytest
from packaging.version import Version

from tapcheck.errors import EngineError
from tapcheck.vllm import decoder_layers
from tapcheck.vllm.decoder_layers import (
    OUTCOMES,
    DecoderLayer,
    Scan,
    main,
    render,
    scan_installed,
    scan_sources,
)

PAGE = Path(__file__).parents[2] / "docs" / "decoder-layers.md"
PAGE_VERSION = "0.32.0"

HEAD = """
from vllm.model_executor.layers.layernorm import GemmaRMSNorm as TinyNorm, RMSNorm
class TinyDecoderLayer(nn.Module):
    def __init__(self):
        self.norm = RMSNorm(8)
        self.norm_2 = TinyNorm(8)
        self.passing_norm = PassingNorm(8)
        self.adding_norm = AddingNorm(8)
        self.foreign_norm = ForeignNorm(8)
"""
TAIL = """
class PassingNorm(nn.Module):
    def forward(self, x, residual=None):
        return layer_norm(x), residual
class AddingNorm(CustomOp):
    def forward_native(self, x, residual: Tensor | None = None):
        if residual is not None:
            x = x + residual
            residual = x
        with autocast():
            x = layer_norm(x)
        return x if residual is None else (x, residual)
"""

FUSED = """
if residual is None:
    residual = hidden_states
    hidden_states = self.norm(hidden_states)
else:
    hidden_states, residual = self.norm(hidden_states, residual)
hidden_states = self.attn(positions, hidden_states)
hidden_states, residual = self.norm_2(hidden_states, residual)
return self.mlp(hidden_states), residual
"""
SERIAL = """
residual = hidden_states
hidden_states = residual + self.attn(self.norm(hidden_states))
residual = hidden_states
hidden_states = self.mlp(self.norm_2(hidden_states))
hidden_states = {sum}
return {result}
"""

KINDS = {
    "llama: the norms add": (FUSED, "to be summed"),
    "nemotron: a norm of the model's own adds": (
        FUSED.replace("self.norm(", "self.adding_norm("),
        "to be summed",
    ),
    "deepseek: scaled, and moved between ranks": (
        FUSED.replace(
            "hidden_states, residual = self.norm_2",
            """
if hidden_states.dtype == torch.float16:
    hidden_states *= 1.0 / self.scale
    if self.layer_idx == 0:
        residual *= 1.0 / self.scale
if self.parallel:
    residual = sequence_parallel_chunk(residual)
hidden_states, residual = self.norm_2""",
        ),
        "to be summed",
    ),
    "longcat: one of several norms, and a sum that is no stream": (
        """
hidden_states, residual = self.norm[0](hidden_states, residual)
moe = self.moe(hidden_states.clone())
hidden_states, residual = self.norm_2[1](self.mlp(hidden_states), residual)
hidden_states = hidden_states + moe
return hidden_states, residual
""",
        "to be summed",
    ),
    "deci: attention may be left out": (
        """
if self.no_op:
    pass
else:
    hidden_states, residual = self.norm(hidden_states, residual)
    hidden_states = self.attn(hidden_states)
return hidden_states, residual
""",
        "to be summed",
    ),
    "stablelm: the stream, beside what it was made of": (
        SERIAL.format(sum="residual + hidden_states", result="hidden_states, residual"),
        "finished stream",
    ),
    "phimoe: the same, added the other way round": (
        SERIAL.format(sum="hidden_states + residual", result="(hidden_states, residual)"),
        "finished stream",
    ),
    "granite hybrid: scaled": (
        SERIAL.format(
            sum="residual + hidden_states * self.multiplier", result="hidden_states, residual"
        ),
        "finished stream",
    ),
    "added in place": (
        SERIAL.format(sum="hidden_states", result="hidden_states, residual").replace(
            "return", "hidden_states += residual\nreturn"
        ),
        "finished stream",
    ),
    "cohere: a norm that passes the residual on": (
        """
residual = hidden_states
hidden_states, residual = self.passing_norm(hidden_states, residual)
both = self.attn(hidden_states) + self.mlp(hidden_states)
if self.tp_size > 1:
    both = tensor_model_parallel_all_reduce(both)
return residual + both, residual
""",
        "finished stream",
    ),
    "gpt2: one tensor": (
        SERIAL.format(sum="residual + hidden_states", result="hidden_states"),
        "one tensor",
    ),
    "bloom: one tensor whatever the branch": (
        "residual = self.norm(hidden_states) if self.after else hidden_states\n"
        "return self.mlp(hidden_states) + residual",
        "one tensor",
    ),
    "bart: what the last norm returns": ("return self.norm(hidden_states)", "one tensor"),
    "minicpm: None beside the stream": (
        SERIAL.format(sum="residual + hidden_states", result="hidden_states, None"),
        "stream, None",
    ),
    "molmo: a residual that is None by then": (
        SERIAL.format(
            sum="residual + hidden_states\nresidual = None", result="hidden_states, residual"
        ),
        "stream, None",
    ),
    "three": ("return hidden_states + 1, residual, self.router(hidden_states)", "three or more"),
    "four": ("return (hidden_states, None, None, residual)", "three or more"),
}

UNDECIDED = {
    "a branch": (
        "if self.fused:\n    return self.mlp(hidden_states), hidden_states\n"
        "return hidden_states + self.mlp(hidden_states)",
        "it depends on a branch: .* or one tensor",
    ),
    "falcon_h1's mixers: the stream is gone": (
        "return self.mixer(hidden_states), residual",
        "neither holds hidden_states",
    ),
    "a residual that is dropped": (
        "return self.mlp(hidden_states), hidden_states",
        "drops the one that it is given",
    ),
    "two that share a term": (
        "out = self.mlp(hidden_states)\nreturn hidden_states + out, residual + out",
        "both hold self.mlp",
    ),
    "the same twice": ("return hidden_states, hidden_states", "both hold hidden_states"),
    "a norm that nobody knows": (
        "hidden_states, residual = self.foreign_norm(hidden_states, residual)\n"
        "return self.mlp(hidden_states), residual",
        "what ForeignNorm does with a residual is not known",
    ),
    "another module's result": ("return self.block(hidden_states)", "what self.block does"),
    "nothing": ("self.mlp(hidden_states)", "it returns None"),
    "an error": ("raise RuntimeError", "never returns"),
    "too many branches": (
        "\n".join(
            f"if test({i}):\n    hidden_states = hidden_states + f(x)" + "\n" for i in range(12)
        )
        + "return hidden_states",
        "too many branches",
    ),
}


def scan_forward(body: str) -> DecoderLayer:
    forward = "def forward(self, positions, hidden_states, residual: Tensor | None = None):\n"
    method = indent(forward + indent(dedent(body).strip(), "    "), "    ")
    [layer] = scan_sources({"tiny": f"{HEAD}{method}\n{TAIL}"})
    return layer


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_is_told(kind: str) -> None:
    body, outcome = KINDS[kind]
    layer = scan_forward(body)
    assert layer.outcome == outcome, layer.reason
    terms = {"to be summed": 2, "three or more": None}.get(outcome, 1)
    assert layer.terms == terms


@pytest.mark.parametrize("kind", UNDECIDED)
def test_what_the_source_does_not_say_is_undecided_with_the_reason(kind: str) -> None:
    body, reason = UNDECIDED[kind]
    layer = scan_forward(body)
    assert layer.outcome == "undecided"
    assert layer.terms is None
    assert re.search(reason, layer.reason), layer.reason


def test_a_layer_may_inherit_its_forward_and_call_methods_across_modules() -> None:
    base = """
class BaseDecoderLayer(nn.Module):
    def __init__(self):
        self.norm = RMSNorm(8)
    def forward(self, hidden_states, residual):
        hidden_states, residual = self.mix(hidden_states, residual)
        return hidden_states, residual
"""
    one = """
from .base import BaseDecoderLayer as Base
class OneDecoderLayer(Base):
    def mix(self, x, residual):
        x, residual = self.norm(x, residual)
        return self.attn(x), residual
class Other(Base):
    pass
"""
    two = """
from vllm.model_executor.models.one import OneDecoderLayer
class TwoDecoderLayer(OneDecoderLayer):
    def forward(self, hidden_states, residual):
        hidden_states, residual = super().forward(hidden_states, residual)
        return hidden_states + residual
"""
    layers = scan_sources({"two": two, "one": one, "base": base})
    assert [(layer.module, layer.name, layer.outcome, layer.defined_by) for layer in layers] == [
        ("base", "BaseDecoderLayer", "undecided", "base.BaseDecoderLayer"),
        ("one", "OneDecoderLayer", "to be summed", "base.BaseDecoderLayer"),
        ("two", "TwoDecoderLayer", "one tensor", "two.TwoDecoderLayer"),
    ]


def test_layers_are_what_a_model_makes_its_layers_of_whatever_their_name() -> None:
    source = """
class Block(nn.Module):
    def forward(self, x):
        return x + self.mlp(x)
class Hybrid(Block): ...
class ByDefault(Block): ...
class Gate(Block): ...
class VisionBlock(Block): ...
class TinyEncoderLayer(Block): ...
class Model(nn.Module):
    def __init__(self, kind=ByDefault):
        def get_layer(prefix):
            return Hybrid(prefix)
        self.start, self.end, self.h = make_layers(4, lambda prefix: Block(prefix))
        self.start, self.end, self.layers = make_layers(4, get_layer, prefix="x")
        self.start, self.end, self.layers = make_layers(4, lambda prefix: kind(prefix))
        self.start, self.end, self.layers = make_layers(4, lambda prefix: TinyEncoderLayer(prefix))
        _, _, self.gates = make_layers(4, lambda prefix: Gate(prefix))
        self.vision = nn.ModuleList([VisionBlock() for _ in range(4)])
"""
    names = [layer.name for layer in scan_sources({"tiny": source})]
    assert names == ["Block", "Hybrid", "ByDefault"]


def test_the_order_of_the_sources_changes_nothing() -> None:
    sources = dict.fromkeys("bca", HEAD + "    def forward(self, x): return x")
    layers = scan_sources(sources)
    assert [layer.module for layer in layers] == ["a", "b", "c"]
    assert layers == scan_sources(dict(reversed(sources.items())))


def test_a_page_counts_every_outcome_and_names_every_class() -> None:
    layers = scan_sources({"tiny": HEAD + "    def forward(self, x): return self.mlp(x), x"})
    page = render(Scan("1.2.3", layers))
    assert "vLLM 1.2.3" in page
    assert "`tiny.TinyDecoderLayer`" in page
    for outcome in OUTCOMES:
        assert f"| {outcome}" in page


def test_without_vllm_the_scan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_layers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineError, match="vLLM is not installed"):
        scan_installed()


def installed() -> str:
    """The version of vLLM here, or of a build of it; empty without one."""
    names = metadata.packages_distributions().get("vllm")
    return Version(metadata.version(names[0])).public if names else ""


@pytest.fixture(scope="module")
def scan() -> Scan:
    if installed() != PAGE_VERSION:
        pytest.skip(f"vLLM {PAGE_VERSION} is not installed")
    return scan_installed()


def test_the_page_in_the_docs_is_that_of_the_version_it_names(
    scan: Scan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decoder_layers, "scan_installed", lambda: scan)
    main()
    assert PAGE.read_text(encoding="utf-8") == capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("llama.LlamaDecoderLayer", "to be summed"),
        ("qwen3_moe.Qwen3MoeDecoderLayer", "to be summed"),
        ("deepseek_v2.DeepseekV2DecoderLayer", "to be summed"),
        ("nemotron.NemotronDecoderLayer", "to be summed"),
        ("mamba2.Mamba2DecoderLayer", "to be summed"),
        ("commandr.CohereDecoderLayer", "finished stream"),
        ("stablelm.StablelmDecoderLayer", "finished stream"),
        ("phimoe.PhiMoEDecoderLayer", "finished stream"),
        ("granitemoehybrid.GraniteMoeHybridAttentionDecoderLayer", "finished stream"),
        ("gpt_j.GPTJBlock", "one tensor"),
        ("falcon.FalconDecoderLayer", "one tensor"),
        ("falcon_h1.FalconH1ParallelHybrid", "one tensor"),
        ("minicpm.MiniCPMDecoderLayer", "stream, None"),
        ("gemma3n.Gemma3nDecoderLayer", "undecided"),
    ],
)
def test_layers_that_were_read_by_eye(scan: Scan, name: str, outcome: str) -> None:
    found = {f"{layer.module}.{layer.name}": layer.outcome for layer in scan.layers}
    assert found[name] == outcome
