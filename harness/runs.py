"""From what a run asked for and what its workers delivered to a capture, row by row."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tapcheck.capture import Capture, IntArray, SiteRows
from tapcheck.errors import CaptureError
from tapcheck.layout import SITUATIONS, Account
from tapcheck.request import Request
from tapcheck.selectors import (
    Selector,
    format_selector,
    parse_selectors,
    reaches,
    resolve,
    within,
)
from tapcheck.sites import Site, parse_sites
from tapcheck.transport import RowBatch

_STRIDE = 1 << 40  # more positions than any request has


@dataclass(frozen=True)
class Plan:
    """What a capture asks for, checked: sites in execution order, and selectors."""

    sites: tuple[Site, ...]
    selectors: tuple[Selector, ...]

    def install_arguments(self, num_layers: int, max_bytes: int) -> str:
        """What a worker needs to install taps for this plan, as JSON."""
        return json.dumps(
            {
                "sites": [str(site) for site in self.sites],
                "select": self.select,
                "num_layers": num_layers,
                "max_bytes": max_bytes,
            }
        )

    def selects_before_the_last(self, request: Request) -> bool:
        """Whether it may select a position that a prefix cache can hold: all but the last given."""
        given = len(prompt_to_run(request)) - 1
        return bool(within(reaches(self.selectors, request.prompt_length), 0, given))

    @property
    def select(self) -> list[str]:
        """The selectors as text."""
        return [format_selector(selector) for selector in self.selectors]


def make_plan(sites: Iterable[str | Site], select: Iterable[int | str], num_layers: int) -> Plan:
    """Check sites and selectors before anything runs; raises SiteError or SelectorError."""
    return Plan(parse_sites(sites, num_layers), parse_selectors(select))


def owner_keys() -> Iterator[str]:
    """Keys for requests, unique over runs and clients, whatever ids the caller uses."""
    client = uuid.uuid4().hex
    return (f"{client}/{number}" for number in itertools.count())


def prompt_to_run(request: Request) -> tuple[int, ...]:
    """The tokens to feed: the prompt, and all of a given continuation that a forward pass sees."""
    return request.token_ids[: request.seen_length]


def tokens_to_generate(request: Request, max_new_tokens: int) -> int:
    """How many tokens to generate; a teacher-forced request generates one, which is dropped."""
    return 1 if request.generated_token_ids else max_new_tokens


def finished(
    request: Request, generated: Sequence[int], max_new_tokens: int | None = None
) -> Request:
    """The request with what was generated for it; a teacher-forced one stays as it was.

    Raises CaptureError when that is not exactly `max_new_tokens` tokens; None allows any number.
    """
    if request.generated_token_ids:
        return request
    if max_new_tokens is not None and len(generated) != max_new_tokens:
        raise CaptureError(
            f"request {request.id!r} ended after {len(generated)} generated tokens, but "
            f"{max_new_tokens} were asked for. Nothing was returned"
        )
    return replace(request, generated_token_ids=tuple(generated))


def check_requests(
    requests: Sequence[Request], new_tokens: Sequence[int], max_model_len: int | None = None
) -> None:
    """Raise CaptureError for requests that can't be run, don't fit, or can't be told apart.

    `new_tokens` is parallel to `requests`: how many tokens each may generate.
    """
    if not requests:
        raise CaptureError("no request was given: give at least one prompt")
    seen: set[str] = set()
    for request, most in zip(requests, new_tokens, strict=True):
        if not isinstance(request, Request):
            raise CaptureError(
                f"{request!r} is no Request: tapcheck.models.as_requests makes them of prompts"
            )
        if request.id in seen:
            raise CaptureError(
                f"request id {request.id!r} stands for two requests: ids must differ"
            )
        seen.add(request.id)
        if most < 1:
            raise CaptureError(f"max_new_tokens is {most}: an engine generates at least 1")
        length = len(prompt_to_run(request)) + tokens_to_generate(request, most)
        if max_model_len is not None and length > max_model_len:
            raise CaptureError(
                f"request {request.id!r} needs {length} positions, but the engine was started with "
                f"max_model_len={max_model_len}: start it with more, or ask for fewer tokens"
            )


def assemble(
    runs: Mapping[str, Request],
    plan: Plan,
    batch: RowBatch,
    metadata: Mapping[str, Any],
    *,
    allow_cached: bool = False,
) -> Capture:
    """The capture of finished requests, by owner key, from their drained rows.

    Its metadata say which situations arose and, with `allow_cached`, which positions have no rows
    because the engine read them from its prefix cache. Raises CaptureError when another selected
    row is missing or one was delivered twice, naming request and position: a capture with a gap
    is never returned.
    """
    requests = tuple(runs.values())
    accounts = dict(zip(batch.request, batch.accounts, strict=True))
    mine = [accounts.get(owner, Account()) for owner in runs]
    cached = [account.cached if allow_cached else () for account in mine]
    due_request, due_position = _due(requests, plan.selectors, cached)
    if not len(due_position):
        raise CaptureError(
            f"the selectors {', '.join(plan.select)} select no position of any request"
            f"{' outside the prefix cache' if any(cached) else ''}: an empty capture proves nothing"
        )
    number = {owner: index for index, owner in enumerate(runs)}
    renumber = np.array([number[owner] for owner in batch.request], np.int64)
    columns = replace(batch.columns, request=renumber[batch.columns.request])
    have, due = _codes(columns.request, columns.position), _codes(due_request, due_position)
    at = None if np.array_equal(have, due) else _places(requests, have, due)
    silent = [str(site) for site in plan.sites if site not in batch.values]
    if silent:
        raise CaptureError(f"no worker delivered site {', '.join(silent)}")
    rows = {site: SiteRows(columns, batch.values[site]) for site in plan.sites}
    if at is not None:
        rows = {site: delivered.take(at) for site, delivered in rows.items()}
    told = {
        "situations": {
            run.id: {name: getattr(account.situations, name) for name in SITUATIONS}
            for run, account in zip(requests, mine, strict=True)
        },
        "cached": {r.id: ranges for r, ranges in zip(requests, cached, strict=True) if ranges},
    }
    return Capture(requests, rows, {**metadata, **told})


def _due(
    requests: Sequence[Request],
    selectors: Sequence[Selector],
    cached: Sequence[Sequence[tuple[int, int]]],
) -> tuple[IntArray, IntArray]:
    """Request and position of every row due: selected, and not in a cached range."""
    positions = []
    for run, ranges in zip(requests, cached, strict=True):
        position = np.array(resolve(selectors, run), np.int64)
        for start, stop in ranges:
            position = position[(position < start) | (position >= stop)]
        positions.append(position)
    counts = [len(position) for position in positions]
    return np.repeat(np.arange(len(requests)), counts), np.concatenate(positions)


def _places(requests: Sequence[Request], have: IntArray, due: IntArray) -> IntArray:
    """Where the due rows are among those delivered; raises CaptureError unless each is there once.

    Both are codes of rows, those due in ascending order.
    """
    distinct, counts = np.unique(have, return_counts=True)
    if len(distinct) < len(have):
        owner, position = divmod(int(distinct[counts > 1][0]), _STRIDE)
        raise CaptureError(
            f"request {requests[owner].id!r}, position {position} was delivered "
            f"{int(counts[counts > 1][0])} times: its rows can't be told apart. "
            "Nothing was returned"
        )
    missing = ~np.isin(due, have)
    if missing.any():
        raise CaptureError(_missing_message(requests, due, missing))
    order: IntArray = np.argsort(have, kind="stable")
    return order[np.isin(have[order], due)]


def _codes(request: IntArray, position: IntArray) -> IntArray:
    """One number for each (request, position), so that sets of rows can be compared."""
    return request * _STRIDE + position


def _missing_message(
    requests: Sequence[Request], due: IntArray, missing: npt.NDArray[np.bool_]
) -> str:
    request, position = np.divmod(due[missing], _STRIDE)
    owner = requests[int(request[0])]
    mine = position[request == request[0]]
    return (
        f"{len(position)} of {len(due)} selected rows were not delivered; the first is request "
        f"{owner.id!r}, position {int(position[0])} (that request misses positions "
        f"{int(mine.min())} to {int(mine.max())}, {len(mine)} in all). The engine ran no forward "
        "pass over them: a prefix cache hit, or an early stop. Nothing was returned"
    )
