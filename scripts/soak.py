"""Soak: random runs on real engines, every row of them judged against Transformers.

    python scripts/soak.py --runs 200 --seed 1
    python scripts/soak.py --seed 1 --only 37

Each engine (vLLM's CPU build, in this process) has random settings and serves five runs. A run is
a session with random sites, selectors and requests, which join, stop, are aborted and are collected
while it lasts. What is delivered is compared with the rows due, counted here by brute force, and
with the values of a teacher-forced Transformers run of the same tokens. The last line is a JSON
object. The exit code is 0 only when no row was lost, duplicated or misnamed (a row that has not the
value of its request, site and position), nothing was left behind, memory did not grow and every
situation arose. The first run that fails ends the soak, and says how to run it again.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import psutil
from rich.console import Console
from soak_scenarios import Arrival, Scenario, draw_prefixes, draw_scenario, draw_settings

from tapcheck.capture import Capture
from tapcheck.errors import TapcheckError
from tapcheck.fixtures.zoo import build_tiny_model
from tapcheck.hf import HFBackend
from tapcheck.layout import SITUATIONS
from tapcheck.request import Request
from tapcheck.sites import Site
from tapcheck.vllm.adapters import OWNER
from tapcheck.vllm.backend import VLLMBackend

if TYPE_CHECKING:
    from tapcheck.vllm.session import Session

RUNS_PER_ENGINE = 5
RTOL = 1e-5
MAX_STEPS = 20_000  # far beyond any run: a request that never ends ends the soak
# Eager steps on CPU are not padded, and rows after a request's stop need async scheduling, which
# vLLM forces off on CPU.
NOT_ON_CPU = ("padded_passes", "unseen_rows")
EXPECTED = (
    *(name for name in SITUATIONS if name not in NOT_ON_CPU),
    "aborted_waiting",
    "aborted_prefilling",
    "aborted_decoding",
    "stopped_early",
    "teacher_forced",
    "ids_used_again",
)
# Healthy soaks grew by 11 MiB (200 runs) and by 3 and 44 MiB (60 runs, where the allocator still
# settles). The rows of a run take 0.8 MiB on average: kept, they would add 80 MiB in 200 runs.
MAX_RSS_GROWTH_MIB = 48.0


@dataclass(frozen=True)
class Ended:
    """A request as vLLM's own output tells its end; `cached` positions were read from its cache."""

    request: Request
    forced: bool
    cached: int


@dataclass(frozen=True)
class Parcel:
    """What one collect gave for the requests that had ended; no capture when it raised."""

    ended: dict[str, Ended]
    capture: Capture | None


@dataclass
class Tally:
    """What was counted; `problems` is empty as long as all is well."""

    requests: int = 0
    aborted: int = 0
    rows_due: int = 0
    rows_delivered: int = 0
    lost: int = 0
    duplicated: int = 0
    misnamed: int = 0
    worst_relative_error: float = 0.0
    situations: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class Player:
    """Plays a scenario in a session, and keeps what was collected and what vLLM said itself."""

    def __init__(
        self, engine: VLLMBackend, session: Session, scenario: Scenario, tally: Tally
    ) -> None:
        self.session = session
        self.scenario = scenario
        self.tally = tally
        self.parcels: list[Parcel] = []
        self._scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
        self._now = 0
        self._running: dict[str, tuple[Arrival, int]] = {}  # by id: when it is to be aborted, too
        self._ended: dict[str, Ended] = {}
        self._used: set[str] = set()

    def play(self) -> None:
        """Run until every request has ended, and collect what is left."""
        for arrival in self.scenario.arrivals:
            for _ in range(arrival.steps_before):
                self._step()
            self._add(arrival)
        while self._running:
            self._step()
            if self._now > MAX_STEPS:
                raise RuntimeError(f"{self.session.unfinished} ran for {MAX_STEPS} steps")
        self._collect()

    def _add(self, arrival: Arrival) -> None:
        from vllm import SamplingParams

        name = next(i for i in arrival.ids if i not in self._running and i not in self._ended)
        params = None
        if arrival.stops:
            params = SamplingParams(
                temperature=0,
                max_tokens=arrival.new_tokens,
                stop_token_ids=list(arrival.stops),
                detokenize=False,
            )
        request = Request(name, arrival.prompt, arrival.given)
        self.session.add_request(request, params, max_new_tokens=arrival.new_tokens)
        self._running[name] = arrival, self._now + arrival.abort_after
        self.tally.requests += 1
        self.tally.situations["ids_used_again"] += name in self._used
        self._used.add(name)

    def _step(self) -> None:
        for name in [n for n, (_, due) in self._running.items() if due <= self._now]:
            self._abort(name)
        for output in self.session.step():
            arrival, _ = self._running.pop(output.request_id)
            generated = arrival.given or tuple(output.outputs[0].token_ids)
            request = Request(output.request_id, arrival.prompt, generated)
            forced = bool(arrival.given)
            self._ended[request.id] = Ended(request, forced, output.num_cached_tokens or 0)
            self.tally.situations["teacher_forced"] += forced
            early = not forced and len(generated) < arrival.new_tokens
            self.tally.situations["stopped_early"] += early
        self._now += 1
        if self._now % self.scenario.collect_every == 0:
            self._collect()

    def _abort(self, name: str) -> None:
        """Abort a request, having looked how far vLLM's scheduler was with it."""
        owner = next(o for o, r in self.session._running.items() if r.id == name)
        seen = next(
            request
            for request in self._scheduler.requests.values()
            if request.sampling_params.extra_args[OWNER] == owner
        )
        computed, prompt = seen.num_computed_tokens, seen.num_prompt_tokens
        done = "waiting" if not computed else "prefilling" if computed < prompt else "decoding"
        self.session.abort_request(name)
        del self._running[name]
        self.tally.aborted += 1
        self.tally.situations[f"aborted_{done}"] += 1

    def _collect(self) -> None:
        """Collect if a row is due: a collect of none is refused, as it should be."""
        if not any(self.scenario.owes(e.request, e.forced) for e in self._ended.values()):
            return
        capture, ended = None, self._ended
        self._ended = {}
        try:
            capture = self.session.collect()
        except TapcheckError as error:
            self.tally.problems.append(f"collect raised {type(error).__name__}: {error}")
        self.parcels.append(Parcel(ended, capture))


