"""How rows leave a worker: one batch of raw bytes, in the dtype in which they were captured.

Layout, little-endian: 8 bytes of magic and version, 8 bytes of header length, a JSON header
padded to a multiple of 8 bytes, each request's situations as int64 counts, the int64 columns one
after the other, then the values of all sites of one dtype and width, kind after kind, widest dtype
first so that everything is aligned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tapcheck.capture import COLUMN_NAMES, VALUE_DTYPES, Columns
from tapcheck.errors import CaptureError, SiteError
from tapcheck.interleave import by_request
from tapcheck.layout import SITUATIONS, Account, Situations
from tapcheck.sites import Site, parse_site

_MAGIC = b"tapchk\x00\x01"
_DTYPE_NAMES = {dtype: name for name, dtype in VALUE_DTYPES.items()}
_columns = attrgetter(*COLUMN_NAMES)


@dataclass(frozen=True, eq=False)
class RowBatch:
    """The rows of one drain of one worker: every site has the same rows.

    `columns.request` indexes `request`, the requests' keys; `values` holds one CPU tensor of
    shape [rows, width] for each site; `accounts` is parallel to `request`. Raises CaptureError
    when these don't fit together.
    """

    request: tuple[str, ...]
    columns: Columns
    values: Mapping[Site, torch.Tensor]
    accounts: tuple[Account, ...]

    def __post_init__(self) -> None:
        columns, rows = self.columns, len(self.columns)
        if len(set(self.request)) < len(self.request):
            raise CaptureError("a row batch has the same request key twice")
        if len(self.accounts) != len(self.request):
            raise CaptureError(
                f"a row batch has {len(self.accounts)} accounts for {len(self.request)} requests"
            )
        if rows and not 0 <= columns.request.min() <= columns.request.max() < len(self.request):
            raise CaptureError(
                f"a row batch has rows of a request outside its {len(self.request)} requests"
            )
        if rows and columns.position.min() < 0:
            raise CaptureError("a row batch has a row at a negative position")
        for site, values in self.values.items():
            if values.ndim != 2 or len(values) != rows or values.dtype not in _DTYPE_NAMES:
                raise CaptureError(
                    f"site {site} of a row batch is {values.dtype} of shape "
                    f"{tuple(values.shape)}: it must be [{rows}, width] in one of "
                    f"{', '.join(VALUE_DTYPES)}"
                )

    def __len__(self) -> int:
        return len(self.columns)


def pack(batch: RowBatch) -> bytes:
    """The batch as bytes; `unpack` reads them back."""
    return b"".join(packed_parts(batch))


def packed_parts(batch: RowBatch) -> list[memoryview]:
    """The bytes of `pack` in pieces, without a copy of what is contiguous already."""
    sites = sorted((_kind(values), site) for site, values in batch.values.items())
    fields = {
        "request": batch.request,
        "cached": [account.cached for account in batch.accounts],
        "rows": len(batch),
        "sites": [(str(site), dtype, width) for (_, dtype, width), site in sites],
    }
    header = json.dumps(fields).encode()
    header += b" " * (-len(header) % 8)
    counts = np.array([account.situations for account in batch.accounts], "<i8")
    columns = [np.ascontiguousarray(column, "<i8") for column in _columns(batch.columns)]
    return [
        memoryview(_MAGIC + len(header).to_bytes(8, "little") + header),
        *(numbers.data.cast("B") for numbers in (counts.reshape(-1), *columns)),
        *(_raw(batch.values[site]).data for _, site in sites),
    ]


def unpack(data: bytes | bytearray | memoryview) -> RowBatch:
    """The batch that `pack` made of these bytes.

    Its tensors share `data` where that is writable, and one copy of it where it isn't. Raises
    CaptureError that says what is wrong with the bytes.
    """
    header, at = _read_header(data)
    names, cached, rows, sites = _check_header(header)
    sizes = [width * dtype.itemsize * rows for _, dtype, width in sites]
    counts = len(names) * len(SITUATIONS)
    expected = at + 8 * (counts + rows * len(COLUMN_NAMES)) + sum(sizes)
    if len(data) != expected:
        raise _bad(f"{len(data)} bytes where the header promises {expected}")
    # tensors want it writable
    buffer = bytearray(data) if memoryview(data).readonly else data
    accounts = _read_accounts(np.frombuffer(buffer, "<i8", counts, at), cached)
    at += 8 * counts
    columns = {}
    for name in COLUMN_NAMES:
        columns[name] = np.frombuffer(buffer, "<i8", rows, at)
        at += 8 * rows
    values = {}
    for (site, dtype, width), size in zip(sites, sizes, strict=True):
        values[site] = _tensor(buffer, at, dtype, rows, width)
        at += size
    return RowBatch(names, Columns(**columns), values, accounts)


def merge(batches: Iterable[RowBatch], names: Mapping[str, str] | None = None) -> RowBatch:
    """One batch of the rows of several workers that ran the same steps, in any order.

    Pipeline stages bring different sites of the same rows. Tensor-parallel ranks bring the same
    sites: they are compared bit for bit and one copy is kept. Rows come ordered by request, as in
    the batches' tables of requests (or by key, where these differ), and position; their times are
    those of the latest copy. A worker that taps nothing is left out. Raises CaptureError that
    names the request and position where workers disagree, a request by `names[key]` if that is
    there, and else by its key.
    """
    batches, names = list(batches), names or {}
    accounts = _merged_accounts(batches, names)
    tables = {batch.request for batch in batches}
    keys = tables.pop() if len(tables) == 1 else tuple(sorted(accounts))
    mine = tuple(accounts[key] for key in keys)
    shown = [names.get(key, key) for key in keys]
    parts = [_arranged(batch, keys, shown) for batch in batches if batch.values]
    if not parts:
        empty = np.zeros(0, np.int64)
        return RowBatch(keys, Columns(*[empty] * len(COLUMN_NAMES)), {}, mine)
    columns = parts[0][0]
    values: dict[Site, torch.Tensor] = {}
    for part_columns, part_values in parts:
        _check_same_rows(shown, columns, part_columns)
        columns = replace(
            columns,
            monotonic_ns=np.maximum(columns.monotonic_ns, part_columns.monotonic_ns),
            unix_ns=np.maximum(columns.unix_ns, part_columns.unix_ns),
        )
        for site, tensor in part_values.items():
            _check_same_values(site, values.setdefault(site, tensor), tensor, shown, columns)
    return RowBatch(keys, columns, {site: values[site] for site in sorted(values)}, mine)


def _merged_accounts(batches: Sequence[RowBatch], names: Mapping[str, str]) -> dict[str, Account]:
    """Every request's account, on which all workers must agree: they ran the same steps."""
    accounts: dict[str, Account] = {}
    for batch in batches:
        for key, account in zip(batch.request, batch.accounts, strict=True):
            if accounts.setdefault(key, account) != account:
                raise CaptureError(
                    f"request {names.get(key, key)!r}: workers saw different steps of it, "
                    f"{accounts[key]} and {account}"
                )
    return accounts


