"""What graph mode costs: a compiled engine that captures over one that doesn't.

    python benchmarks/graph_mode.py [--width 256] [--layers 4] [--pairs 20]

Two compiled engines, each in a subprocess: one with `graph_layers=()`, which generates untapped,
and one that captures `resid_post` at three layers as auxiliary outputs, `generated[*]`, with the
rows delivered to the caller. 16 concurrent requests of 32 prompt and 64 new tokens, float32; runs
alternate, each engine first in every other pair. The last line is a JSON object:
`throughput_ratio` is the median over pairs of tokens per second with capture over those without;
`static_ratio` is the same for a third engine that reads the same sites through static taps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from capture_overhead import NEW, REQUESTS, build_model, make_requests, timed


def measure(model: Path, layers: int, pairs: int) -> dict[str, Any]:
    from tapcheck import VLLMBackend

    requests = make_requests()
    tapped = (0, layers // 2, layers - 1)
    sites = [f"resid_post.{layer}" for layer in tapped]
    delivered = 0
    with ExitStack() as engines:

        def start(**graph: Any) -> VLLMBackend:
            return engines.enter_context(VLLMBackend(model, in_process=False, **graph))

        untapped = start(graph_layers=())
        tapping = {"aux": start(graph_layers=tapped), "static": start(graph_taps=sites)}

        def plain() -> None:
            untapped.generate_untapped(requests, ["generated[*]"], max_new_tokens=NEW)

        def captured(engine: VLLMBackend) -> None:
            nonlocal delivered
            capture = engine.capture(requests, sites, ["generated[*]"], max_new_tokens=NEW)
            delivered += len(capture)

        plain()
        for engine in tapping.values():
            captured(engine)
        delivered = 0
        ratios: dict[str, list[float]] = {name: [] for name in tapping}
        for pair in range(pairs):
            took = {}
            order = ["plain", *tapping]
            for name in order if pair % 2 else reversed(order):
                run = plain if name == "plain" else lambda name=name: captured(tapping[name])
                took[name] = timed(run)
            for name in tapping:
                ratios[name].append(took["plain"] / took[name])
    return {
        "throughput_ratio": round(statistics.median(ratios["aux"]), 3),
        "static_ratio": round(statistics.median(ratios["static"]), 3),
        "rows_due": 2 * pairs * REQUESTS * (NEW - 1) * len(sites),
        "rows_delivered": delivered,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(Path(folder) / "model", arguments.width, arguments.layers)
        result = measure(model, arguments.layers, arguments.pairs)
    print(json.dumps({**result, "width": arguments.width, "layers": arguments.layers}))


if __name__ == "__main__":
    main()
