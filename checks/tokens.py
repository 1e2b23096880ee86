"""Whether two captures are of the same token ids: where they aren't, no activation can agree."""

from __future__ import annotations

from collections.abc import Sequence

from tapcheck.checks.comparison import TokenProblem
from tapcheck.request import Request


def compare_tokens(actual: Sequence[Request], expected: Sequence[Request]) -> list[TokenProblem]:
    """Requests that only one side has; in the others, the first token id that differs."""
    mine = {request.id: request for request in actual}
    problems = []
    for request in expected:
        if request.id not in mine:
            reason = "the request is not in the actual capture"
            problems.append(TokenProblem(request.id, "missing request", None, reason))
        elif mine[request.id] != request:
            problems.append(_token_problem(mine.pop(request.id), request))
        else:
            del mine[request.id]
    reason = "the request is not in the expected capture"
    extra = [TokenProblem(name, "unexpected request", None, reason) for name in mine]
    return problems + extra


def _token_problem(actual: Request, expected: Request) -> TokenProblem:
    mine, theirs = actual.token_ids, expected.token_ids
    if mine == theirs:
        reason = f"the prompt has {actual.prompt_length} tokens, expected {expected.prompt_length}"
        first = min(actual.prompt_length, expected.prompt_length)
        return TokenProblem(actual.id, "prompt length", first, reason)
    common = min(len(mine), len(theirs))
    first = next((at for at in range(common) if mine[at] != theirs[at]), common)
    if first < common:
        reason = f"token id {mine[first]}, expected {theirs[first]}"
    else:
        reason = f"the sequence has {len(mine)} tokens, expected {len(theirs)}"
    prompt, wanted = actual.prompt_token_ids, expected.prompt_token_ids
    if prompt != wanted:
        known = {
            wanted[1:]: "its first token is left out",
            prompt[:1] + wanted: "an extra token stands before it",
            wanted[:1] + wanted: "its first token is there twice",
            wanted[::-1]: "it is reversed",
        }
        reason += f" (the prompt: {known[prompt]})" if prompt in known else " (in the prompt)"
    return TokenProblem(actual.id, "token ids", first, reason)
