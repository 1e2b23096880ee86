"""What capturing costs: generation with every layer's residual stream captured over without.

    python benchmarks/capture_overhead.py [--subprocess] [--json FILE]

16 concurrent requests of 32 prompt and 64 new tokens, float32, eager, two model sizes. Runs with
and without capture alternate in one engine; each figure is the median of the paired ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = {"256 wide x 4 layers": (256, 4), "1024 wide x 8 layers": (1024, 8)}
REQUESTS, PROMPT, NEW = 16, 32, 64
PAIRS = 7


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


def timed(act: Callable[[], Any]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def measure(model: Path, layers: int, in_process: bool) -> dict[str, float]:
    from vllm import SamplingParams

    from tapcheck import Request, VLLMBackend

    requests = [
        Request(str(i), tuple((i * 37 + j * 11) % 512 for j in range(PROMPT)))
        for i in range(REQUESTS)
    ]
    prompts = [{"prompt_token_ids": list(request.prompt_token_ids)} for request in requests]
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False,
                              skip_reading_prefix_cache=True)  # fmt: skip
    sites = [f"resid_post.{layer}" for layer in range(layers)]
    with VLLMBackend(model, in_process=in_process) as engine:
        rows: set[int] = set()

        def plain() -> None:
            engine._llm.collective_rpc("tapcheck_uninstall")
            engine._installed = None
            engine._llm.generate(prompts, sampling, use_tqdm=False)

        def captured() -> None:
            rows.add(len(engine.capture(requests, sites, max_new_tokens=NEW)))

        plain(), captured()  # warm up both
        pairs = [(timed(plain), timed(captured)) for _ in range(PAIRS)]
    due = REQUESTS * (PROMPT + NEW - 1) * layers
    assert rows == {due}, f"rows lost: {rows} of {due}"
    return {
        "time_ratio": round(statistics.median(b / a for a, b in pairs), 3),
        "without_s": round(statistics.median(a for a, _ in pairs), 3),
        "with_s": round(statistics.median(b for _, b in pairs), 3),
        "rows": due,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--subprocess", action="store_true", help="engine core in a subprocess")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (width, layers) in SIZES.items():
            model = build_model(Path(folder) / name.replace(" ", "-"), width, layers)
            results[name] = measure(model, layers, not arguments.subprocess)
            print(name, results[name], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
