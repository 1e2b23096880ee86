"""Static taps: sites read inside a compiled forward, through buffers that it writes.

The module's `forward` is wrapped with a custom op that copies the site into a preallocated buffer.
Compilers keep the op, because it declares what it writes, and a CUDA graph replays it into the same
buffer. Engine-free: any model can be tapped before it is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tapcheck.contract import Source, as_rows, call_tensors, stream_tensors
from tapcheck.errors import CaptureError
from tapcheck.sites import Site

# What a row's first element holds until the tap writes it: a NaN that no computation makes, by its
# payload. By element size, in bits.
_POISON = {
    2: (torch.int16, 0x7FED),
    4: (torch.int32, 0x7FEDDEAD),
    8: (torch.int64, 0x7FFDDEADDEADDEAD),
}

_OPS = torch.library.Library("tapcheck", "DEF")  # type: ignore[no-untyped-call]
_OPS.define(  # type: ignore[no-untyped-call]
    "tap(Tensor[] terms, Tensor(a!) buffer) -> ()"
)


def _tap(terms: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    """Copy the sum of `terms`, each [rows, width], into the first rows of `buffer`."""
    rows = terms[0].shape[0]
    if rows > len(buffer):
        raise CaptureError(
            f"a forward pass has {rows} rows, more than the {len(buffer)} of a static tap's buffer"
        )
    kept = buffer[:rows]
    if len(terms) == 1:
        kept.copy_(terms[0])
        return
    torch.add(terms[0], terms[1], out=kept)
    for term in terms[2:]:
        kept.add_(term)


_OPS.impl("tap", _tap, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("tapcheck::tap", lambda terms, buffer: None, lib=_OPS)


class StaticTap:
    """One site's tap: its buffer, and the module whose `forward` writes it.

    The buffer is [rows, width], with `rows` the most that a forward pass has. It has to be in place
    before the model is compiled, and stays.
    """

    def __init__(
        self, site: Site, source: Source, rows: int, width: int, dtype: torch.dtype
    ) -> None:
        device = next(source.module.parameters(), torch.empty(0)).device
        self.site = site
        self.buffer = torch.empty(rows, width, dtype=dtype, device=device)
        self._bits, self._poison = _POISON[dtype.itemsize]
        self.poison(rows)
        source.module.forward = _wrapped(source, self.buffer)

    def poison(self, rows: int) -> None:
        """Mark the first `rows` rows as not written."""
        self.buffer[:rows, 0].view(self._bits).fill_(self._poison)

    def read(self, rows: int) -> torch.Tensor:
        """The first `rows` rows of the buffer, which the next forward pass overwrites.

        Raises CaptureError when the forward pass did not write all of them.
        """
        unwritten = int((self.buffer[:rows, 0].view(self._bits) == self._poison).sum())
        if unwritten:
            raise CaptureError(
                f"site {self.site}: {unwritten} of {rows} rows of its buffer were not written in "
                "this forward pass, so the tap is not part of what ran: a compiled forward from "
                "before the tap was placed, or a path that leaves its module out"
            )
        return self.buffer[:rows]


def _wrapped(source: Source, buffer: torch.Tensor) -> Any:
    forward, count = source.module.forward, source.terms
    if source.at == "input":

        def before(*args: Any, **kwargs: Any) -> Any:
            torch.ops.tapcheck.tap(list(as_rows(call_tensors(args, kwargs)[:count])), buffer)
            return forward(*args, **kwargs)

        return before

    def after(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        torch.ops.tapcheck.tap(list(as_rows(stream_tensors(output)[:count])), buffer)
        return output

    return after
