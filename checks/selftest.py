"""The checker's own test: every fault is injected into real captures, and must be caught and named.

A healthy pair is two runs of Transformers that differ as engines do: the candidate generates its
requests one at a time, with a KV cache and eager attention; the expected capture is one teacher
forced pass over all of them, padded, with fused attention. The judge is the noise floor, from a
reference in a wider dtype. No fault is caught by comparing a capture with itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tapcheck.capture import Capture
from tapcheck.checks.comparison import Comparison
from tapcheck.checks.equivalence import compare_captures
from tapcheck.checks.faults import FAULTS
from tapcheck.checks.faults.models import MODEL_FAULTS, sliding_window
from tapcheck.checks.noise_floor import PERTURBATIONS, REFERENCE_DTYPES
from tapcheck.errors import CaptureError
from tapcheck.hf import HFBackend
from tapcheck.request import Request

PROMPT_LENGTHS = (3, 9, 16, 23, 41)
NEW_TOKENS = 6
# Tokens beyond a sliding window, for requests to have rows on both sides of its edge.
_BEYOND = (24, 9)


@dataclass(frozen=True)
class Injection:
    """One fault in one healthy capture: whether it was caught, and what it was named as.

    `into` is "capture" or "model"; `excess` is the largest number over its limit, as of
    `Comparison.excess`, None where the numbers are in order (rows are missing, or tokens differ) or
    aren't numbers; `named_as` is the fault of the likeliest diagnosis, None where there is none.
    """

    model: str
    dtype: str
    fault: str
    into: str
    caught: bool
    excess: float | None
    named_as: str | None
    claim: str | None

    @property
    def named(self) -> bool:
        """Whether the likeliest diagnosis is the fault that was injected."""
        return self.named_as == self.fault


@dataclass(frozen=True)
class SelfTest:
    """What injecting every fault found, and what healthy pairs did.

    `healthy` has the largest number over its limit of each healthy pair. `false_alarms` say which
    of them were condemned, and why; `not_applicable` which faults the model has no place for.
    """

    injections: tuple[Injection, ...] = ()
    healthy: tuple[float, ...] = ()
    false_alarms: tuple[str, ...] = ()
    not_applicable: tuple[str, ...] = ()

    @property
    def missed(self) -> tuple[Injection, ...]:
        """The faults that were not caught."""
        return tuple(injection for injection in self.injections if not injection.caught)

    @property
    def caught(self) -> int:
        """Faults that were caught."""
        return len(self.injections) - len(self.missed)

    @property
    def named(self) -> int:
        """Faults that were caught and named."""
        return sum(injection.caught and injection.named for injection in self.injections)

    @property
    def weakest(self) -> float:
        """The smallest excess with which a fault's numbers gave it away; NaN without any."""
        told = [one.excess for one in self.injections if one.excess is not None]
        return min(told, default=math.nan)

    @property
    def passed(self) -> bool:
        """Whether every fault was caught, and every healthy pair passed; never without both."""
        tried = bool(self.injections) and bool(self.healthy)
        return tried and not self.missed and not self.false_alarms

    def __add__(self, other: SelfTest) -> SelfTest:
        return SelfTest(
            self.injections + other.injections,
            self.healthy + other.healthy,
            self.false_alarms + other.false_alarms,
            self.not_applicable + other.not_applicable,
        )

    def report(self) -> str:
        """A table of the faults, the totals, and whatever is wrong, in lines of text."""
        from tabulate import tabulate

        by_fault: dict[str, list[Injection]] = {}
        for injection in self.injections:
            by_fault.setdefault(injection.fault, []).append(injection)
        table = [
            {
                "fault": fault,
                "caught": f"{sum(one.caught for one in tries)} of {len(tries)}",
                "named as": _named_as(tries),
            }
            for fault, tries in by_fault.items()
        ]
        lines = [tabulate(table, headers="keys", disable_numparse=True), ""]
        lines += [f"missed: {one.fault} in {one.model}, {one.dtype}" for one in self.missed]
        lines += [f"false alarm: {alarm}" for alarm in self.false_alarms]
        lines += [f"left out: {reason}" for reason in self.not_applicable]
        lines.append(
            f"of what is allowed, healthy captures took at most {max(self.healthy, default=0):.0%} "
            f"and the weakest fault {self.weakest:.0%}"
        )
        lines.append(
            f"{self.caught} of {len(self.injections)} injected faults caught, {self.named} named; "
            f"{len(self.false_alarms)} of {len(self.healthy)} healthy captures condemned"
        )
        return "\n".join(lines)

    def summary(self) -> dict[str, Any]:
        """The result as JSON: totals, and a record of each injection."""
        return {
            "verdict": "pass" if self.passed else "fail",
            "injected": len(self.injections),
            "caught": self.caught,
            "named": self.named,
            "healthy": len(self.healthy),
            "largest_healthy_excess": max(self.healthy, default=math.nan),
            "weakest_fault_excess": self.weakest,
            "false_alarms": len(self.false_alarms),
            "alarms": list(self.false_alarms),
            "not_applicable": list(self.not_applicable),
            "faults": [asdict(injection) for injection in self.injections],
        }


