"""A made-up engine: every row and every token is a function of the tokens before it.

A healthy one so has every metamorphic property. A variant breaks one by overriding what it gives.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tapcheck.capture import Capture, Columns, SiteRows
from tapcheck.request import Request
from tapcheck.sites import Site, parse_sites

LOGITS = Site("logits")
VOCABULARY = 16
BLOCK = 4


def row_of(tokens: Sequence[int], site: Site) -> torch.Tensor:
    """The row of the last of these tokens."""
    seed = zlib.crc32(repr((*tokens, site.point)).encode())
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))


@dataclass
class Run:
    """One request of a run: its slot, the prompt before it, its rows' steps, what is cached."""

    request: Request
    slot: int
    of: int
    before: Request
    steps: list[int]
    cached: int

    @property
    def chunk_starts(self) -> set[int]:
        """Positions at which a step goes on with a prompt that an earlier one began."""
        prompt = self.steps[: self.request.prompt_length]
        return {at for at in range(1, len(prompt)) if prompt[at] != prompt[at - 1]}


@dataclass
class Engine:
    """A healthy engine: `budget` rows of prompts in a step, and a prefix cache of whole blocks."""

    budget: int = 1000
    caching: bool = True
    counting: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    name: str = "made up"
    num_layers: int = 1
    sites: tuple[Site, ...] = (Site("resid_post", 0), LOGITS)
    tapped: bool = True
    blocks: set[tuple[int, ...]] = field(default_factory=set)

    # What the variants break.
    def row(self, run: Run, site: Site, position: int) -> torch.Tensor:
        return row_of(run.request.token_ids[: position + 1], site)

    def token(self, _slot: int, _of: int, tokens: Sequence[int]) -> int:
        return int(row_of(tokens, LOGITS).argmax())

    def logprob(self, logits: torch.Tensor, token: int) -> float:
        return float(logits.log_softmax(-1)[token])

    def delivered(self, _run: Run, positions: list[int]) -> list[int]:
        return positions

    # The engine.
    def capture(
        self,
        requests: Sequence[Request],
        sites: Iterable[str | Site],
        select: Iterable[int | str] = ("all",),
        *,
        max_new_tokens: int = 16,
        read_prefix_cache: bool = False,
    ) -> Capture:
        runs = self._run(requests, max_new_tokens, read_prefix_cache)
        keys = [
            (slot, position)
            for slot, run in enumerate(runs)
            for position in self.delivered(run, list(range(run.cached, run.request.seen_length)))
        ]
        owner, position = np.array(keys, np.int64).reshape(-1, 2).T.copy()
        step = np.array([runs[slot].steps[at] for slot, at in keys], np.int64)
        columns = Columns(owner, position, step, 0 * step, 0 * step)
        rows = {
            site: SiteRows(columns, torch.stack([self.row(runs[s], site, p) for s, p in keys]))
            for site in parse_sites(sites, self.num_layers)
        }
        metadata: dict[str, Any] = {"engine": self.settings}
        if self.counting:
            metadata["cached"] = {r.request.id: [[0, r.cached]] for r in runs if r.cached}
            metadata["situations"] = {
                run.request.id: {
                    "cached_positions": run.cached,
                    "unfinished_prefills": len(run.chunk_starts),
                }
                for run in runs
            }
        capture = Capture(tuple(run.request for run in runs), rows, metadata)
        return capture.select(select=select)

    def _run(self, requests: Sequence[Request], new: int, read_prefix_cache: bool) -> list[Run]:
        runs = []
        prompt_rows = np.cumsum([0, *(request.prompt_length for request in requests)]).tolist()
        for slot, request in enumerate(requests):
            tokens = list(request.token_ids)
            while len(tokens) < request.prompt_length + new and not request.generated_token_ids:
                tokens.append(self.token(slot, len(requests), tokens))
            done = replace(request, generated_token_ids=tuple(tokens[request.prompt_length :]))
            first = prompt_rows[slot]
            steps = [at // self.budget for at in range(first, first + request.prompt_length)]
            after = prompt_rows[-1] // self.budget + 1
            steps += range(after, after + len(tokens))
            cached = self._cached(request) if read_prefix_cache else 0
            runs.append(Run(done, slot, len(requests), requests[slot - 1], steps, cached))
        for run in runs:
            ids = run.request.token_ids
            self.blocks |= {ids[:end] for end in range(BLOCK, len(ids), BLOCK)}
        return runs

    def _cached(self, request: Request) -> int:
        ends = range(BLOCK, request.prompt_length, BLOCK)
        prompt = request.prompt_token_ids
        return max((e for e in ends if self.caching and prompt[:e] in self.blocks), default=0)

    def reset_prefix_cache(self) -> None:
        self.blocks.clear()

    def close(self) -> None:
        self.blocks.clear()

    def generate_untapped(
        self, requests: Sequence[Request], _select: object, *, sampling_params: Any
    ) -> list[Any]:
        self.tapped = False
        try:
            runs = self._run(requests, sampling_params.max_tokens, False)
            return [self._output(run) for run in runs]
        finally:
            self.tapped = True

    @contextlib.contextmanager
    def session(self, sites: Any, select: Any) -> Iterator[Session]:
        yield Session(self, sites, select)

    def _output(self, run: Run) -> Any:
        request, logprobs = run.request, []
        for at in range(request.prompt_length, len(request.token_ids)):
            logits = row_of(request.token_ids[:at], LOGITS)
            likeliest = logits.topk(5).indices.tolist()
            logprobs.append(
                {t: SimpleNamespace(logprob=self.logprob(logits, t)) for t in likeliest}
            )
        output = SimpleNamespace(token_ids=list(request.generated_token_ids), logprobs=logprobs)
        return SimpleNamespace(request_id=request.id, outputs=[output])


class Session:
    """What `VLLMBackend.session` gives, over an Engine: each step ends one request."""

    def __init__(self, engine: Engine, sites: Any, select: Any) -> None:
        self._engine, self._sites, self._select = engine, sites, select
        self._requests: list[Request] = []
        self._left: list[Any] = []
        self._new = 0

    def add_request(self, request: Request, sampling_params: Any) -> None:
        self._requests.append(request)
        self._new = sampling_params.max_tokens
        self._left = self._engine._run(self._requests, self._new, False)

    @property
    def unfinished(self) -> list[str]:
        return [run.request.id for run in self._left]

    def step(self) -> list[Any]:
        return [self._engine._output(self._left.pop())]

    def collect(self) -> Capture:
        return self._engine.capture(
            self._requests, self._sites, self._select, max_new_tokens=self._new
        )