class Judge:
    """Compares parcels with Transformers, teacher-forced on the tokens that vLLM returned."""

    def __init__(self, hf: HFBackend, scenario: Scenario, parcels: Sequence[Parcel]) -> None:
        self._scenario = scenario
        requests = [e.request for parcel in parcels for e in parcel.ended.values()]
        numbered = [
            Request(str(number), request.prompt_token_ids, request.generated_token_ids)
            for number, request in enumerate(requests)
        ]
        # All rows, in order of request and position.
        self._truth = hf.capture(numbered, scenario.sites) if numbered else None
        self._lengths = np.array([request.seen_length for request in requests], np.int64)
        self._first = np.cumsum(self._lengths) - self._lengths
        self._parcels = parcels

    def judge(self, tally: Tally) -> None:
        """Count every row due and delivered into the tally, with a problem for what is wrong."""
        number = 0
        for parcel in self._parcels:
            self._judge_parcel(parcel, number, tally)
            number += len(parcel.ended)

    def _judge_parcel(self, parcel: Parcel, number: int, tally: Tally) -> None:
        due = {
            (site, name, position)
            for name, ended in parcel.ended.items()
            for position in set(self._scenario.positions(ended.request)) - _cached(parcel, name)
            for site in self._scenario.sites
        }
        tally.rows_due += len(due)
        delivered: Counter[tuple[Site, str, int]] = Counter()
        if parcel.capture is not None:
            tally.situations.update(parcel.capture.situations)
            for request in parcel.capture.requests:
                if parcel.ended[request.id].request != request:
                    tally.problems.append(f"request {request.id!r} has not the tokens vLLM gave")
            numbers = {name: number + at for at, name in enumerate(parcel.ended)}
            for row, error in self._rows(parcel.capture, numbers):
                delivered[row] += 1
                tally.worst_relative_error = max(tally.worst_relative_error, error)
                if row not in due or not error <= RTOL:
                    tally.misnamed += 1
                    why = f"has relative error {error:.3g}" if row in due else "was not due"
                    _complain(tally, row, why)
        tally.rows_delivered += delivered.total()
        for row in due - delivered.keys():
            tally.lost += 1
            _complain(tally, row, "was not delivered")
        for row, copies in delivered.items():
            tally.duplicated += copies - 1
            if copies > 1:
                _complain(tally, row, f"was delivered {copies} times")

    def _rows(
        self, capture: Capture, numbers: dict[str, int]
    ) -> Iterator[tuple[tuple[Site, str, int], float]]:
        """Each row delivered, and its relative error; infinite at a position never computed."""
        assert self._truth is not None
        names = [request.id for request in capture.requests]
        number = np.array([numbers[name] for name in names], np.int64)
        for site, rows in capture.rows.items():
            owner, position = number[rows.columns.request], rows.columns.position
            exists = (position >= 0) & (position < self._lengths[owner])
            at = self._first[owner] + np.where(exists, position, 0)
            wanted = self._truth[site].values[at]
            error = (rows.values - wanted).norm(dim=1) / wanted.norm(dim=1)
            errors = np.where(exists, error.numpy(), np.inf).tolist()
            columns = rows.columns.request.tolist(), position.tolist(), errors
            for request, place, wrong in zip(*columns, strict=True):
                yield (site, names[request], place), wrong


