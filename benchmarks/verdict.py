"""What a verdict costs on a large capture, beside torch.testing.assert_close on the same tensors.

    python benchmarks/verdict.py [--tokens 2000] [--layers 32] [--width 3584] [--pairs 3]

Two bfloat16 captures on disk, resid_post at every layer, that differ by rounding noise. Full
verdicts with every row's metrics and plain assert_close alternate, both from the files:
`times_assert_close` is the median of the paired time ratios. `peak_mb` is how far memory rose at
most above what the process held before, in a process of its own that makes one verdict; pages that
are mapped from the files and can be given back at any time are told apart in `peak_anonymous_mb`.
`diagnosis_s` is the time of the whole verdict, diagnosis included, when one capture's layers are
off by one. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tapcheck import load_capture
from tapcheck.capture import Capture, Columns, SiteRows
from tapcheck.checks.equivalence import compare_captures
from tapcheck.request import Request
from tapcheck.sites import Site
from tapcheck.storage import save_capture

REQUESTS = 4
NOISE = 1 / 256  # of bfloat16


def make_captures(folder: Path, tokens: int, layers: int, width: int) -> tuple[Path, Path, Path]:
    """The files of a capture, of another that differs by noise, and of one that is a layer off."""
    each = tokens // REQUESTS
    requests = tuple(Request(str(i), tuple(range(each))) for i in range(REQUESTS))
    request, position = np.divmod(np.arange(each * REQUESTS, dtype=np.int64), each)
    columns = Columns(request, position, position, position, position)
    generator = torch.Generator().manual_seed(0)
    right, noisy = {}, {}
    for layer in range(layers):
        exact = torch.randn(len(request), width, generator=generator)
        noise = torch.randn(len(request), width, generator=generator)
        site = Site("resid_post", layer)
        right[site] = SiteRows(columns, exact.bfloat16())
        noisy[site] = SiteRows(columns, (exact + NOISE * noise).bfloat16())
    off = {site: noisy[Site("resid_post", (site.layer or 0) ^ 1)] for site in noisy}
    paths = (folder / "right", folder / "noisy", folder / "off")
    for path, rows in zip(paths, (right, noisy, off), strict=True):
        save_capture(Capture(requests, rows), path)
    return paths


def verdict(actual: Path, expected: Path) -> bool:
    return compare_captures(load_capture(actual), load_capture(expected)).passed


def plain(actual: Path, expected: Path) -> None:
    mine, theirs = load_capture(actual), load_capture(expected)
    for site in mine.sites:
        torch.testing.assert_close(mine[site].values, theirs[site].values, rtol=1.0, atol=1.0)


def timed(act: Callable[[], Any]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def memory_mb() -> dict[str, float]:
    """What this process holds now, by /proc: in all, and not mapped from a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    held = dict(line.split(":", 1) for line in lines)
    return {
        key: int(held[name].split()[0]) / 1024
        for key, name in (("peak_mb", "VmRSS"), ("peak_anonymous_mb", "RssAnon"))
    }


def peak_memory(act: Callable[[], Any]) -> dict[str, float]:
    """How far memory rose above its start while `act` ran, sampled every few milliseconds."""
    before, done = memory_mb(), threading.Event()
    highest = dict.fromkeys(before, 0.0)

    def watch() -> None:
        while not done.wait(0.005):
            for key, now in memory_mb().items():
                highest[key] = max(highest[key], now - before[key])

    watcher = threading.Thread(target=watch)
    watcher.start()
    act()
    done.set()
    watcher.join()
    return {key: round(value, 1) for key, value in highest.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=3584)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--memory-of", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        print(json.dumps(peak_memory(lambda: verdict(*arguments.memory_of))))
        return
    with tempfile.TemporaryDirectory() as folder:
        right, noisy, off = make_captures(
            Path(folder), arguments.tokens, arguments.layers, arguments.width
        )
        assert verdict(noisy, right)
        plain(noisy, right)
        ratios, seconds = [], []
        for _ in range(arguments.pairs):
            beside = timed(lambda: plain(noisy, right))
            seconds.append(timed(lambda: verdict(noisy, right)))
            ratios.append(seconds[-1] / beside)
        command = [sys.executable, __file__, "--memory-of", str(noisy), str(right)]
        memory = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        diagnosis = timed(lambda: verdict(off, right))
    figures = {
        "times_assert_close": round(statistics.median(ratios), 2),
        **memory,
        "diagnosis_s": round(diagnosis, 1),
        "verdict_s": round(statistics.median(seconds), 2),
        "rows": arguments.tokens * arguments.layers,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
