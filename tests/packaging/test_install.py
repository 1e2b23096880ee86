"""What a user gets from `pip install tapcheck`."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from checkout import ROOT, Run


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the wheel; its dependencies are this one's."""
    venv = tmp_path_factory.mktemp("plain") / "venv"
    python = venv / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "-q",
        "--python",
        str(python),
    ]
    subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    # A line of a .pth file adds the folder only, not the editable tapcheck that it may link to.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_package_under_one_name(wheel: Path) -> None:
    names = names_in(wheel)
    top = {name.partition("/")[0] for name in names}
    assert top == {"tapcheck", f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info"}
    for package in ("", "vllm/", "compatibility/", "checks/", "checks/report/", "fixtures/"):
        assert f"tapcheck/{package}__init__.py" in names


def test_the_wheel_holds_every_source_file_and_no_test(wheel: Path) -> None:
    folders = {
        "harness": "tapcheck",
        "compatibility": "tapcheck/compatibility",
        "checks": "tapcheck/checks",
        "fixtures": "tapcheck/fixtures",
    }
    expected = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in folders.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {name for name in names_in(wheel) if name.endswith(".py")} == expected


def test_the_wheel_holds_the_data_that_the_package_reads(wheel: Path) -> None:
    expected = {"tapcheck/py.typed"} | {
        f"tapcheck/{path.relative_to(ROOT).as_posix()}"
        for folder, patterns in (
            ("compatibility", ("*.json", "*.html", "rows/*.json")),
            ("checks/report", ("*.json", "*.html")),
        )
        for pattern in patterns
        for path in (ROOT / folder).glob(pattern)
    }
    assert "tapcheck/compatibility/row.schema.json" in expected
    assert {"tapcheck/checks/report/report.html", "tapcheck/checks/report/report.schema.json"} < (
        expected
    )
    code = {name for name in names_in(wheel) if name.endswith(".py") or ".dist-info/" in name}
    assert names_in(wheel) - code == expected


def test_a_plain_install_is_imported_from_outside_the_checkout(installed: Path, run: Run) -> None:
    script = """
import tapcheck, tapcheck.compatibility.known_issues as known
print([tapcheck.__file__, len(known.known_issues())])
"""
    done = run(installed, "-c", script)
    assert done.returncode == 0, done.stderr
    file, issues = ast.literal_eval(done.stdout)
    assert Path(file).is_relative_to(installed.parents[1])
    assert issues > 0


def test_a_plain_install_brings_the_triton_backend_only_to_who_asks(
    installed: Path, run: Run
) -> None:
    script = """
import os, subprocess, sys
from tapcheck.fixtures.runners import runner_variables
show = [sys.executable, "-c", "from triton.backends import backends; print('cpu' in backends)"]
print([subprocess.check_output(show, text=True, env=os.environ | variables).strip()
       for variables in ({}, runner_variables("v1", "cpu"), runner_variables("v2", "cpu"))])
"""
    done = run(installed, "-c", script)
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout) == ["False", "False", "True"]


def test_a_plain_install_has_the_command(installed: Path, run: Run) -> None:
    done = run(installed.with_name("tapcheck"), "--help")
    assert done.returncode == 0, done.stderr
    assert "check" in done.stdout


def test_a_plain_install_gives_pytest_the_plugin_without_loading_torch(
    installed: Path, run: Run
) -> None:
    script = """
import sys
import pytest
code = pytest.main(["--markers", "-p", "no:cacheprovider"])
heavy = [name for name in ("torch", "transformers", "vllm", "numpy") if name in sys.modules]
print([int(code), sys.modules["tapcheck.fixtures.plugin"].__file__, heavy])
"""
    done = run(installed, "-c", script)
    assert done.returncode == 0, done.stderr
    code, plugin, heavy = ast.literal_eval(done.stdout.splitlines()[-1])
    assert "@pytest.mark.gpu(" in done.stdout
    assert (code, heavy) == (0, [])
    assert Path(plugin).is_relative_to(installed.parents[1])
