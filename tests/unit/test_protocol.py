"""Replies of the worker: values and errors come back as what they were."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapcheck import errors
from tapcheck.compatibility.errors import KnownIssueError
from tapcheck.errors import CaptureError, EngineError, TapcheckError, first_line
from tapcheck.vllm.protocol import (
    WORKER_EXTENSION,
    decode,
    encode_error,
    encode_result,
    in_step,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
OURS = [getattr(errors, name) for name in errors.__all__]


@given(JSON)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert decode(encode_result(value)) == value


@pytest.mark.parametrize("kind", OURS)
@given(message=st.text(min_size=1))
def test_an_error_of_ours_comes_back_by_its_class(kind: type[TapcheckError], message: str) -> None:
    with pytest.raises(TapcheckError) as raised:
        decode(encode_error(kind(message)))
    assert type(raised.value) is kind
    assert str(raised.value) == message


def test_an_error_that_isn_t_ours_keeps_its_class_in_the_message() -> None:
    with pytest.raises(CaptureError, match="inside the vLLM worker: ZeroDivisionError: by zero"):
        decode(encode_error(ZeroDivisionError("by zero")))


def test_an_error_of_another_part_of_tapcheck_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match="no such luck"):
        decode(encode_error(KnownIssueError("no such luck")))


@pytest.mark.parametrize("name", ["TapcheckWorkerExtension", "annotations", "__doc__", "", "str"])
def test_a_class_that_is_no_error_of_ours_is_an_engine_error(name: str) -> None:
    with pytest.raises(EngineError, match="what happened"):
        decode(json.dumps({"error": name, "message": "what happened"}))


def test_the_worker_extension_is_where_its_name_says() -> None:
    module, _, name = WORKER_EXTENSION.rpartition(".")
    extension = getattr(importlib.import_module(module), name)
    methods = [method for method in vars(extension) if not method.startswith("__")]
    assert methods
    assert all(method.startswith("tapcheck_") for method in methods)


def test_replies_to_the_call_come_without_its_number() -> None:
    assert in_step("drain", 7, [(7, "a"), [7, b"b"]]) == ["a", b"b"]


@pytest.mark.parametrize(
    ("late", "named"),
    [((6, "old"), "call 6"), (None, "a call that isn't tapcheck's"), ([7], "a call that isn't")],
)
def test_a_reply_to_another_call_is_an_error_that_names_the_worker(late: Any, named: str) -> None:
    with pytest.raises(EngineError, match=f"worker 1 answered {named}.*'drain' was call 7"):
        in_step("drain", 7, [(7, "new"), late])


def test_of_a_configuration_that_is_refused_the_reason_is_said() -> None:
    from pydantic import TypeAdapter, ValidationError

    with pytest.raises(ValidationError) as caught:
        TypeAdapter(int).validate_python("many")
    assert str(caught.value).startswith("1 validation error for int")
    assert first_line(caught.value).startswith("Input should be a valid integer")
