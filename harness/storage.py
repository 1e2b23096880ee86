"""Captures as files: one safetensors file each, with JSON metadata in its header.

Tensors: `values/SITE` in the captured dtype, `columns/SITE/NAME` and `requests/NAME` as int64.
Header metadata: `format` and `format_version`, `tapcheck_version`, and as JSON `request_ids`,
`sites` (dtype and shape of each site's values) and `metadata` (the capture's own). `sha256`
covers all of it but the values, which stay on disk until they are used.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tapcheck.capture import COLUMN_NAMES, VALUE_DTYPES, Capture, Columns, IntArray, SiteRows
from tapcheck.errors import CaptureError, CaptureFileError, SiteError
from tapcheck.request import Request
from tapcheck.sites import parse_site

FORMAT = "tapcheck capture"
FORMAT_VERSION = "1"

_DTYPE_NAMES = {dtype: name for name, dtype in VALUE_DTYPES.items()}
_FILE_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MAP_NORESERVE = 0x4000  # mman-common.h; Python has the name from 3.13 on


def save_capture(capture: Capture, path: str | Path) -> None:
    """Write the capture to `path`, replacing what is there; readers see the old file or the new.

    Raises CaptureFileError when it can't be written or its metadata is not JSON.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise CaptureFileError(f"{path}: the folder {path.parent} doesn't exist; make it first")
    try:
        metadata = json.dumps(dict(capture.metadata), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CaptureFileError(f"{path}: the capture's metadata is not JSON: {error}") from None
    arrays = _request_arrays(capture.requests)
    for site in capture.sites:
        for name in COLUMN_NAMES:
            column = getattr(capture[site].columns, name)
            arrays[f"columns/{site}/{name}"] = np.array(column, np.int64)
    values = {site: capture[site].values.detach().contiguous() for site in capture.sites}
    header = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "tapcheck_version": version("tapcheck"),
        "request_ids": json.dumps([request.id for request in capture.requests]),
        "sites": json.dumps(
            {str(site): [_DTYPE_NAMES[v.dtype], list(v.shape)] for site, v in values.items()}
        ),
        "metadata": metadata,
    }
    header["sha256"] = _digest(header, arrays)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    tensors |= {f"values/{site}": tensor for site, tensor in values.items()}
    _write_whole(_without_overlap(tensors), header, path)


def load_capture(path: str | Path) -> Capture:
    """The capture in `path`; its values are mapped from the file and read when they are used.

    Raises CaptureFileError when the file is absent, damaged, of another format or version.
    """
    path = Path(path)
    if not path.is_file():
        raise CaptureFileError(f"{path}: there is no such file")
    try:
        # By numpy: torch would ask for as much memory as the file has, to map it.
        with safe_open(str(path), framework="np") as file:
            return _read(file, path)
    except SafetensorError as error:
        reason = f"it is damaged, truncated or not a safetensors file ({error})"
    except (CaptureError, CaptureFileError, OSError, SiteError) as error:
        reason = str(error)
    raise CaptureFileError(f"{path} can't be read as a capture: {reason}")


def _request_arrays(requests: Sequence[Request]) -> dict[str, IntArray]:
    # as tensors: a header is limited to 100 MB, which the tokens of many long prompts exceed
    return {
        "requests/token_ids": np.fromiter(chain(*(r.token_ids for r in requests)), np.int64),
        "requests/prompt_length": np.array([r.prompt_length for r in requests], np.int64),
        "requests/length": np.array([len(r.token_ids) for r in requests], np.int64),
    }


def _digest(header: Mapping[str, str], arrays: Mapping[str, IntArray]) -> str:
    digest = hashlib.sha256()
    for key in sorted(header):
        digest.update(f"{key} {len(header[key].encode())} {header[key]}\n".encode())
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].shape}\n".encode())
        digest.update(arrays[name].data)
    return digest.hexdigest()


