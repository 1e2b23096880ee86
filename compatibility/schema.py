"""Validation of JSON documents against the schemas that ship beside this file."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

_FOLDER = Path(__file__).parent
_LONGEST = 300


def violation(document: Any, schema: str) -> str | None:
    """Where and why `document` breaks the schema of this file name; None when it doesn't."""
    error = best_match(_validator(schema).iter_errors(document))
    if error is None:
        return None
    reason = error.message
    if len(reason) > _LONGEST:  # the message quotes the value, which may be the whole document
        reason = f"{reason[:_LONGEST]}..."
    return f"{error.json_path}: {reason}"


@cache
def _validator(schema: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads((_FOLDER / schema).read_text(encoding="utf-8")))
