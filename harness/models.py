"""What is known of a model before it is loaded: its config, its layers, its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tapcheck.errors import ModelError, first_line
from tapcheck.request import Request

# What both engines run in; and Transformers too, for a reference that is wider than float32.
DTYPES = ("float32", "bfloat16", "float16")
HF_DTYPES = (*DTYPES, "float64")
_HUB_SECONDS = 5.0


def load_config(model: str | Path) -> Any:
    """The Transformers config of a folder or a hub id; raises ModelError when there is none."""
    from transformers import AutoConfig

    name = str(model)
    path = Path(name)
    if path.is_file():
        raise ModelError(f"model {name!r} is a file: name the folder that holds the model")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"model {name!r}: the folder has no config.json, so it holds no model")
    if not path.exists():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ModelError(f"model {name!r}: no such folder")
        _require_on_hub(name)
    try:
        return AutoConfig.from_pretrained(name)
    except Exception as error:  # whatever Transformers raises over a config that it can't read
        raise ModelError(
            f"model {name!r}: Transformers can't read its config.json: {first_line(error)}"
        ) from None


def _require_on_hub(name: str) -> None:
    """Ask the hub once for a model that isn't cached; Transformers retries for half a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        if try_to_load_from_cache(name, "config.json") is None:
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_HUB_SECONDS)
    except Exception as error:  # of whichever HTTP client the hub's library brings
        raise ModelError(
            f"model {name!r} is no folder here, and the Hugging Face hub did not give it: "
            f"{first_line(error)}"
        ) from None


def require_tappable(model: str | Path) -> None:
    """Raise ModelError or SiteError for what shows to be wrong before any weight is read.

    A config that gives no decoder-only model of a known structure, or what `require_weights`
    refuses.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from tapcheck.anatomy import find_anatomy

    config = load_config(model)
    require_weights(model)
    auto: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            skeleton = auto.from_config(config)
    except Exception as error:  # whatever a config makes a model's constructor raise
        raise ModelError(f"Transformers can't build {str(model)!r}: {first_line(error)}") from None
    find_anatomy(skeleton, layer_count(config), skeleton.get_input_embeddings())


def require_weights(model: str | Path) -> None:
    """Raise ModelError for a folder without weights, or with a truncated file of them."""
    from safetensors import SafetensorError, safe_open

    folder = Path(model)
    if not folder.is_dir():
        return
    weights = [file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin")]
    if not weights:
        raise ModelError(f"model {str(model)!r}: the folder has a config.json, but no weights")
    for file in weights:
        if file.suffix == ".safetensors":
            try:
                with safe_open(file, framework="pt"):
                    pass
            except SafetensorError as error:
                raise ModelError(f"model {str(model)!r}: {file.name} is damaged: {error}") from None


def layer_count(config: Any) -> int:
    """Decoder layers that a Transformers config declares."""
    return _declared(config, "num_hidden_layers")


def _declared(config: Any, name: str) -> int:
    value = getattr(config.get_text_config(), name, None)
    if not isinstance(value, int):
        raise ModelError(
            f"a model of type {config.model_type!r} is no decoder-only language model: its config "
            f"has no {name}"
        )
    return value


def require_dtype(dtype: str, known: Sequence[str] = DTYPES) -> str:
    """`dtype` itself when it is one of the `known`, else ModelError; "auto" is refused."""
    if dtype not in known:
        raise ModelError(
            f"dtype {dtype!r}: say one of {', '.join(known)} ('auto' is refused: the two engines "
            "resolve it differently)"
        )
    return dtype


def encode(model: str | Path, text: str) -> list[int]:
    """Token ids of `text` by the model's own tokenizer; raises ModelError when it has none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(
            f"model {str(model)!r} has no tokenizer that can be loaded, so text can't be encoded: "
            f"give token ids instead ({first_line(error)})"
        ) from None
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def as_requests(model: str | Path, prompts: Iterable[Any]) -> list[Request]:
    """Requests named "0", "1", ... from prompts.

    A prompt is text, or token ids in a list, an array or a tensor of shape [tokens] on any device;
    a Request passes through. Raises ModelError for what is neither.
    """
    if isinstance(prompts, str):
        raise ModelError(f"prompts come in a list: write [{prompts!r}] for this one alone")
    requests = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, Request):
            requests.append(prompt)
            continue
        ids = encode(model, prompt) if isinstance(prompt, str) else _token_ids(prompt)
        requests.append(Request(str(index), tuple(ids)))
    return requests


def _token_ids(prompt: Any) -> list[int]:
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(values, Iterable):
        raise ModelError(
            f"{prompt!r} is no prompt: prompts come in a list, and each is text or a list of token "
            "ids"
        )
    ids = [value.tolist() if hasattr(value, "tolist") else value for value in values]
    if any(isinstance(value, list) for value in ids):
        raise ModelError(
            "a prompt's token ids must have shape [tokens]; for several prompts give several, "
            "not one array of [prompts, tokens]"
        )
    wrong = [value for value in ids if isinstance(value, bool) or not isinstance(value, int)]
    if wrong:
        raise ModelError(f"a prompt's token ids are integers; {wrong[0]!r} is not one")
    return ids


def require_vocabulary(model: str | Path, config: Any, requests: Iterable[Request]) -> None:
    """Raise ModelError, naming request and position, for a token id outside the vocabulary."""
    size = _declared(config, "vocab_size")
    for request in requests:
        tokens = request.token_ids
        if min(tokens) >= 0 and max(tokens) < size:
            continue
        position = next(i for i, token in enumerate(tokens) if not 0 <= token < size)
        raise ModelError(
            f"request {request.id!r}, position {position}: token id {tokens[position]} is outside "
            f"the vocabulary of {str(model)!r}, which has {size} tokens"
        )
