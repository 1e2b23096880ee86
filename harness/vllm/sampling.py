"""The sampling parameters of a captured request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tapcheck.errors import CaptureError
from tapcheck.request import Request
from tapcheck.runs import Plan, prompt_to_run, tokens_to_generate
from tapcheck.vllm.adapters import FORCED, OWNER

if TYPE_CHECKING:
    from vllm import SamplingParams


def one_for_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, requests: Sequence[Request]
) -> list[SamplingParams | None]:
    """The parameters of each request; raises CaptureError when there are more or fewer."""
    if not isinstance(sampling_params, Sequence):
        return [sampling_params] * len(requests)
    if len(sampling_params) != len(requests):
        raise CaptureError(
            f"{len(sampling_params)} sampling_params were given for {len(requests)} requests: give "
            "one for all of them, or one for each"
        )
    return list(sampling_params)


def most_new_tokens(sampling_params: SamplingParams | None, max_new_tokens: int) -> int:
    """How many tokens a request of these parameters may generate; else `max_new_tokens`."""
    most = None if sampling_params is None else sampling_params.max_tokens
    return max_new_tokens if most is None else most


def captured(
    request: Request,
    owner: str,
    max_new_tokens: int,
    sampling_params: SamplingParams | None,
    *,
    plan: Plan,
    speculative: bool,
    read_prefix_cache: bool,
) -> SamplingParams:
    """The parameters with which `request` runs, captured under `owner`.

    Without `sampling_params`, or for a teacher-forced request, greedy decoding of exactly the
    tokens that are due. The request reads the prefix cache where that leaves out no row of `plan`,
    or anyhow with `read_prefix_cache`; it always writes to it. Raises CaptureError for parameters
    that run one request several times.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    forced = len(prompt_to_run(request)) - request.prompt_length
    if sampling_params is None or request.generated_token_ids:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=tokens_to_generate(request, max_new_tokens),
            ignore_eos=True,
            detokenize=False,
        )
    else:
        params = sampling_params.clone()
    if params.n != 1:
        raise CaptureError(
            f"request {request.id!r} asks for n={params.n} samples, whose rows would share one "
            f"name: send {params.n} requests of different ids with n=1"
        )
    params.output_kind = RequestOutputKind.FINAL_ONLY
    # In an engine that speculates, a preempted request could find its drafts in the cache, when
    # the worker doesn't know yet which of them were accepted.
    needs_rows = speculative or plan.selects_before_the_last(request)
    skip = bool(params.skip_reading_prefix_cache)  # prompt logprobs need it too
    params.skip_reading_prefix_cache = skip or (needs_rows and not read_prefix_cache)
    params.extra_args = {**(params.extra_args or {}), OWNER: owner, FORCED: forced}
    return params
