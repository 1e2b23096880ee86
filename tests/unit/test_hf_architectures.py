"""Which points each architecture has: tiny models of their own classes, captured or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tapcheck.capture import Capture
from tapcheck.errors import SiteError
from tapcheck.hf import HFBackend
from tapcheck.request import Request
from tapcheck.sites import Site, all_sites

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 2
REQUESTS = [Request("a", (5, 9, 30, 33, 44), (1, 7, 3)), Request("b", (50, 12))]
EVERY_POINT = {site.point for site in all_sites(LAYERS)}
NO_SUBLAYER = EVERY_POINT - {"attn_out", "resid_mid", "mlp_out"}

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Case:
    """A configuration class with its settings; `points` are those that the architecture has."""

    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    points: set[str] = field(default_factory=lambda: EVERY_POINT)
    why: str = ""


PARALLEL = {"points": EVERY_POINT - {"resid_mid"}, "why": "run in parallel"}
SCALED = {"points": NO_SUBLAYER, "why": "does not add its attention's or MLP's output"}

CASES = {
    "mistral": Case("MistralConfig", {"sliding_window": 4}),
    "qwen2": Case("Qwen2Config"),
    "qwen3": Case("Qwen3Config", {"head_dim": 8}),
    "phi3": Case("Phi3Config"),
    "opt": Case("OPTConfig", OPT),
    "gemma2": Case("Gemma2Config", {"head_dim": 8, "sliding_window": 4}),
    "gemma3": Case("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 4}),
    "olmo2": Case("Olmo2Config"),
    "mixtral": Case("MixtralConfig", EXPERTS),
    "stablelm": Case("StableLmConfig"),
    "gpt_neox": Case("GPTNeoXConfig", {"use_parallel_residual": True}, **PARALLEL),
    "gpt_neox-serial": Case("GPTNeoXConfig", {"use_parallel_residual": False}),
    "stablelm-parallel": Case("StableLmConfig", {"use_parallel_residual": True}, **PARALLEL),
    "cohere": Case("CohereConfig", **PARALLEL),
    "phi": Case("PhiConfig", **PARALLEL),
    "falcon": Case("FalconConfig", {"new_decoder_architecture": True}, **PARALLEL),
    "granite": Case("GraniteConfig", {"residual_multiplier": 0.22}, **SCALED),
    "granite-nearly-1": Case("GraniteConfig", {"residual_multiplier": 0.95}, **SCALED),
    # Its attention and MLP add the residual themselves.
    "bloom": Case("BloomConfig", {"n_layer": LAYERS, "n_head": 4}, **SCALED),
    # It normalises the stream itself after each sublayer.
    "opt-post-norm": Case(
        "OPTConfig",
        OPT | {"do_layer_norm_before": False},
        NO_SUBLAYER - {"final_norm"},
        "does not add its attention's or MLP's output",
    ),
}


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def backend(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HFBackend]:
    with HFBackend(build(case, tmp_path_factory.mktemp("model"))) as made:
        yield made


@pytest.fixture(scope="module")
def capture(backend: HFBackend) -> Capture:
    return backend.capture(REQUESTS, backend.sites, max_new_tokens=3)


def build(case: Case, folder: Path) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, case.config)(**SMALL | case.settings)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(((one - other).norm(dim=-1) / other.norm(dim=-1)).max())


def test_the_architecture_s_points_are_found(case: Case, backend: HFBackend) -> None:
    expected = tuple(site for site in all_sites(LAYERS) if site.point in case.points)
    assert backend.sites == expected


def test_a_point_that_it_hasn_t_is_refused_with_the_reason(case: Case, backend: HFBackend) -> None:
    absent = [site for site in all_sites(LAYERS) if site.point not in case.points]
    for site in absent:
        reason = case.why if site.layer is not None else "no module whose output is final_norm"
        with pytest.raises(SiteError, match=reason):
            backend.capture(REQUESTS, [site])
    assert bool(absent) is (case.points != EVERY_POINT)


def test_the_residual_stream_is_transformers_own(backend: HFBackend, capture: Capture) -> None:
    for request in capture.requests:
        tokens = torch.tensor([request.token_ids[: request.seen_length]])
        with torch.no_grad():
            output = backend.model(input_ids=tokens, output_hidden_states=True, use_cache=False)
        part = capture.select(requests=[request.id])
        assert distance(part["resid_pre.0"].values, output.hidden_states[0][0]) < 1e-5
        for layer in range(LAYERS - 1):
            rows = part[f"resid_post.{layer}"].values
            assert distance(rows, output.hidden_states[layer + 1][0]) < 1e-5
        if "final_norm" in part:
            assert distance(part["final_norm"].values, output.hidden_states[-1][0]) < 1e-5
        # Some scale or soft-cap what the head returns; captured are the logits sampled from.
        assert distance(part["logits"].values, output.logits[0]) < 1e-5


def test_what_a_layer_adds_is_what_was_captured(case: Case, capture: Capture) -> None:
    for layer in range(LAYERS):
        if layer + 1 < LAYERS:
            following = capture[f"resid_pre.{layer + 1}"].values
            assert torch.equal(capture[f"resid_post.{layer}"].values, following)
        if "attn_out" not in case.points:
            continue
        pre, attn, mlp, post = (
            capture[Site(point, layer)].values
            for point in ("resid_pre", "attn_out", "mlp_out", "resid_post")
        )
        assert distance(pre + attn + mlp, post) < 1e-5
        if "resid_mid" in case.points:
            assert distance(pre + attn, capture[f"resid_mid.{layer}"].values) < 1e-5


def test_bfloat16_is_read_alike(case: Case, tmp_path: Path, backend: HFBackend) -> None:
    with HFBackend(build(case, tmp_path), dtype="bfloat16") as narrow:
        assert narrow.sites == backend.sites
        assert plan(narrow) == plan(backend)


def plan(backend: HFBackend) -> dict[Site, tuple[str, str, int]]:
    """Where each site is read: the module's name, its input or output, and how many terms."""
    from tapcheck.runs import make_plan

    names: Callable[[torch.nn.Module], str] = {
        id(module): name for name, module in backend.model.named_modules()
    }.__getitem__  # type: ignore[assignment]
    taps = backend._taps(make_plan(backend.sites, ["all"], LAYERS))
    return {site: (names(id(s.module)), s.at, s.terms) for site, s in taps.items()}  # type: ignore[arg-type]