def _named_as(tries: Sequence[Injection]) -> str:
    """`scaled`, or `3 scaled, 1 nothing` where they differ."""
    counts = Counter(one.named_as or "nothing" for one in tries)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{many} {name}" for name, many in counts.most_common())


@dataclass(frozen=True, eq=False)
class HealthyPair:
    """Two healthy captures of the same tokens, a reference in a wider dtype, and repeats."""

    actual: Capture
    expected: Capture
    reference: Capture
    repeats: Sequence[Capture]

    def compare(self, actual: Capture) -> Comparison:
        """Judge a capture in the place of the healthy one."""
        return compare_captures(
            actual, self.expected, reference=self.reference, repeats=self.repeats
        )


def selftest(
    model: str | Path, *, dtype: str = "float32", name: str | None = None, healthy: int = 4
) -> SelfTest:
    """Inject every fault into a healthy capture of the model, and judge `healthy` healthy pairs.

    Raises ModelError for a model that can't be loaded.
    """
    called = name or Path(model).name
    with _Engines(model, dtype) as engines:
        found = SelfTest()
        for seed in range(healthy):
            pair = engines.pair(seed)
            comparison = pair.compare(pair.actual)
            alarms = () if comparison.passed else (_alarm(called, dtype, seed, comparison),)
            found += SelfTest((), (comparison.excess,), alarms)
            if seed == 0:
                found += _inject_all(called, dtype, pair, engines.candidate)
        return found


def run_selftest(models: Mapping[str, str], dtypes: Sequence[str], *, healthy: int = 4) -> SelfTest:
    """`selftest` of each model (name to folder) in each dtype, added up."""
    found = SelfTest()
    for name, path in models.items():
        for dtype in dtypes:
            found += selftest(path, dtype=dtype, name=name, healthy=healthy)
    return found


def _alarm(model: str, dtype: str, seed: int, comparison: Comparison) -> str:
    row = comparison.first_divergence
    said = [str(found) for found in comparison.diagnoses]
    where = "no rows" if row is None else f"request {row.request_id!r}, site {row.site}"
    return f"{model}, {dtype}, prompts {seed}: {where}; {'; '.join(said) or 'no diagnosis'}"


def _inject_all(model: str, dtype: str, pair: HealthyPair, candidate: HFBackend) -> SelfTest:
    found = SelfTest()
    for name, into, inject in _faults(pair, candidate):
        try:
            faulty = inject()
        except CaptureError as error:
            found += SelfTest(not_applicable=(f"{model}, {dtype}: {error}",))
            continue
        comparison = pair.compare(faulty)
        first = next(iter(comparison.diagnoses), None)
        injection = Injection(
            model=model,
            dtype=dtype,
            fault=name,
            into=into,
            caught=not comparison.passed,
            excess=comparison.excess if comparison.excess > 1 else None,
            named_as=first.fault if first else None,
            claim=str(first) if first else None,
        )
        found += SelfTest((injection,))
    return found


def _faults(pair: HealthyPair, candidate: HFBackend) -> Iterator[tuple[str, str, Any]]:
    for fault in FAULTS.values():
        yield fault.name, "capture", lambda fault=fault: fault.inject(pair.actual)
    for rerun in MODEL_FAULTS.values():
        yield rerun.name, "model", lambda rerun=rerun: rerun.inject_with(candidate, pair.actual)


class _Engines:
    """Transformers three times: as the candidate, as it is expected to be, and in a wider dtype."""

    def __init__(self, model: str | Path, dtype: str) -> None:
        self.candidate = HFBackend(model, dtype=dtype, batch_size=1)
        self._expected = HFBackend(model, dtype=dtype)
        self._reference = HFBackend(model, dtype=REFERENCE_DTYPES[dtype])
        # Only eager attention knows soft caps.
        config = self.candidate.config.get_text_config()
        if getattr(config, "attn_logit_softcapping", None) is None:
            self.candidate.model.set_attn_implementation("eager")

    def pair(self, seed: int) -> HealthyPair:
        """A healthy pair on random prompts of this seed."""
        requests = _requests(self.candidate, seed)
        sites = self.candidate.sites
        actual = self.candidate.capture(requests, sites, max_new_tokens=NEW_TOKENS)
        expected = self._expected.capture(actual.requests, sites)
        reference = self._reference.capture(actual.requests, sites)
        repeats = [
            self._expected.capture(actual.requests, sites, perturb=number)
            for number in PERTURBATIONS
        ]
        return HealthyPair(actual, expected, reference, repeats)

    def __enter__(self) -> _Engines:
        return self

    def __exit__(self, *_error: object) -> None:
        for backend in (self.candidate, self._expected, self._reference):
            backend.close()


def _requests(backend: HFBackend, seed: int) -> Sequence[Request]:
    """Random prompts, no two alike; some go beyond the model's sliding window, if it has one."""
    lengths = list(PROMPT_LENGTHS)
    window = sliding_window(backend)
    if window is not None and window <= 1024:
        lengths += [window + more for more in _BEYOND]
    generator = torch.Generator().manual_seed(seed)
    return [
        Request(
            f"r{at}",
            tuple(torch.randint(backend.vocabulary_size, (n,), generator=generator).tolist()),
        )
        for at, n in enumerate(lengths)
    ]
