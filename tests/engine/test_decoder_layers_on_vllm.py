"""The scan of vLLM's sources against what a probe forward shows of the running model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tapcheck.anatomy import Anatomy
from tapcheck.contract import LayerContract, ModelContract, Probe, solve
from tapcheck.fixtures.pool import EnginePool
from tapcheck.fixtures.zoo import TINY_MODELS
from tapcheck.vllm.decoder_layers import DecoderLayer, scan_installed

pytestmark = pytest.mark.engine

SMALL = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
OTHERS = {
    "cohere": ("CohereConfig", {}),
    "stablelm": ("StableLmConfig", {}),
    "exaone4": (
        "Exaone4Config",
        {"sliding_window": None, "layer_types": ["full_attention", "full_attention"]},
    ),
    "gptj": ("GPTJConfig", {"n_embd": 128, "n_layer": 2, "n_head": 4, "rotary_dim": 16}),
}
EXPECTED = {
    "llama": "to be summed",
    "gpt2": "one tensor",
    "qwen2": "to be summed",
    "gemma2": "to be summed",
    "cohere": "finished stream",
    "stablelm": "finished stream",
    "exaone4": "finished stream",
    "gptj": "one tensor",
}

Solved = list[tuple[Anatomy, Probe, tuple[LayerContract | None, ...]]]


@pytest.fixture(scope="module")
def scanned() -> dict[tuple[str, str], DecoderLayer]:
    return {(layer.module, layer.name): layer for layer in scan_installed().layers}


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> Solved:
    """What workers in this process find of their model."""
    from tapcheck.vllm import hooks

    found: Solved = []

    def watched(anatomy: Anatomy, probe: Probe) -> ModelContract:
        contract = solve(anatomy, probe)
        found.append((anatomy, probe, contract.layers))
        return contract

    monkeypatch.setattr(hooks, "solve", watched)
    return found


def build(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    config_class, settings = OTHERS[name]
    config = getattr(transformers, config_class)(**SMALL | settings)
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", EXPECTED)
def test_the_source_says_what_the_probe_shows(
    name: str,
    model_zoo: Callable[[str], Path],
    engine_pool: EnginePool,
    solved: Solved,
    scanned: dict[tuple[str, str], DecoderLayer],
    tmp_path: Path,
) -> None:
    engine_pool.close()  # or an engine would be at hand whose model was probed before
    model = model_zoo(name) if name in TINY_MODELS else build(name, tmp_path)
    assert engine_pool.acquire(model, max_model_len=64).sites
    [(anatomy, probe, contracts)] = solved
    for parts, contract in zip(anatomy.layers, contracts, strict=True):
        assert parts is not None
        assert contract is not None
        module = type(parts.layer).__module__.rpartition(".")[2]
        layer = scanned[module, type(parts.layer).__name__]
        assert layer.outcome == EXPECTED[name]
        assert layer.terms == contract.resid_post.terms
        outputs = next(call.outputs for call in probe.calls if call.module is parts.layer)
        assert len(outputs) == (2 if layer.outcome in ("to be summed", "finished stream") else 1)
