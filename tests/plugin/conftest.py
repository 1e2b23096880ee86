"""Runs of pytest inside pytest: the plugin is loaded by its entry point, as for any user."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# A run inside this process forgets what it imported, and torch can't be imported twice.
import torch  # noqa: F401

from tapcheck.fixtures.hardware import Gpu


@pytest.fixture(autouse=True)
def _outer_settings_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


@pytest.fixture
def with_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Say which GPUs runs in this process see."""

    def say(*gpus: Gpu) -> None:
        for module in ("plugin", "captures"):
            monkeypatch.setattr(f"tapcheck.fixtures.{module}.visible_gpus", lambda: gpus)

    return say


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[[str], str]:
    """Run a script in a clean interpreter and return what it prints."""

    def run(script: str) -> str:
        environment = {name: v for name, v in os.environ.items() if not name.startswith("PYTEST")}
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
