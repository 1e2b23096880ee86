"""The sampling parameters of a captured request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tapcheck.vllm.adapters import OWNER

if TYPE_CHECKING:
    from vllm import SamplingParams


def greedy(max_tokens: int, owner: str) -> SamplingParams:
    """Greedy decoding of exactly `max_tokens` tokens, captured under `owner`.

    Cached prefix tokens run no forward pass and would leave rows out, so the request reads no
    prefix cache; it still writes to it.
    """
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        skip_reading_prefix_cache=True,
        extra_args={OWNER: owner},
    )
