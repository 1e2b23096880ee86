"""Every Python example in the README and the docs runs, as it is written."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tapcheck.fixtures.pool import EnginePool

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    )
]
SCRIPTS = [p for p in EXAMPLES if "def test_" not in p.values[0]]
TESTS = [p for p in EXAMPLES if "def test_" in p.values[0]]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory, model_zoo: Callable[[str], Path]) -> Path:
    """A capture of every site of tiny llama, as a file."""
    from tapcheck import HFBackend, Request, save_capture

    path = tmp_path_factory.mktemp("healthy") / "captured.safetensors"
    requests = [Request("a", (5, 9, 200, 4)), Request("b", (7, 8, 9))]
    with HFBackend(model_zoo("llama")) as hf:
        save_capture(hf.capture(requests, hf.sites), path)
    return path


@pytest.fixture
def folder(tmp_path: Path, healthy: Path, model_zoo: Callable[[str], Path]) -> Path:
    """A folder in which `path/to/model` is a model and `captured.safetensors` a capture."""
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "model").symlink_to(model_zoo("llama"))
    shutil.copy(healthy, tmp_path)
    return tmp_path


def test_there_are_examples_of_both_kinds() -> None:
    assert len(SCRIPTS) >= 4
    assert TESTS


@pytest.mark.engine
@pytest.mark.parametrize("example", SCRIPTS)
def test_the_example_runs(
    example: str, folder: Path, monkeypatch: pytest.MonkeyPatch, engine_pool: EnginePool
) -> None:
    engine_pool.close()  # the example starts engines of its own
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    exec(compile(example, "<example>", "exec"), names)
    for name, value in list(names.items()):
        if asyncio.iscoroutinefunction(value):
            assert asyncio.run(value()) is not None, f"{name}() returned nothing"


@pytest.mark.engine
@pytest.mark.parametrize("example", TESTS)
def test_the_example_test_passes_in_a_project_of_its_own(
    example: str, folder: Path, engine_pool: EnginePool
) -> None:
    engine_pool.close()
    (folder / "test_example.py").write_text(example, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_example.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b1 passed", done.stdout), done.stdout


def test_what_needs_a_gpu_is_listed_as_not_run_on_one() -> None:
    page = (ROOT / "docs" / "matrix.md").read_text(encoding="utf-8")
    section = page.partition("## Not yet run on a GPU")[2].partition("\n## ")[0]
    tests = sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    assert tests
    assert [name for name in tests if f"tests/gpu/{name}" not in section] == []


def test_the_readme_shows_what_the_matrix_says() -> None:
    """The table by version, without its links."""

    def cells(text: str) -> list[list[str]]:
        lines = [line for line in text.splitlines() if line.startswith("|")]
        unlinked = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in lines]
        return [[cell.strip(" -") for cell in line.strip("|").split("|")] for line in unlinked]

    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.partition("## What was tested")[2].partition("\n## ")[0]
    by_version = page.partition("## By vLLM version")[2].partition("\n## ")[0]
    assert len(cells(by_version)) > 2
    assert cells(shown) == cells(by_version)
