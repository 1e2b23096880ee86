"""The package as it is built and installed, and stand-ins for what the scripts run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from checkout import ROOT, Run


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built by way of an sdist."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a command away from the checkout, with these variables added to the environment."""

    def run(
        *command: str | Path, env: Mapping[str, str] | None = None, cwd: Path = tmp_path
    ) -> subprocess.CompletedProcess[str]:
        outer = {name: v for name, v in os.environ.items() if not name.startswith("PYTEST")}
        return subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            check=False,
            cwd=cwd,
            env=outer | dict(env or {}),
        )

    return run


@pytest.fixture
def write_program() -> Callable[[Path, str], Path]:
    """Write a bash program."""

    def write(path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/usr/bin/env bash\n" + text, encoding="utf-8")
        path.chmod(0o755)
        return path

    return write
