"""What capturing costs: generation with every layer's residual stream captured over without.

    python benchmarks/capture_overhead.py [--width 256] [--layers 4] [--pairs 20]

16 concurrent requests of 32 prompt and 64 new tokens, `generated[*]` at all layers, float32,
eager, rows delivered to the caller. Runs with and without capture alternate in one engine, each of
them first in every other pair: an engine in a subprocess, then one in this process. The last line
is a JSON object: `subprocess` and `in_process` are medians of the paired time ratios; `rows_due`
and `rows_delivered` are counted over all runs with capture.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tapcheck import Request

REQUESTS, PROMPT, NEW = 16, 32, 64


def build_model(folder: Path, width: int, layers: int) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_requests() -> list[Request]:
    from tapcheck import Request

    return [
        Request(str(i), tuple((i * 37 + j * 11) % 512 for j in range(PROMPT)))
        for i in range(REQUESTS)
    ]


def timed(act: Callable[[], Any]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def measure(model: Path, layers: int, pairs: int, in_process: bool) -> dict[str, Any]:
    from vllm import SamplingParams

    from tapcheck import VLLMBackend

    requests = make_requests()
    prompts = [{"prompt_token_ids": list(request.prompt_token_ids)} for request in requests]
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    sites = [f"resid_post.{layer}" for layer in range(layers)]
    delivered = 0
    with VLLMBackend(model, in_process=in_process) as engine:

        def plain() -> None:
            engine._llm.generate(prompts, sampling, use_tqdm=False)

        def captured() -> None:
            nonlocal delivered
            capture = engine.capture(requests, sites, ["generated[*]"], max_new_tokens=NEW)
            delivered += len(capture)

        def untap() -> None:
            engine._call("tapcheck_uninstall")
            engine._installed = None

        captured(), untap(), plain()  # warm up both
        delivered, ratios, seconds = 0, [], []
        for pair in range(pairs):
            took = {}
            for run in (plain, captured) if pair % 2 else (captured, plain):
                untap()
                took[run] = timed(run)
            ratios.append(took[captured] / took[plain])
            seconds.append(took[plain])
    return {
        "ratio": round(statistics.median(ratios), 3),
        "seconds": round(statistics.median(seconds), 3),
        "due": pairs * REQUESTS * (NEW - 1) * layers,
        "delivered": delivered,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=20)
    arguments = parser.parse_args()
    width, layers = arguments.width, arguments.layers
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(Path(folder) / "model", width, layers)
        apart = measure(model, layers, arguments.pairs, in_process=False)
        inside = measure(model, layers, arguments.pairs, in_process=True)
    result = {
        "subprocess": apart["ratio"],
        "in_process": inside["ratio"],
        "rows_due": apart["due"] + inside["due"],
        "rows_delivered": apart["delivered"] + inside["delivered"],
        "seconds_without_capture": {
            "subprocess": apart["seconds"],
            "in_process": inside["seconds"],
        },
        "width": width,
        "layers": layers,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
