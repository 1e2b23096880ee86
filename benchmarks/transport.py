"""What a drain costs on its way from a worker process to the client, against copying its bytes.

    python benchmarks/transport.py [--pairs N]

A child process holds a batch: 16 requests, one site of 3,584 float32 a row, with each row's columns
and each request's account. One call is: a request to the child over a pipe, packing there, the
bytes through shared memory, the reply, and unpacking here to tensors, in memory of our own.

`times_memcpy` (1,024 rows a drain): the call's time over that of one memcpy of the same packed
bytes into newly allocated memory. Calls and copies alternate, the figure is the median of
the paired ratios, and what both made is held (as captures are) for 8 further pairs, so that the
allocator gives each of them fresh memory. `times_memcpy_recycled` is the same with each result
dropped at once, so that the allocator gives back warm memory, which makes the memcpy cheapest.
`us_per_row_64` (64 rows a drain): microseconds a row of the whole call, the median of all calls.

Prints one JSON object. Every batch is compared with what was sent, outside the timing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import IO, Any, TypeVar

import numpy as np
import torch

from tapcheck.capture import COLUMN_NAMES, Columns
from tapcheck.handover import Receiver, Sender
from tapcheck.layout import SITUATIONS, Account, Situations
from tapcheck.sites import Site
from tapcheck.transport import RowBatch, pack, packed_parts, unpack

R = TypeVar("R")

SITE = Site("resid_post", 12)
REQUESTS, WIDTH = 16, 3584
HELD = 8


def make_batch(rows: int) -> RowBatch:
    """The same batch in both processes: rows split evenly over the requests."""
    each = rows // REQUESTS
    request, position = np.divmod(np.arange(rows, dtype=np.int64), each)
    times = 1_700_000_000_000_000_000 + position
    values = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    account = Account(Situations(*range(len(SITUATIONS))), ((0, 16),))
    return RowBatch(
        tuple(f"tapcheck-{index:08d}" for index in range(REQUESTS)),
        Columns(request, position, position.copy(), times, times.copy()),
        {SITE: values},
        (account,) * REQUESTS,
    )


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """The child: answers each line, a number of rows, with a handle or with packed bytes."""
    sender, batches = Sender(), {}
    for line in requests:
        rows = int(line)
        if rows not in batches:
            batches[rows] = make_batch(rows)
        parts = packed_parts(batches[rows])
        handle = sender.send(parts)
        plain = b"" if handle else b"".join(parts)
        replies.write(json.dumps(handle or len(plain)).encode() + b"\n" + plain)
        replies.flush()


class Client:
    """Asks the child for a drain."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "--serve"]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.receiver = Receiver()

    def drain(self, rows: int) -> RowBatch:
        requests, replies = self.child.stdin, self.child.stdout
        assert requests is not None
        assert replies is not None
        requests.write(b"%d\n" % rows)
        requests.flush()
        handle = json.loads(replies.readline())
        if isinstance(handle, int):
            return unpack(replies.read(handle))
        return unpack(self.receiver.receive(handle))

    def close(self) -> None:
        self.child.communicate()
        self.receiver.close()


def check_same(got: RowBatch, sent: RowBatch) -> None:
    assert (got.request, got.accounts) == (sent.request, sent.accounts)
    for name in COLUMN_NAMES:
        assert np.array_equal(getattr(got.columns, name), getattr(sent.columns, name)), name
    assert list(got.values) == [SITE]
    assert torch.equal(got.values[SITE], sent.values[SITE]), "rows differ from those sent"


def timed(act: Callable[[], R]) -> tuple[float, R]:
    started = time.perf_counter()
    made = act()
    return time.perf_counter() - started, made


def measure(client: Client, rows: int, pairs: int, held: int) -> dict[str, Any]:
    """Medians over alternating calls and copies; results are dropped after `held` pairs."""
    sent = make_batch(rows)
    source = np.frombuffer(pack(sent), np.uint8)
    kept: deque[tuple[RowBatch, Any]] = deque(maxlen=held)
    times: list[tuple[float, float]] = []
    for number in range(-3, pairs):  # three to warm up
        call_s, batch = timed(lambda: client.drain(rows))
        check_same(batch, sent)
        kept.append((batch, None))
        del batch
        copy_s, copied = timed(source.copy)
        kept.append((sent, copied))
        del copied
        if number >= 0:
            times.append((call_s, copy_s))
    return {
        "ratio": round(statistics.median(call / copy for call, copy in times), 2),
        "call_us": round(statistics.median(call for call, _ in times) * 1e6, 1),
        "memcpy_us": round(statistics.median(copy for _, copy in times) * 1e6, 1),
        "fastest_call_us": round(min(call for call, _ in times) * 1e6, 1),
        "bytes": len(source),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200, help="calls for each figure")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(sys.stdin.buffer, sys.stdout.buffer)
    client = Client()
    fresh = measure(client, 1024, arguments.pairs, 2 * HELD)
    recycled = measure(client, 1024, arguments.pairs, 0)
    small = measure(client, 64, arguments.pairs, 2 * HELD)
    client.close()
    result = {
        "times_memcpy": fresh["ratio"],
        "us_per_row_64": round(small["call_us"] / 64, 2),
        "times_memcpy_recycled": recycled["ratio"],
        "pairs": arguments.pairs,
        "rows_1024": fresh,
        "rows_1024_recycled": recycled,
        "rows_64": small,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
