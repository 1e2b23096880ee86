"""What it costs in each step to find the rows that the taps select.

    python benchmarks/matching.py

A run of 16 requests (32 prompt tokens in chunks of 16, then 63 decode steps) under 8 selectors,
with 8 taps at each of 28 layers. `step_us` is the median time of `RowStore.begin_step`, which
matches rows once for all sites, follows every request's progress and counts situations;
`brute_force_us` is that of a plain loop that asks of every row, at every site, whether one of the
selectors selects it, over the same steps in the same run. The last line is a JSON object.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch

from tapcheck.layout import Segment, StepLayout
from tapcheck.request import Request
from tapcheck.rowstore import RowStore
from tapcheck.selectors import parse_selectors, resolve
from tapcheck.sites import Site

REQUESTS, PROMPT, CHUNK, NEW = 16, 32, 16, 64
SITES = [Site("resid_post", tap) for tap in range(8 * 28)]
SELECT = ["prompt[-1]", "prompt[:4]", "generated[*]/4", "generated[-1]", "generated[0]",
          "generated[2:10]", "prompt[-1]+1", 40]  # fmt: skip
ROUNDS = 5


def schedule() -> list[StepLayout]:
    starts = [*range(0, PROMPT, CHUNK), *range(PROMPT, PROMPT + NEW - 1)]
    return [
        StepLayout(
            step,
            tuple(
                Segment(str(owner), start, CHUNK if start < PROMPT else 1, PROMPT)
                for owner in range(REQUESTS)
            ),
            REQUESTS * (CHUNK if start < PROMPT else 1),
        )
        for step, start in enumerate(starts)
    ]


def brute_force(layout: StepLayout, selected: list[set[int]]) -> int:
    """Ask of every row, at every site, whether one of the selectors selects it."""
    found = 0
    for segment in layout.segments:
        for position in range(segment.start, segment.start + segment.rows):
            for _site in SITES:
                if any(position in positions for positions in selected):
                    found += 1
    return found


def median_us(act: Callable[[StepLayout], object], layouts: list[StepLayout]) -> float:
    times = []
    for layout in layouts:
        started = time.perf_counter_ns()
        act(layout)
        times.append((time.perf_counter_ns() - started) / 1000)
    return statistics.median(times)


def main() -> None:
    selectors, layouts, cpu = parse_selectors(SELECT), schedule(), torch.device("cpu")
    request = Request("r", (0,) * PROMPT, (0,) * NEW)
    selected = [set(resolve([selector], request)) for selector in selectors]
    fast, slow = [], []
    for _ in range(ROUNDS):
        store = RowStore(SITES, selectors)
        fast.append(median_us(lambda layout, store=store: store.begin_step(layout, cpu), layouts))
        slow.append(median_us(lambda layout: brute_force(layout, selected), layouts))
    print(
        json.dumps(
            {
                "step_us": round(statistics.median(fast), 1),
                "brute_force_us": round(statistics.median(slow), 1),
                "requests": REQUESTS,
                "selectors": len(SELECT),
                "sites": len(SITES),
            }
        )
    )


if __name__ == "__main__":
    main()
