from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from strategies import captures
from synthetic import synthetic_capture

from tapcheck.capture import COLUMN_NAMES, VALUE_DTYPES, Capture, Columns, SiteRows
from tapcheck.errors import CaptureFileError
from tapcheck.request import Request
from tapcheck.sites import Site
from tapcheck.storage import _digest, load_capture, save_capture

POST, PRE = Site("resid_post", 0), Site("resid_pre", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("captures")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.safetensors"


def a_capture(dtype: torch.dtype = torch.float32) -> Capture:
    times = np.array([7, 7, 8])
    columns = Columns(np.array([0, 0, 1]), np.array([0, 1, 0]), np.array([0, 0, 1]), times, times)
    empty = Columns(*[np.zeros(0, np.int64)] * 5)
    rows = {
        POST: SiteRows(columns, torch.arange(6.0).reshape(3, 2).to(dtype)),
        PRE: SiteRows(empty, torch.empty((0, 4), dtype=dtype)),
    }
    return Capture((Request("a", (1, 2), (3,)), Request("b", (4,))), rows, {"backend": "hf"})


def same_in_full(one: Capture, other: Capture) -> bool:
    """Equal, in steps, times, order of rows and metadata too."""
    return (
        one == other
        and one.metadata == other.metadata
        and all(
            np.array_equal(getattr(rows.columns, name), getattr(other[site].columns, name))
            for site, rows in one.rows.items()
            for name in COLUMN_NAMES
        )
    )


@given(captures())
def test_loading_gives_back_what_was_saved(folder: Path, capture: Capture) -> None:
    path = folder / "same.safetensors"
    save_capture(capture, path)
    assert same_in_full(load_capture(path), capture)


@pytest.mark.parametrize("dtype", VALUE_DTYPES.values(), ids=VALUE_DTYPES)
def test_every_dtype_is_kept_for_empty_sites_too(path: Path, dtype: torch.dtype) -> None:
    save_capture(a_capture(dtype), path)
    loaded = load_capture(path)
    assert loaded == a_capture(dtype)
    assert [loaded[site].values.dtype for site in (POST, PRE)] == [dtype, dtype]
    assert loaded[PRE].values.shape == (0, 4)


def test_sites_that_share_memory_are_saved_each_in_full(path: Path) -> None:
    whole = torch.arange(8.0).reshape(4, 2)
    columns = a_capture()[POST].columns
    sites = {POST: SiteRows(columns, whole[:3]), PRE: SiteRows(columns, whole[1:])}
    capture = Capture(a_capture().requests, sites)
    save_capture(capture, path)
    assert load_capture(path) == capture


def test_values_stay_on_disk_until_they_are_used(path: Path) -> None:
    capture = a_capture()
    save_capture(capture, path)
    loaded = load_capture(path)
    assert len(loaded) == 3
    assert loaded[POST].columns.position.tolist() == [0, 1, 0]
    raw = capture[POST].values.numpy().tobytes()
    at = path.read_bytes().index(raw)
    with path.open("r+b") as file:
        file.seek(at)
        file.write((capture[POST].values * 2).numpy().tobytes())
    assert torch.equal(loaded[POST].values, capture[POST].values * 2)


def test_a_loaded_capture_can_be_changed_without_changing_its_file(path: Path) -> None:
    save_capture(a_capture(), path)
    load_capture(path)[POST].values[:] = 0
    assert load_capture(path) == a_capture()


def test_saving_replaces_the_file_even_while_it_is_loaded(path: Path) -> None:
    save_capture(a_capture(), path)
    loaded = load_capture(path)
    save_capture(a_capture(torch.bfloat16), path)
    assert loaded == a_capture()
    assert load_capture(path) == a_capture(torch.bfloat16)


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_capture(a_capture(), path)

    def full(tensors: object, target: Path, metadata: object) -> None:
        Path(target).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("tapcheck.storage.save_file", full)
    with pytest.raises(CaptureFileError, match="no space left"):
        save_capture(a_capture(torch.bfloat16), path)
    assert load_capture(path) == a_capture()
    assert list(path.parent.iterdir()) == [path]


@given(captures(), st.data())
def test_a_truncated_file_is_refused(folder: Path, capture: Capture, data: st.DataObject) -> None:
    path = folder / "cut.safetensors"
    save_capture(capture, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(CaptureFileError, match=re.escape(str(path))):
        load_capture(path)


@given(captures(), st.data())
def test_a_flipped_header_byte_is_refused_or_harmless(
    folder: Path, capture: Capture, data: st.DataObject
) -> None:
    path = folder / "flipped.safetensors"
    save_capture(capture, path)
    whole = bytearray(path.read_bytes())
    header_end = 8 + int.from_bytes(whole[:8], "little")
    whole[data.draw(st.integers(0, header_end - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    try:
        loaded = load_capture(path)
    except CaptureFileError:
        return
    assert same_in_full(loaded, capture)


def test_most_flips_in_a_header_are_refused(path: Path) -> None:
    save_capture(a_capture(), path)
    whole = path.read_bytes()
    places = range(0, 8 + int.from_bytes(whole[:8], "little"), 7)
    refused = 0
    for at in places:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            load_capture(path)
        except CaptureFileError:
            refused += 1
    assert refused > 0.9 * len(places)


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(folder: Path, data: bytes) -> None:
    path = folder / "foreign.safetensors"
    path.write_bytes(data)
    with pytest.raises(CaptureFileError, match="damaged, truncated or not a safetensors"):
        load_capture(path)


def test_a_damaged_column_is_refused(path: Path) -> None:
    save_capture(a_capture(), path)
    whole = path.read_bytes()
    at = whole.index(np.array([0, 1, 0]).tobytes())
    path.write_bytes(whole[:at] + b"\1" + whole[at + 1 :])
    with pytest.raises(CaptureFileError, match="checksum"):
        load_capture(path)


def test_a_safetensors_file_of_something_else_is_refused(path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(CaptureFileError, match="not of a capture"):
        load_capture(path)


def test_a_missing_file_a_folder_and_a_missing_folder_are_errors(tmp_path: Path) -> None:
    for absent in (tmp_path / "absent", tmp_path):
        with pytest.raises(CaptureFileError, match="there is no such file"):
            load_capture(absent)
    with pytest.raises(CaptureFileError, match="doesn't exist; make it first"):
        save_capture(a_capture(), tmp_path / "absent" / "run.safetensors")
    with pytest.raises(CaptureFileError, match="can't be written"):
        save_capture(a_capture(), tmp_path)


@pytest.mark.parametrize("metadata", [{"a": {1}}, {"a": float("nan")}, {(1, 2): 3}])
def test_metadata_that_is_not_json_is_refused(path: Path, metadata: dict[str, object]) -> None:
    with pytest.raises(CaptureFileError, match="not JSON"):
        save_capture(Capture((), {}, metadata), path)
    assert not path.exists()


Change = Callable[[dict[str, str], dict[str, torch.Tensor]], object]


def rewrite(path: Path, change: Change) -> None:
    """Save a capture with its header and tensors changed, under a checksum that fits them."""
    save_capture(a_capture(), path)
    with safe_open(str(path), framework="pt") as file:
        header = dict(file.metadata())
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    change(header, tensors)
    del header["sha256"]
    arrays = {name: t.numpy() for name, t in tensors.items() if not name.startswith("values/")}
    save_file(tensors, path, metadata={**header, "sha256": _digest(header, arrays)})


def in_header(key: str, text: str) -> Change:
    return lambda header, tensors: header.update({key: text})


def in_tensors(name: str, tensor: torch.Tensor) -> Change:
    return lambda header, tensors: tensors.update({name: tensor})


def without(name: str) -> Change:
    return lambda header, tensors: tensors.pop(name)


def test_rewriting_alone_changes_nothing(path: Path) -> None:
    rewrite(path, lambda header, tensors: None)
    assert load_capture(path) == a_capture()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (in_header("format_version", "2"), "format version is 2, this tapcheck"),
        (in_header("format", "notes"), "not of a capture"),
        (in_header("request_ids", '["a", "a"]'), "'a' stands for two requests"),
        (in_header("request_ids", '["a"]'), "don't fit its requests"),
        (in_header("request_ids", "[1, 2]"), "list of strings"),
        (in_header("request_ids", "[" * 100_000), "not JSON"),
        (in_header("sites", "[]"), "metadata is malformed"),
        (in_header("sites", "{}"), "tensors of no known site"),
        (in_header("sites", '{"resid_post.7": ["float32", [3, 2]]}'), "resid_post.7 is incomplete"),
        (in_header("sites", '{"resid_post.0": ["float16", [3, 2]]}'), "metadata says"),
        (in_header("metadata", "7"), "metadata is malformed"),
        (in_tensors("columns/resid_post.0/step", torch.zeros(2, dtype=torch.int64)), "same shape"),
        (in_tensors("columns/resid_post.0/step", torch.zeros(3)), "not int64"),
        (in_tensors("columns/resid_post.0/request", torch.tensor([0, 1, 2])), "outside the 2 req"),
        (in_tensors("columns/resid_post.0/request", torch.tensor([0, -1, 1])), "outside the 2 req"),
        (in_tensors("values/resid_post.0", torch.zeros(3, 3)), "metadata says"),
        (in_tensors("values/resid_post.9", torch.zeros(3, 3)), "no known site"),
        (in_tensors("requests/prompt_length", torch.tensor([0, 1])), "don't fit its requests"),
        (in_tensors("requests/prompt_length", torch.tensor([4, 1])), "don't fit its requests"),
        (in_tensors("requests/length", torch.tensor([3, 2])), "don't fit its requests"),
        (without("requests/length"), "don't fit its requests"),
        (without("values/resid_post.0"), "resid_post.0 is incomplete"),
        (without("columns/resid_pre.1/unix_ns"), "resid_pre.1 is incomplete"),
    ],
)
def test_an_inconsistent_file_is_refused_with_the_reason(
    path: Path, change: Change, reason: str
) -> None:
    rewrite(path, change)
    with pytest.raises(CaptureFileError, match=reason) as caught:
        load_capture(path)
    assert str(path) in str(caught.value)


def test_the_file_s_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
    save_capture(synthetic_capture(torch.float32), tmp_path / "capture.safetensors")
    (tmp_path / "other").touch()
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1
