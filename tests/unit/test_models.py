"""What a model's folder tells, and prompts in every form that a user has them in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tapcheck.errors import ModelError
from tapcheck.models import as_requests, layer_count, load_config
from tapcheck.request import Request

Zoo = Callable[[str], Path]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_layers_are_counted_whatever_the_config_calls_them(model_zoo: Zoo, name: str) -> None:
    assert layer_count(load_config(model_zoo(name))) == 4


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "~/nowhere", "a/b/c"])
def test_a_path_that_isn_t_there_is_never_asked_of_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        load_config(name)


def test_a_config_that_is_not_json_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"can't read its config\.json"):
        load_config(tmp_path)


def test_prompts_may_be_lists_arrays_and_tensors_of_token_ids() -> None:
    prompts = [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), torch.tensor([1, 2, 3])]
    prompts += [list(np.array([1, 2, 3])), torch.tensor([1, 2, 3], dtype=torch.int32)]
    requests = as_requests("unused", [*prompts, Request("mine", (4,))])
    assert [request.id for request in requests] == ["0", "1", "2", "3", "4", "5", "mine"]
    assert {request.prompt_token_ids for request in requests[:-1]} == {(1, 2, 3)}


@pytest.fixture
def with_tokenizer(model_zoo: Zoo, tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "the": 5, "capital": 9, "of": 200}
    tokenizer: Any = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "with-tokenizer"
    shutil.copytree(model_zoo("llama"), folder)
    fast: Any = transformers.PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def test_text_is_encoded_by_the_model_s_own_tokenizer(with_tokenizer: Path) -> None:
    (request,) = as_requests(with_tokenizer, ["the capital of"])
    assert request.prompt_token_ids == (5, 9, 200)


def test_text_for_a_model_without_tokenizer_is_an_error_that_says_what_to_give(
    model_zoo: Zoo,
) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer .* give token ids instead"):
        as_requests(model_zoo("llama"), ["hello"])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("hello", r"prompts come in a list: write \['hello'\]"),
        ([1, 2, 3], "1 is no prompt"),
        (torch.tensor([1, 2]), "is no prompt"),
        ([np.array([[1, 2], [3, 4]])], "must have shape"),
        ([[[1, 2], [3, 4]]], "must have shape"),
        ([[1, 2.5]], "integers; 2.5 is not one"),
        ([torch.tensor([1.0])], "integers; 1.0 is not one"),
        ([[True]], "integers; True is not one"),
        ([["1"]], "integers; '1' is not one"),
    ],
)
def test_what_is_no_prompt_is_an_error(prompts: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        as_requests("unused", prompts)