def _without_overlap(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A copy for each tensor that shares memory with another, which safetensors refuses."""
    end, kept = 0, {}
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        kept[name] = tensor.clone() if tensor.data_ptr() < end else tensor
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return kept


def _write_whole(tensors: dict[str, torch.Tensor], header: dict[str, str], path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # by the umask; safetensors would leave the owner's only
        save_file(tensors, temporary, metadata=header)
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise CaptureFileError(f"{path}: the capture can't be written: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise CaptureFileError(reason)


def _read(file: Any, path: Path) -> Capture:
    """The capture in an open safetensors file; every message is completed by the file's name."""
    header = dict(file.metadata() or {})
    _require(header.get("format") == FORMAT, "it is a safetensors file, but not of a capture")
    found = header.get("format_version")
    _require(
        found == FORMAT_VERSION,
        f"its format version is {found}, this tapcheck ({version('tapcheck')}) reads "
        f"{FORMAT_VERSION}; it was written by tapcheck {header.get('tapcheck_version')}",
    )
    names = set(file.keys())
    arrays = {name: _int_array(file, name) for name in names if not name.startswith("values/")}
    claimed = header.pop("sha256", None)
    _require(_digest(header, arrays) == claimed, "its checksum doesn't match: it is damaged")
    requests = _read_requests(_parsed(header, "request_ids"), arrays)
    sites = _parsed(header, "sites")
    metadata = _parsed(header, "metadata")
    _require(isinstance(sites, dict) and isinstance(metadata, dict), "its metadata is malformed")
    mapped = _map_values(path)
    rows = {}
    for site, kind in sites.items():
        parts = [f"columns/{site}/{name}" for name in COLUMN_NAMES]
        _require(names.issuperset([f"values/{site}", *parts]), f"site {site} is incomplete")
        dtype, shape = _kind(file, f"values/{site}")
        _require(
            kind == [_FILE_DTYPES.get(dtype), shape],
            f"site {site} holds {dtype} of shape {shape}, but its metadata says {kind}",
        )
        values = mapped[f"values/{site}"]
        rows[parse_site(site)] = SiteRows(Columns(*[arrays[part] for part in parts]), values)
    _require(
        len(names) == 3 + len(sites) * (1 + len(COLUMN_NAMES)), "it has tensors of no known site"
    )
    return Capture(requests, rows, metadata)


def _kind(file: Any, name: str) -> tuple[str, list[int]]:
    """The dtype, as safetensors names it, and the shape of a tensor, which isn't read."""
    piece = file.get_slice(name)
    return piece.get_dtype(), list(piece.get_shape())


def _int_array(file: Any, name: str) -> IntArray:
    dtype, _ = _kind(file, name)
    _require(dtype == "I64", f"tensor {name} is {dtype}, not int64")
    array: IntArray = file.get_tensor(name)
    return array


def _map_values(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of values in a safetensors file that was found sound.

    The file is read as they are used, and never written: a page that is changed is copied first.
    """
    with path.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(begin - 8))
        memory = _map_privately(file.fileno())
    tensors = {}
    for name, entry in header.items():
        if not name.startswith("values/") or entry["dtype"] not in _FILE_DTYPES:
            continue
        dtype, shape = VALUE_DTYPES[_FILE_DTYPES[entry["dtype"]]], entry["shape"]
        count, offset = math.prod(shape), begin + entry["data_offsets"][0]
        if count:
            values = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
            tensors[name] = values.reshape(shape)
        else:  # frombuffer refuses an empty piece
            tensors[name] = torch.empty(shape, dtype=dtype)
    return tensors


def _map_privately(file: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    # Else Linux refuses a file that is larger than its memory, lest all of it be changed.
    flags, rights = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(file, 0, flags=flags, prot=rights)


def _parsed(header: Mapping[str, str], key: str) -> Any:
    try:
        return json.loads(header.get(key, ""))
    except (ValueError, RecursionError):
        raise CaptureFileError(f"{key} in its metadata is not JSON") from None


def _read_requests(ids: Any, arrays: Mapping[str, IntArray]) -> tuple[Request, ...]:
    _require(
        isinstance(ids, list) and all(isinstance(name, str) for name in ids),
        "its request ids are not a list of strings",
    )
    named = [arrays.get(f"requests/{n}") for n in ("token_ids", "prompt_length", "length")]
    tokens, prompt_length, length = [np.zeros(0, np.int64) if a is None else a for a in named]
    _require(
        prompt_length.shape == length.shape == (len(ids),)
        and bool(((prompt_length > 0) & (prompt_length <= length)).all())
        and tokens.shape == (int(length.sum()),),
        "its token ids don't fit its requests",
    )
    ends = np.cumsum(length)
    requests = []
    for name, begin, cut, end in zip(
        ids, ends - length, ends - length + prompt_length, ends, strict=True
    ):
        requests.append(Request(name, tuple(tokens[begin:cut]), tuple(tokens[cut:end])))
    return tuple(requests)
