from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import row_batches

from tapcheck.capture import COLUMN_NAMES, VALUE_DTYPES, Columns
from tapcheck.errors import CaptureError
from tapcheck.layout import SITUATIONS, Account, Situations
from tapcheck.sites import Site
from tapcheck.transport import RowBatch, merge, pack, packed_parts, unpack

PRE, POST = Site("resid_pre", 0), Site("resid_post", 0)
ACCOUNT = Account(Situations(*range(len(SITUATIONS))), ((0, 16), (32, 48)))


def columns(*pairs: tuple[int, int], step: int = 0, time: int = 0) -> Columns:
    request, position = np.array(pairs, np.int64).reshape(-1, 2).T
    steps, times = np.full(len(pairs), step), np.full(len(pairs), time)
    return Columns(request, position, steps, times, times)


def rank(
    *pairs: tuple[int, int], keys: tuple[str, ...] = ("a", "b"), site: Site = POST
) -> RowBatch:
    """One site of width 2, each value made from its request and position."""
    tensor = torch.tensor([[ord(keys[r]), p] for r, p in pairs], dtype=torch.float32).reshape(-1, 2)
    return RowBatch(keys, columns(*pairs), {site: tensor}, (ACCOUNT,) * len(keys))


def content(batch: RowBatch) -> tuple[Any, ...]:
    """Everything in a batch, as comparable data."""
    tensors = {
        site: (tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).tolist())
        for site, tensor in batch.values.items()
    }
    named = [getattr(batch.columns, name).tolist() for name in COLUMN_NAMES]
    return batch.request, batch.accounts, named, tensors


def repacked(batch: RowBatch, **changes: Any) -> bytes:
    """The packed batch with its header changed."""
    data = pack(batch)
    end = 16 + int.from_bytes(data[8:16], "little")
    header = json.dumps({**json.loads(data[16:end]), **changes}).encode()
    return data[:8] + len(header).to_bytes(8, "little") + header + data[end:]


@given(row_batches(), st.booleans())
def test_unpacking_gives_back_what_was_packed(batch: RowBatch, writable: bool) -> None:
    data = pack(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        received = unpack(bytearray(data) if writable else data)
    assert content(received) == content(batch)


@given(row_batches())
def test_the_parts_are_the_packed_bytes(batch: RowBatch) -> None:
    assert b"".join(packed_parts(batch)) == pack(batch)


def test_rows_are_not_copied_on_the_way_into_parts_nor_out_of_writable_bytes() -> None:
    batch = rank((0, 3), (1, 0))
    values = packed_parts(batch)[-1]
    batch.values[POST][0, 0] = 5.0
    assert values[:4] == np.float32(5.0).tobytes()
    data = bytearray(pack(batch))
    received = unpack(memoryview(data))
    received.values[POST][0, 0] = 7.0
    assert unpack(data).values[POST][0, 0] == 7.0


@pytest.mark.parametrize("dtype", VALUE_DTYPES.values(), ids=VALUE_DTYPES)
def test_every_dtype_is_kept(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1.5, -0.0, float("nan")]], dtype=dtype)
    batch = RowBatch(("a",), columns((0, 4)), {POST: tensor}, (ACCOUNT,))
    assert content(unpack(pack(batch))) == content(batch)
    assert unpack(pack(batch)).values[POST].dtype == dtype


def test_a_view_of_a_larger_tensor_is_packed_as_its_own_rows() -> None:
    every_other = torch.arange(12.0).reshape(2, 6)[:, ::2]
    batch = RowBatch(("a",), columns((0, 0), (0, 1)), {POST: every_other}, (ACCOUNT,))
    assert torch.equal(unpack(pack(batch)).values[POST], every_other)


def test_an_empty_batch_survives() -> None:
    batch = RowBatch((), columns(), {}, ())
    assert content(unpack(pack(batch))) == content(batch)


@given(row_batches(), st.data())
def test_a_batch_cut_short_or_grown_is_refused(batch: RowBatch, data: st.DataObject) -> None:
    packed = pack(batch)
    cut = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(CaptureError, match="can't be read"):
        unpack(packed[:cut])
    with pytest.raises(CaptureError, match="can't be read"):
        unpack(packed + b"\0")


@given(st.binary(max_size=64), st.booleans())
def test_foreign_bytes_are_refused(data: bytes, begins_right: bool) -> None:
    magic = pack(RowBatch((), columns(), {}, ()))[:8]
    assume(begins_right or not data.startswith(magic))
    with pytest.raises(CaptureError, match="can't be read"):
        unpack(magic + data if begins_right else data)


