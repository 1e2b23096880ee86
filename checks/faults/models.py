"""Faults of what the model computes: Transformers runs again, with the fault in it.

They can't be made from a capture alone, as every layer after the fault sees it. Each is
deterministic, runs the capture's own tokens, and gives the rows that the capture has; where the
model or the capture lacks what the fault needs, it raises CaptureError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tapcheck.capture import Capture, SiteRows
from tapcheck.checks.faults.rewriting import lacks, rows_at
from tapcheck.errors import CaptureError
from tapcheck.hf import HFBackend
from tapcheck.request import Request

Rerun = Callable[[HFBackend, Capture], Capture]


@dataclass(frozen=True)
class ModelFault:
    """A mistake in what an engine computes; `inject_with` makes it in a Transformers backend.

    `inject_with(backend, capture)` gives the capture that the backend's model would have given
    with the fault. The backend is left as it was.
    """

    name: str
    description: str
    inject_with: Rerun
    parameters: Mapping[str, float | str] = field(default_factory=dict)


MODEL_FAULTS: dict[str, ModelFault] = {}


def _fault(**parameters: float | str) -> Callable[[Rerun], Rerun]:
    """Register a fault under the function's name, described by its docstring."""

    def register(rerun: Rerun) -> Rerun:
        name, description = rerun.__name__, " ".join((rerun.__doc__ or "").split())

        def checked(backend: HFBackend, capture: Capture) -> Capture:
            if not any(map(len, capture.rows.values())):
                raise lacks(name, "rows")
            if not all(request.generated_token_ids for request in capture.requests):
                raise lacks(name, "the tokens that each request generated")
            faulty = rerun(backend, capture)
            if faulty == capture:
                raise lacks(name, "rows that the fault would change")
            return faulty

        MODEL_FAULTS[name] = ModelFault(name, description, checked, parameters)
        return rerun

    return register


@_fault(offset=1, start="half of the longest prompt")
def wrong_position_offset(backend: HFBackend, capture: Capture) -> Capture:
    """From one position on, positions are one too large, as after a chunk that was miscounted."""
    start = max(request.prompt_length for request in capture.requests) // 2
    if not start:
        raise lacks("wrong_position_offset", "a prompt of two tokens")

    def late(_model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "position_ids" not in kwargs:
            raise CaptureError(
                "fault 'wrong_position_offset' can't be injected: the model takes no position_ids"
            )
        positions = kwargs["position_ids"]
        return args, kwargs | {"position_ids": positions + (positions >= start)}

    handle = backend.model.register_forward_pre_hook(late, with_kwargs=True)
    try:
        return _again(backend, capture, capture.requests)
    finally:
        handle.remove()


@_fault()
def sliding_window_off(backend: HFBackend, capture: Capture) -> Capture:
    """Layers that attend to a sliding window attend to everything."""
    config = backend.config.get_text_config()
    window = sliding_window(backend)
    if window is None:
        raise CaptureError(
            "fault 'sliding_window_off' can't be injected: the model has no sliding window"
        )
    if max(request.seen_length for request in capture.requests) <= window:
        raise lacks("sliding_window_off", f"a request of more tokens than the window, {window}")
    with _setting(config, backend.model.config.get_text_config(), sliding_window=1 << 30):
        return _again(backend, capture, capture.requests)


def sliding_window(backend: HFBackend) -> int | None:
    """The window of the model's sliding attention, in tokens; None when it has none."""
    config = backend.config.get_text_config()
    used = getattr(config, "use_sliding_window", True)
    return (getattr(config, "sliding_window", None) or None) if used else None


@_fault()
def extra_start_token(backend: HFBackend, capture: Capture) -> Capture:
    """Each prompt was run with a start token before it, which neither tokens nor positions show.

    The token is the model's own, or else the prompt's first.
    """
    token = getattr(backend.config.get_text_config(), "bos_token_id", None)
    if not isinstance(token, int) or token >= backend.vocabulary_size:
        token = None
    longer = [
        replace(
            request,
            prompt_token_ids=(
                request.prompt_token_ids[0] if token is None else token,
                *request.prompt_token_ids,
            ),
        )
        for request in capture.requests
    ]
    return _again(backend, capture, longer, shift=1)


def _again(
    backend: HFBackend, capture: Capture, requests: Sequence[Request], shift: int = 0
) -> Capture:
    """The capture's rows as the backend gives them, `shift` positions later in its requests."""
    run = backend.capture(requests, capture.sites)
    rows = {}
    for site, given in capture.rows.items():
        columns = given.columns
        index, values = rows_at(run, site, columns.request, columns.position + shift)
        if len(index) != len(given):
            raise CaptureError(
                f"site {site}: the capture has rows at positions that its requests don't have"
            )
        rows[site] = SiteRows(columns, values)
    return replace(capture, rows=rows)


@contextmanager
def _setting(*configs: Any, **values: Any) -> Iterator[None]:
    """Give the configs these values for a while."""
    before = [{name: getattr(config, name) for name in values} for config in configs]
    try:
        for config in configs:
            for name, value in values.items():
                setattr(config, name, value)
        yield
    finally:
        for config, old in zip(configs, before, strict=True):
            for name, value in old.items():
                setattr(config, name, value)
