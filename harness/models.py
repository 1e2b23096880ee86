"""What is known of a model before it is loaded: its config, its layers, its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tapcheck.errors import ModelError
from tapcheck.request import Request

DTYPES = ("float32", "bfloat16", "float16")


def load_config(model: str | Path) -> Any:
    """The Transformers config of a folder or a hub id; raises ModelError when there is none."""
    from transformers import AutoConfig

    name = str(model)
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"model {name!r}: the folder has no config.json, so it holds no model")
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ModelError(f"model {name!r}: no such folder")
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model {name!r} is neither a folder here nor a model id that Transformers can load: "
            f"{first_line(error)}"
        ) from None


def first_line(error: Exception) -> str:
    """An error's message, cut to one line; its class where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def layer_count(config: Any) -> int:
    """Decoder layers that a Transformers config declares."""
    return int(config.get_text_config().num_hidden_layers)


def require_dtype(dtype: str) -> str:
    """`dtype` itself when it is one that captures come in, else ModelError; "auto" is refused."""
    if dtype not in DTYPES:
        raise ModelError(
            f"dtype {dtype!r}: say one of {', '.join(DTYPES)} ('auto' is refused: the two engines "
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
    size = int(config.get_text_config().vocab_size)
    for request in requests:
        for position, token in enumerate(request.token_ids):
            if not 0 <= token < size:
                raise ModelError(
                    f"request {request.id!r}, position {position}: token id {token} is outside "
                    f"the vocabulary of {str(model)!r}, which has {size} tokens"
                )
