"""The arrows between tapcheck's parts hold, and the check of them fails when one is broken."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
from checkout import ROOT, Run


@pytest.fixture
def site(wheel: Path, tmp_path: Path) -> Path:
    """A folder with the built package in it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    return tmp_path / "site"


def lint(run: Run, site: Path) -> tuple[int, str]:
    program = Path(sys.executable).with_name("lint-imports")
    done = run(program, "--no-cache", cwd=ROOT, env={"PYTHONPATH": str(site)})
    return done.returncode, done.stdout + done.stderr


def test_the_arrows_hold(run: Run, site: Path) -> None:
    code, output = lint(run, site)
    assert code == 0, output


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("compatibility/environment.py", "errors"),
        ("compatibility/environment.py", "vllm.engine"),
        ("compatibility/environment.py", "checks"),
        ("capture.py", "checks.ledger"),
        ("capture.py", "fixtures.zoo"),
        ("vllm/worker.py", "checks.equivalence"),
        ("checks/ledger.py", "fixtures.pool"),
        ("checks/ledger.py", "cli"),
        ("fixtures/pool.py", "cli"),
        ("fixtures/pool.py", "__main__"),
        ("cli.py", "__main__"),
    ],
)
def test_an_import_against_the_arrows_is_named(
    run: Run, site: Path, module: str, imported: str
) -> None:
    with (site / "tapcheck" / module).open("a", encoding="utf-8") as source:
        source.write(f"\n\ndef _lazily() -> None:\n    import tapcheck.{imported}\n")
    code, output = lint(run, site)
    importer = module.removesuffix(".py").replace("/", ".")
    assert code == 1
    assert f"tapcheck.{importer} -> tapcheck.{imported}" in output


def test_a_module_that_has_no_place_yet_is_named(run: Run, site: Path) -> None:
    (site / "tapcheck" / "newcomer.py").touch()
    code, output = lint(run, site)
    assert code == 1
    assert "newcomer" in output
