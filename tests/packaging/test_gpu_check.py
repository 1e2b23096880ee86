"""scripts/gpu_check.sh, with a stand-in for python: what it runs where, and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from checkout import ROOT, Run

SCRIPT = ROOT / "scripts" / "gpu_check.sh"
ROWS = ROOT / "compatibility" / "rows"

WriteProgram = Callable[[Path, str], Path]
Interpreter = Callable[..., Path]


@pytest.fixture
def interpreter(tmp_path: Path, write_program: WriteProgram) -> Interpreter:
    """An interpreter that answers the script's questions and tells how it runs tapcheck."""

    def make(unfit: str = "", tapcheck: object = ROOT, code: int = 0) -> Path:
        text = f"""
if [ "$1" = - ]; then
    if grep -q cuda; then printf %s '{unfit}'; else echo '{tapcheck}'; fi
else
    echo "$@"
    exit {code}
fi
"""
        return write_program(tmp_path / "bin" / "python3", text)

    return make


def test_help_is_shown(run: Run) -> None:
    done = run(SCRIPT, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: scripts/gpu_check.sh")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--device"], "--device needs a value"),
        (["--python"], "--python needs a value"),
    ],
)
def test_misuse_shows_the_usage(run: Run, arguments: list[str], complaint: str) -> None:
    done = run(SCRIPT, *arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "usage: scripts/gpu_check.sh" in done.stderr


def test_an_interpreter_that_is_not_there_is_refused(run: Run) -> None:
    done = run(SCRIPT, "--python", "/nowhere/python")
    assert done.returncode == 2
    assert done.stderr == "gpu_check: --python /nowhere/python: there is no such program\n"


@pytest.mark.parametrize("choice", [[], ["--device", "cuda"], ["--device=cuda"]])
def test_an_environment_fit_for_cuda_is_used_as_it_is(
    run: Run, interpreter: Interpreter, choice: list[str]
) -> None:
    done = run(SCRIPT, *choice, "--python", interpreter(), "--dtype", "bfloat16", "some/model")
    assert done.stdout == (
        f"-m tapcheck check --device cuda --record {ROWS} --dtype bfloat16 some/model\n"
    )


def test_the_active_interpreter_is_the_default(run: Run, interpreter: Interpreter) -> None:
    folder = interpreter().parent
    done = run(SCRIPT, env={"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"})
    assert "--device cuda" in done.stdout


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_exit_code_is_that_of_the_check(run: Run, interpreter: Interpreter, code: int) -> None:
    assert run(SCRIPT, "--python", interpreter(code=code)).returncode == code


def test_the_cpu_is_used_when_asked_for(run: Run, interpreter: Interpreter) -> None:
    done = run(SCRIPT, "--device", "cpu", "--python", interpreter())
    assert done.stdout == f"-m tapcheck check --device cpu --record {ROWS}\n"


def test_a_gpu_that_was_asked_for_is_never_replaced_by_the_cpu(
    run: Run, interpreter: Interpreter
) -> None:
    done = run(SCRIPT, "--device", "cuda", "--python", interpreter(unfit="it has no vLLM"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "it has no vLLM; activate the environment of your vLLM" in done.stderr


def test_a_gpu_that_only_the_environment_hides_is_not_passed_over(
    run: Run, interpreter: Interpreter, write_program: WriteProgram
) -> None:
    python = interpreter(unfit="its torch sees no CUDA GPU")
    write_program(python.with_name("nvidia-smi"), "echo 'GPU 0'\n")
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    done = run(SCRIPT, "--python", python, env={"PATH": path})
    assert (done.returncode, done.stdout) == (2, "")
    assert "this machine has a GPU" in done.stderr


@pytest.mark.parametrize("found", ["nothing", "/another/checkout"])
def test_another_tapcheck_than_this_checkout_is_refused_with_the_way_out(
    run: Run, interpreter: Interpreter, found: str
) -> None:
    python = interpreter(tapcheck=found)
    done = run(SCRIPT, "--python", python)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"finds tapcheck in {found}" in done.stderr
    assert f"'{python} -m pip install -e {ROOT}'" in done.stderr
