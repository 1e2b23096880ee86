"""The seam through which captures are produced: ours for HF and vLLM, or somebody else's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from tapcheck.capture import Capture
from tapcheck.request import Request
from tapcheck.sites import Site


@runtime_checkable
class Backend(Protocol):
    """Runs requests through one model and returns what it captured.

    An implementer owes: every row that the selectors ask for, exactly once, under the caller's
    request id and the token's absolute position, in the dtype that the model computed, and the
    token ids of every request, generated ones included. A row that can't be delivered is an
    error, never a gap.
    """

    name: str

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        ...

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every site that this model has, in execution order."""
        ...

    def capture(
        self,
        requests: Sequence[Request],
        sites: Iterable[str | Site],
        select: Iterable[int | str] = ("all",),
        *,
        max_new_tokens: int = 16,
    ) -> Capture:
        """Run `requests` together and capture `sites` at the selected positions.

        A request that carries generated token ids is teacher-forced on them; for any other the
        backend generates `max_new_tokens` greedily, past any end-of-sequence token. Raises
        SiteError, SelectorError or CaptureError.
        """
        ...

    def close(self) -> None:
        """Give back the model's memory and end its processes."""
        ...
