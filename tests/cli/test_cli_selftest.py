"""`tapcheck selftest`: the checker's own test, as a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import Done

from tapcheck.checks.faults import FAULTS, Fault


def test_a_sound_checker_passes_and_says_what_it_caught(
    cli: Callable[..., Done], llama: Path
) -> None:
    done = cli("selftest", llama, "--dtype", "float32", "--healthy", "1", "--json", "found.json")
    assert done.code == 0, done
    found = json.loads(Path("found.json").read_text(encoding="utf-8"))
    assert found["verdict"] == "pass"
    assert found["injected"] == found["caught"] == found["named"] == len(found["faults"]) > 20
    assert (found["healthy"], found["false_alarms"]) == (1, 0)
    total = f"{found['caught']} of {found['injected']} injected faults caught"
    assert done.out.splitlines()[-1].startswith(total)
    assert "dead_tap" in done.out


def test_a_fault_that_is_missed_fails_the_command(
    cli: Callable[..., Done], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAULTS, "invisible", Fault("invisible", "Nothing.", lambda given: given))
    done = cli("selftest", llama, "--dtype", "float32", "--healthy", "1")
    assert done.code == 1
    assert "missed: invisible" in done.out


def test_bad_use_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "no such folder" in refused("selftest", "./nowhere")
    assert "no folder" in refused("selftest", "--json", tmp_path / "none" / "found.json")
    assert "--healthy" in refused("selftest", "--healthy", "0")
    assert "float8" in refused("selftest", "--dtype", "float8")
