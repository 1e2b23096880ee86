"""What one run of the checks consists of: jobs, and the checks that each owes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Topology = Literal["in_process", "subprocess"]
TOPOLOGIES: tuple[Topology, ...] = ("in_process", "subprocess")

# The tiny models that are judged when none is named, and how strictly in float32: four layers lose
# less than the deep trained model behind the fixed tolerances, and 3.1e-6 was the worst row.
TINY_MODELS_JUDGED = ("llama", "gpt2", "qwen2")
TINY_RTOL = 1e-5

SELFTEST = "selftest"
_ENGINE_CHECKS = ("ledger", "equivalence", "tokens")
_METAMORPHIC_CHECKS = (
    "capture_changes_nothing",
    "alone_equals_batched",
    "reordered",
    "cold_equals_warm_prefix",
    "one_shot_equals_chunked",
)


@dataclass(frozen=True)
class Job:
    """One engine to judge against Transformers: `path` is the model's folder, `model` its name.

    `rtol` is the largest relative error that a row may have, None for the dtype's fixed tolerance.
    A job with `topology` None is the checker's own test: faults injected into a healthy capture.
    A `metamorphic` one judges the engine against itself, run in other ways.
    """

    model: str
    path: str
    dtype: str
    device: str
    topology: Topology | None
    rtol: float | None = None
    metamorphic: bool = False


def check_names(job: Job) -> tuple[str, ...]:
    """The checks that a job owes; each must be in the row, or the run can't pass."""
    if job.topology is None:
        return (SELFTEST,)
    if job.metamorphic:
        return tuple(f"{check}[{job.model}]" for check in _METAMORPHIC_CHECKS)
    return tuple(f"{check}[{job.model},{job.topology}]" for check in _ENGINE_CHECKS)


def plan_jobs(
    models: dict[str, str], dtype: str, device: str, rtol: float | None = None
) -> list[Job]:
    """The jobs for these models (name to folder).

    The checker's own test comes first, in float32; the first model's metamorphic checks come last.
    """
    first_name, first_path = next(iter(models.items()))
    selftest = Job(first_name, first_path, "float32", "cpu", None)
    engines = [
        Job(name, path, dtype, device, topology, rtol)
        for name, path in models.items()
        for topology in TOPOLOGIES
    ]
    itself = Job(first_name, first_path, dtype, device, "in_process", rtol, metamorphic=True)
    return [selftest, *engines, itself]
