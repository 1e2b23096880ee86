"""The plugin costs nothing until it is used."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest

HEAVY = ("torch", "transformers", "vllm", "numpy")


def test_the_plugin_brings_in_only_the_standard_library_and_pytest(
    run_python: Callable[[str], str],
) -> None:
    script = """
import sys
import pytest
before = set(sys.modules)
import tapcheck.fixtures.plugin
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before}
             - set(sys.stdlib_module_names)))
"""
    assert ast.literal_eval(run_python(script)) == ["tapcheck"]


@pytest.mark.parametrize("arguments", [["-VV"], ["--help"], ["-q"], ["--markers"]])
def test_a_session_that_uses_nothing_of_tapcheck_stays_light(
    run_python: Callable[[str], str], arguments: list[str]
) -> None:
    script = f"""
import pathlib, sys
import pytest
pathlib.Path("test_it.py").write_text("def test_it(): assert True")
code = pytest.main({arguments!r} + ["-p", "no:cacheprovider"])
print()
print([int(code), "tapcheck.fixtures.plugin" in sys.modules]
      + [name for name in {HEAVY!r} if name in sys.modules])
"""
    assert ast.literal_eval(run_python(script).splitlines()[-1]) == [0, True]