def _kind(values: torch.Tensor) -> tuple[int, str, int]:
    """Dtype and width, so that kinds sort by falling item size."""
    return -values.dtype.itemsize, _DTYPE_NAMES[values.dtype], values.shape[1]


def _raw(values: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The tensor's bytes, without a copy where it is contiguous."""
    raw: npt.NDArray[np.uint8] = values.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return raw


def _bad(reason: str) -> CaptureError:
    return CaptureError(f"a batch of rows from a worker can't be read: {reason}")


def _read_header(data: bytes | bytearray | memoryview) -> tuple[Any, int]:
    """The header's JSON, and where the columns begin."""
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise _bad(f"it begins with {bytes(data[: len(_MAGIC)])!r} instead of {_MAGIC!r}")
    begin = len(_MAGIC) + 8
    end = begin + int.from_bytes(data[len(_MAGIC) : begin], "little")
    if end > len(data):
        raise _bad(f"its {len(data)} bytes end inside the header")
    try:
        return json.loads(bytes(data[begin:end])), end
    except (ValueError, RecursionError):
        raise _bad("its header is not JSON") from None


def _check_header(
    header: Any,
) -> tuple[tuple[str, ...], list[Any], int, list[tuple[Site, torch.dtype, int]]]:
    """Request keys, cached ranges of each, row count, and (site, dtype, width) of each site."""
    if not isinstance(header, dict) or set(header) != {"request", "cached", "rows", "sites"}:
        raise _bad("its header lacks request, cached, rows or sites")
    names, rows, listed = header["request"], header["rows"], header["sites"]
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise _bad("its request keys are not a list of strings")
    if not _is_count(rows) or not isinstance(listed, list):
        raise _bad("its row count or its list of sites is malformed")
    if not isinstance(header["cached"], list) or len(header["cached"]) != len(names):
        raise _bad("its cached ranges are not one list for each request")
    sites = [_check_site(entry) for entry in listed]
    if len({site for site, _, _ in sites}) < len(sites):
        raise _bad("it has a site twice")
    return tuple(names), header["cached"], rows, sites


def _read_accounts(counts: npt.NDArray[np.int64], cached: list[Any]) -> tuple[Account, ...]:
    if (counts < 0).any():
        raise _bad("it counts a situation less than no times")
    table = counts.reshape(-1, len(SITUATIONS)).tolist()
    return tuple(
        [
            Account(Situations._make(row), () if ranges == [] else _check_ranges(ranges))
            for row, ranges in zip(table, cached, strict=True)
        ]
    )


def _check_ranges(ranges: Any) -> tuple[tuple[int, int], ...]:
    try:
        pairs = tuple([(start, stop) for start, stop in ranges])
    except (TypeError, ValueError):
        pairs = ()
    if not pairs or not all(_is_count(end) for pair in pairs for end in pair):
        raise _bad(f"{ranges!r} is not a list of ranges of positions")
    return pairs


def _check_site(entry: Any) -> tuple[Site, torch.dtype, int]:
    if not (isinstance(entry, list) and len(entry) == 3 and _is_count(entry[2])):
        raise _bad(f"{entry!r} is not a site's name, dtype and width")
    name, dtype, width = entry
    if not isinstance(dtype, str) or dtype not in VALUE_DTYPES:
        raise _bad(f"site {name!r} has dtype {dtype!r}, not one of {', '.join(VALUE_DTYPES)}")
    try:
        return parse_site(name), VALUE_DTYPES[dtype], width
    except SiteError as error:
        raise _bad(str(error)) from None


def _is_count(number: object) -> bool:
    return type(number) is int and number >= 0


def _tensor(
    buffer: bytearray | memoryview | bytes, at: int, dtype: torch.dtype, rows: int, width: int
) -> torch.Tensor:
    if not rows * width:  # frombuffer refuses an empty piece
        return torch.empty((rows, width), dtype=dtype)
    flat = torch.frombuffer(buffer, dtype=dtype, count=rows * width, offset=at)
    return flat.reshape(rows, width)


def _arranged(
    batch: RowBatch, keys: Sequence[str], shown: Sequence[str]
) -> tuple[Columns, Mapping[Site, torch.Tensor]]:
    """The rows with `keys` for their request table, ordered by request and position.

    `shown` are these requests' names in errors, here and below.
    """
    index_of = {key: index for index, key in enumerate(keys)}
    new_index = np.array([index_of[key] for key in batch.request], np.int64)
    columns = replace(batch.columns, request=new_index[batch.columns.request])
    order = by_request(columns)
    columns, values = columns.take(order), batch.values
    if not np.array_equal(order, np.arange(len(order))):
        values = {site: tensor[torch.from_numpy(order)] for site, tensor in values.items()}
    twice = (np.diff(columns.request) == 0) & (np.diff(columns.position) == 0)
    if twice.any():
        raise CaptureError(f"{_row(shown, columns, int(twice.argmax()))}: a worker has it twice")
    return columns, values


def _row(shown: Sequence[str], columns: Columns, index: int) -> str:
    return f"request {shown[columns.request[index]]!r}, position {columns.position[index]}"


def _check_same_rows(shown: Sequence[str], one: Columns, other: Columns) -> None:
    """Raise CaptureError unless both have the same rows, taken in the same steps."""
    same = np.array_equal(one.request, other.request) and np.array_equal(
        one.position, other.position
    )
    if not same:
        pairs = [
            set(zip(c.request.tolist(), c.position.tolist(), strict=True)) for c in (one, other)
        ]
        lonely = sorted(pairs[0] ^ pairs[1])
        request, position = lonely[0]
        raise CaptureError(
            f"request {shown[request]!r}, position {position}: one worker has the row and another "
            f"hasn't ({len(lonely)} such rows)"
        )
    differs = one.step != other.step
    if differs.any():
        index = int(differs.argmax())
        raise CaptureError(
            f"{_row(shown, one, index)}: workers took the row in different steps, "
            f"{one.step[index]} and {other.step[index]}"
        )


def _check_same_values(
    site: Site, one: torch.Tensor, other: torch.Tensor, shown: Sequence[str], columns: Columns
) -> None:
    """Raise CaptureError unless both ranks' copies of a site are the same, bit for bit."""
    if one is other:
        return
    if _kind(one) != _kind(other):
        kinds = " and ".join(sorted(f"{t.dtype} x {t.shape[1]}" for t in (one, other)))
        raise CaptureError(f"site {site}: ranks differ in dtype or width: {kinds}")
    # as bytes, so that NaN equals itself and 0.0 isn't -0.0
    differs = one.contiguous().view(torch.uint8) != other.contiguous().view(torch.uint8)
    rows = differs.any(dim=1).nonzero()
    if len(rows):
        raise CaptureError(
            f"site {site}, {_row(shown, columns, int(rows[0]))}: tensor-parallel ranks hold "
            f"different values ({len(rows)} of {len(one)} rows differ); the point is sharded or "
            "was taken before its all-reduce"
        )
