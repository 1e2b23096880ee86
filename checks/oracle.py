"""Checks of the oracle: that the Hugging Face backend, which others are held against, is right.

What it captures is held against what the same Transformers model gives by itself: loaded anew,
without hooks of tapcheck's, one request at a time and without padding. Transformers' own record of
the residual stream (`output_hidden_states=True`) has two meanings: entry 0 is what enters layer 0
and entry n what layer n - 1 returns, but the last entry is what the final norm makes of the last
layer's output. `resid_post` of the last layer is before that norm, and `final_norm` after it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tapcheck.capture import COLUMN_NAMES, Capture, Columns, SiteRows, join
from tapcheck.checks.comparison import Comparison
from tapcheck.checks.equivalence import compare_captures
from tapcheck.checks.measures import comparison_result, completed
from tapcheck.checks.numerics import FloatArray, row_metrics
from tapcheck.checks.tolerances import default_rtol, dtype_name
from tapcheck.compatibility.verdict import CheckResult, Condition
from tapcheck.errors import CaptureError
from tapcheck.hf import HFBackend
from tapcheck.request import Request
from tapcheck.sites import Site

# What is right is at most this part as far as the next candidate: on five models it was 0 away in
# every row, the next layer 0.23 or more, and another dtype 0.009 to 0.015 in the median row.
_NEARER = 0.1
LOGITS, FINAL_NORM = Site("logits"), Site("final_norm")
_NO_STATES = "the model records no hidden states (its output has no `hidden_states`)"
_OTHER_DTYPE = {"float32": "bfloat16", "bfloat16": "float32", "float16": "float32"}


def judge_oracle(backend: HFBackend, requests: Sequence[Request]) -> Iterator[CheckResult]:
    """Every check of a backend on these requests, which should be of different lengths."""
    yield padding_changes_nothing(backend, requests)
    observation = _observe(backend, requests)
    yield _judge_last_layer(observation)
    yield _judge_layers(observation)
    yield _judge_attention(observation)
    yield _judge_dtype(observation)


def padding_changes_nothing(
    backend: HFBackend, requests: Sequence[Request], *, max_new_tokens: int = 4
) -> CheckResult:
    """Requests in a batch padded on the left give the rows that each gives alone.

    Judged while the batch generates (with a cache, and position ids that `generate` works out), and
    when it is teacher-forced on what it generated. Exercised when requests of unequal lengths
    shared a forward pass. Raises what the backend raises.
    """
    given = backend.capture(requests, backend.sites, max_new_tokens=max_new_tokens)
    forced = backend.capture(given.requests, backend.sites)
    alone = join([backend.capture([request], backend.sites) for request in given.requests])
    padding = min(_padding_rows(given), _padding_rows(forced))
    how, comparison = "as given", compare_captures(given, alone)
    if comparison.passed:
        how, comparison = "teacher-forced", compare_captures(forced, alone)
    result = comparison_result(
        padding_changes_nothing,
        comparison,
        Condition("padding_rows", ">=", 1),
        metrics={"padding_rows": padding},
    )
    if comparison.passed and not padding:
        reason = "no padding: give requests of unequal lengths, and a batch_size above 1"
        return replace(result, outcome="not exercised", reason=reason)
    return replace(result, reason=f"{how}, {padding} padding rows: {result.reason}")


def last_layer_is_before_the_final_norm(
    backend: HFBackend, requests: Sequence[Request]
) -> CheckResult:
    """`resid_post` of the last layer is what enters the final norm, and `final_norm` what leaves.

    Where the norm leaves a row within the tolerance the two meanings can't be told apart, and where
    there is no norm there is one meaning: not exercised.
    """
    return _judge_last_layer(_observe(backend, requests))


def layers_are_unique(backend: HFBackend, requests: Sequence[Request]) -> CheckResult:
    """Each layer's `resid_post` is Transformers' own hidden state of that layer, and no other.

    The others are those of all layers, what enters the first, and what leaves the final norm. The
    error of a layer is its worst row's.
    """
    return _judge_layers(_observe(backend, requests))


def attention_is_the_model_s_own(backend: HFBackend, requests: Sequence[Request]) -> CheckResult:
    """The backend's attention implementation computes what Transformers' plain (`eager`) one does.

    A faster one may leave out what it has no support for, such as gemma2's soft cap on attention
    scores.
    """
    return _judge_attention(_observe(backend, requests))


def dtype_is_as_requested(backend: HFBackend, requests: Sequence[Request]) -> CheckResult:
    """Rows come in the dtype that was asked for, and are what the model computes in that dtype.

    The second is judged by the rows themselves: of Transformers' runs in this dtype and in another,
    they must be ten times nearer to the first.
    """
    return _judge_dtype(_observe(backend, requests))


@dataclass(frozen=True, eq=False)
class _Own:
    """What Transformers computes by itself: rows of all requests, by position, one after the other.

    logits: [rows, vocabulary]. hidden_states: what enters the first layer, then what each layer
    returns; empty where the model records none. after_norm: what the final norm makes of the last,
    None where nothing outside the layers does. All but logits are [rows, width].
    """

    requests: tuple[Request, ...]
    logits: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...]
    after_norm: torch.Tensor | None

    def as_capture(self) -> Capture:
        """These rows as a capture of `resid_post` of each layer, `final_norm` and `logits`."""
        lengths = [request.seen_length for request in self.requests]
        position = np.concatenate([np.arange(length) for length in lengths])
        columns = {name: np.zeros(len(position), np.int64) for name in COLUMN_NAMES}
        columns |= {"request": np.repeat(np.arange(len(lengths)), lengths), "position": position}
        values = {LOGITS: self.logits}
        if self.after_norm is not None:
            values[FINAL_NORM] = self.after_norm
        for layer, states in enumerate(self.hidden_states[1:]):
            values[Site("resid_post", layer)] = states
        rows = {site: SiteRows(Columns(**columns), values[site]) for site in sorted(values)}
        return Capture(self.requests, rows)


@dataclass(frozen=True, eq=False)
class _Observation:
    """What a backend captured, each request by itself, and what Transformers itself gives."""

    capture: Capture
    own: _Own

    @property
    def rtol(self) -> float:
        return default_rtol(self.own.logits.dtype)


def _observe(backend: HFBackend, requests: Sequence[Request]) -> _Observation:
    if not requests:
        raise CaptureError("no request was given: give at least one, of two or more tokens")
    sites = [site for site in backend.sites if site.point in ("resid_post", "final_norm", "logits")]
    capture = join([backend.capture([r], sites, max_new_tokens=1) for r in requests])
    return _Observation(capture, _run_transformers(capture))


def _run_transformers(
    capture: Capture, *, dtype: str | None = None, attention: str | None = None
) -> _Own:
    """Run the capture's requests through its model, in its dtype and attention unless given."""
    from transformers import AutoModelForCausalLM

    metadata = capture.metadata
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(
        metadata["model"],
        dtype=getattr(torch, dtype or metadata["dtype"]),
        attn_implementation=attention or metadata["engine"]["attention_implementation"],
    )
    model = model.to("cuda" if metadata["environment"]["gpu"] else "cpu").eval()
    runs = [_run_one(model, request) for request in capture.requests]
    norms = [run.after_norm for run in runs if run.after_norm is not None]
    return _Own(
        requests=capture.requests,
        logits=torch.cat([run.logits for run in runs]),
        hidden_states=tuple(map(torch.cat, zip(*[run.hidden_states for run in runs], strict=True))),
        after_norm=torch.cat(norms) if len(norms) == len(runs) else None,
    )


