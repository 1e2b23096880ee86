"""The capture container: rows of hidden states with the request, site and position they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tapcheck.errors import CaptureError
from tapcheck.request import Request
from tapcheck.sites import Site, parse_site

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Columns:
    """What is known of each row beside its values; every array has shape [rows].

    request: index into the capture's requests. position: index from 0 in prompt + generated.
    step: the engine's forward pass, counted from 0 in one run. monotonic_ns, unix_ns: when the
    row was taken, on the worker's monotonic clock and in UTC, in nanoseconds.
    """

    request: IntArray
    position: IntArray
    step: IntArray
    monotonic_ns: IntArray
    unix_ns: IntArray

    def __len__(self) -> int:
        return len(self.position)

    def take(self, index: IntArray) -> Columns:
        """The rows at `index`, in that order."""
        return Columns(**{name: getattr(self, name)[index] for name in COLUMN_NAMES})


COLUMN_NAMES = ("request", "position", "step", "monotonic_ns", "unix_ns")


def concatenate(parts: Sequence[Columns]) -> Columns:
    """All rows of `parts`, one part after the other."""
    return Columns(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMN_NAMES}
    )


@dataclass(frozen=True, eq=False)
class SiteRows:
    """The rows of one site: columns beside `values`, shape [rows, width], in the captured dtype."""

    columns: Columns
    values: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or len(self.values) != len(self.columns):
            raise CaptureError(
                f"a site's values have shape {tuple(self.values.shape)} but its columns have "
                f"{len(self.columns)} rows: values must be [rows, width]"
            )

    def __len__(self) -> int:
        return len(self.columns)

    def take(self, index: IntArray) -> SiteRows:
        """The rows at `index`, in that order."""
        return SiteRows(self.columns.take(index), self.values[torch.from_numpy(index)])


@dataclass(frozen=True)
class Row:
    """One token's vector at one site, for one request; `values` has shape [width]."""

    request_id: str
    site: Site
    position: int
    generated: bool
    step: int
    monotonic_ns: int
    unix_ns: int
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class Capture:
    """All the rows of a run.

    `rows` keeps each site's rows in the order in which they were delivered. Two captures are
    equal when their requests, sites, positions and values are the same, bit for bit; times,
    steps and metadata are not compared.
    """

    requests: tuple[Request, ...]
    rows: Mapping[Site, SiteRows]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids = [request.id for request in self.requests]
        twice = sorted({name for name in ids if ids.count(name) > 1}) if len(set(ids)) < len(ids) else []
        if twice:
            raise CaptureError(f"request id {twice[0]!r} stands for two requests: ids must be unique")