@given(row_batches(), st.data())
def test_a_flipped_byte_never_escapes_as_another_error(
    batch: RowBatch, data: st.DataObject
) -> None:
    packed = bytearray(pack(batch))
    at = data.draw(st.integers(0, len(packed) - 1))
    packed[at] ^= data.draw(st.integers(1, 255))
    try:
        received = unpack(packed)
    except CaptureError:
        return
    assert content(unpack(pack(received))) == content(received)  # a whole batch, if another


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"request": "ab"}, "list of strings"),
        ({"request": [1, 2]}, "list of strings"),
        ({"request": ["a"]}, "not one list for each request"),
        ({"request": ["a"], "cached": [[]]}, "header promises"),
        ({"cached": []}, "not one list for each request"),
        ({"cached": {}}, "not one list for each request"),
        *(
            ({"cached": [[], ranges]}, "not a list of ranges")
            for ranges in (
                [0, 1],
                [[0]],
                [[0, 1, 2]],
                [[0, -1]],
                [[0, 0.5]],
                [[0, True]],
                "ab",
                5,
                {},
                None,
            )
        ),
        ({"request": ["a", "a"]}, "same request key twice"),
        ({"rows": -1}, "row count"),
        ({"rows": True}, "row count"),
        ({"rows": 1}, "header promises"),
        ({"sites": {}}, "list of sites"),
        ({"sites": [["resid_post.0", "float32"]]}, "name, dtype and width"),
        ({"sites": [["resid_post.0", "float32", -2]]}, "name, dtype and width"),
        ({"sites": [["resid_post.0", "float32", 3]]}, "header promises"),
        ({"sites": [["resid_post.0", "int32", 2]]}, "dtype 'int32'"),
        ({"sites": [["resid_post.0", [], 2]]}, "dtype"),
        ({"sites": [["resid_psot.0", "float32", 2]]}, "did you mean 'resid_post'"),
        ({"sites": [[7, "float32", 2]]}, "not a site"),
        ({"sites": [["resid_post.0", "float32", 1]] * 2}, "a site twice"),
        ({"more": 1}, "lacks request, cached, rows or sites"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(changes: dict[str, Any], reason: str) -> None:
    batch = rank((0, 3), (1, 0))
    assert content(unpack(repacked(batch))) == content(batch)
    with pytest.raises(CaptureError, match=reason):
        unpack(repacked(batch, **changes))


@pytest.mark.parametrize("header", [b"[1]", b"not json", b"\xff", b"[" * 100_000])
def test_a_header_that_is_no_header_is_refused(header: bytes) -> None:
    magic = pack(RowBatch((), columns(), {}, ()))[:8]
    with pytest.raises(CaptureError, match="its header"):
        unpack(magic + len(header).to_bytes(8, "little") + header)


def test_a_negative_count_is_refused() -> None:
    batch = replace(rank((0, 0)), accounts=(ACCOUNT, Account(Situations(preemptions=-1))))
    with pytest.raises(CaptureError, match="less than no times"):
        unpack(pack(batch))


def test_rows_of_an_absent_request_are_refused() -> None:
    with pytest.raises(CaptureError, match="outside its 1 requests"):
        RowBatch(("a",), columns((1, 0)), {POST: torch.zeros(1, 2)}, (ACCOUNT,))


def test_a_negative_position_is_refused() -> None:
    with pytest.raises(CaptureError, match="negative position"):
        rank((0, -1))


def test_values_that_do_not_fit_the_columns_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"site resid_post.0 .* must be \[1, width\]"):
        RowBatch(("a",), columns((0, 0)), {POST: torch.zeros(2, 2)}, (ACCOUNT,))
    with pytest.raises(CaptureError, match=r"torch.int64"):
        RowBatch(("a",), columns((0, 0)), {POST: torch.zeros(1, 2, dtype=torch.int64)}, (ACCOUNT,))


def test_a_batch_without_an_account_for_each_request_is_refused() -> None:
    with pytest.raises(CaptureError, match="1 accounts for 2 requests"):
        replace(rank((0, 0)), accounts=(ACCOUNT,))


