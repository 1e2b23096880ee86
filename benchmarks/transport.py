"""What a drain costs on its way from a worker process to the client, against copying its bytes.

    python benchmarks/transport.py [--pairs N]

A child process holds a batch: 16 requests, one site of 3,584 float32 a row, with each row's columns
and each request's account. One call is: a request to the child over a pipe, packing there, the
bytes through shared memory, the reply, and unpacking here to tensors in memory of our own.

times_memcpy: at 1,024 rows a drain, the call's time over that of numpy's memcpy of the same packed
bytes. Calls and copies alternate, each result is dropped before the next is made, and the figure
is the median of the paired ratios. Both write to fresh memory, as whoever keeps captures does:
glibc is told to map every large block anew, where it would else reuse the block dropped last.
us_per_row_64: at 64 rows a drain, the median call in microseconds a row, with glibc as it is.

Both sizes are printed both ways, fresh and reused. Every batch is compared with what was sent,
outside the timing. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
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
WARM_UP = 3
M_MMAP_THRESHOLD, DEFAULT_THRESHOLD = -3, 128 << 10  # malloc.h, mallopt(3)


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
        sent = sender.send(parts)
        head, plain = (len(sent), sent) if isinstance(sent, bytes) else (sent, b"")
        replies.write(json.dumps(head).encode() + b"\n" + plain)
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
        head = json.loads(replies.readline())
        sent = replies.read(head) if isinstance(head, int) else head
        return unpack(self.receiver.receive([sent])[0])

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
    return (time.perf_counter() - started) * 1e6, made


def measure(client: Client, rows: int, pairs: int) -> dict[str, Any]:
    """Times of alternating calls and copies, in microseconds, and the ratio of the two."""
    sent = make_batch(rows)
    source = np.frombuffer(pack(sent), np.uint8)
    calls, copies = [], []
    for number in range(pairs + WARM_UP):
        call_us, batch = timed(lambda: client.drain(rows))
        check_same(batch, sent)
        del batch
        copy_us, copied = timed(source.copy)
        del copied
        if number >= WARM_UP:
            calls.append(call_us)
            copies.append(copy_us)
    ratios = [call / copy for call, copy in zip(calls, copies, strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 2),
        "call_us": round(statistics.median(calls), 1),
        "memcpy_us": round(statistics.median(copies), 1),
        "us_per_row": round(statistics.median(calls) / rows, 2),
        "us_per_row_fastest": round(min(calls) / rows, 2),
        "bytes": len(source),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=300, help="calls and copies of each kind")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(sys.stdin.buffer, sys.stdout.buffer)
    client, pairs = Client(), arguments.pairs
    results = {f"rows_{rows}_reused": measure(client, rows, pairs) for rows in (64, 1024)}
    # Setting the threshold, even to its default, stops glibc from raising it.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, DEFAULT_THRESHOLD)
    results |= {f"rows_{rows}_fresh": measure(client, rows, pairs) for rows in (64, 1024)}
    client.close()
    figures = {
        "times_memcpy": results["rows_1024_fresh"]["ratio"],
        "us_per_row_64": results["rows_64_reused"]["us_per_row"],
    }
    print(json.dumps({**figures, **results}))


if __name__ == "__main__":
    main()
