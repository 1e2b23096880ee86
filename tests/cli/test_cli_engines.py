"""The commands with a real vLLM engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from commandline import Done

pytestmark = pytest.mark.engine


SITES = ("--site", "embed", "--site", "resid_post.3", "--site", "logits")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files: the path of vLLM's sockets there has 107 characters at most."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize("mode", ["hook", "graph"])
def test_the_same_capture_of_both_engines_passes_and_of_other_tokens_fails(
    cli: Callable[..., Done], command: Callable[..., Done], llama: Path, mode: str
) -> None:
    wanted = [*SITES, "--max-new-tokens", "5", "--prompt-ids", "5,9,200"]
    done = command(
        *("capture", llama, "--backend", "vllm", "--mode", mode, *wanted),
        *("--prompt-ids", "7,8", "-o", "vllm"),
    )
    assert (done.code, done.err) == (0, "")
    assert done.out == "vllm: 39 rows at embed, resid_post.3, logits\n"
    for name, last in (("hf", "7,8"), ("other", "7,9")):
        done = cli(
            *("capture", llama, "--backend", "hf", *wanted, "--prompt-ids", last, "-o", name)
        )
        assert done.code == 0, done.err
    done = cli("diff", "vllm", "hf", "--rtol", "1e-5", "--json", "result.json")
    assert done.code == 0, done.out
    result = json.loads(Path("result.json").read_text(encoding="utf-8"))
    assert result["rows_compared"] == result["rows_due"] == 39
    assert 0 < result["worst_relative_error"] < 1e-5
    done = cli("diff", "vllm", "other")
    assert done.code == 1
    first = done.out.splitlines()[0]
    assert first.startswith("captures differ in their tokens: request '1', position 1: token id 8")
    assert "make the token ids equal first" in done.out


def test_check_judges_a_model_in_both_topologies(
    command: Callable[..., Done], llama: Path, tmp_path: Path, temporary: Path
) -> None:
    done = command(
        "check", llama, "--json", "result.json", "--record", "rows", TMPDIR=str(temporary)
    )
    assert (done.code, done.err) == (0, ""), done
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["verdict"] == "pass"
    assert result["rows_compared"] == result["rows_due"] > 1000
    assert 0 < result["worst_relative_error"] < 1e-5
    kinds = [check["name"].partition("[")[0] for check in result["checks"]]
    oracle = ["padding_changes_nothing", "last_layer_is_before_the_final_norm",
              "layers_are_unique", "attention_is_the_model_s_own",
              "dtype_is_as_requested"]  # fmt: skip
    engine = ["ledger", "equivalence", "tokens", "top_k_logprobs", "kl_divergence", "identities"]
    itself = ["capture_changes_nothing", "alone_equals_batched", "reordered",
              "cold_equals_warm_prefix", "one_shot_equals_chunked"]  # fmt: skip
    assert kinds == ["selftest", *oracle, *(engine * 2), *itself]
    assert {check["status"] for check in result["checks"]} == {"pass"}
    (row,) = (tmp_path / "rows").iterdir()
    recorded = row.read_text(encoding="utf-8")
    assert str(tmp_path) not in recorded
    assert str(temporary) not in recorded


# Runs when an interpreter starts, and breaks the engine's taps in the process of the checks only:
# the one whose core is in a subprocess, and Transformers, stay sound.
BROKEN = """
import sys

if "tapcheck.checks.child" in sys.orig_argv:
    from tapcheck.checks.faults.live import broken_taps
    from tapcheck.vllm.backend import VLLMBackend

    capture = VLLMBackend.capture

    def broken(*arguments, **options):
        with broken_taps("residual_left_out"):
            return capture(*arguments, **options)

    VLLMBackend.capture = broken
"""


def test_a_check_of_a_broken_engine_leaves_a_bundle_that_replays_what_differs(
    cli: Callable[..., Done],
    command: Callable[..., Done],
    llama: Path,
    tmp_path: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(BROKEN, encoding="utf-8")
    done = command(
        *("check", llama, "--bundle", "bundles", "--json", "result.json"),
        TMPDIR=str(temporary),
        PYTHONPATH=str(tmp_path / "broken"),
    )
    assert done.code == 1, done
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    checks = {check["name"]: check["status"] for check in result["checks"]}
    assert checks["selftest"] == "pass"
    assert checks[f"equivalence[{llama.name},in_process]"] == "fail"
    assert checks[f"equivalence[{llama.name},subprocess]"] == "pass"
    (bundle,) = (tmp_path / "bundles").iterdir()
    assert bundle.name == f"{llama.name}-in_process"
    readme = (bundle / "README.md").read_text(encoding="utf-8")
    replay = next(line for line in readme.splitlines() if line.startswith("tapcheck diff "))
    monkeypatch.chdir(bundle)
    again = cli(*replay.split()[1:])
    assert again.code == 1
    assert again.out.splitlines()[0] in readme
    assert "the residual is missing" in again.out


def test_a_check_that_is_interrupted_leaves_no_process(llama: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tapcheck", "check", str(llama), "--log", "log"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
        start_new_session=True,
    ) as checking:
        assert checking.stdout is not None
        while "the checker's own test" not in checking.stdout.readline():
            assert checking.poll() is None
        family = psutil.Process(checking.pid).children(recursive=True)
        os.killpg(checking.pid, signal.SIGINT)  # as a terminal does
        _, err = checking.communicate()
    assert family
    assert checking.returncode == 130
    assert "tapcheck: interrupted" in err
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
