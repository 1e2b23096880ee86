"""What one run of the checks consists of: jobs, and the checks that each owes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Topology = Literal["in_process", "subprocess"]
Mode = Literal["hook", "graph"]
TOPOLOGIES: tuple[Topology, ...] = ("in_process", "subprocess")

# The tiny models that are judged when none is named, and how strictly in float32: four layers lose
# less than the deep trained model behind the fixed tolerances, and 3.1e-6 was the worst row.
TINY_MODELS_JUDGED = ("llama", "gpt2", "qwen2")
TINY_RTOL = 1e-5

SELFTEST = "selftest"
_ENGINE_CHECKS = (
    "ledger",
    "equivalence",
    "tokens",
    "top_k_logprobs",
    "kl_divergence",
    "identities",
)
_ORACLE_CHECKS = (
    "padding_changes_nothing",
    "last_layer_is_before_the_final_norm",
    "layers_are_unique",
    "attention_is_the_model_s_own",
    "dtype_is_as_requested",
)
_METAMORPHIC_CHECKS = (
    "capture_changes_nothing",
    "alone_equals_batched",
    "reordered",
    "cold_equals_warm_prefix",
    "one_shot_equals_chunked",
)
HOOK_EQUALS_GRAPH = "hook_equals_graph"


@dataclass(frozen=True)
class Job:
    """One engine to judge against Transformers: `path` is the model's folder, `model` its name.

    `rtol` is the largest relative error that a row may have; None for the fixed tolerance of
    float32, and for the noise floor of a narrow dtype.
    A job with `topology` None is the checker's own test: faults injected into a healthy capture,
    and whether Transformers' captures, which all others are held against, are right.
    A `metamorphic` one judges the engine against itself, run in other ways. `bundle` is the folder
    to which a comparison with Transformers that fails is written, None for none. In `mode` graph
    every site is a static tap of a compiled engine. `engine` are arguments for vLLM.
    """

    model: str
    path: str
    dtype: str
    device: str
    topology: Topology | None
    rtol: float | None = None
    metamorphic: bool = False
    bundle: str | None = None
    mode: Mode = "hook"
    engine: Mapping[str, Any] = field(default_factory=dict)


def check_names(job: Job) -> tuple[str, ...]:
    """The checks that a job owes; each must be in the row, or the run can't pass."""
    if job.topology is None:
        return (SELFTEST, *(f"{check}[{job.model}]" for check in _ORACLE_CHECKS))
    if job.metamorphic:
        compiled = (HOOK_EQUALS_GRAPH,) if job.mode == "graph" else ()
        return tuple(f"{check}[{job.model}]" for check in (*_METAMORPHIC_CHECKS, *compiled))
    return tuple(f"{check}[{job.model},{job.topology}]" for check in _ENGINE_CHECKS)


def plan_jobs(
    models: dict[str, str],
    dtype: str,
    device: str,
    rtol: float | None = None,
    bundles: Path | None = None,
    mode: Mode = "hook",
) -> list[Job]:
    """The jobs for these models (name to folder).

    The checker's own test comes first, in float32; the first model's metamorphic checks come last.
    Bundles go to folders in `bundles`, one for each model and topology.
    """
    first_name, first_path = next(iter(models.items()))
    selftest = Job(first_name, first_path, "float32", "cpu", None)
    engines = [
        Job(
            name, path, dtype, device, topology, rtol, False, _bundle(bundles, name, topology), mode
        )
        for name, path in models.items()
        for topology in TOPOLOGIES
    ]
    itself = Job(first_name, first_path, dtype, device, "in_process", rtol, True, mode=mode)
    return [selftest, *engines, itself]


def _bundle(bundles: Path | None, model: str, topology: Topology) -> str | None:
    """The folder of one comparison's bundle: a hub id has a slash, the name of a folder hasn't."""
    return None if bundles is None else str(bundles / f"{model.replace('/', '--')}-{topology}")