def _run_one(model: Any, request: Request) -> _Own:
    """One forward pass over one request: no padding, no cache, no position ids of ours."""
    tokens = torch.tensor([request.token_ids[: request.seen_length]], device=model.device)
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(_module: object, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(output, torch.Tensor) and isinstance(args[0], torch.Tensor):
            calls.append((args[0], output))

    # The final norm is outside the list of layers, whose members have a number for a name.
    outside = [
        module
        for path, module in model.named_modules()
        if not any(part.isdigit() for part in path.split("."))
    ]
    handles = [module.register_forward_hook(keep) for module in outside]
    parameters = inspect.signature(model.forward).parameters.values()
    records = any(p.name == "output_hidden_states" or p.kind is p.VAR_KEYWORD for p in parameters)
    try:
        with torch.inference_mode():
            asked = {"output_hidden_states": True} if records else {}
            output = model(input_ids=tokens, use_cache=False, **asked)
    finally:
        for handle in handles:
            handle.remove()
    states = list(getattr(output, "hidden_states", None) or ())
    after_norm = None
    # Where a norm gave the last entry, the last layer's own is what went into it.
    for before, after in calls if states else ():
        if after.shape == before.shape and torch.equal(after, states[-1]):
            states[-1], after_norm = before, after
            break
    rows = [tensor[0].cpu() for tensor in (output.logits, *states)]
    norm_rows = None if after_norm is None else after_norm[0].cpu()
    return _Own((request,), rows[0], tuple(rows[1:]), norm_rows)


def _judge_last_layer(observation: _Observation) -> CheckResult:
    judge, own = last_layer_is_before_the_final_norm, observation.own
    if own.after_norm is None:
        reason = "no norm follows the last layer" if own.hidden_states else _NO_STATES
        return _not_exercised(judge, reason)
    before = own.hidden_states[-1]
    told_apart = row_metrics(own.after_norm, before).relative_error > observation.rtol
    last = Site("resid_post", len(own.hidden_states) - 2)
    result = comparison_result(
        judge,
        _compare(observation.capture, own, (last, FINAL_NORM)),
        Condition("rows_told_apart", ">=", 1),
        metrics={"rows_told_apart": int(told_apart.sum())},
    )
    if not told_apart.any():
        return _not_exercised(judge, "the final norm changes no row")
    return result


def _judge_attention(observation: _Observation) -> CheckResult:
    capture = observation.capture
    eager = _run_transformers(capture, attention="eager")
    comparison = _compare(capture, eager, tuple(eager.as_capture().rows))
    result = comparison_result(attention_is_the_model_s_own, comparison)
    implementation = capture.metadata["engine"]["attention_implementation"]
    return replace(result, reason=f"{implementation} against eager: {result.reason}")


def _judge_dtype(observation: _Observation) -> CheckResult:
    capture = observation.capture
    asked = capture.metadata["dtype"]
    other = _OTHER_DTYPE[asked]
    wrong = [s for s, rows in capture.rows.items() if dtype_name(rows.values.dtype) != asked]
    same = _median_error(capture, LOGITS, observation.own.logits)
    elsewhere = _run_transformers(capture, dtype=other)
    different = _median_error(capture, LOGITS, elsewhere.logits)
    reason = (
        f"logits are {same:.2g} from Transformers' in {asked}, and {different:.2g} from its "
        f"{other} ones"
    )
    if wrong:
        found = dtype_name(capture[wrong[0]].values.dtype)
        reason = f"{wrong[0]} is {found}, and {asked} was asked for; {reason}"
    return completed(
        dtype_is_as_requested,
        reason,
        {
            "rows_compared": len(capture[LOGITS]),
            "sites_in_another_dtype": len(wrong),
            "nearness": same / different if different else math.nan,
        },
        Condition("rows_compared", ">=", 1),
        Condition("sites_in_another_dtype", "==", 0),
        Condition("nearness", "<=", _NEARER),
    )


def _judge_layers(observation: _Observation) -> CheckResult:
    capture, own, rtol = observation.capture, observation.own, observation.rtol
    sites = sorted(site for site in capture.rows if site.point == "resid_post")
    layers = len(sites)
    if len(own.hidden_states) != layers + 1:
        recorded = f"the model records {len(own.hidden_states)} hidden states, with {layers} layers"
        return _not_exercised(layers_are_unique, recorded if own.hidden_states else _NO_STATES)
    states = [*own.hidden_states, *([] if own.after_norm is None else [own.after_norm])]
    names = ["what enters layer 0", *(f"what layer {layer} returns" for layer in range(layers))]
    names.append("what the final norm returns")
    errors = np.array([[_worst_error(capture, site, state) for state in states] for site in sites])
    each = np.arange(layers)
    mine = errors[each, each + 1]
    errors[each, each + 1] = math.inf
    nearest = errors.argmin(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        nearness = mine / errors[each, nearest]  # NaN, which fails, where two layers are the same
    wrong = np.flatnonzero(~((mine <= rtol) & (nearness <= _NEARER)))
    at = int(wrong[0]) if len(wrong) else int(nearness.argmax())
    return completed(
        layers_are_unique,
        f"{layers - len(wrong)} of {layers} layers are Transformers' own and no other; "
        f"{sites[at]} is {mine[at]:.2g} from {names[at + 1]}, and {errors[at, nearest[at]]:.2g} "
        f"from {names[nearest[at]]}",
        {
            "layers": layers,
            "layers_matched": layers - len(wrong),
            "rows": len(states[0]),
            "worst_error": float(mine.max()),
            "worst_nearness": float(nearness.max()),
        },
        Condition("rows", ">=", 1),
        Condition("layers", ">=", 1),
        Condition("layers_matched", "==", "layers"),
        Condition("worst_error", "<=", rtol),
        Condition("worst_nearness", "<=", _NEARER),
        first=f"site {sites[at]}" if len(wrong) else None,
    )


def _compare(capture: Capture, own: _Own, sites: Iterable[Site]) -> Comparison:
    expected = own.as_capture().select(sites=sites)
    return compare_captures(
        capture.select(sites=[site for site in expected.sites if site in capture]), expected
    )


def _errors(capture: Capture, site: Site, own: torch.Tensor) -> FloatArray:
    """The relative error of each row at a site; a NaN where the rows aren't the same number."""
    rows = capture.rows.get(site)  # `join` has put them in the order of `_Own`
    if rows is None or rows.values.shape != own.shape:
        return np.full(1, math.nan)
    return row_metrics(rows.values, own).largest_error


def _worst_error(capture: Capture, site: Site, own: torch.Tensor) -> float:
    return float(_errors(capture, site, own).max())


def _median_error(capture: Capture, site: Site, own: torch.Tensor) -> float:
    return float(np.median(_errors(capture, site, own)))


def _padding_rows(capture: Capture) -> int:
    """Rows of padding in all steps: what each request lacks of the longest that it ran with."""
    columns = next(iter(capture.rows.values())).columns
    padding = 0
    for step in np.unique(columns.step):
        _, rows = np.unique(columns.request[columns.step == step], return_counts=True)
        padding += int((rows.max() - rows).sum())
    return padding


def _not_exercised(judge: Callable[..., CheckResult], reason: str) -> CheckResult:
    return replace(completed(judge, reason, {}), outcome="not exercised")