def _cached(parcel: Parcel, name: str) -> set[int]:
    """The positions that the capture lists as cached, as far as vLLM bears it out.

    vLLM says how much a request found when it was first scheduled. A preempted one may have found
    more when it was resumed, but never the last token that is fed.
    """
    if parcel.capture is None:
        return set()
    metadata, ended = parcel.capture.metadata, parcel.ended[name]
    found = ended.cached
    if metadata["situations"][name]["preemptions"]:
        found = (ended.request.seen_length if ended.forced else ended.request.prompt_length) - 1
    listed = metadata["cached"].get(name, ())
    return {position for start, stop in listed for position in range(start, min(stop, found))}


def _complain(tally: Tally, row: tuple[Site, str, int], what: str) -> None:
    site, name, position = row
    if len(tally.problems) < 10:
        tally.problems.append(f"request {name!r}, {site}, position {position} {what}")


def leftovers(engine: VLLMBackend) -> list[str]:
    """What a run left in the worker's row store or vLLM's scheduler."""
    (store,) = engine._llm.collective_rpc(lambda worker: worker.tapcheck_taps._store)
    requests = engine._llm.llm_engine.engine_core.engine_core.scheduler.requests
    left = {
        "requests in the row store": len(store),
        "bytes in the row store": store.held_bytes,
        "requests in vLLM's scheduler": len(requests),
    }
    return [f"left behind: {count} {what}" for what, count in left.items() if count]


def run_once(engine: VLLMBackend, hf: HFBackend, scenario: Scenario, tally: Tally) -> None:
    """Play and judge one run; whatever goes wrong is a problem in the tally."""
    try:
        with engine.session(
            scenario.sites, scenario.select, read_prefix_cache=scenario.read_prefix_cache
        ) as session:
            player = Player(engine, session, scenario, tally)
            player.play()
        tally.problems += leftovers(engine)
        Judge(hf, scenario, player.parcels).judge(tally)
    except Exception:
        tally.problems.append(traceback.format_exc())


def rss_growth(samples: Sequence[float]) -> float | None:
    """Median of the last quarter over that of the second quarter; None for too few samples.

    The first quarter is left out: the allocator and vLLM's caches still settle.
    """
    quarter = len(samples) // 4
    if quarter < 2:
        return None
    return statistics.median(samples[-quarter:]) - statistics.median(samples[quarter : 2 * quarter])


def soak(seed: int, runs: range, tally: Tally, tell: Callable[[str], None]) -> list[float]:
    """Play the runs of these numbers; returns the process's memory after each engine, in MiB.

    `runs` starts with the first run of an engine. Ends with the first run that has a problem.
    """
    model = build_tiny_model("llama")
    memory: list[float] = []
    with HFBackend(model) as hf:
        for start in runs[::RUNS_PER_ENGINE]:
            rng = random.Random(f"{seed}/engine {start}")
            settings = draw_settings(rng)
            prefixes = draw_prefixes(rng)
            with VLLMBackend(model, **settings) as engine:
                for run in range(start, min(start + RUNS_PER_ENGINE, runs.stop)):
                    rng = random.Random(f"{seed}/run {run}")
                    scenario = draw_scenario(rng, engine.sites, prefixes)
                    run_once(engine, hf, scenario, tally)
                    if tally.problems:
                        tally.problems[:0] = [
                            f"run {run} failed, on an engine with {settings}",
                            f"sites {', '.join(map(str, scenario.sites))}; select "
                            f"{', '.join(scenario.select)}; "
                            f"read_prefix_cache={scenario.read_prefix_cache}",
                        ]
                        tally.problems.append(
                            f"again, with the runs before it on its engine: "
                            f"python scripts/soak.py --seed {seed} --only {run}"
                        )
                        return memory
            gc.collect()
            memory.append(psutil.Process().memory_info().rss / 2**20)
            tell(
                f"{run + 1} of {runs.stop} runs: {tally.rows_delivered} of {tally.rows_due} rows, "
                f"worst relative error {tally.worst_relative_error:.1e}, {memory[-1]:.0f} MiB"
            )
    return memory


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak as the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="RUN", help="this run, after those before it")
    told = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    runs = range(told.runs)
    if told.only is not None:
        runs = range(told.only - told.only % RUNS_PER_ENGINE, told.only + 1)
    started, tally, console = time.monotonic(), Tally(), Console()
    with console.status("starting") as status:
        tell = status.update if console.is_terminal else print
        memory = soak(told.seed, runs, tally, tell)
    growth = rss_growth(memory)
    if growth is not None and growth > MAX_RSS_GROWTH_MIB:
        tally.problems.append(f"memory grew by {growth:.0f} MiB over the second half")
    unseen = [name for name in EXPECTED if not tally.situations[name]]
    if unseen and told.only is None and not tally.problems:
        tally.problems.append(f"did not arise: {', '.join(unseen)}. Take more runs")
    for problem in tally.problems:
        print(problem)
    result = {
        "runs": len(runs),
        "seed": told.seed,
        **{name: count for name, count in vars(tally).items() if name != "problems"},
        "rss_start_mib": round(memory[0]) if memory else None,
        "rss_end_mib": round(memory[-1]) if memory else None,
        "rss_growth_mib": None if growth is None else round(growth, 1),
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(result))
    return 1 if tally.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
