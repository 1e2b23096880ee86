"""The identity of the code that judges: a recorded result is stale once that code has changed."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from importlib import resources
from typing import Any

# Everything that captures or judges, and the models that are judged; the command line and reports
# do neither.
PACKAGES = (
    "tapcheck",
    "tapcheck.vllm",
    "tapcheck.checks",
    "tapcheck.checks.diagnosis",
    "tapcheck.checks.faults",
)
MODELS = ("tapcheck.fixtures", "zoo.py")
NOT_JUDGING = (
    "__main__.py",
    "cli.py",
    "cli_bisect.py",
    "cli_captures.py",
    "results.py",
    "terminal.py",
)


def source_hash(function: Callable[..., Any]) -> str:
    """SHA-256, in hex, of all sources of tapcheck that capture or judge.

    One hash serves all of tapcheck's checks: they share most of that code. For a check written
    elsewhere its own module is hashed as well. Line ends don't matter. Raises OSError when that
    module has no source file.
    """
    name = function.__module__
    digest = hashlib.sha256(_package_sources())
    if name not in _modules():
        module = inspect.getmodule(function)
        digest.update(_normalised(inspect.getsource(module or function)))
    return digest.hexdigest()


@functools.cache
def _modules() -> dict[str, bytes]:
    sources = {}
    for package in PACKAGES:
        for path in resources.files(package).iterdir():
            if path.name.endswith(".py") and path.name not in NOT_JUDGING:
                name = f"{package}.{path.name.removesuffix('.py')}".removesuffix(".__init__")
                sources[name] = _normalised(path.read_text(encoding="utf-8"))
    package, file = MODELS
    text = (resources.files(package) / file).read_text(encoding="utf-8")
    sources[f"{package}.{file.removesuffix('.py')}"] = _normalised(text)
    return sources


@functools.cache
def _package_sources() -> bytes:
    modules = _modules()
    return b"".join(b"\0" + name.encode() + b"\0" + modules[name] for name in sorted(modules))


def _normalised(text: str) -> bytes:
    return text.replace("\r\n", "\n").replace("\r", "\n").encode()
