"""What a backend is asked to run, and what it then ran."""

from __future__ import annotations

from dataclasses import dataclass

from tapcheck.errors import CaptureError


@dataclass(frozen=True)
class Request:
    """One sequence: the caller's id and its token ids.

    `generated_token_ids` is empty when the backend is to generate; a captured request carries
    what was generated. A forward pass never sees the last generated token.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    generated_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", tuple(map(int, self.prompt_token_ids)))
        object.__setattr__(self, "generated_token_ids", tuple(map(int, self.generated_token_ids)))
        if not self.prompt_token_ids:
            raise CaptureError(f"request {self.id!r} has an empty prompt: give at least one token")

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_token_ids)

    @property
    def seen_length(self) -> int:
        """Number of positions that a forward pass sees: all but the last generated token."""
        return self.prompt_length + max(len(self.generated_token_ids) - 1, 0)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and generated token ids, in order of position."""
        return self.prompt_token_ids + self.generated_token_ids