@given(row_batches(), st.data())
def test_merging_does_not_depend_on_the_order_of_arrival(
    batch: RowBatch, data: st.DataObject
) -> None:
    """Split one batch into workers that hold some sites each, in orders of their own."""
    assume(batch.values)
    workers = []
    for site in [*batch.values, *data.draw(st.lists(st.sampled_from(list(batch.values))))]:
        order = np.array(data.draw(st.permutations(range(len(batch)))), np.int64)
        renamed = data.draw(st.permutations(range(len(batch.request))))
        taken = batch.columns.take(order)
        new_index = np.argsort(np.array(renamed, np.int64))
        taken = replace(taken, request=new_index[taken.request])
        late = data.draw(st.integers(0, 9))
        taken = replace(taken, monotonic_ns=taken.monotonic_ns + late)
        keys = tuple(batch.request[old] for old in renamed)
        owed = tuple(batch.accounts[old] for old in renamed)
        values = {site: batch.values[site][torch.from_numpy(order)]}
        workers.append(RowBatch(keys, taken, values, owed))
    merged = merge(workers)
    assert content(merged) == content(merge(data.draw(st.permutations(workers))))
    assert set(merged.values) == set(batch.values)
    rows = list(zip(merged.columns.request, merged.columns.position, strict=True))
    assert rows == sorted(rows)
    tables = {worker.request for worker in workers}
    assert merged.request == (tables.pop() if len(tables) == 1 else tuple(sorted(batch.request)))
    assert len(merged) == len(batch)
    accounts = dict(zip(batch.request, batch.accounts, strict=True))
    assert dict(zip(merged.request, merged.accounts, strict=True)) == accounts


def test_pipeline_stages_bring_different_sites() -> None:
    early = rank((0, 0), (0, 1), site=PRE)
    late = rank((0, 1), (0, 0), site=POST)
    merged = merge([late, early])
    assert list(merged.values) == [PRE, POST]
    assert merged.columns.position.tolist() == [0, 1]
    assert merged.values[POST].tolist() == merged.values[PRE].tolist() == [[97, 0], [97, 1]]


def test_rank_copies_are_kept_once_with_the_latest_time() -> None:
    one, other = rank((0, 0)), rank((0, 0))
    other = replace(other, columns=columns((0, 0), time=5))
    merged = merge([one, other])
    assert len(merged) == 1
    assert merged.columns.monotonic_ns.tolist() == [5]


def test_a_worker_that_taps_nothing_is_left_out() -> None:
    idle = RowBatch(("a", "b"), columns(), {}, (ACCOUNT,) * 2)
    merged = merge([idle, rank((1, 2))])
    assert content(merged) == content(rank((1, 2)))
    assert content(merge([idle])) == content(idle)


def test_rank_copies_that_differ_name_site_request_and_position() -> None:
    one, other = rank((0, 0), (1, 2), (1, 3)), rank((0, 0), (1, 2), (1, 3))
    other.values[POST][1, 0] += 1
    with pytest.raises(CaptureError, match=r"resid_post.0, request 'b', position 2.*1 of 3 rows"):
        merge([one, other])


def test_rank_copies_are_compared_bit_for_bit() -> None:
    one, other = rank((0, 0)), rank((0, 0))
    one.values[POST][:] = float("nan")
    other.values[POST][:] = float("nan")
    assert len(merge([one, other])) == 1
    one.values[POST][:], other.values[POST][:] = 0.0, -0.0
    with pytest.raises(CaptureError, match="different values"):
        merge([one, other])


def test_rank_copies_of_another_kind_are_refused() -> None:
    other = replace(rank((0, 0)), values={POST: torch.zeros(1, 2, dtype=torch.bfloat16)})
    with pytest.raises(CaptureError, match=r"resid_post.0: ranks differ in dtype"):
        merge([rank((0, 0)), other])


def test_a_row_that_one_worker_lacks_is_an_error() -> None:
    with pytest.raises(CaptureError, match="request 'b', position 1: one worker has"):
        merge([rank((0, 0), (1, 1)), rank((0, 0), site=PRE)])


def test_a_row_that_a_worker_has_twice_is_an_error() -> None:
    with pytest.raises(CaptureError, match="request 'b', position 1: a worker has it twice"):
        merge([rank((1, 1), (1, 1))])


def test_an_error_names_a_request_by_the_name_that_it_is_given() -> None:
    twice, alone = rank((1, 1), (1, 1)), rank((1, 1))
    names = {key: f"asked for as {key}" for key in twice.request}
    with pytest.raises(CaptureError, match=rf"request 'asked for as {twice.request[1]}', position"):
        merge([twice], names)
    with pytest.raises(CaptureError, match=r"request 'asked for as .', position 0: one worker has"):
        merge([alone, rank((0, 0))], names)


def test_workers_that_took_a_row_in_different_steps_are_an_error() -> None:
    other = replace(rank((0, 0), site=PRE), columns=columns((0, 0), step=1))
    with pytest.raises(CaptureError, match=r"request 'a', position 0: .* different steps, 0 and 1"):
        merge([rank((0, 0)), other])


def test_workers_whose_accounts_of_a_request_differ_are_an_error() -> None:
    other = replace(rank((0, 0), site=PRE), accounts=(ACCOUNT, Account(Situations(), ((0, 16),))))
    with pytest.raises(CaptureError, match="request 'b': workers saw different steps of it"):
        merge([rank((0, 0)), other])
