from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from tapcheck.checks import sources
from tapcheck.checks.equivalence import compare_captures
from tapcheck.checks.ledger import compare_ledger
from tapcheck.checks.sources import source_hash


def module_with_check(monkeypatch: pytest.MonkeyPatch, path: Path, text: str) -> types.ModuleType:
    """A check written elsewhere: `check` in a module of its own."""
    path.write_text(text, encoding="utf-8", newline="")
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    exec(compile(text, str(path), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, path.stem, module)
    return module


def test_all_checks_of_tapcheck_share_one_hash() -> None:
    first = source_hash(compare_captures)
    assert re.fullmatch(r"[0-9a-f]{64}", first)
    assert first == source_hash(compare_captures) == source_hash(compare_ledger)


def test_a_change_to_any_judging_module_changes_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    before = source_hash(compare_captures)
    modules = sources._modules()
    assert {"tapcheck.capture", "tapcheck.checks.numerics", "tapcheck.vllm"} <= set(modules)
    assert not {"tapcheck.cli", "tapcheck.__main__"} & set(modules)
    changed = {**modules, "tapcheck.checks.numerics": b"other"}
    monkeypatch.setattr(sources, "_modules", lambda: changed)
    sources._package_sources.cache_clear()
    try:
        assert source_hash(compare_captures) != before
    finally:
        sources._package_sources.cache_clear()


def test_a_check_written_elsewhere_is_hashed_with_its_own_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def check():\n    return {}\n"
    hashes = [
        source_hash(module_with_check(monkeypatch, tmp_path / f"elsewhere{at}.py", body).check)
        for at, body in enumerate([text.format(1), text.format(2), text.format(1)])
    ]
    assert hashes[0] == hashes[2]
    assert len({*hashes, source_hash(compare_captures)}) == 3


def test_line_ends_do_not_change_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unix, windows = "def check():\n    return 1\n", "def check():\r\n    return 1\r\n"
    one = module_with_check(monkeypatch, tmp_path / "unix_lines.py", unix)
    other = module_with_check(monkeypatch, tmp_path / "windows_lines.py", windows)
    assert source_hash(one.check) == source_hash(other.check)
