"""Command line and ini file say the same things, and nonsense is refused."""

from __future__ import annotations

import pytest

SHOW = """
import pytest
from tapcheck.fixtures.settings import SETTINGS

def test_show(pytestconfig):
    print(pytestconfig.stash[SETTINGS])
"""


def shown(pytester: pytest.Pytester, *arguments: str) -> str:
    pytester.makepyfile(SHOW)
    result = pytester.runpytest("-s", *arguments)
    result.assert_outcomes(passed=1)
    return next(line for line in result.outlines if "Settings(" in line)


@pytest.mark.parametrize(
    ("arguments", "ini", "expected"),
    [
        (["--require-gpu"], "tapcheck_require_gpu = true", "require_gpu=True"),
        (["--tapcheck-device", "cpu"], "tapcheck_device = cpu", "device='cpu'"),
        (["--tapcheck-timeout", "12.5"], "tapcheck_timeout = 12.5", "timeout=12.5"),
        (["--tapcheck-timeout", "0"], "tapcheck_timeout = 0", "timeout=0.0"),
        (["--tapcheck-model", "org/name"], "tapcheck_model = org/name", "model='org/name'"),
    ],
)
def test_an_option_and_its_ini_option_mean_the_same(
    pytester: pytest.Pytester, arguments: list[str], ini: str, expected: str
) -> None:
    by_option = shown(pytester, *arguments)
    pytester.makeini(f"[pytest]\n{ini}")
    assert shown(pytester) == by_option
    assert expected in by_option


def test_defaults(pytester: pytest.Pytester) -> None:
    line = shown(pytester)
    assert "Settings(require_gpu=False, device='auto', timeout=600.0, model=None)" in line


def test_the_command_line_wins_over_the_ini_file(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\ntapcheck_device = cuda\ntapcheck_timeout = 1")
    line = shown(pytester, "--tapcheck-device", "cpu", "--tapcheck-timeout", "2")
    assert "device='cpu', timeout=2.0" in line


def test_an_ini_model_is_found_from_any_folder_of_the_project(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\ntapcheck_model = models/mine")
    pytester.mkdir("models").joinpath("mine").mkdir()
    assert f"model='{pytester.path / 'models' / 'mine'}'" in shown(pytester)


@pytest.mark.parametrize(
    ("option", "ini_name", "value", "message"),
    [
        ("--tapcheck-device", "tapcheck_device", "tpu", "unknown device 'tpu'; say auto, cpu"),
        ("--tapcheck-timeout", "tapcheck_timeout", "-1", "'-1' is not a time limit"),
        ("--tapcheck-timeout", "tapcheck_timeout", "nan", "'nan' is not a time limit"),
        ("--tapcheck-timeout", "tapcheck_timeout", "inf", "'inf' is not a time limit"),
        ("--tapcheck-timeout", "tapcheck_timeout", "soon", "'soon' is not a time limit"),
        (None, "tapcheck_require_gpu", "maybe", "maybe"),
    ],
)
def test_nonsense_is_a_usage_error_that_names_where_it_was_said(
    pytester: pytest.Pytester, option: str | None, ini_name: str, value: str, message: str
) -> None:
    pytester.makepyfile(SHOW)
    runs = [(["-o", f"{ini_name}={value}"], ini_name)]
    if option is not None:
        runs.append(([f"{option}={value}"], option))
    for arguments, source in runs:
        result = pytester.runpytest(*arguments)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"*{source}: *{message}*"])
        result.stderr.no_fnmatch_line("*Traceback*")


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_the_header_names_versions_and_device_once(
    pytester: pytest.Pytester, workers: list[str]
) -> None:
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest("--tapcheck-device", "cpu", *workers)
    headers = [line for line in result.outlines if line.startswith("tapcheck 0")]
    assert len(headers) == 1
    assert "torch 2" in headers[0]
    assert "vllm" in headers[0]
    assert headers[0].endswith("device cpu")
